"""Losses of the reward model: pairs and whole rankings under the Bradley–Terry model, and what keeps scores honest.

Dimension letters: N pairs, P prompts, K ranked answers, T tokens of an answer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import logsigmoid

from heedful.batches import LossOut
from heedful.objectives import masked

Ties = Literal["skip", "half"]
"""Tied answers form no pair, or one in which either wins with probability one half."""
_EPS = 1e-12
_NEWTON_STEPS = 50


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
    targets_PKK: Float[Tensor, "P K K"] | None = None,
    margins_PKK: Float[Tensor, "P K K"] | None = None,
    ties: Ties = "skip",
    weights_P: Float[Tensor, "P"] | None = None,
) -> LossOut:
    """Bradley–Terry loss over all pairs of each ranking, averaged per prompt, then over prompts (Ouyang et al. 2022).

    A pair (i, j) with q = P(i better than j) costs −q log σ(d) − (1 − q) log σ(−d), d = r_i − r_j − margin. The up to
    C(K, 2) pairs of a prompt share K encodings; each weighs 1 / (pairs of its prompt), so that a prompt with many
    answers does not outvote one with two. A prompt without pairs is no prompt.

    Args:
        scores_PK: rewards of the answers.
        ranks_PK: 1 = best, equal = tie.
        mask_PK: True = a real answer.
        label_smoothing: probability that a label is wrong, in [0, 0.5); q becomes q + s − 2 q s.
        denominator: number of prompts with a pair in the whole step (:func:`num_prompts`); None = of this call.
        targets_PKK: soft labels q of the pairs that the ranks tell apart, read at [i, j] with i the better ranked;
            NaN = nobody compared the two, no pair. None = 1. A tie has one half.
        margins_PKK: by how much i should lead j (Touvron et al. 2023), read at the same places; none in a tie.
        weights_P: what each prompt weighs, 0 = nothing; None = 1. They do not change the denominator.

    Returns:
        loss, and the metrics ``accuracy`` and ``margin`` as in :func:`bradley_terry` over the pairs that the ranks tell
        apart, with the same weights; all add up over micro-batches. Where prompts may have ties alone, the accuracy
        needs a denominator of its own: see :func:`order`.
    """
    scores_PK = masked.counted(scores_PK, mask_PK)
    difference_PKK = scores_PK[:, :, None] - scores_PK[:, None, :]
    pair_PKK = pairs(ranks_PK, mask_PK, targets_PKK=targets_PKK, ties=ties)
    loss_PKK = _pair_losses(difference_PKK, ranks_PK, label_smoothing, targets_PKK, margins_PKK)
    told_apart_PKK = pair_PKK & better(ranks_PK, mask_PK)
    return LossOut(
        _per_prompt(loss_PKK, pair_PKK, denominator, weights_P),
        order(scores_PK, told_apart_PKK, denominator=denominator),
    )


def every_token(
    values_PKT: Float[Tensor, "P K T"],
    token_ids_PKT: Int[Tensor, "P K T"],
    lengths_PK: Int[Tensor, "P K"],
    ranks_PK: Int[Tensor, "P K"],
    mask_PK: Bool[Tensor, "P K"],
    *,
    label_smoothing: float = 0.0,
    denominator: float | Tensor | None = None,
    targets_PKK: Float[Tensor, "P K K"] | None = None,
    margins_PKK: Float[Tensor, "P K K"] | None = None,
    ties: Ties = "skip",
    weights_P: Float[Tensor, "P"] | None = None,
) -> LossOut:
    """As :func:`ranking`, a pair's loss averaged over tokens (Yao et al. 2023, DeepSpeed-Chat).

    The average runs from the first token that differs to the end of the longer answer. An answer that has ended keeps
    its last value, its score: there is no value of padding.

    Args:
        values_PKT: the scalar after each token of an answer.
        token_ids_PKT: the tokens themselves; the answers of a prompt differ.
        lengths_PK: their numbers; what stands after them is never read.

    Returns:
        loss, and the metrics of :func:`ranking` on the last values.
    """
    T = values_PKT.shape[2]
    lengths_PK = torch.where(mask_PK, lengths_PK, 1)
    place_T = torch.arange(T, device=values_PKT.device)
    real_PKT = (place_T < lengths_PK[:, :, None]) & mask_PK[:, :, None]
    held_PKT = place_T.minimum(lengths_PK[:, :, None] - 1)
    values_PKT = torch.where(real_PKT, masked.at_least_float32(values_PKT), 0.0).gather(2, held_PKT)
    ids_PKT = torch.where(real_PKT, token_ids_PKT, -1)
    differs_PKKT = (ids_PKT[:, :, None] != ids_PKT[:, None, :]).cummax(dim=3).values
    longer_PKK = torch.maximum(lengths_PK[:, :, None], lengths_PK[:, None, :])
    counts_PKKT = differs_PKKT & (place_T < longer_PKK[..., None])
    difference_PKKT = values_PKT[:, :, None] - values_PKT[:, None, :]
    pair_PKK = pairs(ranks_PK, mask_PK, targets_PKK=targets_PKK, ties=ties)
    loss_PKKT = _pair_losses(difference_PKKT, ranks_PK, label_smoothing, targets_PKK, margins_PKK)
    loss_PKK = torch.where(counts_PKKT, loss_PKKT, 0.0).sum(dim=3) / counts_PKKT.sum(dim=3).clamp(min=1)
    told_apart_PKK = pair_PKK & better(ranks_PK, mask_PK)
    metrics = order(values_PKT[..., -1], told_apart_PKK, denominator=denominator)
    return LossOut(_per_prompt(loss_PKK, pair_PKK, denominator, weights_P), metrics)


def pairs(
    ranks_PK: Int[Tensor, "P K"],
    mask_PK: Bool[Tensor, "P K"],
    *,
    targets_PKK: Float[Tensor, "P K K"] | None = None,
    ties: Ties = "skip",
) -> Bool[Tensor, "P K K"]:
    """The pairs that are trained: [p, i, j] with i ranked better, and with ``ties="half"`` each tie once.

    A pair whose target is NaN is none.
    """
    pair_PKK = better(ranks_PK, mask_PK)
    if targets_PKK is not None:
        pair_PKK = pair_PKK & ~targets_PKK.isnan()
    if ties == "half":
        real_PKK = mask_PK[:, :, None] & mask_PK[:, None, :]
        pair_PKK = pair_PKK | (real_PKK & _tied(ranks_PK)).triu(diagonal=1)
    return pair_PKK


def better(ranks_PK: Int[Tensor, "P K"], mask_PK: Bool[Tensor, "P K"]) -> Bool[Tensor, "P K K"]:
    """The pairs of each ranking: entry [p, i, j] is True where answer i is ranked strictly better than answer j."""
    real_PKK = mask_PK[:, :, None] & mask_PK[:, None, :]
    return real_PKK & (ranks_PK[:, :, None] < ranks_PK[:, None, :])


def num_prompts(
    ranks_PK: Int[Tensor, "P K"],
    mask_PK: Bool[Tensor, "P K"],
    *,
    targets_PKK: Float[Tensor, "P K K"] | None = None,
    ties: Ties = "skip",
) -> Int[Tensor, ""]:
    """How many prompts have at least one pair: the denominator of :func:`ranking`, to be summed over the step."""
    return (num_pairs(ranks_PK, mask_PK, targets_PKK=targets_PKK, ties=ties) > 0).sum()


def num_pairs(
    ranks_PK: Int[Tensor, "P K"],
    mask_PK: Bool[Tensor, "P K"],
    *,
    targets_PKK: Float[Tensor, "P K K"] | None = None,
    ties: Ties = "skip",
) -> Int[Tensor, "P"]:
    """Of each prompt. As :func:`ranking`'s weights, with their sum as the denominator, they let every pair weigh the
    same."""
    return pairs(ranks_PK, mask_PK, targets_PKK=targets_PKK, ties=ties).sum(dim=(1, 2))


def order(
    scores_PK: Float[Tensor, "P K"], pair_PKK: Bool[Tensor, "P K K"], *, denominator: float | Tensor | None = None
) -> dict[str, Tensor]:
    """``accuracy`` and ``margin`` of the pairs [p, i, j], i the better: means per prompt, then over prompts, detached.

    Args:
        denominator: number of prompts with one of these pairs in the whole step; None = of this call.
    """
    scores_PK = masked.at_least_float32(scores_PK.detach())
    difference_PKK = torch.where(pair_PKK, scores_PK[:, :, None] - scores_PK[:, None, :], 0.0)
    return {
        "accuracy": _per_prompt(_correct(difference_PKK), pair_PKK, denominator),
        "margin": _per_prompt(difference_PKK, pair_PKK, denominator),
    }


def zero_centre(
    scores_PK: Float[Tensor, "P K"], mask_PK: Bool[Tensor, "P K"], *, coefficient: float, denominator: float | Tensor
) -> LossOut:
    """coefficient · mean over prompts of (mean score of the prompt's answers)².

    Bradley–Terry sees differences alone, so that each prompt's level is free; this ties it to 0 and leaves the
    differences be. For two answers it is a quarter of the (r_i + r_j)² of Eisenstein et al. 2023, and with more answers
    it does not grow with the number of pairs.

    Returns:
        loss, and the metric ``level`` (root of it at coefficient 1 is the typical distance from 0).
    """
    scores_PK = masked.counted(scores_PK, mask_PK)
    mean_P = scores_PK.sum(dim=1) / mask_PK.sum(dim=1).clamp(min=1)
    square = (mean_P**2).sum() / denominator
    return LossOut(coefficient * square, {"level": square.detach()})


def spread_limit(
    scores_PK: Float[Tensor, "P K"],
    mask_PK: Bool[Tensor, "P K"],
    *,
    limit: float,
    coefficient: float = 1.0,
    denominator: float | Tensor,
) -> LossOut:
    """coefficient · mean over prompts of max(0, σ_p − limit)², σ_p the population deviation of a prompt's scores.

    Separable data let score differences grow for ever; within the limit nothing happens.

    Returns:
        loss, and the metric ``spread``, the mean of σ_p.
    """
    deviation_PK = _centred(scores_PK, mask_PK)
    variance_P = (deviation_PK**2).sum(dim=1) / mask_PK.sum(dim=1).clamp(min=1)
    spread_P = variance_P.clamp(min=_EPS).sqrt()  # the root of 0 has no gradient
    excess_P = (spread_P - limit).clamp(min=0)
    return LossOut(coefficient * (excess_P**2).sum() / denominator, {"spread": (spread_P.sum() / denominator).detach()})


def length_correlation(
    scores_PK: Float[Tensor, "P K"], lengths_PK: Int[Tensor, "P K"], mask_PK: Bool[Tensor, "P K"]
) -> Float[Tensor, ""]:
    """Pearson correlation of score and log length, both centred within their prompt and pooled over all prompts.

    Σ s̃ l̃ / √(Σ s̃² Σ l̃²) with s̃, l̃ = deviations from the prompt's mean. A prompt of two answers alone has a
    correlation of ±1 whatever its scores, so its own would carry no gradient; pooled, the error is that of one
    correlation over the (answers − prompts) degrees of freedom of all. It needs all scores of the optimizer step at
    once: pass the whole step, not a micro-batch. As a penalty, E[ρ̂²] ≈ ρ² + (1 − ρ²)² / df: noise weakens it a little
    and turns nothing round.

    Returns:
        a number in [−1, 1]; 0 with gradient 0 where scores or lengths do not differ.
    """
    score_PK = _centred(scores_PK, mask_PK)
    length_PK = _centred(torch.where(mask_PK, lengths_PK, 1).clamp(min=1).to(score_PK.dtype).log(), mask_PK)
    product = (score_PK**2).sum() * (length_PK**2).sum()
    is_defined = product > _EPS
    return torch.where(is_defined, (score_PK * length_PK).sum() * torch.where(is_defined, product, 1.0).rsqrt(), 0.0)


def length_slope(
    rankings: Sequence[tuple[Int[Tensor, "P K"], Int[Tensor, "P K"], Bool[Tensor, "P K"], Mapping[str, Any]]],
) -> float:
    """The β of scores β · log length that explain the labels best: a logistic regression on length alone.

    The loss is that of :func:`ranking`, convex in β; Newton's method finds its minimum.

    Args:
        rankings: lengths, ranks, mask and other arguments of :func:`ranking`, of one batch after the other.

    Returns:
        nats per unit of log length; ±inf where length alone orders every pair rightly, or wrongly.
    """
    beta = torch.zeros((), dtype=torch.float64, requires_grad=True)
    slope = beta
    for _ in range(_NEWTON_STEPS):
        losses = [
            ranking(beta * lengths_PK.clamp(min=1).double().log(), ranks_PK, mask_PK, **{**told, "denominator": 1}).loss
            for lengths_PK, ranks_PK, mask_PK, told in rankings
        ]
        (slope,) = torch.autograd.grad(torch.stack(losses).sum(), beta, create_graph=True)
        (curvature,) = torch.autograd.grad(slope, beta)
        slope = slope.detach()
        if float(curvature) < _EPS:
            break
        step = float((slope / curvature).clamp(-1, 1))
        beta.data -= step
        if abs(step) < 1e-8:
            return float(beta.detach())
    return math.copysign(math.inf, -float(slope)) if float(slope) else 0.0


def deviation(scores_PK: Float[Tensor, "P K"], mask_PK: Bool[Tensor, "P K"]) -> Float[Tensor, ""]:
    """By how much the scores of one prompt's answers deviate: √(Σ s̃² / Σ (K_p − 1)), s̃ within the prompt; 0 for none.

    The levels of different prompts, which Bradley–Terry leaves free, do not count.
    """
    num_free = (mask_PK.sum(dim=1) - 1).clamp(min=0).sum().clamp(min=1)
    return ((_centred(scores_PK, mask_PK) ** 2).sum() / num_free).sqrt()


def disagreement(scores_PKH: Float[Tensor, "P K H"], mask_PK: Bool[Tensor, "P K"]) -> Float[Tensor, ""]:
    """How far the heads of an ensemble disagree: mean over answers of the deviation over heads of s̃_h / σ_h.

    s̃_h is the head's score within its prompt, σ_h its :func:`deviation`: level and scale, in which heads may differ and
    agree all the same, are taken out. 0 = one order and one spacing, near 1 = nothing in common.
    """
    scores = scores_PKH.unbind(-1)
    standard_HPK = torch.stack([_centred(x_PK, mask_PK) / deviation(x_PK, mask_PK).clamp(min=_EPS) for x_PK in scores])
    return masked.mean(standard_HPK.std(dim=0), mask_PK)


def _centred(x_PK: Tensor, mask_PK: Tensor) -> Tensor:
    """Deviations from the mean of the prompt's answers; 0 where masked."""
    x_PK = masked.counted(x_PK, mask_PK)
    mean_P1 = x_PK.sum(dim=1, keepdim=True) / mask_PK.sum(dim=1, keepdim=True).clamp(min=1)
    return masked.counted(x_PK - mean_P1, mask_PK)


def _tied(ranks_PK: Tensor) -> Tensor:
    return ranks_PK[:, :, None] == ranks_PK[:, None, :]


def _pair_losses(
    difference: Tensor, ranks_PK: Tensor, label_smoothing: float, targets_PKK: Tensor | None, margins_PKK: Tensor | None
) -> Tensor:
    """The loss at [p, i, j] as if i were ranked better than j or tied with it; ``difference`` may end in T."""
    tied_PKK = _tied(ranks_PK)
    each = (slice(None),) * 3 + (None,) * (difference.ndim - 3)
    target_PKK = torch.ones_like(tied_PKK, dtype=difference.dtype)
    if targets_PKK is not None:
        target_PKK = targets_PKK.to(difference.dtype).nan_to_num(1.0)
    if margins_PKK is not None:
        difference = difference - torch.where(tied_PKK, 0.0, margins_PKK.to(difference.dtype))[each]
    return _negative_log_likelihood(difference, label_smoothing, torch.where(tied_PKK, 0.5, target_PKK)[each])


def _per_prompt(
    x_PKK: Tensor, pair_PKK: Tensor, denominator: float | Tensor | None, weights_P: Tensor | None = None
) -> Tensor:
    """Mean over the pairs of a prompt, then over the prompts that have one."""
    num_pairs_P = pair_PKK.sum(dim=(1, 2))
    weight_PKK = pair_PKK / num_pairs_P.clamp(min=1)[:, None, None]
    if weights_P is not None:
        weight_PKK = weight_PKK * weights_P[:, None, None]
    count = (num_pairs_P > 0).sum() if denominator is None else denominator
    return masked.mean(x_PKK * weight_PKK, pair_PKK, denominator=count)


def _negative_log_likelihood(difference: Tensor, label_smoothing: float, target: Tensor | float = 1.0) -> Tensor:
    """−q log σ(d) − (1 − q) log σ(−d), q the smoothed target. logsigmoid, since log(sigmoid(−120)) is −∞ in float32."""
    if not 0 <= label_smoothing < 0.5:
        raise ValueError(f"label_smoothing is {label_smoothing}; must be at least 0 and below 0.5")
    q = target * (1 - 2 * label_smoothing) + label_smoothing
    return -q * logsigmoid(difference) - (1 - q) * logsigmoid(-difference)


def _correct(difference: Tensor) -> Tensor:
    return (difference > 0).float() + 0.5 * (difference == 0).float()
