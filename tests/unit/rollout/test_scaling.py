"""Scaled parts are comparable, exactly resumable, and constant scores stay small."""

from __future__ import annotations

import json
import math
import random
import statistics

import pytest

from heedful.rollout.scaling import Batch, Fixed, Running, build_scaler, mean_and_std

STEPS = [[1.0, 2.0, 6.0], [3.0], [-4.0, 0.5, 0.5, 2.0]]


def test_card_and_none():
    assert build_scaler("card", mean=1.0, std=2.0)([1.0, 5.0]) == [0.0, 2.0]
    assert build_scaler("none", mean=1.0, std=2.0)([1.0, 5.0]) == [1.0, 5.0]


def test_running_is_the_plain_formula_over_all_numbers_so_far():
    scaler, seen = Running(), []
    for step in STEPS:
        seen += step
        mean, std = statistics.fmean(seen), statistics.pstdev(seen)
        assert scaler(step) == pytest.approx([(x - mean) / std if std > 1e-5 else 0.0 for x in step], abs=1e-12)


def test_running_statistics_far_from_zero_lose_no_digits():
    generator = random.Random(0)
    values = [1e4 + generator.gauss(0, 1) for _ in range(1000)]
    scaler = Running()
    for start in range(0, 1000, 10):
        found = scaler(values[start : start + 10])
    expected = [(x - statistics.fmean(values)) / statistics.pstdev(values) for x in values[-10:]]
    assert found == pytest.approx(expected, abs=1e-9)


def test_batch_has_mean_0_and_deviation_1_whatever_came_before():
    scaler = Batch()
    for step in (STEPS[0], STEPS[2]):
        mean, std = mean_and_std(scaler(step))
        assert mean == pytest.approx(0, abs=1e-12) and std == pytest.approx(1)


@pytest.mark.parametrize("kind", ["running", "batch"])
@pytest.mark.parametrize("level", [0.0, 0.1, -3.7, 1e4])
def test_constant_scores_become_zero_and_rounding_stays_small(kind, level):
    scaler = build_scaler(kind)
    assert scaler([level] * 7) == pytest.approx([0.0] * 7, abs=1e-6)
    rounded = [level * (1 + 1e-7 * (n % 2)) for n in range(7)]  # what float32 makes of equal scores
    assert all(abs(x) < 0.02 for x in scaler(rounded))
    assert build_scaler(kind)([level]) == pytest.approx([0.0])


def test_nothing_to_scale_is_nothing():
    for scaler in (Fixed(), Batch(), Running()):
        assert scaler([]) == []


@pytest.mark.parametrize("kind", ["running", "batch"])
def test_validation_is_in_the_units_of_the_first_step_and_leaves_no_trace(kind):
    scaler = build_scaler(kind)
    assert scaler([1.0, 3.0], update=False) == [-1.0, 1.0]  # nothing known yet: its own
    scaler(STEPS[0])
    mean, std = mean_and_std(STEPS[0])
    expected = [(x - mean) / std for x in (10.0, 20.0)]
    assert scaler([10.0, 20.0], update=False) == expected
    before = scaler.state_dict()
    scaler(STEPS[2])
    assert scaler([10.0, 20.0], update=False) == expected
    scaler.load_state_dict(before)
    assert scaler.state_dict() == before


@pytest.mark.parametrize("kind", ["card", "none", "running", "batch"])
def test_RES_04_state_goes_through_json_bit_by_bit(kind):
    straight, first, second = (build_scaler(kind, mean=0.3, std=0.7) for _ in range(3))
    expected = [straight(step) for step in STEPS]
    assert first(STEPS[0]) == expected[0]
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert [second(step) for step in STEPS[1:]] == expected[1:]
    assert second([1.5], update=False) == straight([1.5], update=False)
    assert all(math.isfinite(x) for step in expected for x in step)


@pytest.mark.parametrize("kind", ["running", "batch"])
def test_a_step_without_spread_is_no_unit(kind):
    """A part that gives every answer of the first step the same would count 100 000 times in later validations."""
    scaler = build_scaler(kind)
    assert scaler([2.0, 2.0, 2.0]) == [0.0] * 3
    assert scaler([2.0, 4.0], update=False) == [-1.0, 1.0]  # no unit yet: its own
    scaler([0.0, 4.0, 2.0, 2.0])
    assert max(scaler([4.0], update=False)) < 3
