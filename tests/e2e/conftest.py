"""Where the attempts at a run come from."""

from __future__ import annotations

import multiprocessing
from typing import Any

import pytest


@pytest.fixture(scope="session")
def processes() -> Any:
    """Processes forked from one that has imported everything, so that an attempt costs its work and no start-up."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([
        "attempt", "heedful.cli.run", "heedful.data.load", "heedful.models.export", "heedful.pipeline",
        "heedful.report.build", "heedful.rollout.sources", "heedful.train.ppo", "heedful.train.selftest",
        "matplotlib.backends.backend_agg", "matplotlib.figure", "peft", "tensorboard.compat.proto.event_pb2",
        "tensorboard.summary.writer.event_file_writer", "transformers",
    ])  # fmt: skip
    return context
