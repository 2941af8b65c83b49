"""What the pairs of a ranking say beyond the order: how sure people are, and by how much one answer is better."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

from heedful.data.pairs import judgements_once, strength, votes
from heedful.errors import DataError
from heedful.records import Answer, Ranking

Labels = Literal["ranks", "votes", "scores"]
Matrix = list[list[float]]
_SUREST = 0.999
"""A judge's 0 or 1 would be infinite log odds."""


def soft_labels(ranking: Ranking, answers: Sequence[Answer], labels: Labels) -> Matrix | None:
    """P(answer i better than answer j) at [i][j], NaN = nobody compared the two; None where ranks are all there is.

    votes: the share of raters, ties counting one half for either. scores: σ(logit s_i − logit s_j), each score being
    the probability to beat one and the same reference answer (Bradley and Terry again). A bait loses for certain.

    Raises:
        DataError: no rater's own ranking (votes), or a score that is missing or no probability (scores).
    """
    if labels == "ranks":
        return None
    if labels == "votes":
        return _fill(answers, lambda a, b: _vote_share(ranking, a, b))
    odds = {answer.id: _log_odds(ranking, answer) for answer in answers if answer.kind != "bait"}
    return _fill(answers, lambda a, b: 1 / (1 + math.exp(odds[b.id] - odds[a.id])))


def strengths(ranking: Ranking, answers: Sequence[Answer], ranks: Mapping[str, int]) -> Matrix:
    """By how much i should lead j: the strength that the data give, never negative, or else the distance of ranks.

    Raises:
        DataError: a margin in the data that is no finite number.
    """

    def lead(a: Answer, b: Answer) -> float:
        better, worse = (a, b) if ranks[a.id] < ranks[b.id] else (b, a)
        given = strength(ranking, better, worse)
        if given is None:
            return float(abs(ranks[a.id] - ranks[b.id]))
        if not isinstance(given, int | float) or not math.isfinite(given):
            name = f"ranking {ranking.group_id!r}"
            raise DataError(f"{name}: info.margin is {given!r:.60}, and reward.margin needs a number; correct it")
        return max(0.0, float(given))

    return [[lead(a, b) for b in answers] for a in answers]


def _fill(answers: Sequence[Answer], probability: Callable[[Answer, Answer], float]) -> Matrix:
    def entry(a: Answer, b: Answer) -> float:
        baits = (a.kind == "bait", b.kind == "bait")
        if a.id == b.id or any(baits):
            return 0.5 + (baits[1] - baits[0]) / 2
        return probability(a, b)

    return [[entry(a, b) for b in answers] for a in answers]


def _vote_share(ranking: Ranking, a: Answer, b: Answer) -> float:
    if not ranking.rankings:
        raise DataError(
            f"ranking {ranking.group_id!r} has no rater's own ranking, which reward.labels: votes needs; "
            "take reward.labels: ranks"
        )
    wins, losses, ties = votes(judgements_once(ranking), a.id, b.id)
    return (wins + ties / 2) / (wins + losses + ties) if wins + losses + ties else math.nan


def _log_odds(ranking: Ranking, answer: Answer) -> float:
    if answer.score is None or not 0 <= answer.score <= 1:
        raise DataError(
            f"ranking {ranking.group_id!r}, answer {answer.id!r}: its score is {answer.score}, and reward.labels: "
            "scores needs a probability from 0 to 1; take reward.labels: ranks"
        )
    p = min(max(answer.score, 1 - _SUREST), _SUREST)
    return math.log(p / (1 - p))
