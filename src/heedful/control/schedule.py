"""Learning-rate schedules as a pure function of the number of optimizer steps done."""

from __future__ import annotations

import math
from typing import Literal

from heedful.errors import ConfigError

Kind = Literal["constant", "linear", "cosine"]


def factor(step: int, *, total_steps: int, warmup_steps: int, kind: Kind) -> float:
    """What the learning rate is multiplied by for the next optimizer step.

    The warm-up rises linearly and reaches 1 in its last step; the first step is never wasted on a rate of 0. Then
    ``linear`` and ``cosine`` fall from 1 to 0, which is reached after ``total_steps`` and never before. There is no
    state: a resumed run passes the step it is at.

    Args:
        step: optimizer steps already done, 0 before the first.
        total_steps: optimizer steps of the whole run (rollouts × epochs × minibatches), the same on every rank.
        warmup_steps: optimizer steps of the warm-up.
        kind: constant, linear or cosine.

    Raises:
        ConfigError: no steps, a warm-up longer than the run, or an unknown kind.
    """
    if total_steps <= 0:
        raise ConfigError(f"total_steps is {total_steps}; it must be above 0")
    if not 0 <= warmup_steps <= total_steps:
        raise ConfigError(f"warmup_steps is {warmup_steps}; it must lie between 0 and total_steps ({total_steps})")
    if kind not in ("constant", "linear", "cosine"):
        raise ConfigError(f"the learning-rate schedule is {kind!r}; choose constant, linear or cosine")
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    if kind == "constant":
        return 1.0
    if step >= total_steps:
        return 0.0
    progress = (step - warmup_steps) / (total_steps - warmup_steps)
    return 1 - progress if kind == "linear" else (1 + math.cos(math.pi * progress)) / 2
