"""Rankings become verdicts on pairs of answers, the unit in which items with different numbers of answers compare."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import combinations

import numpy as np

from heedful.annotate.submitted import Submitted


def first_rankings(submitted: Iterable[Submitted]) -> list[Submitted]:
    """What agreement is computed from: no control items, no repetitions, each person once per item (the last)."""
    kept = (s for s in submitted if s.gold is None and s.repetition == 0)
    return list({(s.annotator, s.group_id): s for s in kept}.values())


def verdict(ranks: dict[str, int], first: str, second: str) -> int | None:
    """1: the first answer is better, -1: the second, 0: a tie, None: neither is ranked.

    An answer without a rank stands behind every answer that has one (``Settings.allow_unranked``).
    """
    a, b = ranks.get(first, math.inf), ranks.get(second, math.inf)
    if a == b == math.inf:
        return None
    return (a < b) - (a > b)


def normal_scores(submission: Submitted) -> dict[str, float]:
    """Van der Waerden scores of the answers, higher is better: a common scale for items of different size.

    Of N answers the one with mid-rank r gets the normal quantile of (N + 1 - r) / (N + 1).
    """
    answers = sorted(submission.slots)
    last = max(submission.ranks.values(), default=0) + 1
    return dict(zip(answers, _normal_scores(tuple(submission.ranks.get(a, last) for a in answers))))


@lru_cache(maxsize=100_000)
def _normal_scores(ranks: tuple[int, ...]) -> tuple[float, ...]:
    from scipy.special import ndtri
    from scipy.stats import rankdata

    return tuple(ndtri(1 - rankdata(ranks) / (len(ranks) + 1)).tolist())


@dataclass(frozen=True)
class Verdicts:
    """One row per person, item and pair of answers, as columns; V = rows. Both ways round a pair says the same:
    exchanging its answers changes the sign of every ``…_V`` of the second block."""

    raters: list[str]
    groups: list[str]
    num_units: int
    """Pairs of answers, over all items."""
    rater_V: np.ndarray
    group_V: np.ndarray
    unit_V: np.ndarray
    counted_V: np.ndarray
    """Whether the person counts for others, that is, is not excluded."""

    verdict_V: np.ndarray
    """1 the first is better, -1 the second, 0 a tie."""
    earlier_V: np.ndarray
    """1 where the first answer stood earlier on this person's screen, else -1."""
    doublings_V: np.ndarray
    """log2 of the first answer's length over the second's, in characters that are no white space."""
    gap_V: np.ndarray
    """The others' consensus: mean over the other people (those excluded left out) of the difference of the answers'
    :func:`normal_scores`; NaN where nobody else ranked the item."""

    def rows(self, mask_V: np.ndarray) -> Verdicts:
        """A part of the rows; numbers of raters, groups and units stay as they are."""
        columns = {name: column[mask_V] for name, column in vars(self).items() if name.endswith("_V")}
        return replace(self, **columns)

    def of(self, rater: str) -> np.ndarray:
        """The rows of one rater, as a mask."""
        return self.rater_V == (self.raters.index(rater) if rater in self.raters else -1)


def verdicts(submitted: Iterable[Submitted]) -> Verdicts:
    """The verdicts of all rankings; :func:`first_rankings` chooses which."""
    rankings = list(submitted)
    raters = sorted({s.annotator for s in rankings})
    groups = sorted({s.group_id for s in rankings})
    rater_at = {name: i for i, name in enumerate(raters)}
    group_at = {name: i for i, name in enumerate(groups)}
    scores = [normal_scores(s) for s in rankings]
    totals, nums = _consensus(rankings, scores)
    units: dict[tuple[str, str, str], int] = {}
    rows: list[tuple[float, ...]] = []
    for s, own in zip(rankings, scores):
        total, counted = totals.get(s.group_id, {}), not s.excluded
        num_others = nums.get(s.group_id, 0) - counted
        others = {a: (total[a] - own[a] * counted) / num_others for a in own} if num_others else {}
        for first, second in combinations(sorted(s.slots), 2):
            said = verdict(s.ranks, first, second)
            if said is None:
                continue
            unit = units.setdefault((s.group_id, first, second), len(units))
            gap = others[first] - others[second] if others else math.nan
            doublings = math.log2((1 + s.num_characters[first]) / (1 + s.num_characters[second]))
            earlier = 1 if s.slots[first] < s.slots[second] else -1
            rows.append((rater_at[s.annotator], group_at[s.group_id], unit, said, counted, earlier, doublings, gap))
    table = np.array(rows, dtype=float).reshape(-1, 8)
    who, where, unit_V, said_V, counted_V = (column.astype(int) for column in table[:, :5].T)
    return Verdicts(
        raters=raters, groups=groups, num_units=len(units), rater_V=who, group_V=where, unit_V=unit_V,
        counted_V=counted_V.astype(bool), verdict_V=said_V, earlier_V=table[:, 5], doublings_V=table[:, 6],
        gap_V=table[:, 7],
    )  # fmt: skip


def _consensus(
    rankings: Sequence[Submitted], scores: Sequence[dict[str, float]]
) -> tuple[dict[str, dict[str, float]], dict[str, int]]:
    """Per item the sum of the scores of each answer over people who are not excluded, and how many these are."""
    totals: dict[str, dict[str, float]] = {}
    nums: dict[str, int] = {}
    for s, own in zip(rankings, scores):
        if not s.excluded:
            nums[s.group_id] = nums.get(s.group_id, 0) + 1
            total = totals.setdefault(s.group_id, dict.fromkeys(own, 0.0))
            for answer, score in own.items():
                total[answer] += score
    return totals, nums
