"""The coefficient of the KL penalty: fixed, or steered towards a target."""

from __future__ import annotations

import math
from typing import Protocol

from heedful.errors import CheckpointError, ConfigError, GuardError

_MAX_ERROR = 0.2


class KLController(Protocol):
    """What the loop sees: read ``coefficient`` for the step, then ``update`` with what the step measured."""

    @property
    def coefficient(self) -> float: ...

    def update(self, kl_nats: float, num_samples: int) -> float: ...

    def state_dict(self) -> dict[str, float]: ...

    def load_state_dict(self, state: dict[str, float]) -> None: ...


class FixedKL:
    """The same coefficient in every step.

    Raises:
        ConfigError: the coefficient is negative or not a number.
    """

    def __init__(self, coefficient: float) -> None:
        if not (math.isfinite(coefficient) and coefficient >= 0):
            raise ConfigError(f"the KL coefficient is {coefficient}; it must be a number of at least 0")
        self.coefficient = float(coefficient)

    def update(self, kl_nats: float, num_samples: int) -> float:
        """Changes nothing; returns the coefficient."""
        return self.coefficient

    def state_dict(self) -> dict[str, float]:
        """What a checkpoint must hold."""
        return {"coefficient": self.coefficient}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Raises CheckpointError when the state holds no usable coefficient."""
        self.coefficient = _restored(state)


class AdaptiveKL:
    """Proportional controller: β ← β (1 + e n / horizon), e = clip(KL / target − 1, ±0.2) (Ziegler et al. 2019).

    Args:
        initial: β of the first step.
        target: wanted KL to the reference (nats per sequence).
        horizon: number of samples over which β may change by a factor of about e^±0.2.

    Raises:
        ConfigError: an argument is not above 0.
    """

    def __init__(self, initial: float, target: float, horizon: float) -> None:
        for name, value in (("initial coefficient", initial), ("target", target), ("horizon", horizon)):
            if not (math.isfinite(value) and value > 0):
                raise ConfigError(f"adaptive KL: the {name} is {value}; it must be a number above 0")
        self.coefficient = float(initial)
        self.target = float(target)
        self.horizon = float(horizon)

    def update(self, kl_nats: float, num_samples: int) -> float:
        """Moves the coefficient for the next step and returns it.

        Args:
            kl_nats: mean KL per sequence that the step measured, over all ranks.
            num_samples: sequences in the step, over all ranks (not per rank, not optimizer steps).

        Raises:
            GuardError: the KL is not finite.
            ConfigError: so many samples that one step could turn the coefficient negative.
        """
        if not math.isfinite(kl_nats):
            raise GuardError(f"the measured KL is {kl_nats}, so the KL coefficient cannot be updated")
        if _MAX_ERROR * num_samples >= self.horizon:
            raise ConfigError(
                f"adaptive KL: horizon {self.horizon:g} is too short for {num_samples} samples per step; "
                f"use at least {num_samples}"
            )
        error = min(max(kl_nats / self.target - 1, -_MAX_ERROR), _MAX_ERROR)
        self.coefficient *= 1 + error * num_samples / self.horizon
        return self.coefficient

    def state_dict(self) -> dict[str, float]:
        """What a checkpoint must hold; target and horizon come from the recipe."""
        return {"coefficient": self.coefficient}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Raises CheckpointError when the state holds no usable coefficient."""
        self.coefficient = _restored(state)


def _restored(state: dict[str, float]) -> float:
    coefficient = state.get("coefficient")
    if not isinstance(coefficient, (int, float)) or not math.isfinite(coefficient) or coefficient < 0:
        raise CheckpointError(f"the saved KL state {state!r} holds no usable 'coefficient'; the checkpoint is damaged")
    return float(coefficient)
