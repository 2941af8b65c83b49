"""A frozen linear layer in int8: a quarter of float32, half of bfloat16, by the same code on every device.

    W ≈ diag(scale) · Q    Q whole numbers in −127 … 127, scale = max |row| / 127, so |W − diag(scale) · Q| ≤ scale / 2

Dimension letters: O outputs, I inputs.
"""

from __future__ import annotations

from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn import functional

from heedful.errors import ModelError


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
    """x Qᵀ · scale; autograd's own product would keep a float copy of every Q until the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, whole_OI: Tensor, scale_O: Tensor) -> Tensor:
        ctx.save_for_backward(whole_OI, scale_O)
        return functional.linear(x, whole_OI.to(x.dtype)).mul_(scale_O.to(x.dtype))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (gradient,), (whole_OI, scale_O) = gradients, ctx.saved_tensors
        return (gradient * scale_O.to(gradient.dtype)) @ whole_OI.to(gradient.dtype), None, None


@final
class Int8Linear(nn.Module):
    """A frozen ``nn.Linear`` (or GPT-2's transposed ``Conv1D``) with its weight in int8; inputs get gradients."""

    weight: Tensor
    """int8 [O, I]"""
    scale: Tensor
    """bfloat16 [O]"""

    def __init__(self, layer: Any) -> None:
        """Raises ModelError where a weight is not finite."""
        super().__init__()
        self.is_transposed = not isinstance(layer, nn.Linear)
        whole_OI, scale_O = self._quantised(layer.weight)
        self.out_features, self.in_features = whole_OI.shape
        self.register_buffer("weight", whole_OI)
        self.register_buffer("scale", scale_O)
        self.bias = layer.bias

    def forward(self, x: Tensor) -> Tensor:
        """[…, I] → […, O] in autocast's precision, where it is on, else in that of x."""
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        y: Tensor = _Product.apply(x, self.weight, self.scale)
        return y if self.bias is None else y + self.bias.to(y.dtype)

    def dequantised(self) -> Tensor:
        """The weights that it computes with, float32 in the layout of the layer it was made from."""
        weight_OI = self.weight.float() * self.scale.float()[:, None]
        return weight_OI.T if self.is_transposed else weight_OI

    def is_made_of(self, weight: Tensor) -> bool:
        """Whether these float weights are the ones it was made from, as far as int8 can tell."""
        if weight.shape != (self.weight.T if self.is_transposed else self.weight).shape:
            return False
        whole_OI, scale_O = self._quantised(weight.to(self.weight.device))
        return torch.equal(whole_OI, self.weight) and torch.equal(scale_O, self.scale)

    def _quantised(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        return to_int8(weight.T.contiguous() if self.is_transposed else weight)


def is_quantised(model: nn.Module) -> bool:
    """Whether some layer of the model is held in int8."""
    return any(isinstance(module, Int8Linear) for module in model.modules())
