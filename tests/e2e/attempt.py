"""One attempt at a run, in a process of its own that the test may kill at any moment."""

from __future__ import annotations

import random
import shutil
import sys
from pathlib import Path
from typing import Any


def attempt(recipe_file: str, overrides: list[str]) -> None:
    """``heedful run RECIPE --resume``, with two changes that make the test sharper.

    The random generators start anywhere, as if everything before had used them: what is not seeded shows as a
    difference. The checkpoints of finished stages stay, so that they can be compared.
    """
    import numpy
    import torch

    from heedful import pipeline
    from heedful.cli.main import main

    random.seed()
    numpy.random.seed()
    torch.seed()
    torch.set_num_threads(1)

    def keep_checkpoints(path: Any, **options: Any) -> None:
        if Path(path).name != "checkpoints":
            shutil.rmtree(path, **options)

    pipeline.stages.shutil = type("shutil", (), {"rmtree": staticmethod(keep_checkpoints)})  # type: ignore[misc, assignment]
    sys.exit(main(["run", recipe_file, "--resume", *overrides]))
