"""Does a reward model order answers as people do: pair accuracy against ranks, with an interval."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from heedful.errors import DataError
from heedful.evaluate.intervals import middle, resampled_sums, wilson
from heedful.records import Accuracy


@dataclass(frozen=True)
class Pairs:
    """All pairs of answers to one prompt that the labels do not tie, one row each.

    Answers are counted through all prompts, in order: an index here is a place in the flat list of answers.
    """

    better_M: np.ndarray
    worse_M: np.ndarray
    prompt_M: np.ndarray
    num_tied: int
    """Pairs tied in the labels."""

    def differences(self, values_A: np.ndarray) -> np.ndarray:
        """Value of the better answer - value of the worse one."""
        return values_A[self.better_M] - values_A[self.worse_M]

    def where(self, chosen_M: np.ndarray) -> Pairs:
        """Some of the pairs."""
        return Pairs(self.better_M[chosen_M], self.worse_M[chosen_M], self.prompt_M[chosen_M], self.num_tied)


def pairs_of(ranks: Sequence[Sequence[int]]) -> Pairs:
    """The pairs of rankings given as one list of ranks (1 is best) per prompt."""
    rows: list[tuple[int, int, int]] = []
    first = num_tied = 0
    for prompt, labels in enumerate(ranks):
        for i, j in itertools.combinations(range(len(labels)), 2):
            if labels[i] == labels[j]:
                num_tied += 1
            else:
                better, worse = (i, j) if labels[i] < labels[j] else (j, i)
                rows.append((first + better, first + worse, prompt))
        first += len(labels)
    better_M, worse_M, prompt_M = np.asarray(rows, dtype=np.int64).reshape(-1, 3).T
    return Pairs(better_M, worse_M, prompt_M, num_tied)


def is_right(margin_M: np.ndarray) -> np.ndarray:
    """1 where the better answer scores higher, 0 where it scores lower, 0.5 for equal scores."""
    return (1 + np.sign(margin_M)) / 2


def accuracy_of(right_M: np.ndarray, prompt_M: np.ndarray, *, seed: int = 0) -> Accuracy | None:
    """Accuracy of pairs that are each right (1), wrong (0) or undecided (0.5); None without pairs.

    The interval resamples prompts. Where every prompt is right, or every one wrong, resampling sees no spread, so
    Wilson's interval over prompts stands in.
    """
    if not len(right_M):
        return None
    _, place_M = np.unique(prompt_M, return_inverse=True)
    count_P = np.bincount(place_M)
    right_P = np.bincount(place_M, weights=right_M)
    share_P = right_P / count_P
    value, over_pairs = float(share_P.mean()), float(right_M.mean())
    if value in (0.0, 1.0):
        interval = over = wilson(value * len(share_P), len(share_P))
    else:
        sums_R3 = resampled_sums(np.stack([share_P, right_P, count_P], axis=1), seed=seed)
        interval, over = middle(sums_R3[:, 0] / len(share_P)), middle(sums_R3[:, 1] / sums_R3[:, 2])
    return Accuracy(value, *interval, len(share_P), len(right_M), over_pairs, *over)


def flat_scores(scores: Sequence[Sequence[float]], ranks: Sequence[Sequence[int]]) -> np.ndarray:
    """All scores in one array. Raises DataError when the lists do not match or a score is not finite."""
    if len(scores) != len(ranks):
        raise DataError(f"{len(scores)} lists of scores but {len(ranks)} lists of ranks")
    for index, (row, labels) in enumerate(zip(scores, ranks)):
        if len(row) != len(labels):
            raise DataError(f"prompt {index}: {len(row)} scores but {len(labels)} ranks")
        if not np.isfinite(np.asarray(row, dtype=float)).all():
            raise DataError(f"prompt {index}: a score is not finite")
    return np.asarray([score for row in scores for score in row], dtype=float)


def pair_accuracy(scores: Sequence[Sequence[float]], ranks: Sequence[Sequence[int]], *, seed: int = 0) -> Accuracy:
    """Accuracy of ``scores`` (higher is better) against ``ranks`` (1 is best), both one list of answers per prompt.

    Pairs tied in the labels are left out; equal scores count one half. The value is the mean over prompts of each
    prompt's share, so that a prompt with more answers does not weigh more.

    Raises:
        DataError: the lists do not match, a score is not finite, or no prompt has a pair that is not tied.
    """
    scores_A, pairs = flat_scores(scores, ranks), pairs_of(ranks)
    found = accuracy_of(is_right(pairs.differences(scores_A)), pairs.prompt_M, seed=seed)
    if found is None:
        raise DataError("no pair to judge: every pair of answers is tied in the labels")
    return found


def length_accuracy(lengths: Sequence[Sequence[int]], ranks: Sequence[Sequence[int]], *, seed: int = 0) -> Accuracy:
    """Accuracy of 'the longer answer wins' on the same pairs: what length alone explains."""
    return pair_accuracy(lengths, ranks, seed=seed)
