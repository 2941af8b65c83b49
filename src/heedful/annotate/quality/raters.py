"""The same questions to every rater, each answered by an estimate with an interval or by why there is none.

Control items, agreement with the others, pull of length and of position, first place by slot, agreement with oneself,
tempo. Nothing here accuses: :mod:`heedful.annotate.quality.flags` says which intervals a person should look into.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

import numpy as np

from heedful.annotate.quality.bias import pulls
from heedful.annotate.quality.pairs import Verdicts, first_rankings, verdict, verdicts
from heedful.annotate.submitted import Submitted
from heedful.annotate.wording import Wording, undefined
from heedful.evaluate.intervals import resampled_sums, wilson
from heedful.records import Record

KINDS = ("gold", "agreement", "ties", "length", "position", "slot", "self", "speed")
MIN_GOLD = 10
MIN_PROMPTS = 15
"""With fewer prompts a sandwich or a bootstrap over them is too sure of itself."""
MIN_REPEATED = 8
MIN_TIMED = 10
GOLD_LEVEL = 0.90
"""Of the interval of the control items: its upper end is a one-sided 95 % bound, whatever the number of raters."""


@dataclass(frozen=True, slots=True)
class Measure(Record):
    """One question about one rater, answered."""

    rater: str
    kind: str
    num_items: int
    estimate: float | None = None
    """gold: share passed. agreement, self: Kendall's τ-b, pooled over items. ties: share of pairs tied. length: log
    odds that doubling an answer's length adds. position: log odds that standing earlier adds. slot: share of first
    places of the slot that deviates most. speed: how many times as fast as the middle rater."""
    low: float | None = None
    high: float | None = None
    undefined: str = ""
    """Why there is no estimate."""
    details: dict[str, float] = field(default_factory=dict)


def measures(submitted: Iterable[Submitted], *, level: float = 0.95) -> list[Measure]:
    """All measures of all raters, the excluded ones too (they do not count for the others).

    Args:
        level: of the intervals; those of the control items have :data:`GOLD_LEVEL`.
    """
    everything = sorted(submitted, key=lambda s: (s.annotator, s.at, s.group_id, s.repetition))
    rankings = first_rankings(everything)
    table = verdicts(rankings)
    work: dict[str, list[Submitted]] = {}
    for s in everything:
        work.setdefault(s.annotator, []).append(s)
    lengths, positions = _pulls_of_all(table, level)
    agreements, speeds = _agreement_of_all(table, level), _speed_of_all(everything, level)
    results = []
    for rater, own in work.items():
        results += [
            _gold(rater, own),
            agreements.get(rater, _none(rater, "agreement", 0, "this person ranked control items only")),
            _ties(rater, table, level),
            lengths.get(rater, _none(rater, "length", 0, "this person ranked control items only")),
            positions.get(rater, _none(rater, "position", 0, "this person ranked control items only")),
            _slot(rater, first_rankings(own), level),
            _self(rater, own, level),
            speeds[rater],
        ]
    return results


def _none(rater: str, kind: str, num: int, because: str, /, **values: Any) -> Measure:
    return Measure(rater, kind, num, undefined=undefined(because, **values))


def _too_few(rater: str, kind: str, num: int, what: Wording, needed: int = MIN_PROMPTS) -> Measure:
    values = {"num": num, "what": what, "needed": needed}
    return _none(rater, kind, num, "only {num} items were {what}; {needed} are needed", **values)


def _untimed(rater: str, num: int) -> Measure:
    return _none(rater, "speed", num, "{needed} timed items are needed", needed=MIN_TIMED)


def _around(rater: str, kind: str, num: int, value: float, error: float, level: float, **details: float) -> Measure:
    """With Student's interval, one degree of freedom for each prompt but one."""
    from scipy.stats import t

    half = float(t.ppf((1 + level) / 2, num - 1)) * error
    return Measure(rater, kind, num, value, value - half, value + half, details=details)


def _quantile(level: float) -> float:
    """Of the normal distribution, at the upper end of a two-sided interval of that level."""
    return statistics.NormalDist().inv_cdf((1 + level) / 2)


def passed(control: Submitted) -> bool:
    """Whether every better answer of a control item stands strictly before its worse one."""
    return all(verdict(control.ranks, better, worse) == 1 for better, worse in control.gold or ())


def _gold(rater: str, own: Sequence[Submitted]) -> Measure:
    results = [passed(s) for s in own if s.gold and s.repetition == 0]
    if not results:
        return _none(rater, "gold", 0, "no control item was ranked")
    low, high = wilson(sum(results), len(results), z=_quantile(GOLD_LEVEL))
    return Measure(rater, "gold", len(results), sum(results) / len(results), low, high)


def _agreement_of_all(table: Verdicts, level: float) -> dict[str, Measure]:
    """Each rater's τ-b with all others who are not excluded, pooled over the pairs both ranked."""
    v, counted = table.verdict_V, table.counted_V
    num_U, sum_U, decided_U = (
        np.bincount(table.unit_V, weights=counted * x, minlength=table.num_units) for x in (np.ones_like(v), v, v**2)
    )
    num_others_V = num_U[table.unit_V] - counted
    parts_V3 = np.column_stack(
        [v * (sum_U[table.unit_V] - counted * v), v**2 * num_others_V, decided_U[table.unit_V] - counted * v**2]
    )
    results = {}
    for rater in table.raters:
        rows = table.of(rater) & (num_others_V > 0)
        results[rater] = _tau(rater, "agreement", parts_V3[rows], table.group_V[rows], MIN_PROMPTS, level)
    return results


def _tau(rater: str, kind: str, parts_V3: np.ndarray, prompt_V: np.ndarray, min_prompts: int, level: float) -> Measure:
    """τ-b from rows of (concordant - discordant, pairs that one side decided, pairs that the other side decided)."""
    prompts, at = np.unique(prompt_V, return_inverse=True)
    if len(prompts) < min_prompts:
        what = Wording("repeated") if kind == "self" else Wording("ranked by others too")
        return _too_few(rater, kind, len(prompts), what, min_prompts)
    sums_P3 = np.column_stack([np.bincount(at, weights=column) for column in parts_V3.T])
    total = sums_P3.sum(0)
    if not total[1] * total[2]:
        return _none(rater, kind, len(prompts), "every pair is tied")
    resamples_R3 = resampled_sums(sums_P3)
    scale_R = np.sqrt(resamples_R3[:, 1] * resamples_R3[:, 2])
    taus_R = resamples_R3[:, 0][scale_R > 0] / scale_R[scale_R > 0]
    value = float(total[0] / math.sqrt(total[1] * total[2]))
    found = _around(rater, kind, len(prompts), value, float(taus_R.std()), level)
    assert found.low is not None and found.high is not None
    return Measure(rater, kind, len(prompts), value, max(-1.0, found.low), min(1.0, found.high))


def _ties(rater: str, table: Verdicts, level: float) -> Measure:
    mine = table.of(rater)
    prompts, at = np.unique(table.group_V[mine], return_inverse=True)
    if len(prompts) < MIN_PROMPTS:
        return _too_few(rater, "ties", len(prompts), Wording("ranked"))
    share_P = np.bincount(at, weights=table.verdict_V[mine] == 0) / np.bincount(at)
    error = float(share_P.std(ddof=1)) / math.sqrt(len(prompts))
    return _around(rater, "ties", len(prompts), float(share_P.mean()), error, level)


def _pulls_of_all(table: Verdicts, level: float) -> tuple[dict[str, Measure], dict[str, Measure]]:
    """The pulls of length and of position of every rater.

    Position is drawn at random, so that items without other raters count as well; length needs the others' consensus.
    """
    lengths, positions = {}, {}
    few = len(np.unique(table.rater_V[table.counted_V])) < 3
    for rater in table.raters:
        mine = table.of(rater)
        positions[rater] = _pull(rater, "position", table, mine, level)
        lengths[rater] = _pull(rater, "length", table, mine & ~np.isnan(table.gap_V), level)
        if few:
            lengths[rater] = _none(rater, "length", 0, "of two raters nobody can say which one leans")
    return lengths, positions


def _pull(rater: str, kind: str, table: Verdicts, rows: np.ndarray, level: float) -> Measure:
    num = len(np.unique(table.group_V[rows]))
    if num < MIN_PROMPTS:
        return _too_few(rater, kind, num, Wording("ranked by others too") if kind == "length" else Wording("ranked"))
    if not table.verdict_V[rows].any():
        return _none(rater, kind, num, "every pair is tied")
    if kind == "length" and not table.doublings_V[rows].any():
        return _none(rater, kind, num, "all answers are equally long")
    pull = pulls(table, rows)["doubling" if kind == "length" else "earlier"]
    return _around(rater, kind, num, pull.value, pull.error, level, win_rate=pull.win_rate())


def _slot(rater: str, own: Sequence[Submitted], level: float) -> Measure:
    """Of the slot whose share of first places is furthest from chance; Wilson's interval, for as many slots as are."""
    if len(own) < MIN_PROMPTS:
        return _too_few(rater, "slot", len(own), Wording("ranked"))
    from scipy.stats import chi2

    num_slots = max(len(s.slots) for s in own)
    firsts_S, chance_S, num_S = np.zeros(num_slots), np.zeros(num_slots), np.zeros(num_slots)
    for s in own:
        best = [a for a, rank in s.ranks.items() if rank == 1]
        num_S[: len(s.slots)] += 1
        chance_S[: len(s.slots)] += 1 / len(s.slots)
        for answer in best:
            firsts_S[s.slots[answer]] += 1 / len(best)
    share_S, expected_S = firsts_S / num_S, chance_S / num_S
    worst = int(np.argmax(abs(firsts_S - chance_S) / np.sqrt(chance_S)))
    z = _quantile(1 - (1 - level) / num_slots)
    low, high = wilson(float(firsts_S[worst]), float(num_S[worst]), z=z)
    statistic = float(((firsts_S - chance_S) ** 2 / chance_S).sum())
    details = {
        "slot": worst, "expected": float(expected_S[worst]), "chi2": statistic,
        "p": float(chi2.sf(statistic, num_slots - 1)),
    }  # fmt: skip
    return Measure(rater, "slot", len(own), float(share_S[worst]), low, high, details=details)


def _self(rater: str, own: Sequence[Submitted], level: float) -> Measure:
    before = {s.group_id: s for s in own if s.repetition == 0}
    rows, prompts = [], []
    for at, again in enumerate(s for s in own if s.repetition and s.group_id in before):
        for first, second in combinations(sorted(again.slots), 2):
            then, now = verdict(before[again.group_id].ranks, first, second), verdict(again.ranks, first, second)
            if then is not None and now is not None:
                rows.append((then * now, then**2, now**2))
                prompts.append(at)
    return _tau(rater, "self", np.array(rows, float).reshape(-1, 3), np.array(prompts), MIN_REPEATED, level)


def _speed_of_all(submitted: Sequence[Submitted], level: float) -> dict[str, Measure]:
    """Median of the log seconds per character, against the middle rater's."""
    logs: dict[str, list[float]] = {s.annotator: [] for s in submitted}
    for s in submitted:
        if s.seconds and s.seconds > 0:
            logs[s.annotator].append(math.log(s.seconds / max(1, sum(s.num_characters.values()))))
    medians = {rater: float(np.median(x)) for rater, x in logs.items() if len(x) >= MIN_TIMED}
    if not medians:
        return {r: _untimed(r, len(x)) for r, x in logs.items()}
    from scipy.stats import median_abs_deviation

    middle = float(np.median(list(medians.values())))
    spread = float(median_abs_deviation(list(medians.values()), scale="normal"))
    results = {}
    for rater, x in logs.items():
        if rater not in medians:
            results[rater] = _untimed(rater, len(x))
            continue
        gap = middle - medians[rater]
        half = _quantile(level) * median_abs_deviation(x, scale="normal") * 1.2533 / math.sqrt(len(x))
        details = {"seconds_per_1000": 1000 * math.exp(medians[rater])}
        details |= {"robust_z": -gap / spread} if spread else {}
        results[rater] = Measure(
            rater, "speed", len(x), math.exp(gap), math.exp(gap - half), math.exp(gap + half), details=details
        )
    return results
