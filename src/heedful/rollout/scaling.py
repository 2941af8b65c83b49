"""Scaling: the raw numbers of one part of the reward become comparable with those of another, (raw − mean) / std."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, final

from heedful.config.ppo import Scaling

SMALLEST_SPREAD = 1e-5
"""Deviations below this share of the mean (or of 1) are rounding, not spread: scores that are all the same become 0
instead of noise at full size."""


class Scaler(ABC):
    """(raw − mean) / std; where mean and deviation come from is the kind."""

    @final
    def __call__(self, raw: Sequence[float], *, update: bool = True) -> list[float]:
        """The scaled numbers, in order.

        Args:
            update: True for the answers of a training step. False leaves no trace and scales in the units of the first
                training step whose numbers are not all the same, so that validations of different steps compare.
        """
        if not raw:
            return []
        mean, std = self._statistics(raw, update)
        std = max(std, _smallest_std(mean))
        return [(x - mean) / std for x in raw]

    @abstractmethod
    def _statistics(self, raw: Sequence[float], update: bool) -> tuple[float, float]: ...

    @abstractmethod
    def state_dict(self) -> dict[str, Any]: ...

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None: ...


@final
class Fixed(Scaler):
    """Mean and deviation known beforehand: those of a reward card, or 0 and 1 (no scaling)."""

    def __init__(self, mean: float = 0.0, std: float = 1.0) -> None:
        self._mean, self._std = mean, std

    def _statistics(self, raw: Sequence[float], update: bool) -> tuple[float, float]:
        return self._mean, self._std

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


class _Measured(Scaler):
    """Statistics of what was seen; those of the first step with any spread are kept as the unit of validations."""

    def __init__(self) -> None:
        self._first: tuple[float, float] | None = None

    def _statistics(self, raw: Sequence[float], update: bool) -> tuple[float, float]:
        if not update:
            return self._first or mean_and_std(raw)
        mean, std = self._see(raw)
        if self._first is None and std > _smallest_std(mean):
            self._first = mean, std
        return mean, std

    @abstractmethod
    def _see(self, raw: Sequence[float]) -> tuple[float, float]: ...

    def state_dict(self) -> dict[str, Any]:
        return {"first": list(self._first) if self._first else None}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._first = tuple(state["first"]) if state["first"] else None  # type: ignore[assignment]


@final
class Batch(_Measured):
    """Mean and deviation of the step's own answers."""

    def _see(self, raw: Sequence[float]) -> tuple[float, float]:
        return mean_and_std(raw)


@final
class Running(_Measured):
    """Mean and deviation of all answers so far, those of the step included (Welford; merged as by Chan et al.)."""

    def __init__(self) -> None:
        super().__init__()
        self._num, self._mean, self._squares = 0, 0.0, 0.0

    def _see(self, raw: Sequence[float]) -> tuple[float, float]:
        mean, std = mean_and_std(raw)
        total = self._num + len(raw)
        step = mean - self._mean
        self._squares += std * std * len(raw) + step * step * self._num * len(raw) / total
        self._mean += step * len(raw) / total
        self._num = total
        return self._mean, math.sqrt(self._squares / total)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "num": self._num, "mean": self._mean, "squares": self._squares}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._num, self._mean, self._squares = state["num"], state["mean"], state["squares"]


def build_scaler(kind: Scaling, *, mean: float = 0.0, std: float = 1.0) -> Scaler:
    """The scaler of a recipe's word; ``mean`` and ``std`` are those of the reward card, which only "card" reads."""
    if kind == "card":
        return Fixed(mean, std)
    return {"running": Running, "batch": Batch, "none": Fixed}[kind]()


def _smallest_std(mean: float) -> float:
    return SMALLEST_SPREAD * max(1.0, abs(mean))


def mean_and_std(values: Sequence[float]) -> tuple[float, float]:
    """Mean and population deviation."""
    mean = math.fsum(values) / len(values)
    return mean, math.sqrt(math.fsum((x - mean) ** 2 for x in values) / len(values))
