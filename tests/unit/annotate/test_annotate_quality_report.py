"""annotate/quality/report.py: plain JSON, the same as text, and Bradley–Terry against a logistic regression."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from heedful.annotate.quality.report import TIE_PRIOR, report, strengths, text
from heedful.annotate.submitted import Submitted

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "benchmarks"))

from rater_flags import simulate  # noqa: E402


def game(item, winner, loser, *, tie=False, who="r"):
    return Submitted(
        annotator=who, group_id=item, category="chat", round=0, lang="en", ranks={"a": 1, "b": 1 if tie else 2},
        slots={"a": 0, "b": 1}, num_characters={"a": 10, "b": 10}, policies={"a": winner, "b": loser}, at=0.0,
    )  # fmt: skip


def test_two_policies_are_the_log_odds_of_their_games():
    rows = [game(f"i{i}", "x", "y") for i in range(14)] + [game(f"j{i}", "y", "x") for i in range(5)]
    rows.append(game("k", "x", "y", tie=True))
    found = strengths(rows)
    odds = np.log((14.5 + TIE_PRIOR / 2) / (5.5 + TIE_PRIOR / 2))
    assert found["x"]["value"] - found["y"]["value"] == pytest.approx(odds, abs=1e-4)
    assert found["x"]["low"] < found["x"]["value"] < found["x"]["high"] and found["x"]["num_comparisons"] == 20


def test_bradley_terry_is_a_logistic_regression():
    from statsmodels.genmod.families import Binomial
    from statsmodels.genmod.generalized_linear_model import GLM

    rng = np.random.default_rng(0)
    true = {"w": 0.8, "x": 0.3, "y": -0.2, "z": -0.9}
    rows = []
    for i in range(300):
        one, other = rng.choice(list(true), 2, replace=False)
        if rng.random() > 1 / (1 + np.exp(true[other] - true[one])):
            one, other = other, one
        rows.append(game(f"i{i}", str(one), str(other)))
    found, names = strengths(rows), list(true)
    column = {name: np.eye(4)[i] for i, name in enumerate(names)}
    design = [column[s.policies["a"]] - column[s.policies["b"]] for s in rows]
    wins = [1.0] * len(rows)
    prior = [column[a] - column[b] for a in names for b in names if a < b]
    x = np.array(design + prior)[:, 1:]
    weights = np.array([1.0] * len(rows) + [TIE_PRIOR] * len(prior))
    b = np.append(0.0, GLM(np.array(wins + [0.5] * len(prior)), x, Binomial(), freq_weights=weights).fit().params)
    assert [found[name]["value"] for name in names] == pytest.approx(b - b.mean(), abs=1e-4)


def test_a_policy_that_never_lost_is_finite_and_strangers_are_undefined():
    rows = [game(f"i{i}", "x", "y") for i in range(10)]
    assert 1 < strengths(rows)["x"]["value"] < 3
    assert strengths([*rows, game("j", "u", "v")])["undefined"].startswith("undefined, because some policies never met")
    assert strengths([game("i", "x", "x")])["undefined"] == "undefined, because all answers come from one policy"


@pytest.fixture(scope="module")
def found():
    submitted, _ = simulate(1, num_raters=6, items=60, planted=("spammer: ties",), overlap_share=0.5)
    return report(submitted)


def test_the_report_is_plain_json(found):
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    assert found["counts"]["raters"] == 6 and found["counts"]["control_rankings"] == 6 * 5
    assert found["agreement_by_category"] == {"chat": found["agreement"]["pair_rate"]}
    assert set(found["raters"]["r00"]["measures"]["length"]) >= {"estimate", "low", "high", "tolerated", "undefined"}
    assert [(f["rater"], f["kind"]) for f in found["findings"]] == [("r00", "ties")]


def test_the_report_as_text(found):
    lines = text(found).splitlines()
    assert any("Krippendorff's alpha" in line for line in lines)
    assert any(line.startswith("  r00: ties 100% of the pairs") and line.endswith("for review") for line in lines)
    assert any("1.00*" in line and "r00" in line for line in lines)


def test_an_empty_project_has_a_report():
    empty = report([])
    assert (
        json.loads(json.dumps(empty, allow_nan=False)) == empty and not empty["findings"] and "undefined" in text(empty)
    )


def test_excluded_raters_are_measured_but_do_not_count():
    submitted, _ = simulate(1, num_raters=4, items=40, planted=("spammer: random",), overlap_share=0.8)
    left_out = [Submitted.from_json(s.to_json() | {"excluded": s.annotator == "r00"}) for s in submitted]
    all_in, without = report(submitted), report(left_out)
    assert without["agreement"]["pair_rate"]["value"] > all_in["agreement"]["pair_rate"]["value"]
    assert without["raters"]["r00"]["excluded"] and without["counts"]["excluded_raters"] == 1
    assert without["raters"]["r00"]["measures"]["agreement"]["estimate"] is not None
