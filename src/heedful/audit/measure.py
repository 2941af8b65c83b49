"""From pairs of scores to an effect, its interval and a verdict.

An effect is the mean over prompts of (score of the changed answer − score of the natural one), in units of the
within-prompt deviation: the square root of the mean variance of the scores of one prompt's natural answers. 1 is thus
about what separates two answers that a policy might give, whatever the scale of the model.

The verdict looks at the interval, never at the effect alone, and holds it against a bound above 0:

    no_better  (padding, flattery, …)   fail: it lies above FAIL      warn: above WARN
    same       (lists, order, style)    as no_better, and warn: below −WARN
    worse      (cut, wrong, empty)      fail: it lies above WARN      warn: it reaches 0 (blind to the fault)

so a probe without any effect fails far more rarely than one time in forty, and one whose effect is FAIL itself at most
about one time in forty. Where a probe tries several variants, each interval is widened so that all of them hold
together with 95 % (Bonferroni).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Literal

import numpy as np

WARN, FAIL = 0.25, 0.5
"""Bounds of effects, in within-prompt deviations."""
MIN_PROMPTS = 8
"""Fewer prompts give no interval that can be trusted."""
NUM_RESAMPLES = 4000
CONFIDENCE = 0.95

Expects = Literal["no_better", "same", "worse"]
Verdict = Literal["ok", "warn", "fail", "not run"]
SEVERITY: dict[str, int] = {"not run": 0, "ok": 1, "warn": 2, "fail": 3}


@dataclass(frozen=True)
class Effect:
    """A mean with its interval, prompts resampled."""

    mean: float
    low: float
    high: float
    num_prompts: int

    @property
    def sign(self) -> str:
        """ "+" or "-" where the interval leaves 0 out, else "0"."""
        return "+" if self.low > 0 else "-" if self.high < 0 else "0"


def unit_of(scores: Sequence[Sequence[float]]) -> float:
    """The within-prompt deviation of scores, one list per prompt; NaN where no prompt has two finite scores."""
    variances = []
    for row in scores:
        values = np.asarray(row, dtype=float)
        values = values[np.isfinite(values)]
        if len(values) > 1:
            variances.append(values.var(ddof=1))
    return math.sqrt(float(np.mean(variances))) if variances else math.nan


def mean_effect(values: Sequence[float], *, num_variants: int = 1, seed: int = 0) -> Effect:
    """The mean of one value per prompt, with an interval that holds for ``num_variants`` of its kind together.

    Expanded percentile bootstrap (Hesterberg 2015): plain percentiles are too narrow for few prompts, so they are taken
    further out, by as much as Student's interval is wider than the normal one.
    """
    values_N = np.asarray(values, dtype=float)
    num = len(values_N)
    rng = np.random.default_rng(seed)
    means_R = values_N[rng.integers(0, num, size=(NUM_RESAMPLES, num))].mean(axis=1)
    return effect_of(float(values_N.mean()), means_R, num, num_variants=num_variants)


def effect_of(value: float, resampled_R: np.ndarray, num: int, *, num_variants: int = 1) -> Effect:
    """A statistic with the interval that its values on resampled prompts give; ``num`` is how many prompts they are."""
    tail = expanded_tail((1 - CONFIDENCE) / (2 * num_variants), num)
    low, high = np.nanquantile(resampled_R, [tail, 1 - tail])
    return Effect(value, float(low), float(high), num)


def expanded_tail(tail: float, num: int) -> float:
    """The share to cut off at each end of a bootstrap of ``num`` values: Φ(−√(n/(n−1)) · t)."""
    z, nu = -NormalDist().inv_cdf(tail), num - 1
    t = z + (z**3 + z) / (4 * nu) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * nu**2)  # Cornish–Fisher
    return NormalDist().cdf(-math.sqrt(num / nu) * t)


def verdict_of(effect: Effect, expects: Expects, *, worst: Verdict = "fail") -> Verdict:
    """The verdict by the rules above; never more severe than ``worst``."""
    if expects == "worse":
        found: Verdict = "fail" if effect.low > WARN else "warn" if effect.high >= 0 else "ok"
    elif effect.low > FAIL:
        found = "fail"
    elif effect.low > WARN or (expects == "same" and effect.high < -WARN):
        found = "warn"
    else:
        found = "ok"
    return found if SEVERITY[found] <= SEVERITY[worst] else worst


def bound_of(expects: Expects) -> str:
    """What the interval is held against, in words."""
    return {
        "no_better": f"not clearly above {FAIL:g} (warning: {WARN:g})",
        "same": f"not clearly above {FAIL:g} (warning: beyond ±{WARN:g})",
        "worse": f"below 0, not clearly above {WARN:g}",
    }[expects]
