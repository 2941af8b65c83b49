"""Sums, means, variances and whitening over the tokens that count.

Dimension letters: B sequences, T tokens.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor


def at_least_float32(x: Tensor) -> Tensor:
    """``x`` in float32, or unchanged when it is float64 (finite-difference tests)."""
    return x if x.dtype == torch.float64 else x.float()


def counted(x_BT: Float[Tensor, "B T"], loss_mask_BT: Bool[Tensor, "B T"]) -> Float[Tensor, "B T"]:
    """``x`` in float32 with exactly 0 at masked places.

    A selection and not a product: 0 · NaN is NaN, in the gradient too. Functions that are not linear call this on their
    *inputs*, since a NaN that arises before a selection still reaches the gradient.

    Raises:
        ValueError: the shapes differ (broadcasting a mask hides a bug).
    """
    if x_BT.shape != loss_mask_BT.shape:
        raise ValueError(
            f"values of shape {tuple(x_BT.shape)} need a mask of that shape, not {tuple(loss_mask_BT.shape)}"
        )
    return torch.where(loss_mask_BT, at_least_float32(x_BT), 0.0)


def mean(
    x_BT: Float[Tensor, "B T"], loss_mask_BT: Bool[Tensor, "B T"], *, denominator: float | Tensor | None = None
) -> Float[Tensor, ""]:
    """Sum of the counted values divided by ``denominator``; 0 with zero gradient where nothing counts.

    Args:
        x_BT: any values.
        loss_mask_BT: True = counts.
        denominator: number of counted tokens of the whole step; None = of this call. A mean of means over micro-batches
            of unequal length is not the mean of the step, so losses always pass it. [B, 1] divides each sequence by its
            own: (its counted tokens) · (sequences of the whole step) makes every sequence weigh the same. What is
            divided by 0 counts as 0.

    Raises:
        ValueError: a denominator that is neither one number nor [B, 1].
    """
    count = torch.as_tensor(loss_mask_BT.sum() if denominator is None else denominator, device=x_BT.device)
    if count.ndim and count.shape != (len(x_BT), 1):
        raise ValueError(f"the denominator is one number or [{len(x_BT)}, 1], not of shape {tuple(count.shape)}")
    x_BT = counted(x_BT, loss_mask_BT)
    total = x_BT.sum(dim=1, keepdim=True) if count.ndim else x_BT.sum()
    count = count.to(total.dtype)
    return torch.where(count == 0, 0.0, total / torch.where(count == 0, torch.ones_like(count), count)).sum()


def maximum(x_BT: Float[Tensor, "B T"], loss_mask_BT: Bool[Tensor, "B T"]) -> Float[Tensor, ""]:
    """Largest counted value of a non-negative ``x``; 0 where nothing counts."""
    return counted(x_BT, loss_mask_BT).amax()


def var(x_BT: Float[Tensor, "B T"], loss_mask_BT: Bool[Tensor, "B T"], *, unbiased: bool = False) -> Float[Tensor, ""]:
    """Variance of the counted values: Σ(x − x̄)² / n (population), or / (n − 1) when ``unbiased``.

    0 for fewer than two counted values, in both conventions.
    """
    deviation_BT = _deviation(x_BT, loss_mask_BT)
    count = loss_mask_BT.sum()
    return mean(deviation_BT**2, loss_mask_BT, denominator=count - 1 if unbiased else count)


def whiten(
    x_BT: Float[Tensor, "B T"],
    loss_mask_BT: Bool[Tensor, "B T"],
    *,
    shift_mean: bool = True,
    mean: Tensor | None = None,
    var: Tensor | None = None,
    eps: float = 1e-8,
) -> Float[Tensor, "B T"]:
    """(x − x̄) / √(var + ε) over the counted values, 0 at masked places.

    The variance is that of the population (÷ n): [2, 4, 6] becomes [−1.2247, 0, 1.2247]. One value, or equal values,
    become 0.

    Args:
        x_BT: for instance advantages.
        loss_mask_BT: True = counts.
        shift_mean: False adds x̄ back after the division, as in Ziegler et al. 2019 for rewards: the variance becomes
            1, the mean stays.
        mean: scalar; the mean over all ranks, i.e. the sum over ranks of ``masked.mean(x, mask, denominator=n_all)``.
        var: scalar; the variance over all ranks, i.e. the sum over ranks of
            ``masked.mean((x - mean) ** 2, mask, denominator=n_all)``.
        eps: added to the variance; √ε is the spread below which values count as equal.
    """
    deviation_BT = _deviation(x_BT, loss_mask_BT) if mean is None else counted(x_BT - mean, loss_mask_BT)
    if var is None:
        var = _mean(deviation_BT**2, loss_mask_BT)
    white_BT = deviation_BT * torch.rsqrt(var + eps)
    if not shift_mean:
        white_BT = white_BT + (_mean(x_BT, loss_mask_BT) if mean is None else mean)
    return counted(white_BT, loss_mask_BT)


_mean = mean  # ``whiten`` has an argument of that name


def _deviation(x_BT: Tensor, loss_mask_BT: Tensor) -> Tensor:
    """x − x̄ in two passes: the second removes the rounding error of the first mean, which √ε would blow up."""
    once_BT = counted(x_BT, loss_mask_BT) - _mean(x_BT, loss_mask_BT)
    return counted(once_BT - _mean(once_BT, loss_mask_BT), loss_mask_BT)
