"""The value (critic) loss and how well the values explain the returns.

Dimension letters: B sequences, T tokens.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from heedful.batches import LossOut
from heedful.objectives import masked


def clipped_mse(
    values_BT: Float[Tensor, "B T"],
    old_values_BT: Float[Tensor, "B T"],
    returns_BT: Float[Tensor, "B T"],
    loss_mask_BT: Bool[Tensor, "B T"],
    *,
    denominator: float | Tensor,
    clip: float | None,
) -> LossOut:
    """½ Σ max((V − R)², (clip(V, V_old − ε, V_old + ε) − R)²) / denominator (Dhariwal et al. 2017, baselines PPO).

    Args:
        values_BT: now, with gradient.
        old_values_BT: when the answers were sampled.
        returns_BT: targets, from :func:`heedful.objectives.advantages.gae`.
        loss_mask_BT: True = sampled by the policy; aligned with values of the state *before* the token, so the last
            prompt token's state is the first that counts.
        denominator: number of counted tokens of the whole step, or [B, 1]; see :func:`heedful.objectives.masked.mean`.
        clip: ε, or None = plain ½ mean squared error.

    Returns:
        loss, and the metrics ``value_clip_fraction`` (tokens where the clipped error is the larger one, so that no
        gradient flows) and ``value_mean``, which add up over micro-batches.
    """
    values_BT = masked.counted(values_BT, loss_mask_BT)
    old_values_BT = masked.at_least_float32(old_values_BT).detach()
    returns_BT = masked.at_least_float32(returns_BT).detach()
    plain_BT = (values_BT - returns_BT) ** 2
    clipped_BT = plain_BT
    if clip is not None:
        limited_BT = old_values_BT + (values_BT - old_values_BT).clamp(-clip, clip)
        clipped_BT = (limited_BT - returns_BT) ** 2
    loss = masked.mean(torch.maximum(plain_BT, clipped_BT) / 2, loss_mask_BT, denominator=denominator)
    means = {
        "value_clip_fraction": (clipped_BT > plain_BT).float(),
        "value_mean": values_BT.detach(),
    }
    return LossOut(loss, {name: masked.mean(x, loss_mask_BT, denominator=denominator) for name, x in means.items()})


def explained_variance(
    values_BT: Float[Tensor, "B T"], returns_BT: Float[Tensor, "B T"], loss_mask_BT: Bool[Tensor, "B T"]
) -> Float[Tensor, ""]:
    """1 − Var(R − V) / Var(R) over the counted tokens: 1 = perfect, 0 = no better than a constant, negative = worse.

    0 when the returns do not vary, since then there is nothing to explain.
    """
    values_BT, returns_BT = masked.at_least_float32(values_BT), masked.at_least_float32(returns_BT)
    total = masked.var(returns_BT, loss_mask_BT)
    left = masked.var(returns_BT - values_BT, loss_mask_BT)
    varies = total > 1e-12 * masked.mean(returns_BT**2, loss_mask_BT)  # a smaller spread is rounding
    return torch.where(varies, 1 - left / torch.where(varies, total, torch.ones_like(total)), torch.zeros_like(total))
