"""Progress on the terminal: a bar where there is one, plain lines in a log file."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import IO, Any

SECONDS_BETWEEN_LINES = 5.0


class Progress:
    """Shows how far a stage is, a few key numbers, the time spent and an estimate of the time left.

        with Progress("PPO", 25) as progress:
            progress.step({"score": 0.3, "kl": 1.2})

    Args:
        stage: shown in front, for example "PPO".
        total_steps: how many times :meth:`step` will be called in all.
        first_step: steps already done before (a resumed run); they do not count in the estimate.
        plain: True = lines, False = a bar, None = a bar when the stream is a terminal.
        stream: where to write, by default standard error.
        clock: seconds; replaced in tests.
    """

    def __init__(
        self, stage: str, total_steps: int, *, first_step: int = 0, plain: bool | None = None,
        stream: IO[str] | None = None, clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self._stage, self._total, self._first, self._done = stage, total_steps, first_step, first_step
        self._stream = sys.stderr if stream is None else stream
        self._plain = not self._stream.isatty() if plain is None else plain
        self._clock = clock
        self._start = self._last_line = clock()
        self._bar: Any = None

    def __enter__(self) -> Progress:
        self._start = self._last_line = self._clock()
        if not self._plain:
            from rich import progress
            from rich.console import Console

            self._bar = progress.Progress(
                progress.TextColumn("{task.fields[line]}", markup=False),
                progress.BarColumn(bar_width=20),
                console=Console(file=self._stream),
                transient=False,
            )
            self._bar.start()
            self._task = self._bar.add_task("", total=self._total, completed=self._done, line=self._line({}))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def step(self, numbers: Mapping[str, float] | None = None) -> None:
        """One more step is done; ``numbers`` are shown beside it under the names given."""
        self._done += 1
        line = self._line(numbers or {})
        if self._bar is not None:
            self._bar.update(self._task, completed=self._done, line=line)
            return
        now = self._clock()
        is_edge = self._done == self._first + 1 or self._done >= self._total
        if is_edge or now - self._last_line >= SECONDS_BETWEEN_LINES:
            self._last_line = now
            self._print(line)

    def message(self, text: str) -> None:
        """Print a line of its own, above the bar where there is one."""
        if self._bar is not None:
            self._bar.console.print(text, markup=False, highlight=False)
        else:
            self._print(text)

    @property
    def seconds_left(self) -> float | None:
        """Estimate from the mean time of the steps so far; None before the first."""
        num_done = self._done - self._first
        if num_done <= 0:
            return None
        return (self._clock() - self._start) / num_done * max(self._total - self._done, 0)

    def _line(self, numbers: Mapping[str, float]) -> str:
        parts = [f"{self._stage} {self._done}/{self._total}"]
        parts += [f"{name} {value:.4g}" for name, value in numbers.items()]
        parts.append(duration(self._clock() - self._start))
        if self.seconds_left is not None and self._done < self._total:
            parts.append(f"about {duration(self.seconds_left)} left")
        return " · ".join(parts)

    def _print(self, text: str) -> None:
        print(text, file=self._stream, flush=True)


def duration(seconds: float) -> str:
    """Seconds for people: ``8 s``, ``3 min 20 s``, ``2 h 5 min``."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def peak_memory_bytes() -> int:
    """The largest memory this process has held so far (resident set), 0 where the system does not say."""
    try:
        import resource
    except ImportError:  # Windows
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # macOS counts bytes, Linux KiB


def tell(text: str) -> None:
    """A line for the person at the terminal; standard output is kept for results."""
    print(text, file=sys.stderr, flush=True)
