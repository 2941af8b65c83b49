"""A small version of benchmarks/rater_flags.py: planted raters of a simulated project are flagged, honest ones not."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "benchmarks"))

from rater_flags import PLANTED, count, simulate  # noqa: E402

STRONG = tuple(profile for profile in PLANTED if not profile.endswith("0.5"))


def test_the_simulated_project_is_as_described():
    submitted, profiles = simulate(0, items=100)
    assert len(profiles) == 30 and list(profiles.values()).count("honest") == 30 - len(PLANTED)
    of_rater = [s for s in submitted if s.annotator == "r29"]
    assert 95 <= len(of_rater) <= 105 and sum(s.gold is not None for s in of_rater) == 9
    people: dict[str, int] = {}
    for s in submitted:
        if s.gold is None and s.repetition == 0:
            people[s.group_id] = people.get(s.group_id, 0) + 1
    assert set(people.values()) == {1, 3} and 0.15 < list(people.values()).count(3) / len(people) < 0.25


@pytest.mark.slow
def test_planted_raters_are_flagged_and_honest_ones_are_not():
    num, named, _ = count(range(3), items=150, planted=PLANTED)
    assert all(named[profile] == 3 for profile in STRONG if profile != "position lover 1")
    assert named["honest"] <= 1 and num["honest"] == 63


def test_one_project_with_planted_raters():
    planted = ("spammer: patient", "spammer: ties", "length lover 2", "position lover 2")
    num, named, _ = count(range(1), items=150, num_raters=15, planted=planted)
    assert num["honest"] == 11 and named["honest"] == 0
    assert all(named[profile] for profile in planted)
