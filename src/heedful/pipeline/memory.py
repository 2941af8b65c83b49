"""The largest memory of one stage: of a GPU as torch counts it, else of this process as the system does."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import torch

from heedful.plan.parts import StagePlan
from heedful.runs.progress import peak_memory_bytes

_RESET, _STATUS = Path("/proc/self/clear_refs"), Path("/proc/self/status")


class PeakMeter:
    """Watches the peak from its making on.

    On Linux the system's high-water mark is set back; elsewhere it is that of the whole process, and ``is_own`` is
    False where an earlier stage may have left it.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device if device.type == "cuda" else None
        self._before = 0
        self.is_own = True
        if self._cuda is not None:
            torch.cuda.reset_peak_memory_stats(self._cuda)
            return
        with contextlib.suppress(OSError):
            _RESET.write_text("5")
            self._before = _resident("VmRSS")
            return
        self._before = peak_memory_bytes()
        self.is_own = False

    @property
    def start_bytes(self) -> int:
        """What was held when it began; on a GPU 0."""
        return self._before

    def peak_bytes(self) -> int:
        """The most that was held since."""
        if self._cuda is not None:
            return torch.cuda.max_memory_allocated(self._cuda)
        if not self.is_own:
            peak = peak_memory_bytes()
            self.is_own = peak > self._before  # raised since, so by this stage
            return peak
        return max(self._before, _resident("VmHWM"))  # the kernel sums its threads' counts late: it may lag


def _resident(name: str) -> int:
    """A number of /proc/self/status, which has it in kB."""
    for line in _STATUS.read_text(encoding="ascii", errors="replace").splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    return 0


def compared(meter: PeakMeter, plan: StagePlan | None) -> dict[str, Any]:
    """The measured peak of a stage beside the planned one; ``error`` is planned / measured − 1.

    There is no error where there is no plan, or where the peak may be an earlier stage's.
    """
    peak = meter.peak_bytes()
    found: dict[str, Any] = {"measured_bytes": peak, "start_bytes": meter.start_bytes}
    if plan is not None and peak:
        found |= {"planned_bytes": plan.peak_bytes, "phase": plan.largest.name}
        if meter.is_own:
            found["error"] = plan.peak_bytes / peak - 1
    return found
