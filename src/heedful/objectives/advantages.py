"""Advantages and returns from rewards and values.

Dimension letters: B sequences, T tokens.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from heedful.objectives.masked import at_least_float32, counted


@torch.no_grad()
def gae(
    rewards_BT: Float[Tensor, "B T"],
    values_BT: Float[Tensor, "B T"],
    loss_mask_BT: Bool[Tensor, "B T"],
    *,
    gamma: float,
    lam: float,
    value_lam: float | None = None,
    bootstrap_B: Float[Tensor, "B"] | None = None,
) -> tuple[Float[Tensor, "B T"], Float[Tensor, "B T"]]:
    """Generalised advantage estimation (Schulman et al. 2016) over the counted tokens.

    δ_t = r_t + γ V_next − V_t,  A_t = δ_t + γ λ A_next,  R_t = A'_t + V_t, where *next* is the next counted token:
    masked tokens in the middle (a tool's output, padding) carry nothing and cost no decay. After the last counted token
    the value is that of the end: 0, or ``bootstrap_B``.

    Args:
        rewards_BT: reward of each token; see :func:`heedful.objectives.shaping.token_rewards`.
        values_BT: V of the state in which the token was chosen.
        loss_mask_BT: True = sampled by the policy.
        gamma: discount.
        lam: decay λ of the advantages; 1 = Monte-Carlo return, 0 = one-step.
        value_lam: decay λ' of the A' in the returns (Yuan et al. 2025); None = lam.
        bootstrap_B: value after the last counted token, for answers cut by the length limit; must be 0 for answers that
            ended by themselves, also those that ended exactly at the limit. None = 0 for all.

    Returns:
        advantages and returns, float32, 0 at masked places, without gradient. Advantages are not whitened.
    """

    def decayed(lam: float) -> Tensor:
        advantages_TB = torch.zeros_like(values_TB)
        next_value_B = torch.zeros_like(values_TB[0]) if bootstrap_B is None else bootstrap_B.to(values_TB)
        next_advantage_B = torch.zeros_like(next_value_B)
        for t in range(len(rewards_TB) - 1, -1, -1):
            counts_B = loss_mask_BT[:, t]
            delta_B = rewards_TB[t] + gamma * next_value_B - values_TB[t]
            next_advantage_B = torch.where(counts_B, delta_B + gamma * lam * next_advantage_B, next_advantage_B)
            next_value_B = torch.where(counts_B, values_TB[t], next_value_B)
            advantages_TB[t] = next_advantage_B
        return counted(advantages_TB.T, loss_mask_BT)

    rewards_TB, values_TB = at_least_float32(rewards_BT).T, at_least_float32(values_BT).T
    advantages_BT = decayed(lam)
    gains_BT = advantages_BT if value_lam is None else decayed(value_lam)
    return advantages_BT, counted(gains_BT + values_TB.T, loss_mask_BT)
