"""The policy loss of PPO.

Dimension letters: B sequences, T tokens.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from heedful.batches import LossOut
from heedful.objectives import kl, masked

_MAX_LOG_RATIO = 20.0


def ppo_clip(
    logprobs_BT: Float[Tensor, "B T"],
    old_logprobs_BT: Float[Tensor, "B T"],
    advantages_BT: Float[Tensor, "B T"],
    loss_mask_BT: Bool[Tensor, "B T"],
    *,
    denominator: float | Tensor,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> LossOut:
    """Clipped surrogate objective, Σ max(−A ρ, −A clip(ρ, 1 − ε_low, 1 + ε_high)) / denominator (Schulman et al. 2017).

    ρ = exp(log π − log π_old). With ``dual_clip`` = c > 1 the loss of a token with A < 0 is at most −A c (Ye et al.
    2020): a ratio that exploded under a bad advantage no longer dominates the step. log ρ is limited to 20, so that the
    loss and its gradient stay finite.

    Args:
        logprobs_BT: of the policy now, with gradient.
        old_logprobs_BT: of the policy that sampled, recomputed by the training forward.
        advantages_BT: no gradient flows into them.
        loss_mask_BT: True = sampled by the policy.
        denominator: number of counted tokens of the whole step, or [B, 1]; see :func:`heedful.objectives.masked.mean`.
        clip_low: ε_low.
        clip_high: ε_high; equal to ε_low in the paper.
        dual_clip: c, or None = off.

    Returns:
        loss, and the metrics ``clip_fraction`` (tokens whose gradient the clip removed, not all ratios outside the
        band), ``dual_clip_fraction``, ``ratio_mean``, ``approx_kl_nats`` (KL(π_old ‖ π), k3), which add up over
        micro-batches; ``ratio_max`` and ``ratio_deviation_max`` (largest distance of ρ from 1, which is 0 on the first
        minibatch), of which one takes the maximum.
    """
    advantages_BT = masked.at_least_float32(advantages_BT).detach()
    log_ratio_BT = masked.at_least_float32(logprobs_BT) - masked.at_least_float32(old_logprobs_BT).detach()
    ratio_BT = masked.counted(log_ratio_BT, loss_mask_BT).clamp(max=_MAX_LOG_RATIO).exp()
    plain_BT = -advantages_BT * ratio_BT
    clipped_BT = -advantages_BT * ratio_BT.clamp(1 - clip_low, 1 + clip_high)
    loss_BT = torch.maximum(plain_BT, clipped_BT)
    ceiling_BT = torch.full_like(loss_BT, torch.inf)
    if dual_clip is not None:
        ceiling_BT = torch.where(advantages_BT < 0, -advantages_BT * dual_clip, ceiling_BT)
    loss = masked.mean(torch.minimum(loss_BT, ceiling_BT), loss_mask_BT, denominator=denominator)

    with torch.no_grad():
        means = {
            "clip_fraction": (clipped_BT > plain_BT).float(),
            "dual_clip_fraction": (loss_BT > ceiling_BT).float(),
            "ratio_mean": ratio_BT,
            "approx_kl_nats": kl.estimate(old_logprobs_BT, logprobs_BT, "k3"),
        }
        metrics = {name: masked.mean(x, loss_mask_BT, denominator=denominator) for name, x in means.items()}
        metrics["ratio_max"] = masked.maximum(ratio_BT, loss_mask_BT)
        metrics["ratio_deviation_max"] = masked.maximum((ratio_BT - 1).abs(), loss_mask_BT)
    return LossOut(loss, metrics)


def entropy_bonus(
    entropy_BT: Float[Tensor, "B T"],
    loss_mask_BT: Bool[Tensor, "B T"],
    *,
    coefficient: float,
    denominator: float | Tensor,
) -> LossOut:
    """−c Σ H / denominator: a reward for breadth (Williams & Peng 1991; Schulman et al. 2017).

    Args:
        entropy_BT: H of the next-token distribution, with gradient; :func:`heedful.objectives.logprobs.token_logprobs`.
        loss_mask_BT: True = sampled by the policy.
        coefficient: c.
        denominator: number of counted tokens of the whole step, or [B, 1]; see :func:`heedful.objectives.masked.mean`.

    Returns:
        loss, and the metric ``entropy_bonus_nats`` (the mean of H, without c), which adds up over micro-batches.
    """
    entropy = masked.mean(entropy_BT, loss_mask_BT, denominator=denominator)
    return LossOut(-coefficient * entropy, {"entropy_bonus_nats": entropy.detach()})
