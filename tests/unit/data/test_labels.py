"""What pairs say beyond their order: votes, a judge's probabilities, strengths; controls kept apart."""

from __future__ import annotations

import math

import pytest

from heedful.data.labels import soft_labels, strengths
from heedful.data.pairs import consensus, gold_ranks, training_ranks, without_controls
from heedful.errors import DataError
from heedful.records import Answer, Judgement, Message, Ranking


def ranking(*answers, **options):
    return Ranking("g7", (Message("user", "Q"),), answers, **options)


A, B, C = Answer("a", "one"), Answer("b", "two"), Answer("c", "three")


def test_votes_are_the_share_of_raters_and_nobodys_pair_has_none():
    record = ranking(A, B, C, rankings=(
        Judgement("x", {"a": 1, "b": 2}), Judgement("y", {"a": 1, "b": 2}), Judgement("z", {"a": 2, "b": 1}),
        Judgement("w", {"a": 1, "b": 1}), Judgement("v", {"c": 1}),
    ))  # fmt: skip
    found = soft_labels(record, record.answers, "votes")
    assert found[0][1] == 2.5 / 4 and found[1][0] == 1.5 / 4
    assert math.isnan(found[0][2]) and math.isnan(found[2][1])
    with pytest.raises(DataError, match="'g7' has no rater's own ranking.*labels: ranks"):
        soft_labels(ranking(A, B, consensus={"a": 1, "b": 2}), (A, B), "votes")


def test_scores_are_probabilities_against_one_reference():
    judged = [Answer(x, x, score=s) for x, s in zip("abc", (0.8, 0.5, 1.0), strict=True)]
    found = soft_labels(ranking(*judged), judged, "scores")
    assert found[0][1] == pytest.approx(0.8) and found[1][0] == pytest.approx(0.2)  # 0.5 is as good as the reference
    assert found[2][0] == pytest.approx(999 / (999 + 4)) and found[1][1] == 0.5
    for score in (None, 1.2, -0.1):
        wrong = [judged[0], Answer("b", "b", score=score)]
        with pytest.raises(DataError, match=f"'g7', answer 'b': its score is {score}.*from 0 to 1"):
            soft_labels(ranking(*wrong), wrong, "scores")


def test_a_bait_loses_for_certain():
    bait, other = (Answer(x, x, kind="bait") for x in "de")
    answers = (Answer("a", "one", score=0.2), bait, other)
    record = ranking(*answers, rankings=(Judgement("x", {"a": 2, "d": 1}),))
    for labels in ("votes", "scores"):
        found = soft_labels(record, answers, labels)
        assert found[0][1] == 1 and found[1][0] == 0 and found[1][2] == 0.5
    assert soft_labels(record, answers, "ranks") is None


def test_strengths_are_those_of_the_data_or_the_distance_of_ranks():
    assert strengths(ranking(A, B, C), (A, B, C), {"a": 1, "b": 3, "c": 3}) == [[0, 2, 2], [2, 0, 0], [2, 0, 0]]
    judged = [Answer(x, x, score=s) for x, s in zip("ab", (0.75, 0.5), strict=True)]
    assert strengths(ranking(*judged), judged, {"a": 1, "b": 2}) == [[0, 0.25], [0.25, 0]]
    assert strengths(ranking(*judged), judged, {"a": 2, "b": 1}) == [[0, 0], [0, 0]]  # people turned the judge round
    pair = ranking(A, B, info={"margin": 3})
    assert strengths(pair, (A, B), {"a": 1, "b": 2})[0][1] == 3
    for wrong in ("strong", math.nan):
        with pytest.raises(DataError, match=f"'g7': info.margin is '?{wrong}'?, and reward.margin needs a number"):
            strengths(ranking(A, B, info={"margin": wrong}), (A, B), {"a": 1, "b": 2})


def test_a_bait_that_nobody_ranked_is_last():
    bait = Answer("d", "wrong", kind="bait")
    assert training_ranks(ranking(A, bait, B, consensus={"a": 2, "b": 1})) == {"a": 2, "b": 1, "d": 3}
    assert training_ranks(ranking(A, bait, B, consensus={"a": 2, "d": 1})) == {"a": 2, "d": 1}


def test_rankings_of_ties_alone_are_kept_on_demand(tmp_path):
    import json

    from heedful.data.load import load, load_rankings

    file = tmp_path / "ties.jsonl"
    rows = [{"prompt": f"Q{n}", "answers": [{"text": "one", "score": 2}, {"text": "two", "score": n}]} for n in (1, 2)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert load(file).dropped == {"all_tied": 1} and len(load_rankings(file)) == 1
    assert len(load_rankings(file, keep_ties=True)) == 2


def test_controls_are_kept_apart():
    control = ranking(A, B, C, gold=(("b", "c"), ("a", "b")))
    assert consensus(control) == {} and gold_ranks(control) == {"a": 1, "b": 2, "c": 3}
    known = Answer("k", "known", kind="gold")
    assert [r.answers for r in without_controls([control, ranking(A, known, B)])] == [(A, B)]


def test_a_control_needs_its_known_pairs_and_no_judge(tmp_path):
    import json

    from heedful.data.load import load_rankings

    row = {"group_id": "c", "prompt": [{"role": "user", "content": "Q"}], "gold": [["a", "b"]],
           "answers": [{"id": "a", "text": "one"}, {"id": "b", "text": "two"}]}  # fmt: skip
    file = tmp_path / "controls.jsonl"
    file.write_text(json.dumps(row))
    assert load_rankings(file)[0].gold == (("a", "b"),)
    for wrong in (["a", "x"], ["a"], ["a", "a"], 3):
        file.write_text(json.dumps({**row, "gold": [wrong]}))
        with pytest.raises(DataError, match=r"line 1: field 'gold' has .* \[better, worse\]"):
            load_rankings(file)
