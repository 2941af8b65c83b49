"""annotate/quality/bias.py, raters.py and flags.py: hand-worked cases, scipy and numpy as oracles, pitfalls."""

import itertools
import math

import numpy as np
import pytest
from scipy.optimize import minimize
from scipy.stats import binom, chisquare, kendalltau, rankdata

from heedful.annotate.quality.bias import SLIP, pulls
from heedful.annotate.quality.flags import findings, flagged, simultaneous
from heedful.annotate.quality.pairs import verdicts
from heedful.annotate.quality.raters import KINDS, measures, passed
from heedful.annotate.submitted import Submitted


def ranking(who, item, ranks, *, slots=None, characters=None, **more):
    answers = [f"a{i}" for i in range(len(ranks))]
    return Submitted(
        annotator=who, group_id=item, category="chat", round=0, lang="en",
        ranks={a: int(r) for a, r in zip(answers, ranks) if r},
        slots=dict(zip(answers, slots if slots is not None else range(len(answers)))),
        num_characters=dict(zip(answers, characters)) if characters is not None else dict.fromkeys(answers, 100),
        policies=dict.fromkeys(answers, "p"), at=more.pop("at", 0.0), **more,
    )  # fmt: skip


def people(num_items, taste, *, position=None, seed=0, noise=0.8, worth_of_length=0.3, num_answers=4):
    """Everybody ranks everything; ``taste`` and ``position``: rater → log-odds-like pull in units of worth."""
    rng = np.random.default_rng(seed)
    rows = []
    for item in range(num_items):
        length = rng.normal(size=num_answers)
        worth = worth_of_length * length + rng.normal(size=num_answers)
        for who, love in taste.items():
            slots = rng.permutation(num_answers)
            seen = worth + noise * rng.normal(size=num_answers) + love * length
            seen += (position or {}).get(who, 0.0) * (1 - slots / (num_answers - 1))
            characters = np.round(500 * 2.0**length).astype(int)
            rows.append(ranking(who, f"i{item}", rankdata(-seen), slots=slots, characters=characters, seconds=60.0))
    return rows


def of(measured, rater, kind):
    (found,) = [m for m in measured if (m.rater, m.kind) == (rater, kind)]
    return found


def controls(num_passed, num, who="r"):
    return [ranking(who, f"g{i}", [1, 2] if i < num_passed else [2, 1], gold=(("a0", "a1"),)) for i in range(num)]


def test_the_regression_is_maximum_likelihood_with_the_sandwich_of_prompts():
    table = verdicts(people(40, {"r": 0.5, "s": 0.0, "t": 0.0}, position={"r": 0.5}))
    mine = table.of("r")
    x = np.column_stack([table.earlier_V, table.gap_V, table.doublings_V.clip(-4, 4)])[mine]
    y = 0.5 + (0.5 - SLIP) * table.verdict_V[mine]
    x, y = np.vstack([x, np.eye(3)]), np.append(y, [0.5] * 3)
    best = minimize(lambda b: (np.log1p(np.exp(x @ b)) - y * (x @ b)).sum(), np.zeros(3), tol=1e-10).x
    found = pulls(table, mine)
    assert [p.value for p in found.values()] == pytest.approx(best, abs=1e-4)
    clusters = np.append(table.group_V[mine], [1000, 1001, 1002])
    p = 1 / (1 + np.exp(-x @ best))
    bread = np.linalg.inv((x * (p * (1 - p))[:, None]).T @ x)
    scores = np.array([((y - p)[:, None] * x)[clusters == c].sum(0) for c in np.unique(clusters)])
    num, groups = len(y), len(scores)
    meat = scores.T @ scores * groups / (groups - 1) * (num - 1) / (num - 3)
    assert [p.error for p in found.values()] == pytest.approx(np.sqrt(np.diag(bread @ meat @ bread)), rel=1e-3)


def test_the_regression_does_not_know_which_answer_is_first():
    rows = people(30, {"r": 0.5, "s": 0.0, "t": 0.0})
    turned = [
        ranking(
            s.annotator, s.group_id, list(s.ranks.values())[::-1], slots=list(s.slots.values())[::-1],
            characters=list(s.num_characters.values())[::-1],
        )
        for s in rows
    ]  # fmt: skip
    one, other = (pulls(t, t.of("r")) for t in (verdicts(rows), verdicts(turned)))
    assert [p.value for p in one.values()] == pytest.approx([p.value for p in other.values()], abs=1e-6)


def test_a_rater_who_looks_at_length_alone_has_a_finite_pull():
    rows = people(40, {"r": 1e6, "s": 0.0, "t": 0.0})
    found = of(measures(rows), "r", "length")
    assert 1 < found.low < found.estimate < 10


def test_pitfall_4_longer_wins_is_not_yet_bias():
    """Longer answers are truly better; honest raters choose the longer one in 58 to 63 % of pairs all the same."""
    truth = {"none": 0.0, "none too": 0.0, "little": 0.2, "some": 0.5, "much": 1.5}
    rows = people(250, truth, worth_of_length=0.35)
    table = verdicts(rows)
    for honest in ("none", "none too"):
        mine = table.of(honest)
        assert 0.57 < np.mean(table.verdict_V[mine] == np.sign(table.doublings_V[mine])) < 0.66
    measured = measures(rows)
    found = {who: of(measured, who, "length") for who in truth}
    values = [found[who].estimate for who in ("none", "little", "some", "much")]
    assert values == sorted(values)
    assert found["none"].low < 0.1 and found["none too"].low < 0.1 and found["some"].low > 0.3 < found["much"].low
    assert {f.rater for f in findings(rows) if f.kind == "length" and f.estimate > 0} == {"much"}


def test_a_length_that_everybody_follows_is_nobodys_fault():
    """A noisy consensus leaves some of the worth of length to the length column, for all raters alike."""
    rows = people(250, dict.fromkeys("rstu", 0.0), noise=1.2, worth_of_length=1.0)
    measured = measures(rows)
    assert all(of(measured, who, "length").low > 0 for who in "rstu")
    assert not [f for f in findings(rows) if f.kind == "length"]


def test_position_is_found_on_items_without_other_raters():
    rows = [s for i, s in enumerate(people(150, {"r": 0.0, "s": 0.0}, position={"r": 1.5})) if i // 2 % 2 == i % 2]
    measured = measures(rows)
    assert of(measured, "r", "position").low > 0.2 > of(measured, "s", "position").low
    assert of(measured, "r", "length").undefined == "undefined, because of two raters nobody can say which one leans"
    assert {(f.rater, f.kind) for f in findings(rows)} == {("r", "position"), ("r", "slot")}


def test_first_places_by_slot():
    rows = [ranking("r", f"i{i}", [1, 2, 3, 4], slots=np.roll(range(4), 0 if i < 12 else i)) for i in range(20)]
    found = of(measures(rows), "r", "slot")
    firsts = [sum(s.slots["a0"] == slot for s in rows) for slot in range(4)]
    assert found.details["slot"] == np.argmax(firsts) and found.estimate == max(firsts) / 20
    assert (found.details["chi2"], found.details["p"]) == pytest.approx(tuple(chisquare(firsts)))
    assert found.details["expected"] == 0.25
    tied = [ranking("r", f"i{i}", [1, 1, 2], slots=[0, 1, 2]) for i in range(20)]
    assert of(measures(tied), "r", "slot").estimate == 0.0  # slot 2 never came first, 0 and 1 shared it


def test_control_items_pass_when_every_order_holds():
    key = (("a0", "a1"), ("a0", "a2"))
    assert passed(ranking("r", "g", [1, 3, 2], gold=key)) and passed(ranking("r", "g", [1, 2, 2], gold=key))
    assert not passed(ranking("r", "g", [1, 1, 2], gold=key)) and not passed(ranking("r", "g", [2, 1, 3], gold=key))
    assert passed(ranking("r", "g", [1, 0, 0], gold=key)) and not passed(ranking("r", "g", [0, 1, 2], gold=key))


def test_control_items_have_wilsons_interval():
    found = of(measures(controls(15, 20)), "r", "gold")
    z, rate, num = 1.6448536, 15 / 20, 20
    centre = (rate + z**2 / 2 / num) / (1 + z**2 / num)
    half = z / (1 + z**2 / num) * math.sqrt(rate * (1 - rate) / num + z**2 / 4 / num**2)
    assert (found.low, found.high) == pytest.approx((centre - half, centre + half), rel=1e-6)


@pytest.mark.parametrize(("num", "caught"), [(10, 0.37), (20, 0.75), (30, 0.82)])
def test_pitfall_5_how_many_control_items_are_needed(num, caught):
    flags = [bool(flagged(measures(controls(k, num)))) for k in range(num + 1)]
    of_rate = {rate: float(np.dot(binom.pmf(range(num + 1), num, rate), flags)) for rate in (0.6, 0.8, 0.9)}
    assert of_rate[0.6] == pytest.approx(caught, abs=0.02) and of_rate[0.9] <= 0.009 and of_rate[0.8] < 0.09


def test_fewer_than_ten_control_items_flag_nobody():
    assert of(measures(controls(0, 9)), "r", "gold").high < 0.8 and not flagged(measures(controls(0, 9)))


def test_agreement_with_the_others_is_tau_b_over_all_of_them():
    rows = people(20, dict.fromkeys("rst", 0.0))
    ranks = {(s.annotator, s.group_id): list(s.ranks.values()) for s in rows}
    mine, theirs = [], []
    for other, item in itertools.product("st", {s.group_id for s in rows}):
        for i, j in itertools.combinations(range(4), 2):
            mine.append(np.sign(ranks["r", item][i] - ranks["r", item][j]))
            theirs.append(np.sign(ranks[other, item][i] - ranks[other, item][j]))
    found = of(measures(rows), "r", "agreement")
    assert found.estimate == pytest.approx(np.mean(np.multiply(mine, theirs)))
    assert found.low < found.estimate < found.high
    excluded = [ranking("x", s.group_id, [5 - r for r in s.ranks.values()], excluded=True) for s in rows[::3]]
    assert of(measures(rows + excluded), "r", "agreement") == found
    assert of(measures(rows + excluded), "x", "agreement").estimate < 0


def test_agreement_with_oneself_needs_repetitions():
    rng = np.random.default_rng(0)
    before = [ranking("r", f"i{i}", rng.permutation(4) + 1) for i in range(12)]
    again = [ranking("r", s.group_id, list(s.ranks.values()), repetition=1, at=1.0) for s in before]
    assert of(measures(before + again), "r", "self").estimate == pytest.approx(1.0)
    assert of(measures(before + again[:3]), "r", "self").undefined == (
        "undefined, because only 3 items were repeated; 8 are needed"
    )
    one = [ranking("r", "i", [1, 2, 3, 4]), ranking("r", "i", [2, 1, 2, 3], repetition=1)]
    assert kendalltau([1, 2, 3, 4], [2, 1, 2, 3]).statistic == pytest.approx(3 / math.sqrt(6 * 5))
    rows = [s for i in range(8) for s in (_as(one[0], f"i{i}"), _as(one[1], f"i{i}"))]
    assert of(measures(rows), "r", "self").estimate == pytest.approx(3 / math.sqrt(6 * 5))
    other = [ranking("r", s.group_id, 5 - np.array(list(s.ranks.values())), repetition=1) for s in before]
    assert [f.kind for f in findings(before + other) if f.kind == "self"] == ["self"]


def _as(s, item):
    return ranking(s.annotator, item, list(s.ranks.values()), repetition=s.repetition)


def test_speed_is_against_the_middle_rater_and_by_text():
    rows = [
        ranking(who, f"i{i}", [1, 2], characters=[500 * (1 + i % 3)] * 2, seconds=tempo * (1 + i % 3))
        for who, tempo in {"r": 60, "s": 50, "t": 40, "u": 70, "fast": 10}.items()
        for i in range(12)
    ]
    measured = measures(rows)
    assert of(measured, "fast", "speed").estimate == pytest.approx(5)
    assert of(measured, "fast", "speed").details["seconds_per_1000"] == pytest.approx(10)
    assert of(measured, "fast", "speed").details["robust_z"] < -3
    assert [f.rater for f in flagged(measured) if f.kind == "speed"] == ["fast"]
    assert of(measures([ranking("r", "i", [1, 2])]), "r", "speed").undefined


def test_pitfall_6_what_cannot_be_computed_says_why():
    measured = measures([ranking("r", "i", [1, 2, 3]), *controls(1, 1, who="c")])
    assert {m.kind for m in measured if m.rater == "r"} == set(KINDS)
    assert all(m.estimate is None and m.undefined.startswith("undefined, because") for m in measured if m.rater == "r")
    assert of(measured, "c", "agreement").undefined == "undefined, because this person ranked control items only"
    tied = [ranking(who, f"i{i}", [1, 1, 1] if who == "r" else [1, 2, 3]) for who in "rst" for i in range(20)]
    for kind in ("agreement", "length", "position"):
        assert of(measures(tied), "r", kind).undefined == "undefined, because every pair is tied"
    assert [(f.rater, f.kind) for f in findings(tied) if f.rater == "r"] == [("r", "ties")]
    assert measures([]) == [] == findings([])


def test_equally_long_answers_say_nothing_of_length():
    rows = [ranking(who, f"i{i}", np.random.default_rng(i).permutation(3) + 1) for who in "rst" for i in range(20)]
    assert of(measures(rows), "r", "length").undefined == "undefined, because all answers are equally long"


def test_intervals_widen_with_the_number_of_raters():
    assert simultaneous(1) == 0.95 and simultaneous(30) == pytest.approx(1 - 0.05 / 30)
    rows = people(60, dict.fromkeys("rst", 0.0))
    narrow, wide = (of(measures(rows, level=level), "r", "position") for level in (0.95, 0.999))
    assert wide.low < narrow.low < narrow.high < wide.high and wide.estimate == narrow.estimate


def test_a_finding_says_that_a_person_decides():
    (found,) = flagged(measures(controls(3, 12)))
    assert found.says == "passes 25% of 12 control items: for review" and found.estimate == 0.25


def test_the_order_of_submissions_does_not_matter():
    rows = people(30, {"r": 1.0, "s": 0.0, "t": 0.0})
    assert measures(rows[::-1]) == measures(rows)
