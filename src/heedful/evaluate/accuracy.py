"""Does a reward model order answers as people do: pair accuracy against ranks, with an interval."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from heedful.errors import DataError
from heedful.evaluate.compare import bootstrap_interval


@dataclass(frozen=True)
class Accuracy:
    """Share of pairs in the right order, every prompt weighted equally."""

    value: float
    low: float
    high: float
    """95 % bootstrap interval, prompts resampled."""
    num_prompts: int
    """Prompts with at least one pair that is not tied in the labels."""
    num_pairs: int


def pair_accuracy(scores: Sequence[Sequence[float]], ranks: Sequence[Sequence[int]], *, seed: int = 0) -> Accuracy:
    """Accuracy of ``scores`` (higher is better) against ``ranks`` (1 is best), both one list of answers per prompt.

    Pairs tied in the labels are left out; equal scores count one half. The value is the mean over prompts of each
    prompt's share, so that a prompt with more answers does not weigh more.

    Raises:
        DataError: the lists do not match, a score is not finite, or no prompt has a pair that is not tied.
    """
    if len(scores) != len(ranks):
        raise DataError(f"{len(scores)} lists of scores but {len(ranks)} lists of ranks")
    shares: list[float] = []
    num_pairs = 0
    for index, (row, labels) in enumerate(zip(scores, ranks)):
        if len(row) != len(labels):
            raise DataError(f"prompt {index}: {len(row)} scores but {len(labels)} ranks")
        if not np.isfinite(np.asarray(row, dtype=float)).all():
            raise DataError(f"prompt {index}: a score is not finite")
        right = [
            0.5 if row[i] == row[j] else float((row[i] > row[j]) == (labels[i] < labels[j]))
            for i, j in itertools.combinations(range(len(row)), 2)
            if labels[i] != labels[j]
        ]
        num_pairs += len(right)
        if right:
            shares.append(sum(right) / len(right))
    if not shares:
        raise DataError("no pair to judge: every pair of answers is tied in the labels")
    low, high = bootstrap_interval(np.asarray(shares), seed=seed)
    return Accuracy(float(np.mean(shares)), low, high, len(shares), num_pairs)


def length_accuracy(lengths: Sequence[Sequence[int]], ranks: Sequence[Sequence[int]], *, seed: int = 0) -> Accuracy:
    """Accuracy of 'the longer answer wins' on the same pairs: what length alone explains."""
    return pair_accuracy(lengths, ranks, seed=seed)
