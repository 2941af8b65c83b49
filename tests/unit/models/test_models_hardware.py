from __future__ import annotations

import io
import platform
import random
import subprocess
import sys

import numpy
import pytest
import torch

from heedful.errors import ConfigError
from heedful.models import hardware


def test_device_names() -> None:
    assert hardware.device("cpu") == torch.device("cpu")
    assert hardware.device().type in ("cpu", "cuda", "mps")
    with pytest.raises(ConfigError, match="'quantum' is unknown"):
        hardware.device("quantum")
    with pytest.raises(ConfigError, match="CUDA devices"):
        hardware.device("cuda:99")


@pytest.mark.parametrize(
    ("capability", "expected"), [((7, 5), torch.float32), ((8, 0), torch.bfloat16), ((9, 0), torch.bfloat16)]
)
def test_bfloat16_only_where_cuda_multiplies_it(monkeypatch, capability, expected) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    assert hardware.compute_dtype(torch.device("cuda")) == expected


@pytest.mark.parametrize(
    ("flags", "expected"),
    [({"avx512f"}, torch.float32), ({"avx512_bf16"}, torch.bfloat16), ({"amx_bf16"}, torch.bfloat16)],
)
def test_bfloat16_only_where_the_cpu_multiplies_it(monkeypatch, flags, expected) -> None:
    monkeypatch.setattr(hardware, "_cpu_flags", lambda: flags)
    assert hardware.compute_dtype(torch.device("cpu")) == expected
    assert hardware.compute_dtype(torch.device("cpu"), "float32") == torch.float32
    assert hardware.compute_dtype(torch.device("mps")) == torch.float32


def test_unknown_dtype_is_refused() -> None:
    with pytest.raises(ConfigError, match="float8"):
        hardware.compute_dtype(torch.device("cpu"), "float8")


def test_autocast_computes_low_and_keeps_weights() -> None:
    layer = torch.nn.Linear(4, 4)
    with hardware.autocast(torch.device("cpu"), torch.bfloat16):
        assert layer(torch.ones(1, 4)).dtype == torch.bfloat16
    with hardware.autocast(torch.device("cpu"), torch.float32):
        assert layer(torch.ones(1, 4)).dtype == torch.float32
    assert layer.weight.dtype == torch.float32


def _draw() -> list[float]:
    return [random.random(), random.gauss(0, 1), numpy.random.rand(), numpy.random.randn(), float(torch.rand(()))]


def test_random_state_survives_a_checkpoint() -> None:
    hardware.seed_everything(7)
    _draw()
    file = io.BytesIO()
    torch.save(hardware.random_state(), file)
    expected = [_draw() for _ in range(3)]
    hardware.seed_everything(8)
    file.seek(0)
    hardware.restore_random_state(torch.load(file, weights_only=True))
    assert [_draw() for _ in range(3)] == expected


def test_seed_repeats() -> None:
    hardware.seed_everything(3)
    first = _draw()
    hardware.seed_everything(3)
    assert _draw() == first


HEAP = """
import resource, sys, torch
from heedful.models.hardware import keep_large_tensors_off_the_heap, keeping_pages
from heedful.models.hardware import release_between_phases, release_memory
if "both" in sys.argv:
    keep_large_tensors_off_the_heap()
def resident():
    return int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize()
def phase():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    kept = [torch.ones(2**20) for _ in range(50)]  # 200 MiB, the last of which ends the heap
    del kept
    release_between_phases()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
start = resident()
with keeping_pages("neither" not in sys.argv):
    faults = [phase() for _ in range(3)]
    held = resident() - start
release_memory()
phase()
print(faults[-1], held >> 20, (resident() - start) >> 20)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc" or torch.cuda.is_available(), reason="glibc's heap, on a CPU")
@pytest.mark.parametrize("mode", ["pages", "neither", "both"])
def test_pages_are_kept_between_phases_where_that_is_wanted_and_memory_is_not_saved(mode: str) -> None:
    done = subprocess.run([sys.executable, "-c", HEAP, mode], capture_output=True, text=True, check=True, timeout=300)
    faults, held, after = (int(x) for x in done.stdout.split())
    if mode == "pages":
        assert faults < 5_000 and held > 190  # 51 200 pages of 4 KiB
    else:
        assert faults > 40_000 and held < 20
    assert after < 20  # as ever when it is over
