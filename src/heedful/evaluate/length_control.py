"""Would it still win at equal length: the win rate with the effect of length taken out."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from heedful.errors import DataError
from heedful.evaluate.compare import outcomes
from heedful.evaluate.intervals import NUM_RESAMPLES

RIDGE = 1.0
"""Prior on the length effect (per standard deviation): keeps it finite when length separates wins from losses."""


def win_rate_at_equal_length(
    before: Sequence[float],
    after: Sequence[float],
    before_lengths: Sequence[int],
    after_lengths: Sequence[int],
    *,
    tie_width: float = 0.0,
    seed: int = 0,
) -> tuple[float, float, float]:
    """(rate, low, high) that a logistic model predicts for answers of equal length.

    Fits ``P(win) = sigmoid(a + b·d)`` with d = log(after length / before length) in standard deviations, and reports
    ``sigmoid(a)``; 95 % bootstrap interval, prompts resampled. Ties count as half a win. When almost all answers
    became longer, this is an extrapolation: read it beside the plain win rate, not instead of it.

    Raises:
        DataError: the lists differ in length.
    """
    outcome_N = outcomes(before, after, tie_width=tie_width)
    if not len(outcome_N) == len(before_lengths) == len(after_lengths):
        raise DataError("win_rate_at_equal_length needs two scores and two lengths for every prompt")
    gap_N = np.log1p(np.asarray(after_lengths, dtype=float)) - np.log1p(np.asarray(before_lengths, dtype=float))
    spread = gap_N.std()
    if spread > 0:
        gap_N = gap_N / spread
    rate = _fit(outcome_N[None], gap_N[None])[0]
    rng = np.random.default_rng(seed)
    draws = rng.integers(0, len(outcome_N), size=(NUM_RESAMPLES // 2, len(outcome_N)))
    low, high = np.quantile(_fit(outcome_N[draws], gap_N[draws]), [0.025, 0.975])
    return float(rate), float(low), float(high)


def _fit(outcome_RN: np.ndarray, gap_RN: np.ndarray) -> np.ndarray:
    """sigmoid(intercept) of R logistic fits at once, by Newton's method.

    Half a win and half a loss are added at equal length, so that a resample without a loss stays finite.
    """
    num_fits = len(outcome_RN)
    half = np.full((num_fits, 1), 0.5)
    outcome_RN = np.concatenate([outcome_RN, half], axis=1)
    gap_RN = np.concatenate([gap_RN, np.zeros((num_fits, 1))], axis=1)
    a_R1, b_R1 = np.zeros((num_fits, 1)), np.zeros((num_fits, 1))
    for _ in range(25):
        p_RN = 1 / (1 + np.exp(-np.clip(a_R1 + b_R1 * gap_RN, -30, 30)))
        w_RN = p_RN * (1 - p_RN) + 1e-6
        error_RN = outcome_RN - p_RN
        grad_a, grad_b = error_RN.sum(1), (error_RN * gap_RN).sum(1) - RIDGE * b_R1[:, 0]
        h_aa, h_ab, h_bb = w_RN.sum(1), (w_RN * gap_RN).sum(1), (w_RN * gap_RN**2).sum(1) + RIDGE
        determinant = h_aa * h_bb - h_ab**2
        a_R1 = a_R1 + np.clip((h_bb * grad_a - h_ab * grad_b) / determinant, -2, 2)[:, None]
        b_R1 = b_R1 + np.clip((h_aa * grad_b - h_ab * grad_a) / determinant, -2, 2)[:, None]
    return 1 / (1 + np.exp(-a_R1[:, 0]))
