"""Proofs at run time: what must be true of a correct set-up is asserted on the user's own, before the optimizer moves.

Every failure names the stream, the step and the samples, and what usually causes it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from heedful.errors import GuardError

TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-6, torch.bfloat16: 2e-3, torch.float16: 2e-3}
"""Largest |ratio − 1| and |KL| that rounding may cause. Both forwards take the same micro-batches through the same
kernels, so on a CPU the difference is exactly 0 in every dtype; the slack is for kernels that are not deterministic."""


def finite(stream: str, values: Tensor, *, step: int, ids: Sequence[str] = (), mask: Tensor | None = None) -> None:
    """Raise GuardError when ``values`` ([B, …], counted where ``mask``) holds NaN or infinity, naming the samples."""
    bad = ~torch.isfinite(values.detach())
    if mask is not None:
        bad &= mask
    if not bool(bad.any()):
        return
    rows = bad.reshape(bad.shape[0], -1).any(dim=1).nonzero().flatten().tolist() if bad.dim() else []
    names = ", ".join(ids[r] if r < len(ids) else str(r) for r in rows[:8]) or "the whole batch"
    more = f" and {len(rows) - 8} more" if len(rows) > 8 else ""
    raise GuardError(
        f"{stream} is not finite at step {step} (samples: {names}{more}); the optimizer has not moved. "
        f"Look at these samples, then lower the learning rate or set model.dtype to float32"
    )


def gradient(norm: float, *, model: str, step: int) -> None:
    """Raise GuardError when the gradient norm is not finite."""
    if norm != norm or norm in (float("inf"), float("-inf")):
        raise GuardError(
            f"the gradient of the {model} model is not finite at step {step}; the optimizer has not moved. "
            f"Lower its learning rate or set model.dtype to float32"
        )


def reference_is_start(kl_BT: Tensor, loss_mask_BT: Tensor, *, dtype: torch.dtype, ids: Sequence[str]) -> None:
    """At step 0 policy and reference are the same model: log π − log π_ref must be 0 on every counted token."""
    gap_BT = torch.where(loss_mask_BT, kl_BT.abs(), 0.0)
    worst = float(gap_BT.max()) if gap_BT.numel() else 0.0
    if worst > TOLERANCE[dtype]:
        row = int(gap_BT.max(dim=1).values.argmax())
        raise GuardError(
            f"KL to the reference is {worst:.3g} nats on a token of sample {ids[row]} at step 0, where policy and "
            f"reference are the same model and it must be 0; check that both were loaded from the same folder with "
            f"the same dtype, and that no dropout is active"
        )


def first_minibatch(ratio_max_gap: float, clip_fraction: float, *, dtype: torch.dtype, step: int) -> None:
    """Before the first update of a step the policy is the one that spoke: every ratio is 1 and nothing is clipped."""
    if ratio_max_gap > TOLERANCE[dtype] or clip_fraction > 0:
        raise GuardError(
            f"the importance ratio differs from 1 by {ratio_max_gap:.3g} (clip fraction {clip_fraction:.3g}) on the "
            f"first minibatch of step {step}, before any update; masks, padding, dropout, chat template or temperature "
            f"differ between the two forwards"
        )
