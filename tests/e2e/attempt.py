"""One attempt at a run, in a process of its own that the test may kill at any moment."""

from __future__ import annotations

import random
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

CHUNK = 4
"""Answers per chunk of a rollout, so that toy rollouts have several and a kill may fall between two."""


def brevity(prompts: Sequence[Any], answers: Sequence[str]) -> list[float]:
    """A reward function for recipes."""
    return [-float(len(answer)) for answer in answers]


def attempt(recipe_file: str, overrides: list[str], draws_report: bool = True) -> None:
    """``heedful run RECIPE --resume``, with changes that make the test sharper.

    The random generators start anywhere, as if everything before had used them: what is not seeded shows as a
    difference. Every loop saves its last state too, and the checkpoints of finished stages stay, so that they can be
    compared: optimizers, averages and all. Rollouts have several chunks.

    Args:
        draws_report: False leaves the report at the end out, half of the time of a toy run.
    """
    import numpy
    import torch

    import heedful.report.build
    from heedful import pipeline
    from heedful.cli.main import main
    from heedful.rollout.buffer import RolloutBuffer
    from heedful.train.loop import Loop

    random.seed()
    numpy.random.seed()
    torch.seed()
    torch.set_num_threads(1)

    run = Loop.run

    def run_and_save(loop: Loop, step: Callable[[int], Any]) -> None:
        run(loop, step)
        loop._save(loop.total_steps)

    Loop.run = run_and_save  # type: ignore[method-assign]
    RolloutBuffer.generate.__kwdefaults__["chunk"] = CHUNK  # type: ignore[index]

    def keep_checkpoints(path: Any, **options: Any) -> None:
        if Path(path).name != "checkpoints":
            shutil.rmtree(path, **options)

    if not draws_report:
        heedful.report.build.write_report = lambda path: path
    pipeline.stages.shutil = type("shutil", (), {"rmtree": staticmethod(keep_checkpoints)})  # type: ignore[misc, assignment]
    sys.exit(main(["run", recipe_file, "--resume", *overrides]))
