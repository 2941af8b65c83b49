"""What every loop shares around its steps: resume, the clock, the log, the checkpoint, Ctrl-C."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from heedful.batches import StepStats
from heedful.config.section import CheckpointConfig
from heedful.errors import CheckpointError
from heedful.models.hardware import keeping_pages, random_state, release_memory, restore_random_state
from heedful.runs.folder import StageFolder
from heedful.runs.progress import Progress, peak_memory_bytes
from heedful.runs.progress import tell as tell
from heedful.runs.writer import StageWriter
from heedful.train import checkpoint

RELEASE_EVERY_STEPS = 8
"""Batches of ever new shapes cut freed memory into pieces; giving it back costs half a second, so not every step."""


class Interrupted(KeyboardInterrupt):
    """Ctrl-C or SIGTERM arrived; the loop saved a checkpoint and stopped at a step border."""


@dataclass
class Loop:
    """Runs ``step(i)`` for every step from the newest checkpoint on, logging and saving as it goes.

    Args:
        parts: objects with ``state_dict`` and ``load_state_dict``; together they are the whole state of the loop.
    """

    title: str
    stage: StageFolder
    total_steps: int
    config: CheckpointConfig
    parts: dict[str, Any]
    shown: dict[str, str] = field(default_factory=dict)
    """metric name → short name on the progress line"""
    on_saved: Callable[[int], None] = lambda done: None
    """Told the number of steps done when a checkpoint of it is complete."""
    keeps_pages: bool = False
    """Whether the heap keeps its pages between the phases of a step, which is quicker: where all weights are trained"""

    def run(self, step: Callable[[int], StepStats]) -> None:
        """Steps ``0 … total_steps − 1``, or from where the newest complete checkpoint stands.

        Raises:
            Interrupted: after Ctrl-C or SIGTERM, once the current step is done and saved.
        """
        start = self._restore()
        release_memory()  # what loading the models left
        writer = StageWriter(self.stage, resume_step=start - 1 if start else None)
        progress = Progress(self.title, self.total_steps, first_step=start)
        with progress, writer, _stop_signals() as stop, keeping_pages(self.keeps_pages):
            for i in range(start, self.total_steps):
                before = time.perf_counter()
                stats = step(i)
                stats.scalars["run/seconds"] = time.perf_counter() - before
                stats.scalars["run/peak_memory_bytes"] = peak_memory_bytes()
                writer.scalars(i, stats.scalars)
                if stats.histograms:
                    writer.histograms(i, stats.histograms)
                if stats.samples:
                    writer.samples(i, stats.samples)
                progress.step({short: stats.scalars[n] for n, short in self.shown.items() if n in stats.scalars})
                done, stopping = i + 1, stop()
                if done % RELEASE_EVERY_STEPS == 0:
                    release_memory()
                if stopping or (done % self.config.every_steps == 0 and done < self.total_steps):
                    self._save(done)
                if stopping:
                    raise Interrupted(f"{self.title} stopped after step {done} of {self.total_steps}")
        release_memory()  # pieces of activations, too small for the weights that are merged for saving

    def _restore(self) -> int:
        """Number of steps already done according to the newest complete checkpoint, whose state is put back."""
        found = checkpoint.load_newest(self.stage.checkpoints, say=tell)
        if found is None and checkpoint.exist(self.stage.checkpoints):
            raise CheckpointError(
                f"{self.stage.checkpoints}: none of the checkpoints is usable, so this run cannot go on; start another "
                f"with --new, or delete that folder to begin the stage again"
            )
        if found is None:
            return 0
        done, state = found
        for name, part in self.parts.items():
            part.load_state_dict(checkpoint.take(state, name))
        restore_random_state(checkpoint.take(state, "random"))
        tell(f"{self.title}: resumed after step {done} of {self.total_steps}")
        return done

    def _save(self, done: int) -> None:
        state = {name: part.state_dict() for name, part in self.parts.items()}
        state["random"] = random_state()
        checkpoint.save(self.stage.checkpoints, done, state, keep=self.config.keep, say=tell)
        self.on_saved(done)


@contextmanager
def _stop_signals() -> Iterator[Callable[[], bool]]:
    """The first Ctrl-C or SIGTERM asks for a stop at the next step border; the second one stops at once."""
    asked = False

    def ask(number: int, frame: object) -> None:
        nonlocal asked
        if asked:
            raise KeyboardInterrupt
        asked = True
        tell("stopping after this step (once more to stop at once)")

    try:
        previous = {s: signal.signal(s, ask) for s in (signal.SIGINT, signal.SIGTERM)}
    except ValueError:  # not in the main thread: signals are somebody else's
        previous = {}
    try:
        yield lambda: asked
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
