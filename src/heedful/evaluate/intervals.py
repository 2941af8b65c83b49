"""95 % intervals: bootstrap over prompts, and Wilson's for counts."""

from __future__ import annotations

import math

import numpy as np

NUM_RESAMPLES = 2000
DRAWS_AT_ONCE = 4_000_000
Z95 = 1.959964


def bootstrap_interval(values: np.ndarray, *, seed: int = 0) -> tuple[float, float]:
    """95 % percentile bootstrap interval of the mean of ``values``; the same seed gives the same interval."""
    return middle(resampled_sums(np.asarray(values, dtype=float)[:, None], seed=seed)[:, 0] / len(values))


def resampled_sums(values_NC: np.ndarray, *, seed: int = 0) -> np.ndarray:
    """Column sums over ``NUM_RESAMPLES`` bootstrap draws of the rows (one per prompt); shape [resamples, C].

    The same seed and number of rows give the same draws, so that ratios of sums can be resampled together.
    """
    rng, num_rows = np.random.default_rng(seed), len(values_NC)
    at_once = max(1, DRAWS_AT_ONCE // num_rows)
    parts = []
    for start in range(0, NUM_RESAMPLES, at_once):
        num = min(at_once, NUM_RESAMPLES - start)
        draws = rng.integers(0, num_rows, size=(num, num_rows)) + num_rows * np.arange(num)[:, None]
        counts_RN = np.bincount(draws.ravel(), minlength=num * num_rows).reshape(num, num_rows)
        parts.append(counts_RN @ values_NC)
    return np.concatenate(parts)


def middle(resamples: np.ndarray) -> tuple[float, float]:
    """The middle 95 % of the resamples."""
    low, high = np.quantile(resamples, [0.025, 0.975])
    return float(low), float(high)


def wilson(num_passed: float, num: float, *, z: float = Z95) -> tuple[float, float]:
    """Wilson's score interval of a rate; its ends lie strictly inside where all passed or none.

    Args:
        z: normal quantile of the interval's upper end; the default gives 95 %.
    """
    rate, spread = num_passed / num, z**2 / num
    centre = (rate + spread / 2) / (1 + spread)
    half = math.sqrt(rate * (1 - rate) * spread + spread**2 / 4) / (1 + spread)
    return max(0.0, centre - half), min(1.0, centre + half)
