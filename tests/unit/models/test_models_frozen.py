"""Linear layers in few bits compute with the weights that they say they hold, and keep nothing else."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from heedful.models.frozen import FrozenLinear
from heedful.models.int8 import Int8Linear
from heedful.models.nf4 import Nf4Linear


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["linear", "bias", "conv"])
@pytest.mark.parametrize(("form", "num_inputs", "largest"), [(Int8Linear, 16, 2e-6), (Nf4Linear, 17, 1e-6)])
def test_it_computes_and_differentiates_as_a_layer_of_its_weights(
    form: type[FrozenLinear], num_inputs: int, largest: float, kind: str, dtype: torch.dtype
) -> None:
    layer: Any = Conv1D(24, num_inputs) if kind == "conv" else nn.Linear(num_inputs, 24, bias=kind == "bias")
    layer.requires_grad_(False)
    if kind == "conv":
        layer.bias.normal_()
    ours = form(layer)
    assert ours.is_made_of(layer.weight) and not ours.is_made_of(layer.weight + 0.1)
    assert not ours.is_made_of(layer.weight.T)
    layer.weight.copy_(ours.dequantised())
    x = torch.randn(2, 5, num_inputs, requires_grad=True)
    gradient = torch.randn(2, 5, 24)
    found = []
    for module in (layer, ours):
        with torch.autocast("cpu", dtype=dtype, enabled=dtype != torch.float32):
            y = module(x)
        found.append((y.float(), *torch.autograd.grad(y, x, gradient.to(y.dtype))))
        assert y.dtype == dtype
    for a, b in zip(*found, strict=True):
        assert torch.allclose(a, b, rtol=0, atol=largest if dtype == torch.float32 else 0.03)


@pytest.mark.parametrize(("form", "dtypes"), [
    (Int8Linear, {torch.int8, torch.bfloat16}), (Nf4Linear, {torch.uint8, torch.bfloat16}),
])  # fmt: skip
def test_no_float_copy_of_a_weight_waits_for_the_backward(form: type[FrozenLinear], dtypes: set[torch.dtype]) -> None:
    layers = nn.Sequential(*[form(nn.Linear(16, 16, bias=False).requires_grad_(False)) for _ in range(3)])
    kept: list[torch.Tensor] = []
    x = torch.randn(2, 16, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        layers(x).sum().backward()
    assert kept and {t.dtype for t in kept} <= dtypes
    assert {t.data_ptr() for t in kept} == {b.data_ptr() for b in layers.buffers()}
    assert x.grad is not None and bool(x.grad.any())
