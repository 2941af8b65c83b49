"""The reward card: what is known of a reward model, worked out from its scores on rankings alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from heedful.evaluate.accuracy import length_accuracy, pair_accuracy
from heedful.records import RewardCard


@dataclass(frozen=True, slots=True)
class ScoredRanking:
    """The answers to one prompt with their scores: all that a card needs of a ranking."""

    scores: Sequence[float]
    """higher is better"""
    ranks: Sequence[int]
    """1 = best, equal = tie"""
    num_chars: Sequence[int]
    """lengths of the answers' texts"""
    category: str = ""
    source: str = ""
    kinds: Sequence[str] = ()
    """of the answers, as in :class:`~heedful.records.Answer`; () = all sampled"""


def build_card(
    rankings: Sequence[ScoredRanking],
    *,
    model: str = "reward_model",
    loss: float | None = None,
    train_accuracy: float | None = None,
    seed: int = 0,
) -> RewardCard:
    """Accuracy with interval, by category, scale and the length-only baseline.

    Args:
        loss: the Bradley-Terry loss on the same rankings (nats), where it is known.
        train_accuracy: pair accuracy on the rankings of the training, where it is known.

    Raises:
        DataError: as :func:`~heedful.evaluate.accuracy.pair_accuracy`.
    """
    scores, ranks = [r.scores for r in rankings], [r.ranks for r in rankings]
    overall = pair_accuracy(scores, ranks, seed=seed)
    by_category = {}
    for category in sorted({r.category for r in rankings if r.category}):
        rows = [r for r in rankings if r.category == category]
        by_category[category] = pair_accuracy([r.scores for r in rows], [r.ranks for r in rows], seed=seed).value
    flat = np.concatenate([np.asarray(row, dtype=float) for row in scores])
    return RewardCard(
        model=model,
        accuracy=overall.value,
        accuracy_low=overall.low,
        accuracy_high=overall.high,
        num_prompts=overall.num_prompts,
        num_pairs=overall.num_pairs,
        accuracy_by_category=by_category,
        length_accuracy=length_accuracy([r.num_chars for r in rankings], ranks, seed=seed).value,
        score_mean=float(flat.mean()),
        score_std=max(float(flat.std(ddof=1)), 1e-6),
        train_accuracy=train_accuracy,
        loss=loss,
    )
