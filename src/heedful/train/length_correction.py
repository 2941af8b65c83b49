"""A trained score turned away from length: its head moves, nothing is trained.

How long an answer is can be read from the last hidden state nearly exactly, whatever the score makes of it. Ridge
regression finds the row w that reads it; the head q becomes q − λ w, with the λ at which the scores of the training
answers follow log length as much as they should and no more. It takes one pass over some rankings without gradients;
the model that leaves is an ordinary one. Of published methods the nearest corrects scores by length from outside (Huang
et al. 2024, post-hoc reward calibration), which no file format of a reward model could hold.

Dimension letters: N answers, P rankings, K answers of a ranking, D hidden width.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from heedful.batches import RankingBatch, to_device
from heedful.models.parts import ScalarModel
from heedful.objectives import preference
from heedful.train.reward_metrics import pooled

T = TypeVar("T")
NUM_RANKINGS = 512
"""Rankings that the row and its factor are found from."""
_RIDGES = (1e-3, 1e-2, 1e-1, 1.0)
"""Strengths that are tried, in units of the mean square of a hidden dimension."""
_HALVINGS = 50


@dataclass(frozen=True)
class LengthCorrection:
    """What was done to the head."""

    factor: float
    """λ, what a unit of log length costs an answer; 0 = the scores did not follow length more than they should"""
    before: float
    """Correlation of score and log length within prompts (:func:`~heedful.objectives.preference.length_correlation`)"""
    after: float
    target: float
    readable: float
    """Correlation of log length and what is read of it, on rankings that were not fitted"""


def some_rankings(samples: Sequence[T], seed: int) -> list[T]:
    """Those that :func:`correct_length` is worth running on: all, or a sample of ``NUM_RANKINGS``."""
    if len(samples) <= NUM_RANKINGS:
        return list(samples)
    return random.Random(f"{seed}/length correction").sample(list(samples), NUM_RANKINGS)


@torch.no_grad()
def correct_length(
    model: ScalarModel, batches: Sequence[RankingBatch], *, target: float | None
) -> LengthCorrection:
    """Turn the head of ``model`` so that its scores correlate with log length as ``target`` says.

    The level of the scores stays about as it was. Scores that follow length less than that are left alone.

    Args:
        batches: rankings that it was trained on; baits in them do not count, their length is chance.
        target: a correlation in [−1, 1]; None = that of the ranks of the same answers.
    """
    pool = pooled([(_last_states(model, batch), batch) for batch in batches])
    states_PKD, mask_PK, lengths_PK = pool.scores_PKH, pool.mask_PK, pool.lengths_PK
    scores_PK = model.scalars(states_PKD.to(model.device)).cpu().double()
    if target is None:
        target = float(preference.length_correlation(-pool.ranks_PK.double(), lengths_PK, mask_PK))
    states_ND = _centred(states_PKD.double(), mask_PK)
    lengths_N = _centred(lengths_PK.clamp(min=1).double().log()[..., None], mask_PK)[:, 0]
    is_odd_N = (torch.arange(len(mask_PK)) % 2 > 0)[:, None].expand_as(mask_PK)[mask_PK]
    readable, ridge = max((_readable(states_ND, lengths_N, is_odd_N, ridge), ridge) for ridge in _RIDGES)
    level_1D = states_PKD.double()[mask_PK].mean(dim=0, keepdim=True) * len(lengths_N) ** 0.5  # is to be read as 0
    weight_D = _reader(torch.cat([states_ND, level_1D]), torch.cat([lengths_N, lengths_N.new_zeros(1)]), ridge)
    read_PK = states_PKD.double() @ weight_D

    def correlation(factor: float) -> float:
        return float(preference.length_correlation(scores_PK - factor * read_PK, lengths_PK, mask_PK))

    factor = _factor(correlation, target)
    model.turn_head((-factor * weight_D).float().to(model.device))
    return LengthCorrection(factor, correlation(0.0), correlation(factor), target, readable)


def _last_states(model: ScalarModel, batch: RankingBatch) -> Tensor:
    """[P, K, D]: the states that the head reads, on the CPU."""
    states_RTD = model.ranking_states(to_device(batch, model.device))
    return states_RTD[batch.rows_PK, batch.columns_PK].float().cpu()


def _centred(x_PKD: Tensor, mask_PK: Tensor) -> Tensor:
    """[N, D]: what tells each answer from the mean of its prompt's."""
    x_PKD = torch.where(mask_PK[..., None], x_PKD, 0.0)
    mean_P1D = x_PKD.sum(dim=1, keepdim=True) / mask_PK.sum(dim=1).clamp(min=1)[:, None, None]
    return (x_PKD - mean_P1D)[mask_PK]


def _reader(states_ND: Tensor, lengths_N: Tensor, ridge: float) -> Tensor:
    """[D]: ridge regression, in its dual form, which stays small however wide the model is."""
    gram_NN = states_ND @ states_ND.T
    gram_NN.diagonal().add_(ridge * states_ND.square().sum() / states_ND.shape[1])
    return states_ND.T @ torch.linalg.solve(gram_NN, lengths_N)


def _readable(states_ND: Tensor, lengths_N: Tensor, is_odd_N: Tensor, ridge: float) -> float:
    """How well each half's lengths are read by a row that was fitted to the other half."""
    read_N = torch.zeros_like(lengths_N)
    for half_N in (is_odd_N, ~is_odd_N):
        read_N[half_N] = states_ND[half_N] @ _reader(states_ND[~half_N], lengths_N[~half_N], ridge)
    return float(read_N @ lengths_N / (read_N.norm() * lengths_N.norm()).clamp(min=1e-12))


def _factor(correlation: Callable[[float], float], target: float) -> float:
    """The least λ ≥ 0 at which the correlation, which falls with it, is the target or less."""
    if correlation(0.0) <= target:
        return 0.0
    low, high = 0.0, 1.0
    while correlation(high) > target:
        low, high = high, 2 * high
        if high > 2.0**_HALVINGS:  # length cannot be read from the states at all
            return 0.0
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if correlation(middle) > target else (low, middle)
    return high
