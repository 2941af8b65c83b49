"""A frozen linear layer whose weight is held in few bits; ``int8.py`` and ``nf4.py`` say in which.

Dimension letters: O outputs, I inputs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor, nn


class FrozenLinear(nn.Module, ABC):
    """A frozen ``nn.Linear`` (or GPT-2's transposed ``Conv1D``) in few bits; inputs get gradients."""

    weight: Tensor
    """Codes of the weights"""
    scale: Tensor
    """What the codes are multiples of"""

    def __init__(self, layer: Any) -> None:
        """Raises ModelError where a weight is not finite."""
        super().__init__()
        self.is_transposed = not isinstance(layer, nn.Linear)
        weight_OI = self._turned(layer.weight)
        self.out_features, self.in_features = weight_OI.shape
        codes, scale = self._encoded(weight_OI)
        self.register_buffer("weight", codes)
        self.register_buffer("scale", scale)
        self.bias = layer.bias

    def forward(self, x: Tensor) -> Tensor:
        """[…, I] → […, O] in autocast's precision, where it is on, else in that of x."""
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        y = self._product(x)
        return y if self.bias is None else y + self.bias.to(y.dtype)

    def dequantised(self) -> Tensor:
        """The weights that it computes with, float32 in the layout of the layer it was made from."""
        return self._turned(self._decoded())

    def is_made_of(self, weight: Tensor) -> bool:
        """Whether these float weights are the ones it was made from, as far as its bits can tell."""
        weight_OI = self._turned(weight.to(self.weight.device))
        if weight_OI.shape != (self.out_features, self.in_features):
            return False
        codes, scale = self._encoded(weight_OI)
        return torch.equal(codes, self.weight) and torch.equal(scale, self.scale)

    def _turned(self, weight: Tensor) -> Tensor:
        """From the layer's layout to [O, I], and back."""
        return weight.T.contiguous() if self.is_transposed else weight

    @abstractmethod
    def _encoded(self, weight_OI: Tensor) -> tuple[Tensor, Tensor]:
        """Codes and scale."""

    @abstractmethod
    def _decoded(self) -> Tensor:
        """float32 [O, I]"""

    @abstractmethod
    def _product(self, x: Tensor) -> Tensor:
        """x Wᵀ; autograd's own would keep a float copy of every weight until the backward pass."""


def is_product(module: Any) -> bool:
    """A linear layer, or GPT-2's transposed one."""
    from transformers.pytorch_utils import Conv1D

    return type(module) in (nn.Linear, Conv1D)  # not isinstance: what derives from one may do more than a product


def is_frozen_product(module: Any) -> bool:
    """One that is never trained."""
    return is_product(module) and not module.weight.requires_grad


def is_quantised(model: nn.Module) -> bool:
    """Whether some layer of the model is held in few bits."""
    return any(isinstance(module, FrozenLinear) for module in model.modules())
