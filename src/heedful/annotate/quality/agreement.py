"""How far all raters agree: per comparison of two people, per pair of people, per item, and corrected for chance.

Every figure has an interval by resampling prompts, since what is said of one prompt's answers hangs together; a
bootstrap over single verdicts is too narrow. What cannot be computed is None with the reason beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from heedful.annotate.quality.pairs import Verdicts, verdicts
from heedful.annotate.submitted import Submitted
from heedful.annotate.wording import undefined
from heedful.evaluate.intervals import middle, resampled_sums
from heedful.records import Record


@dataclass(frozen=True, slots=True)
class Figure(Record):
    """A number with a 95 % interval, or why there is none."""

    value: float | None = None
    low: float | None = None
    high: float | None = None
    num_prompts: int = 0
    num: int = 0
    """Comparisons of two people, pairs of answers (α) or items (W) behind it."""
    undefined: str = ""


@dataclass(frozen=True, slots=True)
class Agreement(Record):
    """Agreement of all raters who are not excluded; control items and repetitions left out."""

    pair_rate: Figure
    """Share of comparisons (two people on two answers) with the same better answer; a tie on either side is half."""
    pair_rate_decided: Figure
    """The same where neither tied."""
    alpha: Figure
    """Krippendorff's α of verdicts -1, 0, 1 (interval distance), both ways round each pair."""
    tau_b: Figure
    """Kendall's τ-b of two people, pooled over all pairs of people and items."""
    w: dict[str, float] = field(default_factory=dict)
    """Number of people → mean Kendall's W over the items that so many ranked in full. Random raters reach 1/m."""
    mean_spearman: Figure = Figure()
    """(m·W - 1) / (m - 1), over items: the mean rank correlation of two people; random raters reach 0."""


def agreement(rankings: Sequence[Submitted]) -> Agreement:
    """Of rankings that :func:`~heedful.annotate.quality.pairs.first_rankings` chose; excluded ones are left out."""
    kept = [s for s in rankings if not s.excluded]
    table = verdicts(kept)
    w, spearman = kendall_w(kept)
    return Agreement(
        pair_rate=pair_rate(table),
        pair_rate_decided=pair_rate(table, decided=True),
        alpha=alpha(table),
        tau_b=_tau_of_all(table),
        w=w,
        mean_spearman=spearman,
    )


def _unit_sums(table: Verdicts) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Per pair of answers: verdicts, their sum, how many decided; and the prompt it belongs to."""
    num_U, sum_U, decided_U = (
        np.bincount(table.unit_V, weights=x, minlength=table.num_units)
        for x in (np.ones(len(table.unit_V)), table.verdict_V, table.verdict_V**2)
    )
    group_U = np.zeros(table.num_units, dtype=int)
    group_U[table.unit_V] = table.group_V
    return num_U, sum_U, decided_U, group_U


def pair_rate(table: Verdicts, *, decided: bool = False) -> Figure:
    """Pair agreement, every comparison of two people weighted equally.

    Two verdicts a and b in {-1, 0, 1} agree to (1 + a·b) / 2: a tie is a coin that the rater did not throw.
    """
    num_U, sum_U, decided_U, group_U = _unit_sums(table)
    people_U = decided_U if decided else num_U
    comparisons_U = people_U * (people_U - 1) / 2
    agreed_U = (comparisons_U + (sum_U**2 - decided_U) / 2) / 2
    return _ratio(agreed_U, comparisons_U, group_U, "no pair of answers was judged by two people")


def _tau_of_all(table: Verdicts) -> Figure:
    """Σ a·b / Σ (a² + b²)/2 over ordered comparisons; as both orders count, the two sides of τ-b are equal."""
    num_U, sum_U, decided_U, group_U = _unit_sums(table)
    top_U, below_U = sum_U**2 - decided_U, decided_U * (num_U - 1)
    found = _ratio(top_U, below_U, group_U, "no pair of answers was judged by two people, or all are tied")
    return replace(found, num=int((num_U * (num_U - 1) / 2).sum()))


def _ratio(top_U: np.ndarray, below_U: np.ndarray, group_U: np.ndarray, because: str) -> Figure:
    """Σ top / Σ below with its interval by resampling prompts; both counted per pair of answers or per item."""
    prompts, at = np.unique(group_U[below_U > 0], return_inverse=True)
    if not len(prompts):
        return Figure(undefined=undefined(because))
    sums_P2 = np.column_stack([np.bincount(at, weights=x[below_U > 0]) for x in (top_U, below_U)])
    top, below = sums_P2.sum(0)
    tops_R, belows_R = resampled_sums(sums_P2).T
    low, high = middle(tops_R / belows_R)
    return Figure(float(top / below), low, high, len(prompts), int(below))


def alpha(table: Verdicts) -> Figure:
    """Krippendorff's α of the verdicts by evalica, with an interval by resampling prompts.

    Ranks of items with different numbers of answers have no common scale, verdicts on pairs have. Each pair enters both
    ways round, so that the names of the answers do not matter.
    """
    num_U, sum_U, decided_U, group_U = _unit_sums(table)
    shared_U = np.flatnonzero(num_U > 1)
    if not len(shared_U):
        return Figure(undefined=undefined("no pair of answers was judged by two people"))
    if not decided_U[shared_U].any():
        return Figure(undefined=undefined("every pair is tied"))  # evalica says 1
    m_U, s_U, q_U = num_U[shared_U], sum_U[shared_U], decided_U[shared_U]
    # with both ways round α is 1 - (n - 1) / n · Σ (m q - s²) / (m - 1) / Σ q, n = 2 Σ m; evalica would need seconds
    prompts, at = np.unique(group_U[shared_U], return_inverse=True)
    parts = (2 * m_U, (m_U * q_U - s_U**2) / (m_U - 1), q_U)
    sums_P3 = np.column_stack([np.bincount(at, weights=part) for part in parts])
    n_R, apart_R, q_R = resampled_sums(sums_P3).T
    defined_R = q_R > 0
    low, high = middle((1 - (n_R - 1) / n_R * apart_R / np.where(defined_R, q_R, 1))[defined_R])
    return Figure(_alpha(table, shared_U), low, high, len(prompts), len(shared_U))


def _alpha(table: Verdicts, shared_U: np.ndarray) -> float:
    import evalica
    import pandas as pd

    order = np.argsort(table.unit_V, kind="stable")
    unit_V = table.unit_V[order]
    place_V = np.arange(len(unit_V)) - np.searchsorted(unit_V, unit_V)
    values_KU = np.full((int(place_V.max()) + 1, table.num_units), np.nan)
    values_KU[place_V, unit_V] = table.verdict_V[order]
    values_KU = values_KU[:, shared_U]
    return float(evalica.alpha(pd.DataFrame(np.hstack([values_KU, -values_KU])), distance="interval").alpha)


def kendall_w(rankings: Sequence[Submitted]) -> tuple[dict[str, float], Figure]:
    """Kendall's W, corrected for ties, of items that two or more people ranked in full; by number of people."""
    from scipy.stats import friedmanchisquare

    of_item: dict[str, list[list[int]]] = {}
    for s in rankings:
        if len(s.ranks) == len(s.slots) > 2:
            of_item.setdefault(s.group_id, []).append([s.ranks[a] for a in sorted(s.slots)])
    shapes: dict[tuple[int, int], list[list[list[int]]]] = {}
    for ranks in of_item.values():
        if len(ranks) > 1 and any(len(set(row)) > 1 for row in ranks):
            shapes.setdefault((len(ranks), len(ranks[0])), []).append(ranks)
    by_people: dict[int, list[float]] = {}
    correlations: list[float] = []
    for (num_people, num_answers), items in sorted(shapes.items()):
        ranks_INM = np.moveaxis(np.array(items, dtype=float), 2, 0)
        statistic_I = np.atleast_1d(friedmanchisquare(*ranks_INM, axis=1).statistic)
        w_I = statistic_I / (num_people * (num_answers - 1))
        by_people.setdefault(num_people, []).extend(w_I.tolist())
        correlations += ((num_people * w_I - 1) / (num_people - 1)).tolist()
    w = {str(m): float(np.mean(values)) for m, values in sorted(by_people.items())}
    if not correlations:
        return w, Figure(undefined=undefined("no two people ranked an item of three or more answers in full"))
    ones = np.ones(len(correlations))
    return w, _ratio(np.array(correlations), ones, np.arange(len(ones)), "")


def tau_of_pairs(table: Verdicts, *, min_prompts: int = 5) -> list[tuple[str, str, float, int]]:
    """Kendall's τ-b of every two people who share so many prompts: (one, other, τ-b, shared prompts).

    Concordant and discordant pairs are summed over items before dividing: a single item of four answers rests on six.
    """
    from scipy.sparse import csr_array

    shape = (len(table.raters), table.num_units)
    verdict, decided, judged = (
        csr_array((x.astype(float), (table.rater_V, table.unit_V)), shape=shape)
        for x in (table.verdict_V, table.verdict_V**2, np.ones(len(table.unit_V)))
    )
    seen = {(int(r), int(g)) for r, g in zip(table.rater_V, table.group_V)}
    rows, columns = zip(*seen) if seen else ((), ())
    took = csr_array((np.ones(len(seen)), (rows, columns)), shape=(len(table.raters), len(table.groups)))
    balance_RR, decided_RR, prompts_RR = (
        (a @ b.T).toarray() for a, b in ((verdict, verdict), (decided, judged), (took, took))
    )
    results = []
    for i, j in zip(*np.triu_indices(len(table.raters), k=1)):
        scale = np.sqrt(decided_RR[i, j] * decided_RR[j, i])
        if prompts_RR[i, j] >= min_prompts and scale:
            tau = float(balance_RR[i, j] / scale)
            results.append((table.raters[i], table.raters[j], tau, int(prompts_RR[i, j])))
    return results
