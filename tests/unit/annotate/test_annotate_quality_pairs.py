"""annotate/quality/pairs.py against hand-worked rankings."""

import itertools
import math
import random

import numpy as np
import pytest
from scipy.stats import norm

from heedful.annotate.quality.pairs import first_rankings, normal_scores, verdict, verdicts
from heedful.annotate.submitted import Submitted


def ranking(who, item, ranks, *, slots=None, characters=None, shown=None, **more):
    answers = shown or sorted(ranks)
    return Submitted(
        annotator=who, group_id=item, category=more.pop("category", "chat"), round=more.pop("round", 0), lang="en",
        ranks=ranks, slots=slots or {a: i for i, a in enumerate(answers)},
        num_characters=characters or dict.fromkeys(answers, 100),
        policies=more.pop("policies", dict.fromkeys(answers, "p")), at=more.pop("at", 0.0), **more,
    )  # fmt: skip


def test_verdicts_of_a_pair():
    ranks = {"a": 1, "b": 2, "c": 2}
    assert [verdict(ranks, *pair) for pair in ("ab", "ba", "bc")] == [1, -1, 0]
    assert verdict(ranks, "a", "unranked") == 1 and verdict(ranks, "unranked", "b") == -1
    assert verdict(ranks, "unranked", "unranked too") is None


def test_controls_repetitions_and_older_submissions_do_not_count():
    rows = [
        ranking("r", "i", {"a": 1, "b": 2}),
        ranking("r", "i", {"a": 2, "b": 1}, at=1.0),
        ranking("r", "i", {"a": 1, "b": 1}, repetition=1, at=2.0),
        ranking("r", "g", {"a": 1, "b": 2}, gold=(("a", "b"),)),
        ranking("s", "i", {"a": 1, "b": 2}),
    ]
    assert first_rankings(rows) == [rows[1], rows[4]]


def test_normal_scores_put_different_sizes_and_ties_on_one_scale():
    assert normal_scores(ranking("r", "i", {"a": 2, "b": 1})) == pytest.approx(
        {"a": norm.ppf(1 / 3), "b": norm.ppf(2 / 3)}
    )
    tied = normal_scores(ranking("r", "i", {"a": 1, "b": 2, "c": 2, "d": 3}))
    assert tied == pytest.approx({"a": norm.ppf(4 / 5), "b": 0.0, "c": 0.0, "d": norm.ppf(1 / 5)})
    unranked = normal_scores(ranking("r", "i", {"a": 1}, shown=["a", "b", "c"]))
    assert unranked["b"] == unranked["c"] == pytest.approx(norm.ppf(1.5 / 4))


def test_rows_say_what_was_on_the_screen():
    rows = [
        ranking("r", "i", {"a": 1, "b": 2}, slots={"a": 1, "b": 0}, characters={"a": 399, "b": 99}),
        ranking("s", "i", {"a": 1, "b": 1}, characters={"a": 399, "b": 99}),
        ranking("t", "i", {"a": 2, "b": 1}, characters={"a": 399, "b": 99}, excluded=True),
        ranking("r", "alone", {"a": 1, "b": 2}),
    ]
    table = verdicts(rows)
    assert table.verdict_V.tolist() == [1, 0, -1, 1] and table.earlier_V.tolist() == [-1, 1, 1, 1]
    assert table.doublings_V.tolist() == [2, 2, 2, 0]
    # the consensus of the others: s tied for r, r for s, both without the excluded t; for t the mean of r and s
    full = norm.ppf(2 / 3) - norm.ppf(1 / 3)
    assert table.gap_V[:3] == pytest.approx([0.0, full, full / 2]) and math.isnan(table.gap_V[3])
    assert table.counted_V.tolist() == [True, True, False, True] and table.num_units == 2


@pytest.mark.parametrize("num", range(2, 10))
def test_every_ranking_in_full_gives_all_pairs(num):
    rng = random.Random(num)
    ranks = {f"a{i}": rng.randint(1, num) for i in range(num)}
    table = verdicts([ranking("r", "i", ranks)])
    assert len(table.verdict_V) == math.comb(num, 2)
    assert (table.verdict_V == 0).sum() == sum(x == y for x, y in itertools.combinations(ranks.values(), 2))


def test_pitfall_3_answers_are_matched_by_id_not_by_place():
    """Best-first lists say nothing place by place; the order in which ranks were stored must not matter."""
    one, other = ranking("r", "i", {"a": 1, "b": 2, "c": 3}), ranking("s", "i", {"c": 1, "a": 2, "b": 3})
    told_otherwise = ranking("s", "i", {"b": 3, "c": 1, "a": 2}, slots=other.slots)
    x, y = verdicts([one, other]), verdicts([one, told_otherwise])
    assert np.array_equal(x.verdict_V, y.verdict_V) and np.array_equal(x.unit_V, y.unit_V)
    assert verdicts([one, other]).verdict_V.tolist() == [1, 1, 1, 1, -1, -1]


def test_pitfall_7_length_is_characters_without_white_space():
    """Chinese has no spaces: by words both answers would be one long; spaces and line breaks add nothing."""
    texts = {"a": "水在零度结冰。", "b": "水在零度结冰,\n  在一百度沸腾。"}
    characters = {name: len("".join(text.split())) for name, text in texts.items()}
    table = verdicts([ranking("r", "i", {"a": 1, "b": 2}, characters=characters)])
    assert table.doublings_V == pytest.approx([math.log2(8 / 15)])
