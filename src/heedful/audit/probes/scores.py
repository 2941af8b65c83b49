"""The scores themselves: numbers, not all the same, the same again when asked again, and in a usual range."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from heedful.audit.scorer import Scorer, Scores, Text
from heedful.records import ProbeResult

REPEATED = 32
"""Texts that are scored a second time."""
TOLERANCE = 0.1
"""Within-prompt deviations by which a second score may differ: bfloat16 and other batches move it by less."""


def finite_and_spread(scores: Scores, natural: Sequence[Text], changed: Sequence[Text]) -> ProbeResult:
    """NaN, infinity or one score for all fail; changed answers far above all natural ones warn."""
    values = np.asarray([scores[t] for t in natural])
    everything = np.asarray(list(scores.all.values()))
    result = ProbeResult(
        "scores", "scores that are no numbers, all the same, or far out", "ok", "", unit="", num_pairs=len(everything)
    )
    num_bad = int((~np.isfinite(everything)).sum())
    if num_bad:
        return replace(result, verdict="fail", says=f"{num_bad} of {len(everything)} scores are NaN or infinite")
    if not len(values):
        return replace(result, verdict="not run", says="no natural answer is short enough for the model")
    low, high = float(values.min()), float(values.max())
    if low == high:
        return replace(result, verdict="fail", says=f"all {len(values)} natural answers have the same score, {low:g}")
    says = f"natural answers score from {low:.3g} to {high:.3g}"
    beyond = [t for t in changed if scores[t] > high + (high - low)]
    if not beyond:
        return replace(result, says=says)
    worst = max(beyond, key=lambda t: scores[t])
    says += f", but {len({a for _, a in beyond})} changed ones up to {scores[worst]:.3g}"
    example = {"prompt": worst[0].messages[-1].content, "base": "", "changed": worst[1]}
    return replace(result, verdict="warn", says=says, sign="+", examples=(example,))


def repeatable(scorer: Scorer, scores: Scores, texts: Sequence[Text], unit: float) -> ProbeResult:
    """The same texts, in the opposite order and in another batch, must score the same."""
    again = list(dict.fromkeys((p.id, a) for p, a in texts))[:REPEATED]
    prompt_of = {p.id: p for p, _ in texts}
    asked = [(prompt_of[name], answer) for name, answer in reversed(again)]
    values = np.asarray([float(v) for v in scorer([p for p, _ in asked], [a for _, a in asked])])
    first = np.asarray([scores[t] for t in asked])
    known = np.isfinite(values) & np.isfinite(first)
    apart = float(np.abs(values - first)[known].max(initial=0.0)) / unit
    return ProbeResult(
        "repeatable", "the same texts in another order",
        verdict="fail" if apart > TOLERANCE else "ok",
        says=f"asked again in another order, scores differ by at most {apart:.2g} deviations",
        effect=apart, bound=f"at most {TOLERANCE:g}", num_pairs=int(known.sum()),
    )  # fmt: skip
