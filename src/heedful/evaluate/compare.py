"""Is one policy better than another on the same prompts: win rate and mean difference with 95 % intervals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from heedful.errors import DataError
from heedful.evaluate.intervals import bootstrap_interval


@dataclass(frozen=True)
class WinRate:
    """How often ``after`` beats ``before``; a tie is half a win."""

    rate: float
    low: float
    high: float
    """95 % bootstrap interval, prompts resampled."""
    num_wins: int
    num_ties: int
    num_losses: int


@dataclass(frozen=True)
class Difference:
    """Mean of ``after - before`` with its 95 % bootstrap interval, prompts resampled."""

    mean: float
    low: float
    high: float
    num_prompts: int


def win_rate(before: Sequence[float], after: Sequence[float], *, tie_width: float = 0.0, seed: int = 0) -> WinRate:
    """Win rate of ``after`` over ``before``, one score per prompt each; scores within ``tie_width`` are tied.

    Raises:
        DataError: lists empty or of different lengths, or a score that is not finite.
    """
    outcome_N = outcomes(before, after, tie_width=tie_width)
    low, high = bootstrap_interval(outcome_N, seed=seed)
    num_wins, num_ties, num_losses = (int((outcome_N == value).sum()) for value in (1.0, 0.5, 0.0))
    return WinRate(float(outcome_N.mean()), low, high, num_wins, num_ties, num_losses)


def win_rate_by_category(
    before: Sequence[float],
    after: Sequence[float],
    categories: Sequence[str],
    *,
    tie_width: float = 0.0,
    seed: int = 0,
) -> dict[str, WinRate]:
    """:func:`win_rate` within each category, in order of name."""
    if len(categories) != len(before):
        raise DataError(f"{len(before)} scores but {len(categories)} categories")
    rates = {}
    for category in sorted(set(categories)):
        chosen = [i for i, c in enumerate(categories) if c == category]
        rates[category] = win_rate(
            [before[i] for i in chosen], [after[i] for i in chosen], tie_width=tie_width, seed=seed
        )
    return rates


def mean_difference(before: Sequence[float], after: Sequence[float], *, seed: int = 0) -> Difference:
    """Mean of ``after - before`` over prompts. Raises DataError as :func:`win_rate` does."""
    before_N, after_N = _paired(before, after)
    low, high = bootstrap_interval(after_N - before_N, seed=seed)
    return Difference(float((after_N - before_N).mean()), low, high, len(before_N))


def outcomes(before: Sequence[float], after: Sequence[float], *, tie_width: float = 0.0) -> np.ndarray:
    """1 where ``after`` wins, 0 where it loses, 0.5 for ties; shape [num_prompts]."""
    before_N, after_N = _paired(before, after)
    gap_N = after_N - before_N
    return np.where(np.abs(gap_N) <= tie_width, 0.5, (gap_N > 0).astype(float))


def _paired(before: Sequence[float], after: Sequence[float]) -> tuple[np.ndarray, np.ndarray]:
    before_N, after_N = np.asarray(before, dtype=float), np.asarray(after, dtype=float)
    if before_N.shape != after_N.shape or before_N.ndim != 1:
        raise DataError(f"a comparison needs one score per prompt on both sides, got {len(before)} and {len(after)}")
    if not len(before_N):
        raise DataError("a comparison needs at least one prompt")
    if not (np.isfinite(before_N).all() and np.isfinite(after_N).all()):
        raise DataError("a comparison needs finite scores; found NaN or infinity")
    return before_N, after_N
