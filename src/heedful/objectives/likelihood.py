"""Maximum likelihood: the loss of supervised fine-tuning.

Dimension letters: B sequences, T tokens.
"""

from __future__ import annotations

from jaxtyping import Bool, Float
from torch import Tensor

from heedful.batches import LossOut
from heedful.objectives import masked


def token_nll(
    logprobs_BT: Float[Tensor, "B T"], loss_mask_BT: Bool[Tensor, "B T"], *, denominator: float | Tensor
) -> LossOut:
    """−Σ log π(target) / denominator over the counted tokens (nats per token).

    Args:
        logprobs_BT: of the targets, with gradient.
        loss_mask_BT: True = trained. A batch without any gives loss 0 and gradient 0.
        denominator: number of counted tokens of the whole step, or [B, 1]; see :func:`heedful.objectives.masked.mean`.

    Returns:
        loss, and the metric ``nll_nats``, which adds up over micro-batches.
    """
    loss = -masked.mean(logprobs_BT, loss_mask_BT, denominator=denominator)
    return LossOut(loss, {"nll_nats": loss.detach()})
