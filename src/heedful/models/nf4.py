"""A frozen linear layer in 4-bit NormalFloat (QLoRA, Dettmers et al. 2023): 4.25 bits per weight, on every device.

Weights are taken row by row in blocks of 64. With s = max |w| of a block, w becomes s · level[i] of the nearest of 16
levels in −1 … 1, which are quantiles of a normal distribution, so that about equally many weights fall to each:

    q(p) = Φ⁻¹(p),  p_max = ½ (1 − 1/32 + 1 − 1/30) = 0.96771
    8 levels above 0    q at 8 even steps from p_max down to, but without, ½
    0 itself, which is thus exact
    7 levels below 0    −q at 7 even steps from p_max down to, but without, ½
    all divided by q(p_max), so that the outermost are −1 and 1

Two numbers of levels share a byte. s is bfloat16 instead of the paper's float32 that is quantised once more (4.25 bits
per weight against 4.13), and rounded before weights are divided by it. Weights that were rounded once are exact the
second time: the largest of a block is ±s, so s comes out the same.

Dimension letters: O outputs, I inputs, B blocks, H half of a block.
"""

from __future__ import annotations

from functools import cache
from typing import Any, final

import torch
from torch import Tensor
from torch.nn import functional

from heedful.errors import ModelError
from heedful.models.frozen import FrozenLinear

BLOCK = 64
"""Weights that share a scale."""
LEVELS = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
"""In float32, as the paper prints them (appendix E)."""


def to_nf4(weight_OI: Tensor) -> tuple[Tensor, Tensor]:
    """Numbers of levels, two in a byte (the earlier weight in the low bits), uint8 [B, H], and scales, bfloat16 [B].

    Raises:
        ModelError: a weight that is not finite.
    """
    flat = weight_OI.detach().float().flatten()
    blocks_BX = functional.pad(flat, (0, -flat.numel() % BLOCK)).view(-1, BLOCK)
    scale_B = blocks_BX.abs().amax(dim=1).bfloat16()
    if not bool(torch.isfinite(scale_B).all()):
        raise ModelError("a weight is not finite, so it cannot be held in 4 bits; the model is damaged")
    scale_B = torch.where(scale_B > 0, scale_B, 1.0)
    levels = torch.tensor(LEVELS, device=flat.device)
    middles = (levels[1:] + levels[:-1]) / 2
    number_BX = torch.bucketize(blocks_BX / scale_B.float()[:, None], middles, out_int32=True).to(torch.uint8)
    return number_BX[:, 0::2] | number_BX[:, 1::2] << 4, scale_B


def from_nf4(packed_BH: Tensor, scale_B: Tensor, shape: tuple[int, int]) -> Tensor:
    """The weights that these bytes stand for, float32 [O, I]."""
    both = _pairs(packed_BH.device).index_select(0, packed_BH.flatten().int())
    blocks_BX = both.view(torch.float32).view(-1, BLOCK).mul_(scale_B.float()[:, None])
    return blocks_BX.flatten()[: shape[0] * shape[1]].view(shape)


@cache
def _pairs(device: torch.device) -> Tensor:
    """The two levels of every byte, side by side in one number of 64 bits: one look-up gives two weights."""
    levels, byte = torch.tensor(LEVELS), torch.arange(256)
    return torch.stack([levels[byte & 15], levels[byte >> 4]], dim=1).view(torch.int64).flatten().to(device)


class _Product(torch.autograd.Function):
    """x Wᵀ, W made from its bytes when it is needed and not kept."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, packed_BH: Tensor, scale_B: Tensor, shape: tuple[int, int]) -> Tensor:
        ctx.save_for_backward(packed_BH, scale_B)
        ctx.shape = shape
        return functional.linear(x, from_nf4(packed_BH, scale_B, shape).to(x.dtype))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        (gradient,), (packed_BH, scale_B) = gradients, ctx.saved_tensors
        return gradient @ from_nf4(packed_BH, scale_B, ctx.shape).to(gradient.dtype), None, None, None


@final
class Nf4Linear(FrozenLinear):
    """``weight``: numbers of levels, uint8 [B, H]; ``scale``: bfloat16 [B]."""

    def _encoded(self, weight_OI: Tensor) -> tuple[Tensor, Tensor]:
        return to_nf4(weight_OI)

    def _decoded(self) -> Tensor:
        return from_nf4(self.weight, self.scale, (self.out_features, self.in_features))

    def _product(self, x: Tensor) -> Tensor:
        y: Tensor = _Product.apply(x, self.weight, self.scale, (self.out_features, self.in_features))
        return y
