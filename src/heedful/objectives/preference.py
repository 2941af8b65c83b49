"""Losses of the reward model: pairs and whole rankings under the Bradley–Terry model.

Dimension letters: N pairs, P prompts, K ranked answers.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import logsigmoid

from heedful.batches import LossOut
from heedful.objectives import masked


def bradley_terry(
    chosen_N: Float[Tensor, "N"],
    rejected_N: Float[Tensor, "N"],
    *,
    margin_N: Float[Tensor, "N"] | None = None,
    label_smoothing: float = 0.0,
) -> LossOut:
    """Mean of −log σ(r_chosen − r_rejected − margin) over the pairs (Bradley & Terry 1952).

    The margin is that of Touvron et al. 2023.

    Args:
        chosen_N: scores of the preferred answers.
        rejected_N: scores of the others.
        margin_N: by how much the chosen one should win.
        label_smoothing: probability that a label is wrong, in [0, 0.5).

    Returns:
        loss (0 for no pairs), and the metrics ``accuracy`` (equal scores count one half, so an identical pair is not a
        success) and ``margin`` (mean of r_chosen − r_rejected).
    """
    difference_N = masked.at_least_float32(chosen_N) - masked.at_least_float32(rejected_N)
    target_N = difference_N if margin_N is None else difference_N - margin_N
    all_N = torch.ones_like(difference_N, dtype=torch.bool)
    loss = masked.mean(_negative_log_likelihood(target_N, label_smoothing), all_N)
    metrics = {"accuracy": masked.mean(_correct(difference_N), all_N), "margin": masked.mean(difference_N, all_N)}
    return LossOut(loss, {name: x.detach() for name, x in metrics.items()})


def ranking(
    scores_PK: Float[Tensor, "P K"],
    ranks_PK: Int[Tensor, "P K"],
    mask_PK: Bool[Tensor, "P K"],
    *,
    label_smoothing: float = 0.0,
    denominator: float | Tensor | None = None,
) -> LossOut:
    """Bradley–Terry loss over all pairs of each ranking, averaged per prompt, then over prompts (Ouyang et al. 2022).

    The up to C(K, 2) pairs of a prompt share K encodings; each weighs 1 / (pairs of its prompt), so that a prompt with
    many answers does not outvote one with two. Tied answers form no pair, and a prompt without pairs is no prompt.

    Args:
        scores_PK: rewards of the answers.
        ranks_PK: 1 = best, equal = tie.
        mask_PK: True = a real answer.
        label_smoothing: probability that a label is wrong, in [0, 0.5).
        denominator: number of prompts with a pair in the whole step (:func:`num_prompts`); None = of this call.

    Returns:
        loss, and the metrics ``accuracy`` and ``margin`` as in :func:`bradley_terry` with the same weights; all add up
        over micro-batches.
    """
    scores_PK = masked.counted(scores_PK, mask_PK)
    difference_PKK = scores_PK[:, :, None] - scores_PK[:, None, :]
    pair_PKK = better(ranks_PK, mask_PK)
    num_pairs_P = pair_PKK.sum(dim=(1, 2))
    weight_PKK = pair_PKK / num_pairs_P.clamp(min=1)[:, None, None]
    count = num_prompts(ranks_PK, mask_PK) if denominator is None else denominator

    def average(x_PKK: Tensor) -> Tensor:
        return masked.mean(x_PKK * weight_PKK, pair_PKK, denominator=count)

    loss = average(_negative_log_likelihood(difference_PKK, label_smoothing))
    metrics = {"accuracy": average(_correct(difference_PKK)), "margin": average(difference_PKK)}
    return LossOut(loss, {name: x.detach() for name, x in metrics.items()})


def better(ranks_PK: Int[Tensor, "P K"], mask_PK: Bool[Tensor, "P K"]) -> Bool[Tensor, "P K K"]:
    """The pairs of each ranking: entry [p, i, j] is True where answer i is ranked strictly better than answer j."""
    real_PKK = mask_PK[:, :, None] & mask_PK[:, None, :]
    return real_PKK & (ranks_PK[:, :, None] < ranks_PK[:, None, :])


def num_prompts(ranks_PK: Int[Tensor, "P K"], mask_PK: Bool[Tensor, "P K"]) -> Int[Tensor, ""]:
    """How many prompts have at least one pair: the denominator of :func:`ranking`, to be summed over the step."""
    return better(ranks_PK, mask_PK).any(dim=2).any(dim=1).sum()


def _negative_log_likelihood(difference: Tensor, label_smoothing: float) -> Tensor:
    """−(1 − s) log σ(d) − s log σ(−d). logsigmoid, since log(sigmoid(−120)) is −∞ in float32."""
    if not 0 <= label_smoothing < 0.5:
        raise ValueError(f"label_smoothing is {label_smoothing}; must be at least 0 and below 0.5")
    return -(1 - label_smoothing) * logsigmoid(difference) - label_smoothing * logsigmoid(-difference)


def _correct(difference: Tensor) -> Tensor:
    return (difference > 0).float() + 0.5 * (difference == 0).float()
