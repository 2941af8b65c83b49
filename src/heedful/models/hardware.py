"""The machine: device and precision by detection, autocast, and every random generator in one place."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import platform
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import torch

from heedful.errors import ConfigError

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_MMAP_MAX = -1, -3, -4
"""glibc's numbers for what is freed at the end of the heap and goes back to the system, for the size from which on
memory comes from the system, and for how many pieces of it may."""

_saves_memory = _keeps_pages = False
"""Whether large tensors are kept off the heap, and whether the heap keeps its pages."""
_AS_EVER = ((_M_MMAP_MAX, 65536), (_M_MMAP_THRESHOLD, 32 * 2**20), (_M_TRIM_THRESHOLD, 64 * 2**20))
"""What glibc comes to by itself when large tensors have come and gone"""


def device(name: str = "auto") -> torch.device:
    """The device to compute on; "auto" takes CUDA, else MPS, else CPU.

    Raises:
        ConfigError: the name is no torch device, or this machine does not have it.
    """
    if name == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda", torch.cuda.current_device())
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    try:
        found = torch.device(name)
    except RuntimeError:
        raise ConfigError(f"device {name!r} is unknown; use auto, cpu, cuda, cuda:N or mps") from None
    if found.type == "cuda" and (found.index or 0) >= torch.cuda.device_count():
        raise ConfigError(f"device {name!r} is not there: torch sees {torch.cuda.device_count()} CUDA devices")
    if found.type == "mps" and not torch.backends.mps.is_available():
        raise ConfigError("device 'mps' is not there: torch sees no Apple GPU")
    return found


def compute_dtype(device: torch.device, name: str = "auto") -> torch.dtype:
    """The precision of forward and backward; trained weights stay float32 whatever it is.

    "auto" takes bfloat16 only where the hardware multiplies it natively, since emulated bfloat16 is slower than
    float32: CUDA from capability 8.0 (Ampere), CPUs with AVX512-BF16, AMX or Arm BF16. Elsewhere, and on MPS, float32.

    Raises:
        ConfigError: the name is not auto, float32 or bfloat16.
    """
    if name == "auto":
        return torch.bfloat16 if _has_fast_bfloat16(device) else torch.float32
    try:
        return {"float32": torch.float32, "bfloat16": torch.bfloat16}[name]
    except KeyError:
        raise ConfigError(f"dtype {name!r} is unknown; use auto, float32 or bfloat16") from None


def _has_fast_bfloat16(device: torch.device) -> bool:
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (8, 0)
    return device.type == "cpu" and bool(_cpu_flags() & {"avx512_bf16", "amx_bf16", "bf16"})


def _cpu_flags() -> set[str]:
    """Instruction sets that matter here, from torch's own (private, so guarded) probes, else from /proc/cpuinfo."""
    flags = set()
    for flag, probe in (("avx512_bf16", "_is_avx512_bf16_supported"), ("amx_bf16", "_is_amx_tile_supported")):
        supported = getattr(torch.cpu, probe, None)
        if supported is not None and supported():
            flags.add(flag)
    if not flags and platform.system() == "Linux":
        with contextlib.suppress(OSError):
            for line in Path("/proc/cpuinfo").read_text().splitlines():
                if line.lower().startswith(("flags", "features")):
                    return set(line.split(":", 1)[1].split())
    return flags


def autocast(device: torch.device, dtype: torch.dtype) -> contextlib.AbstractContextManager[Any]:
    """Compute in ``dtype`` with weights kept as they are; float32 needs nothing."""
    if dtype == torch.float32:
        return contextlib.nullcontext()
    return torch.autocast(device.type, dtype=dtype)


def release_models() -> None:
    """Free the models that nothing names any more, whose modules refer to each other, and give their memory back."""
    gc.collect()
    release_memory()


def release_memory() -> None:
    """Give memory that was freed back to the system."""
    with contextlib.suppress(OSError, AttributeError):  # not glibc
        ctypes.CDLL(None).malloc_trim(0)


def release_between_phases() -> None:
    """Give it back before the next phase of a step, unless its pages are kept."""
    if not _keeps_pages:
        release_memory()


@contextlib.contextmanager
def keeping_pages(wanted: bool) -> Iterator[None]:
    """Whether the heap of this process keeps the pages of what is freed for what comes next.

    A page that comes back from the system must be cleared first, 600 000 of them in a PPO step on all weights of
    SmolLM2-135M: an eighth of its time, measured in a virtual machine that gives free memory back to its host, for 0.1
    of 5.5 GiB. Adapters, which are there to save memory, leave holes of so many sizes that it would cost 0.5 of 1.9.
    Never together with :func:`keep_large_tensors_off_the_heap`.
    """
    global _keeps_pages
    if not wanted or _saves_memory or torch.cuda.is_available():
        yield
        return
    _keeps_pages = True
    _tell_heap((_M_TRIM_THRESHOLD, -1), (_M_MMAP_MAX, 0))
    try:
        yield
    finally:
        _keeps_pages = False
        _tell_heap(*_AS_EVER)


def keep_large_tensors_off_the_heap() -> None:
    """From now on ask the system itself for every tensor of 4 MiB and more, in this process, for good.

    What a layer that is recomputed needs for a moment comes and goes between the inputs that all layers keep, and the
    heap of glibc cannot use the holes for the next: SmolLM2-135M, 16 × 231 tokens, held 3.9 GiB of which 2.6 were
    holes, and so 2.0. It costs time where tensors are that large (a quarter of a step of 12 × 218 tokens), so nothing
    else does it.
    """
    global _saves_memory
    _saves_memory = True
    _tell_heap((_M_MMAP_THRESHOLD, 4 * 2**20))


def _tell_heap(*options: tuple[int, int]) -> None:
    with contextlib.suppress(OSError, AttributeError):  # not glibc
        for option, value in options:
            ctypes.CDLL(None).mallopt(option, value)


def seed_everything(seed: int) -> None:
    """Seed python, numpy and torch (every device)."""
    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def random_state() -> dict[str, Any]:
    """The state of every random generator, in types that ``torch.load(weights_only=True)`` reads back."""
    kind, keys, position, has_gauss, cached = numpy.random.get_state()
    numbers = numpy.asarray(keys, dtype="int64")
    state: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": (str(kind), torch.from_numpy(numbers), int(position), int(has_gauss), float(cached)),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }
    if torch.backends.mps.is_available():
        state["mps"] = torch.mps.get_rng_state()
    return state


def restore_random_state(state: dict[str, Any]) -> None:
    """Put back what :func:`random_state` gave. Generators of devices that are gone are left alone."""
    version, keys, gauss = state["python"]
    random.setstate((version, tuple(keys), gauss))
    kind, numbers, position, has_gauss, cached = state["numpy"]
    numpy.random.set_state((kind, numbers.numpy().astype("uint32"), position, has_gauss, cached))
    torch.set_rng_state(state["torch"])
    if state["cuda"] and torch.cuda.device_count() == len(state["cuda"]):
        torch.cuda.set_rng_state_all(state["cuda"])
    if "mps" in state and torch.backends.mps.is_available():
        torch.mps.set_rng_state(state["mps"])
