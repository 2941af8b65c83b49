"""Are score differences log odds: how sure a reward model is of an order, against how often it is right."""

from __future__ import annotations

import numpy as np

from heedful.evaluate.accuracy import Pairs, accuracy_of, is_right
from heedful.evaluate.intervals import middle, resampled_sums
from heedful.records import Calibration, CalibrationBin

MOST_BINS, PAIRS_PER_BIN = 10, 30
NUM_SIMULATIONS = 400


def calibration(scores_A: np.ndarray, pairs: Pairs, *, seed: int = 0) -> Calibration:
    """Reliability by bins of the model's confidence in the answer that it prefers, every prompt weighted equally.

    The bins hold about equally many pairs. By sampling alone the error is above 0 for a perfect model, too, so it comes
    with what chance makes of it: orders are drawn from the scores themselves (score + Gumbel noise orders answers by
    Plackett-Luce, whose pairs follow Bradley-Terry exactly and hang together within a prompt as those of people do).

    Args:
        pairs: at least one.
    """
    margin_M = pairs.differences(scores_A)
    confidence_M = 1 / (1 + np.exp(-np.minimum(np.abs(margin_M), 700.0)))
    right_M = is_right(margin_M)
    bin_M = _bins(confidence_M)
    num_bins = int(bin_M.max()) + 1
    _, prompt_M, count_P = np.unique(pairs.prompt_M, return_inverse=True, return_counts=True)
    weight_M = 1 / count_P[prompt_M]
    num_prompts = len(count_P)

    gap_PB = np.zeros((num_prompts, num_bins))
    np.add.at(gap_PB, (prompt_M, bin_M), weight_M * (confidence_M - right_M))
    gap_RB = resampled_sums(gap_PB, seed=seed) / num_prompts
    gap_B = gap_PB.sum(axis=0) / num_prompts
    error, error_R = float(np.abs(gap_B).sum()), np.abs(gap_RB).sum(axis=1)
    # Noise lifts an absolute value: once in the sample, which resampling doubles, so twice is taken out.
    low, high = middle(error_R - 2 * (error_R.mean() - error))

    rng, errors = np.random.default_rng(seed), []
    for _ in range(NUM_SIMULATIONS):
        drawn_M = pairs.differences(scores_A + rng.gumbel(size=len(scores_A)))
        won_M = np.where(margin_M == 0, 0.5, drawn_M * margin_M > 0)
        gaps = np.bincount(bin_M, weights=weight_M * (confidence_M - won_M), minlength=num_bins)
        errors.append(np.abs(gaps).sum() / num_prompts)

    by_chance = float(np.quantile(errors, 0.95))
    over_low, over_high = middle(gap_RB.sum(axis=1))
    return Calibration(
        error=error,
        low=0.0 if error <= by_chance else min(max(low, 0.0), error),
        high=max(high, error),
        by_chance=by_chance,
        overconfidence=float(gap_B.sum()),
        overconfidence_low=over_low,
        overconfidence_high=over_high,
        bins=tuple(
            _bin(confidence_M[bin_M == b], right_M[bin_M == b], prompt_M[bin_M == b], weight_M[bin_M == b], seed=seed)
            for b in range(num_bins)
        ),
    )


def _bins(confidence_M: np.ndarray) -> np.ndarray:
    """The bin of every pair: equally many pairs in each, equal confidences together, none empty."""
    num_bins = int(np.clip(len(confidence_M) // PAIRS_PER_BIN, 1, MOST_BINS))
    edges = np.unique(np.quantile(confidence_M, np.arange(1, num_bins) / num_bins))
    bin_M: np.ndarray = np.unique(np.searchsorted(edges, confidence_M, side="right"), return_inverse=True)[1]
    return bin_M


def _bin(
    confidence_M: np.ndarray, right_M: np.ndarray, prompt_M: np.ndarray, weight_M: np.ndarray, *, seed: int
) -> CalibrationBin:
    found = accuracy_of(right_M, prompt_M, seed=seed)
    assert found is not None
    mean = np.average(confidence_M, weights=weight_M)
    return CalibrationBin(float(mean), found.value, found.low, found.high, found.num_pairs)
