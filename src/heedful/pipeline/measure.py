"""How fast this machine multiplies and reads, measured once for ``heedful plan``."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from heedful.models.hardware import compute_dtype
from heedful.plan.machine import measured_file
from heedful.runs.environment import snapshot
from heedful.runs.files import write_json
from heedful.runs.progress import tell

SIZE = 1024
"""Rows and columns of the matrices that are multiplied."""
NUM_BYTES = 256 * 2**20
"""Read and written by the copy, more than any cache holds."""


def measure_machine() -> dict[str, float]:
    """Measure matrix product (operations per second) and copy (bytes per second) of this CPU and keep them."""
    device = torch.device("cpu")
    matrix = torch.randn(SIZE, SIZE, dtype=compute_dtype(device))
    block = torch.zeros(NUM_BYTES // 4)
    target = torch.empty_like(block)
    flops = 2 * SIZE**3 / _best(lambda: torch.mm(matrix, matrix))
    bytes_per_second = 2 * NUM_BYTES / _best(lambda: target.copy_(block))
    found = snapshot()
    speeds = {"flops": flops, "bytes_per_second": bytes_per_second}
    write_json(measured_file(), {"name": found["cpu"], "num_cores": found["num_cores"], **speeds})
    tell(f"this machine: {flops / 1e9:.0f} GFLOP/s, {bytes_per_second / 1e9:.1f} GB/s; kept in {measured_file()}")
    return speeds


def _best(run: Callable[[], object], *, num: int = 7) -> float:
    """Seconds of the fastest of a few runs; the first warms up."""
    seconds = []
    for _ in range(num):
        started = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - started)
    return min(seconds[1:])
