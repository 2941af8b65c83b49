"""A score for the whole answer and a KL penalty become one reward per token.

Dimension letters: B sequences, T tokens.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from heedful.objectives.masked import at_least_float32, counted


@torch.no_grad()
def token_rewards(
    scores_B: Float[Tensor, "B"],
    kl_BT: Float[Tensor, "B T"],
    loss_mask_BT: Bool[Tensor, "B T"],
    *,
    kl_coefficient: float | Tensor,
    score_clip: float | None = None,
    missing_end_penalty: float = 0.0,
    finished_B: Bool[Tensor, "B"] | None = None,
) -> Float[Tensor, "B T"]:
    """r_t = −β KL_t on every counted token, plus the score on the last counted one (Ziegler et al. 2019).

    Args:
        scores_B: reward of each answer.
        kl_BT: KL to the reference per token (nats), from :func:`heedful.objectives.kl.estimate`.
        loss_mask_BT: True = sampled by the policy.
        kl_coefficient: β; a number, or [B, 1] for one per sequence.
        score_clip: scores are limited to ± this first; None = not limited.
        missing_end_penalty: taken off the (limited) score of an answer that did not end by itself.
        finished_B: True = the answer ended with an end token; needed for the penalty.

    Returns:
        float32 rewards, 0 at masked places, without gradient. A sequence without a counted token gets no reward at all.

    Raises:
        ValueError: a penalty without ``finished_B``.
    """
    scores_B = at_least_float32(scores_B)
    if score_clip is not None:
        scores_B = scores_B.clamp(-score_clip, score_clip)
    if missing_end_penalty:
        if finished_B is None:
            raise ValueError("missing_end_penalty needs finished_B, which tells the answers that ended by themselves")
        scores_B = torch.where(finished_B, scores_B, scores_B - missing_end_penalty)
    num_left_BT = loss_mask_BT.flip(1).cumsum(1).flip(1)
    score_BT = torch.where(num_left_BT == 1, scores_B[:, None], 0.0)
    return counted(score_BT - kl_coefficient * at_least_float32(kl_BT), loss_mask_BT)
