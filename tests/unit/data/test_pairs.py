"""Consensus by majority, all pairs of a ranking, agreement."""

from __future__ import annotations

from itertools import permutations

import pytest

from heedful.data.pairs import agreement, consensus, judgements_once, to_pairs
from heedful.records import Answer, Judgement, Message, Ranking


def ranking(*orders: str, **fields: object) -> Ranking:
    """Judgements written as "abc" (best first) or "a=bc" (a and b tied)."""
    judgements = []
    for number, order in enumerate(orders):
        ranks, rank = {}, 0
        for i, letter in enumerate(order):
            if letter != "=":
                rank += order[i - 1 : i] != "="
                ranks[letter] = rank
        judgements.append(Judgement(f"p{number}", ranks))
    names = sorted({letter for order in orders for letter in order if letter != "="})
    answers = tuple(Answer(name, f"text {name}") for name in names)
    return Ranking("g", (Message("user", "Q"),), answers, tuple(judgements), **fields)  # type: ignore[arg-type]


def letters(item: Ranking) -> list[str]:
    return [pair.chosen[-1] + pair.rejected[-1] for pair in to_pairs(item)]


def test_one_judgement_gives_all_pairs() -> None:
    assert letters(ranking("cabd")) == ["ca", "cb", "cd", "ab", "ad", "bd"]
    assert letters(ranking("a=bc")) == ["ac", "bc"]


def test_majority_wins_whatever_the_minority_says() -> None:
    item = ranking("abc", "abc", "cba")
    assert consensus(item) == {"a": 1, "b": 2, "c": 3}
    assert [(p.num_votes, p.agree_fraction) for p in to_pairs(item)] == [(3, pytest.approx(2 / 3))] * 3


def test_equal_votes_are_a_tie() -> None:
    item = ranking("ab", "ba")
    assert consensus(item) == {"a": 1, "b": 1} and to_pairs(item) == []
    assert consensus(ranking("a=b", "ab")) == {"a": 1, "b": 2}
    assert to_pairs(ranking("a=b", "ab"))[0].agree_fraction == 0.75  # a tied vote counts one half


def test_a_cycle_goes_by_mean_rank_then_ties() -> None:
    assert consensus(ranking("abc", "bca", "cab")) == {"a": 1, "b": 1, "c": 1}
    # a beats b (3:2), b beats c (4:1), c beats a (3:2); mean ranks: b 1.8, a 2.0, c 2.2
    assert consensus(ranking("abc", "abc", "bca", "bca", "cab")) == {"b": 1, "a": 2, "c": 3}


def test_unanimous_orders_survive_any_order_of_answers() -> None:
    for order in permutations("abcd"):
        item = ranking("".join(order), "".join(order))
        assert sorted(consensus(item), key=lambda n: consensus(item)[n]) == list(order)


def test_partial_judgements_and_unranked_answers() -> None:
    item = Ranking(
        "g", (Message("user", "Q"),), tuple(Answer(n, n) for n in "abcd"),
        (Judgement("x", {"a": 1, "b": 2}), Judgement("y", {"b": 1, "c": 2})),
    )  # fmt: skip
    assert consensus(item) == {"a": 1, "b": 2, "c": 3}
    votes = [(p.chosen + p.rejected, p.num_votes) for p in to_pairs(item)]
    assert votes == [("ab", 1), ("ac", 0), ("bc", 1)]


def test_given_consensus_is_used_and_its_gaps_closed() -> None:
    assert consensus(ranking("ab", consensus={"b": 2, "a": 7})) == {"b": 1, "a": 2}


def test_ANN_06_a_double_submit_counts_once_and_the_last_word_counts() -> None:
    item = Ranking(
        "g", (Message("user", "Q"),), (Answer("a", "x"), Answer("b", "y")),
        (Judgement("1", {"a": 1, "b": 2}), Judgement("1", {"a": 1, "b": 2}), Judgement("2", {"a": 2, "b": 1})),
    )  # fmt: skip
    assert len(judgements_once(item)) == 2 and consensus(item) == {"a": 1, "b": 1}
    changed = Ranking(
        "g", item.prompt, item.answers, (Judgement("1", {"a": 1, "b": 2}), Judgement("1", {"a": 2, "b": 1}))
    )
    assert consensus(changed) == {"b": 1, "a": 2}


def test_ANN_06_agreement_and_kappa() -> None:
    ranks = {"A": {"a": 1, "b": 2}, "B": {"a": 2, "b": 1}, "T": {"a": 1, "b": 1}}
    items = [
        Ranking(
            str(i), (Message("user", "Q"),), (Answer("a", "x"), Answer("b", "y")),
            (Judgement("1", ranks[first]), Judgement("2", ranks[second]))
            + ((Judgement("1", ranks[first]),) if i == 0 else ()),
        )
        for i, (first, second) in enumerate(zip("AABBT", "ABBBT"))
    ]  # fmt: skip
    found = agreement(items)
    assert found is not None
    assert (found.num_pairs, found.observed, found.kappa) == (5, pytest.approx(0.8), pytest.approx(0.6875))
    assert agreement([ranking("ab")]) is None
    assert to_pairs(items[1]) == []  # opposite verdicts of two people: a tie by the documented rule


def test_margin_bait_and_small_agreement() -> None:
    answers = (Answer("a", "x", score=0.9), Answer("b", "y", score=0.2), Answer("c", "z", score=0.1, kind="bait"))
    item = Ranking("g", (Message("user", "Q"),), answers, (Judgement("1", {"a": 1, "b": 2, "c": 3}),))
    assert [(p.margin, p.bait) for p in to_pairs(item)] == [
        (pytest.approx(0.7), False), (pytest.approx(0.8), True), (pytest.approx(0.1), True),
    ]  # fmt: skip
    assert to_pairs(ranking("ab", info={"margin": 3.0}))[0].margin == 3.0
    split_votes = ranking("abc", "abc", "acb")
    assert [p.chosen[-1] + p.rejected[-1] for p in to_pairs(split_votes, min_agree_fraction=0.9)] == ["ab", "ac"]


def test_equal_texts_make_no_pair() -> None:
    item = Ranking(
        "g", (Message("user", "Q"),), (Answer("a", "x"), Answer("b", "x"), Answer("c", "y")),
        (Judgement("1", {"a": 1, "b": 2, "c": 3}),),
    )  # fmt: skip
    assert [(p.chosen, p.rejected) for p in to_pairs(item)] == [("x", "y"), ("x", "y")]
