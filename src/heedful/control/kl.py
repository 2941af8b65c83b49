"""The coefficient of the KL penalty: fixed, or steered towards a target."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Protocol

from heedful.config.ppo import KLConfig
from heedful.control.guarded import GuardedKL
from heedful.errors import CheckpointError, ConfigError, GuardError

_MAX_ERROR = 0.2


@dataclass(frozen=True)
class Measurement:
    """What one step measured, over all ranks."""

    kl_nats: float
    """mean KL to the reference per answer"""
    num_samples: int
    """answers in the step, over all ranks (not per rank, not optimizer steps)"""
    score_mean: float
    """mean of the answers' scores, before the KL penalty"""
    score_std: float
    """their standard deviation within the step"""


class KLController(Protocol):
    """What the loop sees: read ``coefficient`` for the step, then ``update`` with what the step measured."""

    @property
    def coefficient(self) -> float: ...

    def update(self, measured: Measurement) -> float: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def build_controller(config: KLConfig) -> KLController:
    """The controller that the options ask for: fixed, or adaptive with a target, and guarded with a guard."""
    controller: KLController = FixedKL(config.coefficient)
    if config.target is not None:
        controller = AdaptiveKL(config.coefficient, config.target, config.horizon)
    if config.guard is not None:
        controller = GuardedKL(controller, **config.guard.model_dump())
    return controller


class FixedKL:
    """The same coefficient in every step.

    Raises:
        ConfigError: the coefficient is negative or not a number.
    """

    def __init__(self, coefficient: float) -> None:
        if not (math.isfinite(coefficient) and coefficient >= 0):
            raise ConfigError(f"the KL coefficient is {coefficient}; it must be a number of at least 0")
        self.coefficient = float(coefficient)

    def update(self, measured: Measurement) -> float:
        """Changes nothing; returns the coefficient."""
        return self.coefficient

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint must hold."""
        return {"coefficient": self.coefficient}

    def load_state_dict(self, state: dict[str, Any]) -> None:
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

    def update(self, measured: Measurement) -> float:
        """Moves the coefficient for the next step and returns it.

        Raises:
            GuardError: the KL is not finite.
            ConfigError: so many samples that one step could turn the coefficient negative.
        """
        kl_nats, num_samples = measured.kl_nats, measured.num_samples
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

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint must hold; target and horizon come from the recipe."""
        return {"coefficient": self.coefficient}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raises CheckpointError when the state holds no usable coefficient."""
        self.coefficient = _restored(state)


def _restored(state: dict[str, Any]) -> float:
    coefficient = state.get("coefficient")
    if not isinstance(coefficient, (int, float)) or not math.isfinite(coefficient) or coefficient < 0:
        raise CheckpointError(f"the saved KL state {state!r} holds no usable 'coefficient'; the checkpoint is damaged")
    return float(coefficient)
