"""What an answer is worth, token by token: a score, what its end and length cost, and the KL penalty.

Dimension letters: B sequences, T tokens.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from heedful.objectives.masked import at_least_float32, counted


@torch.no_grad()
def answer_scores(
    scores_B: Float[Tensor, "B"],
    *,
    finished_B: Bool[Tensor, "B"],
    lengths_B: Int[Tensor, "B"],
    score_clip: float | None = None,
    missing_end_penalty: float = 0.0,
    missing_end_score: float | None = None,
    overlong_from_tokens: int | None = None,
    overlong_full_tokens: int | None = None,
    overlong_penalty: float = 0.0,
) -> Float[Tensor, "B"]:
    """Clip the score, make cut answers pay, then subtract p · clamp((n − from) / (full − from), 0, 1) for the length.

    A fixed score for cut answers is that of Ziegler et al. 2019, the linear length penalty that of Yu et al. 2025.

    Args:
        scores_B: reward of each answer.
        finished_B: True = the answer ended with an end token.
        lengths_B: n, counted tokens of each answer.
        score_clip: c; None = not limited.
        missing_end_penalty: taken off the (limited) score of an answer that did not end by itself.
        missing_end_score: instead, the score of every such answer, whatever the reward says of it.
        overlong_from_tokens: longest answer without a length penalty; None = no such penalty.
        overlong_full_tokens: length of the full penalty.
        overlong_penalty: p; negative = a bonus for length.

    Returns:
        float32 scores, without gradient.

    Raises:
        ValueError: ``overlong_full_tokens`` is missing or not above ``overlong_from_tokens``.
    """
    scores_B = at_least_float32(scores_B)
    if score_clip is not None:
        scores_B = scores_B.clamp(-score_clip, score_clip)
    cut_B = scores_B - missing_end_penalty if missing_end_score is None else scores_B.new_tensor(missing_end_score)
    scores_B = torch.where(finished_B, scores_B, cut_B)
    if overlong_from_tokens is None:
        return scores_B
    if overlong_full_tokens is None or overlong_full_tokens <= overlong_from_tokens:
        raise ValueError(
            f"overlong_full_tokens is {overlong_full_tokens}; must be above overlong_from_tokens "
            f"({overlong_from_tokens})"
        )
    excess_B = (lengths_B - overlong_from_tokens) / (overlong_full_tokens - overlong_from_tokens)
    return scores_B - overlong_penalty * excess_B.clamp(0, 1)


@torch.no_grad()
def token_rewards(
    scores_B: Float[Tensor, "B"],
    kl_BT: Float[Tensor, "B T"],
    loss_mask_BT: Bool[Tensor, "B T"],
    *,
    kl_coefficient: float | Tensor,
) -> Float[Tensor, "B T"]:
    """r_t = −β KL_t on every counted token, plus the score on the last counted one (Ziegler et al. 2019).

    Args:
        scores_B: of each answer, from :func:`answer_scores`.
        kl_BT: KL to the reference per token (nats), from :func:`heedful.objectives.kl.estimate`; of later tokens only
            (:func:`of_later_tokens`) where a loss term holds that of the token itself.
        loss_mask_BT: True = sampled by the policy.
        kl_coefficient: β; a number, or [B, 1] for one per sequence.

    Returns:
        float32 rewards, 0 at masked places, without gradient. A sequence without a counted token gets no reward at all.
    """
    num_left_BT = loss_mask_BT.flip(1).cumsum(1).flip(1)
    score_BT = torch.where(num_left_BT == 1, scores_B[:, None], 0.0)
    return counted(score_BT - kl_coefficient * at_least_float32(kl_BT), loss_mask_BT)


@torch.no_grad()
def of_later_tokens(kl_BT: Float[Tensor, "B T"], loss_mask_BT: Bool[Tensor, "B T"]) -> Float[Tensor, "B T"]:
    """The KL of the next counted token at every counted one, 0 at the last: what choosing this token will cost.

    The rewards from a token on then hold −β KL of the tokens after it, which is what its choice can change through the
    reward. The KL of the token itself is left to the loss; in both it would count twice.
    """
    later_BT = torch.zeros_like(kl_BT)
    next_B = later_BT.new_zeros(len(later_BT))
    for t in range(kl_BT.shape[1] - 1, -1, -1):
        later_BT[:, t], next_B = next_B, torch.where(loss_mask_BT[:, t], kl_BT[:, t], next_B)
    return counted(later_BT, loss_mask_BT)
