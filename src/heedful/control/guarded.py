"""A guard on the KL coefficient against reward hacking: score and KL that climb together."""

from __future__ import annotations

import math
from dataclasses import astuple
from typing import TYPE_CHECKING, Any

from heedful.errors import CheckpointError, ConfigError, GuardError

if TYPE_CHECKING:
    from heedful.control.kl import KLController, Measurement


class GuardedKL:
    """Another controller's coefficient times a multiplier of at least 1, which grows while the alarm is on.

    The alarm compares the last ``window_steps`` steps with as many before them: it is on when the mean score rose by
    more than ``score_rise`` mean deviations of a step's scores *and* the mean KL by more than ``kl_rise_nats``. Before
    there are that many steps it is off. At every step of the alarm the multiplier is multiplied by ``factor``, at every
    step without divided by it, within 1 and ``limit``. The base moves as if there were no guard.

    Args:
        base: FixedKL or AdaptiveKL.
        window_steps: steps of each of the two windows.
        score_rise: in deviations of a step's scores.
        kl_rise_nats: nats per answer.
        factor: above 1.
        limit: of the multiplier, above 1.

    Raises:
        ConfigError: an argument out of its range.
    """

    def __init__(
        self,
        base: KLController,
        *,
        window_steps: int,
        score_rise: float,
        kl_rise_nats: float,
        factor: float,
        limit: float,
    ) -> None:
        least = {"window_steps": 0, "score_rise": 0, "kl_rise_nats": 0, "factor": 1, "limit": 1}
        given = (window_steps, score_rise, kl_rise_nats, factor, limit)
        for (name, bound), value in zip(least.items(), given):
            if not (math.isfinite(value) and value > bound):
                raise ConfigError(f"KL guard: {name} is {value}; it must be a number above {bound}")
        self.base = base
        self.multiplier = 1.0
        self._window, self._score_rise, self._kl_rise_nats = window_steps, score_rise, kl_rise_nats
        self._factor, self._limit = factor, limit
        self._history: list[list[float]] = []
        """KL, mean score and its deviation of the last steps"""

    @property
    def coefficient(self) -> float:
        """β of the next step."""
        return self.base.coefficient * self.multiplier

    @property
    def alarm(self) -> bool:
        """Whether score and KL climbed together up to the last measurement."""
        n = self._window
        if len(self._history) < 2 * n:
            return False
        kl_nats, scores, deviations = zip(*self._history)
        score_climbs = _rise(scores) > self._score_rise * sum(deviations) / (2 * n)
        return score_climbs and _rise(kl_nats) > self._kl_rise_nats

    def update(self, measured: Measurement) -> float:
        """Moves the base, then the multiplier, and returns the coefficient of the next step.

        Raises:
            GuardError: a measurement is not finite; nothing has moved then.
        """
        if not all(math.isfinite(x) for x in astuple(measured)):
            raise GuardError(
                f"the KL guard got {measured}, which is not finite, so the KL coefficient cannot be updated"
            )
        self.base.update(measured)
        self._history.append([measured.kl_nats, measured.score_mean, measured.score_std])
        del self._history[: -2 * self._window]
        moved = self.multiplier * self._factor if self.alarm else self.multiplier / self._factor
        self.multiplier = min(max(moved, 1.0), self._limit)
        return self.coefficient

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint must hold: the base's state, the multiplier and the steps that the alarm looks at."""
        return {
            "base": self.base.state_dict(),
            "multiplier": self.multiplier,
            "history": list(self._history),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raises CheckpointError when the state is not usable."""
        try:
            multiplier = float(state["multiplier"])
            history = [[float(x) for x in row] for row in state["history"]]
            usable = 1 <= multiplier < math.inf and all(len(row) == 3 for row in history)
            usable = usable and all(math.isfinite(x) for row in history for x in row)
            base = dict(state["base"])
        except (KeyError, TypeError, ValueError):
            usable = False
        if not usable:
            raise CheckpointError(
                f"the saved state of the KL guard, {state!r}, is not usable; the checkpoint is damaged"
            )
        self.base.load_state_dict(base)
        self.multiplier, self._history = min(multiplier, self._limit), history[-2 * self._window :]


def _rise(values: tuple[float, ...]) -> float:
    """Mean of the second half minus mean of the first."""
    n = len(values) // 2
    return (sum(values[n:]) - sum(values[:n])) / n
