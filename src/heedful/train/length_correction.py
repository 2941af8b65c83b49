"""A trained score turned away from length: its head moves, nothing is trained.

How long an answer is can be read from the last hidden state nearly exactly, whatever the score makes of it. Ridge
regression finds the row w that reads log length; the head q becomes q − λ w. λ has the lowest ranking loss over the
training pairs when those in which the shorter answer won weigh as much, all together, as the others: then length alone
says nothing about who wins, and what a score owes to it only costs. Or λ is the least at which the scores follow length
no more than was asked. One pass over some rankings without gradients; the model that leaves is an ordinary one. Of
published methods the nearest corrects scores by length from outside (Huang et al. 2024, post-hoc reward calibration),
which no file format of a reward model could hold.

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
_LARGEST = 1e6
"""A factor beyond it means that length cannot be read at all"""


@dataclass(frozen=True)
class LengthCorrection:
    """What was done to the head."""

    factor: float
    """λ, what a unit of log length costs an answer; 0 = the scores did not follow length more than they should"""
    before: float
    """Correlation of score and log length within prompts (:func:`~heedful.objectives.preference.length_correlation`)"""
    after: float
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
    """Turn the head of ``model`` away from length; the level of the scores stays about as it was.

    Args:
        batches: rankings that it was trained on; baits in them do not count, their length is chance.
        target: correlation of score and log length that is left, in [−1, 1]; None = what the pairs say, those that the
            shorter answer won weighing as much as the others.
    """
    states = [model.answer_states(to_device(batch, model.device)).float().cpu() for batch in batches]
    pool = pooled(list(zip(states, batches, strict=True)))
    states_PKD, mask_PK, lengths_PK = pool.scores_PKH, pool.mask_PK, pool.lengths_PK
    scores_PK = model.scalars(states_PKD.to(model.device)).cpu().double()
    states_ND = _centred(states_PKD.double(), mask_PK)
    lengths_N = _centred(lengths_PK.clamp(min=1).double().log()[..., None], mask_PK)[:, 0]
    is_odd_N = (torch.arange(len(mask_PK)) % 2 > 0)[:, None].expand_as(mask_PK)[mask_PK]
    readable, ridge = max((_readable(states_ND, lengths_N, is_odd_N, ridge), ridge) for ridge in _RIDGES)
    level_1D = states_PKD.double()[mask_PK].mean(dim=0, keepdim=True) * len(lengths_N) ** 0.5  # is to be read as 0
    weight_D = _reader(torch.cat([states_ND, level_1D]), torch.cat([lengths_N, lengths_N.new_zeros(1)]), ridge)
    read_PK = states_PKD.double() @ weight_D

    def correlation(factor: float) -> float:
        return float(preference.length_correlation(scores_PK - factor * read_PK, lengths_PK, mask_PK))

    if target is None:
        won_PKK = preference.better(pool.ranks_PK, mask_PK)
        leads = [(x_PK[:, :, None] - x_PK[:, None, :])[won_PKK] for x_PK in (scores_PK, read_PK, lengths_PK)]
        factor = _least(_excess_of_length(*leads))
    else:
        factor = _least(lambda factor: correlation(factor) - target)
    model.turn_head((-factor * weight_D).float().to(model.device))
    return LengthCorrection(factor, correlation(0.0), correlation(factor), readable)


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


def _excess_of_length(scores_M: Tensor, read_M: Tensor, lengths_M: Tensor) -> Callable[[float], float]:
    """Minus the slope in λ of the balanced ranking loss of M pairs, given by how the winner leads in each number."""
    kinds = [kind_M / kind_M.sum() for kind_M in ((lengths_M < 0).double(), (lengths_M > 0).double()) if kind_M.any()]
    weights_M = sum(kinds) if len(kinds) == 2 else torch.zeros_like(scores_M)  # one kind alone cannot be balanced
    return lambda factor: float(-(weights_M * torch.sigmoid(factor * read_M - scores_M) * read_M).sum())


def _least(excess: Callable[[float], float]) -> float:
    """The least λ ≥ 0 at which ``excess``, which falls with it, is not above 0; 0 where there is none."""
    if excess(0.0) <= 0:
        return 0.0
    low, high = 0.0, 1.0
    while excess(high) > 0:
        low, high = high, 2 * high
        if high > _LARGEST:
            return 0.0
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if excess(middle) > 0 else (low, middle)
    return high
