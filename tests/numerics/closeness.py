"""How the numeric tests compare: largest and mean difference, poison at masked places, finite differences."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

POISONS = (float("nan"), float("inf"), 1e9)


def assert_close(actual: Any, expected: Any, largest: float = 2e-6, mean: float | None = None) -> None:
    """Fails unless shapes are equal and both the largest and the mean absolute difference are small (NaN is not)."""
    actual, expected = torch.as_tensor(actual).double(), torch.as_tensor(expected).double()
    assert actual.shape == expected.shape, f"shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"
    difference = (actual - expected).abs()
    bound = largest / 2 if mean is None else mean
    assert bool((difference <= largest).all()), (
        f"largest difference {difference.max():.3g} > {largest}: {actual} {expected}"
    )
    assert difference.numel() < 2 or bool(difference.mean() <= bound), (
        f"mean difference {difference.mean():.3g} > {bound}"
    )


def poisoned(x_BT: Tensor, loss_mask_BT: Tensor, value: float) -> Tensor:
    """``x`` with ``value`` at masked places."""
    return torch.where(loss_mask_BT, x_BT, torch.full_like(x_BT, value))


def mask_of(lengths: list[int], width: int) -> Tensor:
    """Right-padded mask [B, T]."""
    return torch.arange(width)[None, :] < torch.tensor(lengths)[:, None]


def gradient(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Gradient of a scalar function at ``x``."""
    x = x.detach().clone().requires_grad_()
    (grad,) = torch.autograd.grad(function(x), x)
    return grad


def assert_gradient(function: Callable[[Tensor], Tensor], x: Tensor, step: float = 1e-6, largest: float = 1e-7) -> None:
    """Fails unless the gradient at float64 ``x`` equals central differences."""
    assert x.dtype == torch.float64
    numeric = torch.zeros_like(x)
    with torch.no_grad():
        for i in range(x.numel()):
            shift = torch.zeros_like(x).reshape(-1)
            shift[i] = step
            shift = shift.reshape(x.shape)
            numeric.reshape(-1)[i] = (function(x + shift) - function(x - shift)) / (2 * step)
    assert_close(gradient(function, x), numeric, largest=largest)
