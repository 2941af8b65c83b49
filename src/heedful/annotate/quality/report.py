"""Everything quality control knows of a project, as JSON, and the same as text."""

from __future__ import annotations

import io
import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from heedful.annotate.quality.agreement import Figure, agreement, pair_rate, tau_of_pairs
from heedful.annotate.quality.flags import FALSE_ALARMS, flagged, middles, simultaneous, tolerated
from heedful.annotate.quality.pairs import Verdicts, first_rankings, verdict, verdicts
from heedful.annotate.quality.raters import Measure, measures
from heedful.annotate.submitted import Submitted
from heedful.annotate.wording import undefined
from heedful.evaluate.intervals import middle, resampled_sums

TIE_PRIOR = 0.5
"""Tied games that every two policies are thought to have played: keeps Bradley–Terry finite when one never lost."""
NUM_STRENGTHS = 500


def report(submitted: Iterable[Submitted]) -> dict[str, Any]:
    """Counts, agreement, policies, every measure of every rater, and what to review.

    Excluded raters are measured, but count neither for agreement nor for policies.
    """
    everything = list(submitted)
    rankings = first_rankings(everything)
    kept = [s for s in rankings if not s.excluded]
    num_rankings = Counter(s.annotator for s in everything)
    excluded = {s.annotator for s in everything if s.excluded}
    level = simultaneous(len(num_rankings))
    measured = measures(everything, level=level)
    table = verdicts(kept)
    return {
        "counts": _counts(everything, kept),
        "agreement": agreement(rankings).to_json(),
        "agreement_by_category": _by(table, {s.group_id: s.category for s in kept}),
        "agreement_by_round": _by(table, {s.group_id: str(s.round) for s in kept}),
        "pairs_of_raters": [
            {"raters": [one, other], "tau_b": tau, "num_prompts": num} for one, other, tau, num in tau_of_pairs(table)
        ],
        "policies": strengths(kept),
        "level": level,
        "false_alarms": FALSE_ALARMS,
        "raters": {
            rater: {"excluded": rater in excluded, "num_rankings": num_rankings[rater], "measures": of_rater}
            for rater, of_rater in _by_rater(measured).items()
        },
        "findings": [f.to_json() for f in flagged(measured)],
    }


def _by_rater(measured: Sequence[Measure]) -> dict[str, dict[str, Any]]:
    centre = middles(measured)
    results: dict[str, dict[str, Any]] = {}
    for m in measured:
        results.setdefault(m.rater, {})[m.kind] = m.to_json() | {"tolerated": _finite(tolerated(m, centre))}
    return results


def _finite(limits: tuple[float, float]) -> list[float | None]:
    """JSON has no infinity."""
    return [x if np.isfinite(x) else None for x in limits]


def _counts(everything: Sequence[Submitted], kept: Sequence[Submitted]) -> dict[str, int]:
    per_item: dict[str, int] = {}
    for s in kept:
        per_item[s.group_id] = per_item.get(s.group_id, 0) + 1
    return {
        "rankings": len(everything),
        "raters": len({s.annotator for s in everything}),
        "excluded_raters": len({s.annotator for s in everything if s.excluded}),
        "control_rankings": sum(s.gold is not None for s in everything),
        "repetitions": sum(s.repetition > 0 for s in everything),
        "items": len(per_item),
        "items_of_several_raters": sum(n > 1 for n in per_item.values()),
        "all_bad": sum(s.all_bad for s in kept),
        "corrected": sum(s.num_revisions > 1 for s in everything),
    }


def _by(table: Verdicts, part_of: dict[str, str]) -> dict[str, dict[str, Any]]:
    """Pair agreement by what the items belong to."""
    part_V = np.array([part_of[g] for g in table.groups])[table.group_V] if table.groups else np.array([])
    return {name: pair_rate(table.rows(part_V == name)).to_json() for name in sorted(set(part_of.values()))}


def strengths(rankings: Sequence[Submitted], *, seed: int = 0) -> dict[str, Any]:
    """Bradley–Terry strengths of the policies (natural log, mean 0), with 95 % intervals by resampling prompts.

    A tie is half a win for both. Fitted by evalica.
    """
    names = sorted({policy for s in rankings for policy in s.policies.values()})
    if len(names) < 2:
        return {"undefined": undefined("all answers come from one policy")}
    at = {name: i for i, name in enumerate(names)}
    groups = {g: i for i, g in enumerate(sorted({s.group_id for s in rankings}))}
    wins_PMM = np.zeros((len(groups), len(names), len(names)))
    for s in rankings:
        for first, second in itertools.combinations(sorted(s.slots), 2):
            said = verdict(s.ranks, first, second)
            i, j = at[s.policies[first]], at[s.policies[second]]
            if said is not None and i != j:
                wins_PMM[groups[s.group_id], i, j] += (1 + said) / 2
                wins_PMM[groups[s.group_id], j, i] += (1 - said) / 2
    total_MM = wins_PMM.sum(0)
    if not _connected(total_MM + total_MM.T):
        return {"undefined": undefined("some policies never met, not even through others")}
    resamples_RMM = resampled_sums(wins_PMM.reshape(len(groups), -1), seed=seed)[:NUM_STRENGTHS]
    value_M = _bradley_terry(total_MM)
    values_RM = np.array([_bradley_terry(x.reshape(total_MM.shape)) for x in resamples_RMM])
    return {
        name: dict(zip(("value", "low", "high"), (float(value_M[i]), *middle(values_RM[:, i]))))
        | {"num_comparisons": int(total_MM[i].sum() + total_MM[:, i].sum())}
        for name, i in at.items()
    }


def _connected(met_MM: np.ndarray) -> bool:
    from scipy.sparse.csgraph import connected_components

    return int(connected_components(met_MM > 0, directed=False)[0]) == 1


def _bradley_terry(wins_MM: np.ndarray) -> np.ndarray:
    import evalica

    first, second = np.nonzero(~np.eye(len(wins_MM), dtype=bool))
    weights = wins_MM[first, second] + TIE_PRIOR / 2
    fitted = evalica.bradley_terry(
        first.tolist(), second.tolist(), [evalica.Winner.X] * len(first),
        weights=weights.tolist(), tolerance=1e-9, limit=10_000,
    )  # fmt: skip
    logs_M = np.log(fitted.scores.loc[list(range(len(wins_MM)))].to_numpy())
    return np.asarray(logs_M - logs_M.mean())


def text(found: dict[str, Any]) -> str:
    """The report as a terminal shows it."""
    from rich.console import Console
    from rich.table import Table

    out = io.StringIO()
    console = Console(width=120, no_color=True, highlight=False, file=out)
    counts = found["counts"]
    console.print(", ".join(f"{n} {name.replace('_', ' ')}" for name, n in counts.items()))
    table = Table("agreement", "value", "95 % interval", "prompts", title="How far raters agree", title_justify="left")
    for label, key in _AGREEMENT:
        table.add_row(label, *_cells(found["agreement"][key]))
    for what in ("category", "round"):
        for name, figure in found[f"agreement_by_{what}"].items():
            table.add_row(f"  {what} {name or '(none)'}", *_cells(figure))
    console.print(table)
    policies = found["policies"]
    if "undefined" in policies:
        console.print(f"Strength of the policies: {policies['undefined']}")
    else:
        table = Table("policy", "strength", "95 % interval", "comparisons", title="Bradley–Terry", title_justify="left")
        for name, s in sorted(policies.items(), key=lambda item: -item[1]["value"]):
            table.add_row(name, f"{s['value']:+.2f}", f"{s['low']:+.2f} to {s['high']:+.2f}", str(s["num_comparisons"]))
        console.print(table)
    console.print(_rater_table(found))
    console.print("For review, a person decides:" if found["findings"] else "Nothing to review.")
    for finding in found["findings"]:
        console.print(f"  {finding['rater']}: {finding['says']}", soft_wrap=True)
    return out.getvalue()


_AGREEMENT = (
    ("pairs, a tie is half", "pair_rate"), ("pairs that both decided", "pair_rate_decided"),
    ("Krippendorff's alpha", "alpha"), ("Kendall's tau-b", "tau_b"), ("mean rank correlation (W)", "mean_spearman"),
)  # fmt: skip


def _cells(figure: dict[str, Any]) -> tuple[str, str, str]:
    f = Figure.from_json(figure)
    if f.value is None or f.low is None or f.high is None:
        return f.undefined, "", ""
    return f"{f.value:.3f}", f"{f.low:.3f} to {f.high:.3f}", str(f.num_prompts)


def _rater_table(found: dict[str, Any]) -> Any:
    from rich.table import Table

    flags = {(f["rater"], f["kind"]) for f in found["findings"]}
    kinds = list(next(iter(found["raters"].values()))["measures"]) if found["raters"] else []
    table = Table("rater", "rankings", *kinds, title="Raters (* = for review, - = undefined)", title_justify="left")
    for name, rater in found["raters"].items():
        cells = []
        for kind in kinds:
            estimate = rater["measures"][kind]["estimate"]
            cells.append("-" if estimate is None else f"{estimate:.2f}" + "*" * ((name, kind) in flags))
        table.add_row(name + " (excluded)" * rater["excluded"], str(rater["num_rankings"]), *cells)
    return table
