"""The run and report rooms load without torch, and quickly."""

import subprocess
import sys

import pytest

MODULES = [
    "heedful.runs.metrics", "heedful.runs.folder", "heedful.runs.writer", "heedful.runs.reader",
    "heedful.runs.progress", "heedful.runs.environment", "heedful.runs.trackers", "heedful.report.build",
    "heedful.cli.report",
]  # fmt: skip


@pytest.mark.parametrize("heavy", ["torch", "matplotlib"])
def test_import_without(heavy: str) -> None:
    code = (
        f"import sys; sys.modules[{heavy!r}] = None\n"  # an import of it now fails
        + "\n".join(f"import {name}" for name in MODULES)
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_stage_is_written_without_torch(tmp_path) -> None:
    code = f"""
import sys; sys.modules["torch"] = None
from heedful.runs.folder import RunFolder
from heedful.runs.writer import StageWriter
with RunFolder.create({str(tmp_path / "r")!r}, {{"seed": 1}}) as run, StageWriter(run.stage("sft", 1)) as writer:
    writer.scalars(1, {{"sft/loss_nats": 2.0}})
    writer.histograms(1, {{"ppo/ratios": [1.0, 1.1]}})
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert list((tmp_path / "r" / "stages" / "01-sft" / "tensorboard").iterdir())
