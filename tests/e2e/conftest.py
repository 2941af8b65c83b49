"""Where the attempts at a run come from."""

from __future__ import annotations

import multiprocessing
from typing import Any

import pytest


@pytest.fixture(scope="session")
def processes() -> Any:
    """Processes forked from one that has imported everything, so that an attempt costs its work and no start-up."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["attempt", "heedful.pipeline", "heedful.train.ppo", "transformers", "peft"])
    return context
