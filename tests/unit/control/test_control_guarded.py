"""The guard on the KL coefficient."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from heedful.control.guarded import GuardedKL
from heedful.control.kl import AdaptiveKL, FixedKL, KLController, Measurement
from heedful.errors import CheckpointError, ConfigError, GuardError

OPTIONS: dict[str, Any] = {"window_steps": 2, "score_rise": 0.5, "kl_rise_nats": 2.0, "factor": 1.5, "limit": 3.0}


def guarded(base: KLController | None = None, **options: Any) -> GuardedKL:
    return GuardedKL(base or FixedKL(0.1), **{**OPTIONS, **options})


def feed(controller: KLController, kl_nats: list[float], scores: list[float], std: float = 1.0) -> list[float]:
    return [controller.update(Measurement(k, 64, s, std)) for k, s in zip(kl_nats, scores, strict=True)]


def test_the_alarm_needs_two_full_windows_and_both_climbs() -> None:
    both = guarded()
    assert feed(both, [1, 1, 4], [0, 0, 1]) == [0.1] * 3 and not both.alarm  # three steps are no two windows
    assert feed(both, [4], [1]) == [pytest.approx(0.15)] and both.alarm
    for kl_nats, scores in (
        ([1, 1, 4, 4], [0, 0, 0, 0]),  # KL alone
        ([1, 1, 1, 1], [0, 0, 1, 1]),  # score alone
        ([1, 1, 4, 4], [1, 1, 0, 0]),  # apart from each other
        ([4, 4, 1, 1], [0, 0, 1, 1]),
        ([4, 4, 1, 1], [1, 1, 0, 0]),  # both fall
    ):
        quiet = guarded()
        assert feed(quiet, kl_nats, scores) == [0.1] * 4 and not quiet.alarm


def test_thresholds_are_of_the_windows_means() -> None:
    def alarm(kl_rise: float, score_rise: float, std: float = 1.0) -> bool:
        controller = guarded()
        feed(controller, [1, 3, 2 + kl_rise - 1, 2 + kl_rise + 1], [5, 7, 6 + score_rise, 6 + score_rise], std)
        return controller.alarm

    assert alarm(2.01, 0.51)
    assert not alarm(1.99, 0.51)
    assert not alarm(2.01, 0.49)
    assert alarm(2.01, 1.01, std=2.0)  # the rise counts in deviations of a step's scores
    assert not alarm(2.01, 0.99, std=2.0)
    assert alarm(2.01, 0.01, std=0.0)  # all answers of a step score alike: any rise is one
    assert not alarm(2.01, 0.0, std=0.0)


def test_the_deviation_is_the_mean_of_both_windows() -> None:
    for last, right in ((2.9, True), (3.1, False)):
        controller = guarded()
        for i, std in enumerate((1.0, 1.0, 1.0, last)):  # mean 1.475 or 1.525
            controller.update(Measurement(4.0 * (i > 1), 64, 0.75 * (i > 1), std))
        assert controller.alarm is right


def test_raised_at_every_step_of_the_alarm_up_to_the_limit_and_given_back_after() -> None:
    controller = guarded()
    climbing = feed(controller, [1, 1, 4, 6, 8, 10, 12], [0, 0, 1, 2, 3, 4, 5])
    assert climbing == pytest.approx([0.1, 0.1, 0.1, 0.15, 0.225, 0.3, 0.3])  # 0.3375 would exceed the limit
    assert controller.multiplier == 3.0
    after = feed(controller, [12, 12, 12, 12, 12, 12], [5, 5, 5, 5, 5, 5])
    assert after == pytest.approx([0.3, 0.2, 0.4 / 3, 0.1, 0.1, 0.1])  # still an alarm first: the windows lag behind
    assert controller.coefficient == 0.1 and controller.multiplier == 1.0


def test_the_base_moves_as_if_there_were_no_guard() -> None:
    kl_nats, scores = [1.0, 1, 4, 6, 8, 8, 8], [0.0, 0, 1, 2, 3, 3, 3]
    controller, alone = guarded(AdaptiveKL(0.1, 3.0, 640)), AdaptiveKL(0.1, 3.0, 640)
    multipliers = []
    for k, s in zip(kl_nats, scores):
        coefficient = controller.update(Measurement(k, 64, s, 1.0))
        alone.update(Measurement(k, 64, s, 1.0))
        assert controller.base.coefficient == alone.coefficient
        assert coefficient == controller.coefficient == alone.coefficient * controller.multiplier
        multipliers.append(controller.multiplier)
    assert max(multipliers) > 1 and alone.coefficient != 0.1


def test_RES_04_guard_and_base_survive_a_restart_at_any_step() -> None:
    kl_nats, scores = [1.0, 1, 4, 6, 8, 8.5, 8, 8, 8], [0.0, 0, 1, 2, 3, 3.5, 3, 3, 3]
    straight = guarded(AdaptiveKL(0.1, 3.0, 640))
    right = feed(straight, kl_nats, scores)
    assert len(set(right)) > 6
    for stop in range(len(right)):
        first, second = guarded(AdaptiveKL(0.1, 3.0, 640)), guarded(AdaptiveKL(0.7, 3.0, 640))
        feed(first, kl_nats[:stop], scores[:stop])
        state = first.state_dict()
        feed(first, kl_nats[stop:], scores[stop:])  # what is saved is no view of what goes on
        second.load_state_dict(json.loads(json.dumps(state)))
        assert feed(second, kl_nats[stop:], scores[stop:]) == right[stop:]
        assert second.state_dict() == straight.state_dict()
    assert len(straight.state_dict()["history"]) == 4  # no longer than needed


def test_a_saved_history_longer_than_the_windows_is_cut() -> None:
    controller = guarded(window_steps=1)
    rows = [[9.0, 0.0, 1.0], [9.0, 0.0, 1.0], [1.0, 0.0, 1.0], [4.0, 1.0, 1.0]]
    controller.load_state_dict({"base": {"coefficient": 0.1}, "multiplier": 1.0, "history": rows})
    assert controller.alarm


def test_a_saved_multiplier_above_a_lowered_limit_is_brought_under_it() -> None:
    controller = guarded(limit=2.0)
    controller.load_state_dict({"base": {"coefficient": 0.1}, "multiplier": 3.0, "history": []})
    assert controller.multiplier == 2.0


@pytest.mark.parametrize("field", ["kl_nats", "score_mean", "score_std"])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_broken_measurement_stops_and_moves_nothing(field: str, bad: float) -> None:
    controller = guarded(AdaptiveKL(0.1, 3.0, 640))
    before = controller.state_dict()
    values: dict[str, Any] = {"kl_nats": 1.0, "num_samples": 64, "score_mean": 0.0, "score_std": 1.0, field: bad}
    with pytest.raises(GuardError, match="KL coefficient"):
        controller.update(Measurement(**values))
    assert controller.state_dict() == before


@pytest.mark.parametrize(
    ("name", "bad"),
    [("window_steps", 0), ("score_rise", 0.0), ("kl_rise_nats", -1.0), ("factor", 1.0), ("limit", 1.0),
     ("factor", math.nan), ("limit", math.inf)],
)  # fmt: skip
def test_bad_settings_are_refused_at_the_start(name: str, bad: float) -> None:
    with pytest.raises(ConfigError, match=name):
        guarded(**{name: bad})


GOOD: dict[str, Any] = {"base": {"coefficient": 0.1}, "multiplier": 1.5, "history": [[1.0, 0.0, 1.0]]}


@pytest.mark.parametrize(
    "damage",
    [{"multiplier": 0.5}, {"multiplier": math.nan}, {"multiplier": math.inf}, {"multiplier": "x"}, {"history": [[1.0]]},
     {"history": None}, {"history": [[1.0, math.nan, 1.0]]}, {"base": {}}, {"base": None}],
)  # fmt: skip
def test_a_damaged_state_is_refused(damage: dict[str, Any]) -> None:
    controller = guarded()
    with pytest.raises(CheckpointError, match="damaged"):
        controller.load_state_dict({**GOOD, **damage})
    for missing in GOOD:
        with pytest.raises(CheckpointError, match="damaged"):
            controller.load_state_dict({name: x for name, x in GOOD.items() if name != missing})
    assert controller.multiplier == 1.0
    controller.load_state_dict(GOOD)
    assert controller.multiplier == 1.5 and controller.coefficient == pytest.approx(0.15)
