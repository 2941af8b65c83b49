"""A frozen linear layer in int8: a quarter of float32, half of bfloat16, by the same code on every device.

    W ≈ diag(scale) · Q    Q whole numbers in −127 … 127, scale = max |row| / 127, so |W − diag(scale) · Q| ≤ scale / 2

Dimension letters: O outputs, I inputs.
"""

from __future__ import annotations

from typing import Any, final

import torch
from torch import Tensor
from torch.nn import functional

from heedful.errors import ModelError
from heedful.models.frozen import FrozenLinear


def to_int8(weight_OI: Tensor) -> tuple[Tensor, Tensor]:
    """Whole numbers int8 [O, I] and one scale per row, bfloat16 [O].

    The scale is rounded to bfloat16 before the weights are divided by it, so no compute precision ever rounds it again;
    whole numbers up to 127 are exact in bfloat16 too.

    Raises:
        ModelError: a weight that is not finite.
    """
    weight_OI = weight_OI.detach().float()
    scale_O = (weight_OI.abs().amax(dim=1) / 127).bfloat16()
    if not bool(torch.isfinite(scale_O).all()):
        raise ModelError("a weight is not finite, so it cannot be held in int8; the model is damaged")
    scale_O = torch.where(scale_O > 0, scale_O, 1.0)
    whole_OI = (weight_OI / scale_O.float()[:, None]).round_().clamp_(-127, 127)
    return whole_OI.to(torch.int8), scale_O


class _Product(torch.autograd.Function):
    """x Qᵀ · scale."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, whole_OI: Tensor, scale_O: Tensor) -> Tensor:
        ctx.save_for_backward(whole_OI, scale_O)
        return functional.linear(x, whole_OI.to(x.dtype)).mul_(scale_O.to(x.dtype))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (gradient,), (whole_OI, scale_O) = gradients, ctx.saved_tensors
        return (gradient * scale_O.to(gradient.dtype)) @ whole_OI.to(gradient.dtype), None, None


@final
class Int8Linear(FrozenLinear):
    """``weight``: whole numbers, int8 [O, I]; ``scale``: bfloat16 [O]."""

    def _encoded(self, weight_OI: Tensor) -> tuple[Tensor, Tensor]:
        return to_int8(weight_OI)

    def _decoded(self) -> Tensor:
        return self.weight.float() * self.scale.float()[:, None]

    def _product(self, x: Tensor) -> Tensor:
        y: Tensor = _Product.apply(x, self.weight, self.scale)
        return y
