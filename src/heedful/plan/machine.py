"""The machine of a plan: memory, precision, and how fast it multiplies and reads.

GPUs by name with their published peaks (dense bfloat16 with float32 sums, bytes per second of their memory); a CPU as
``heedful plan --measure`` found it, or else as it is assumed.
"""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from heedful.errors import ConfigError
from heedful.runs.environment import snapshot
from heedful.runs.files import read_json

GIB = 2**30
Dtype = Literal["auto", "float32", "bfloat16"]
Kernel = Literal["eager", "pieces", "sdpa"]
"""Of attention: probabilities of whole rows written out, as ``models/attention.py`` has it on a CPU, or fused"""


@dataclass(frozen=True)
class Machine:
    """One device, of which there may be several."""

    name: str
    kind: Literal["cpu", "cuda"]
    memory_bytes: int
    flops: float
    """Multiply-adds count twice; bfloat16 where the machine has it, per device and second"""
    bytes_per_second: float
    bfloat16: bool = True
    num: int = 1
    source: str = "published"

    @property
    def usable_bytes(self) -> int:
        """Of one device, for tensors: on a GPU without the context of CUDA and what its allocator cannot use."""
        if self.kind == "cpu":
            return self.memory_bytes
        return int((self.memory_bytes - CONTEXT_BYTES) * 0.95)

    def compute_bytes(self, dtype: Dtype) -> int:
        """Of a number in the compute precision of a recipe."""
        return 4 if dtype == "float32" or (dtype == "auto" and not self.bfloat16) else 2

    def num_flops(self, compute_bytes: int) -> float:
        """Per second in that precision; float32 counts as eight times slower where bfloat16 has units of its own."""
        return self.flops / (8 if compute_bytes == 4 and self.bfloat16 else 1)

    def kernel(self, attention: str) -> Kernel:
        """What a recipe's attention is here."""
        if attention == "eager" or (attention == "auto" and self.kind == "cpu"):
            return "pieces" if self.kind == "cpu" else "eager"
        return "sdpa"


CONTEXT_BYTES = int(0.6 * GIB)
"""Of CUDA with its libraries on every GPU; no tensor of ours."""
LIBRARY_BYTES = int(0.65 * GIB)
"""Python, torch for CPUs, transformers, peft, tokenizers and the data of a stage in main memory, as measured."""


def _gpu(name: str, gibibytes: float, teraflops: float, gigabytes_s: float, *, bfloat16: bool = True) -> Machine:
    return Machine(name, "cuda", int(gibibytes * GIB), teraflops * 1e12, gigabytes_s * 1e9, bfloat16)


GPUS = {
    gpu.name: gpu
    for gpu in (  # NVIDIA's data sheets; without sparsity
        _gpu("a100-40g", 40, 312, 1555),
        _gpu("a100-80g", 80, 312, 2039),
        _gpu("h100-80g", 80, 989, 3350),
        _gpu("h200", 141e9 / GIB, 989, 4800),
        _gpu("l4", 24, 121, 300),
        _gpu("l40s", 48, 362, 864),
        _gpu("a10g", 24, 70, 600),
        _gpu("rtx-3090", 24, 71, 936),
        _gpu("rtx-4090", 24, 165, 1008),
        _gpu("t4", 16, 8.1, 320, bfloat16=False),  # no bfloat16: heedful computes in float32 there
        _gpu("v100-32g", 32, 15.7, 900, bfloat16=False),
    )
}


def gpu(name: str, num: int = 1) -> Machine:
    """A named GPU, ``num`` of them.

    Raises:
        ConfigError: the name is not in the list.
    """
    found = GPUS.get(name.lower())
    if found is None:
        raise ConfigError(f"GPU {name!r} is not in the list; it has {', '.join(GPUS)}")
    return replace(found, num=num)


def this_machine(device: str = "auto") -> Machine:
    """The machine that this process runs on, without torch: its first GPU, or else its CPU with assumed speeds."""
    found = snapshot()
    gpus = found["gpus"] if device == "auto" or device.startswith("cuda") else []
    if gpus:
        return _recognised(gpus[0]["name"], gpus[0]["memory"], len(gpus))
    cores = found["num_cores"]
    bfloat16 = bool(_cpu_flags() & {"avx512_bf16", "amx_bf16", "bf16"})
    memory = found["memory_bytes"] or 0
    file = measured_file()
    known = read_json(file) if file.is_file() else {}
    if known.get("name") == found["cpu"] and known.get("num_cores") == cores:
        return Machine(found["cpu"], "cpu", memory, known["flops"], known["bytes_per_second"], bfloat16,
                       source="measured")  # fmt: skip
    return Machine(
        found["cpu"], "cpu", memory, cores * (850e9 if bfloat16 else 100e9), 12e9 * min(cores, 8), bfloat16,
        source="assumed",
    )  # fmt: skip


def measured_file() -> Path:
    """Where ``heedful plan --measure`` keeps the speeds of this machine."""
    if chosen := os.environ.get("HEEDFUL_CACHE"):
        return Path(chosen).expanduser() / "machine.json"
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "heedful" / "machine.json"


def _recognised(name: str, memory: str, num: int) -> Machine:
    """A GPU as nvidia-smi names it, with the peaks of the listed GPU that it is."""
    words = name.lower().replace("-", " ")
    mebibytes = float(memory.split()[0])
    for known in sorted(GPUS.values(), key=lambda g: abs(g.memory_bytes / 2**20 - mebibytes)):
        if known.name.removeprefix("rtx-").split("-")[0] in words.split():
            return replace(known, name=name, memory_bytes=int(mebibytes * 2**20), num=num)
    return Machine(name, "cuda", int(mebibytes * 2**20), 100e12, 500e9, num=num, source="assumed")


def _cpu_flags() -> set[str]:
    """The instruction sets of the CPU, as Linux lists them."""
    if platform.system() != "Linux":
        return set()
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return set()
    return next((set(x.split(":", 1)[1].split()) for x in lines if x.lower().startswith(("flags", "features"))), set())
