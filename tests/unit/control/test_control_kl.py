"""The KL controllers."""

from __future__ import annotations

import json
import math

import pytest

from heedful.config.ppo import GuardConfig, KLConfig
from heedful.control.guarded import GuardedKL
from heedful.control.kl import AdaptiveKL, FixedKL, KLController, Measurement, build_controller
from heedful.errors import CheckpointError, ConfigError, GuardError


def measured(kl_nats: float, num_samples: int = 256, score_mean: float = 0.0, score_std: float = 1.0) -> Measurement:
    return Measurement(kl_nats, num_samples, score_mean, score_std)


def test_PPO_11_values() -> None:
    for kl_nats, right in ((9, 0.201024), (6.6, 0.200512), (6, 0.2), (0, 0.198976), (5.7, 0.199744)):
        controller = AdaptiveKL(0.2, 6, 10000)
        assert controller.update(measured(kl_nats)) == pytest.approx(right, abs=1e-6)
        assert controller.coefficient == pytest.approx(right, abs=1e-6)
    controller = AdaptiveKL(0.2, 6, 10000)
    for _ in range(3):
        controller.update(measured(9))
    assert controller.coefficient == pytest.approx(0.203088, abs=1e-6)


def test_PPO_11_the_coefficient_of_the_step_is_read_before_the_update() -> None:
    controller = AdaptiveKL(0.2, 6, 10000)
    assert controller.coefficient == 0.2
    assert controller.update(measured(9)) == controller.coefficient != 0.2


@pytest.mark.parametrize("bad", [0, -1, math.nan, math.inf])
@pytest.mark.parametrize("name", ["initial", "target", "horizon"])
def test_PPO_11_bad_settings_are_refused_at_the_start(name: str, bad: float) -> None:
    with pytest.raises(ConfigError, match=name):
        AdaptiveKL(**{"initial": 0.2, "target": 6.0, "horizon": 1e4, name: bad})


def test_a_step_can_never_turn_the_coefficient_negative() -> None:
    with pytest.raises(ConfigError, match="horizon 100"):
        AdaptiveKL(0.2, 6, 100).update(measured(0, 512))
    assert AdaptiveKL(0.2, 6, 512).update(measured(0, 512)) == pytest.approx(0.16)


@pytest.mark.parametrize("kl_nats", [math.nan, math.inf])
def test_a_broken_measurement_stops(kl_nats: float) -> None:
    controller = AdaptiveKL(0.2, 6, 10000)
    with pytest.raises(GuardError, match="KL"):
        controller.update(measured(kl_nats))
    assert controller.coefficient == 0.2


def test_RES_04_coefficient_survives_a_restart() -> None:
    straight = AdaptiveKL(0.2, 6, 10000)
    for _ in range(3):
        straight.update(measured(9))
    state = json.loads(json.dumps(straight.state_dict()))
    resumed = AdaptiveKL(0.2, 6, 10000)
    resumed.load_state_dict(state)
    assert resumed.coefficient == pytest.approx(0.203088, abs=1e-6)
    assert resumed.update(measured(9)) == straight.update(measured(9)) == pytest.approx(0.203088 * 1.00512, abs=1e-6)


def test_fixed() -> None:
    controller = FixedKL(0.05)
    assert controller.update(measured(100.0, 10)) == controller.coefficient == 0.05
    other = FixedKL(0.0)
    other.load_state_dict(controller.state_dict())
    assert other.coefficient == 0.05
    for bad in (-0.1, math.nan):
        with pytest.raises(ConfigError, match="KL coefficient"):
            FixedKL(bad)


@pytest.mark.parametrize("state", [{}, {"coefficient": "x"}, {"coefficient": math.nan}, {"coefficient": -1.0}])
def test_a_damaged_state_is_refused(state: dict[str, float]) -> None:
    controllers: list[KLController] = [FixedKL(0.1), AdaptiveKL(0.1, 6, 10000)]
    for controller in controllers:
        with pytest.raises(CheckpointError, match="coefficient"):
            controller.load_state_dict(state)


def test_the_options_choose_the_controller() -> None:
    fixed = build_controller(KLConfig(coefficient=0.3))
    assert isinstance(fixed, FixedKL) and fixed.coefficient == 0.3
    adaptive = build_controller(KLConfig(coefficient=0.3, target=4.0, horizon=500))
    assert isinstance(adaptive, AdaptiveKL)
    assert (adaptive.coefficient, adaptive.target, adaptive.horizon) == (0.3, 4.0, 500)
    config = GuardConfig(window_steps=1, score_rise=0.5, kl_rise_nats=2.0, factor=1.5, limit=2.0)
    for target, base in ((None, FixedKL), (4.0, AdaptiveKL)):
        guarded = build_controller(KLConfig(coefficient=0.3, target=target, guard=config))
        assert isinstance(guarded, GuardedKL) and isinstance(guarded.base, base)
        guarded.update(measured(4.0))
        guarded.update(measured(6.1, score_mean=0.6))
        assert guarded.alarm and guarded.multiplier == 1.5
        guarded.update(measured(8.2, score_mean=1.2))
        assert guarded.multiplier == 2.0  # the limit
