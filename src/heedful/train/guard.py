"""Proofs at run time: what must be true of a correct set-up is asserted on the user's own, before the optimizer moves.

Every failure names the stream, the step and the samples, and what usually causes it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from heedful.errors import GuardError, NonFiniteError
from heedful.models.quantise import LARGEST_BOUND_NATS

TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-6, torch.bfloat16: 2e-3, torch.float16: 2e-3}
"""Largest |ratio − 1| and |KL| that rounding may cause. Both forwards take the same micro-batches through the same
kernels, so on a CPU the difference is exactly 0 in every dtype; the slack is for kernels that are not deterministic."""


def finite(stream: str, values: Tensor, *, step: int, ids: Sequence[str] = (), mask: Tensor | None = None) -> None:
    """Raise NonFiniteError when ``values`` ([B, …], counted where ``mask``) holds NaN or infinity.

    The samples are named; of a scalar all in ``ids``.
    """
    bad = ~torch.isfinite(values.detach())
    if mask is not None:
        bad &= mask
    if not bool(bad.any()):
        return
    rows = bad.reshape(bad.shape[0], -1).any(dim=1).nonzero().flatten().tolist() if bad.dim() else range(len(ids))
    named = [ids[r] if r < len(ids) else str(r) for r in rows]
    shown = ", ".join(named[:8]) or "the whole batch"
    more = f" and {len(named) - 8} more" if len(named) > 8 else ""
    remedy = "lower the learning rate or set model.dtype to float32"
    if stream in ("scores", "rewards"):
        remedy = "look for the part of the reward that overflows"
    raise NonFiniteError(
        f"{stream} is not finite at step {step} (samples: {shown}{more}); no weight has moved on it. "
        f"Look at these samples, then {remedy}",
        stream=stream, step=step, ids=named,
    )  # fmt: skip


def gradients(
    parameters: Mapping[str, nn.Parameter], norm: float | Tensor, *, model: str, step: int, ids: Sequence[str] = ()
) -> None:
    """Raise NonFiniteError when the gradient norm is not finite, naming the weight at which it goes bad.

    A gradient runs backwards: everything before the faulty layer is bad too. So the *last* bad weight in the model's
    own order is the one named (within a layer that order is only roughly that of the computation; the replay is exact).

    Args:
        parameters: by name, in the order of the forward pass, with their gradients *before* clipping: a clip by a norm
            that is NaN would make every gradient NaN.
        norm: of all gradients together.
        ids: the samples of the step.
    """
    if bool(torch.isfinite(torch.as_tensor(norm))):
        return
    given = {name: p.grad for name, p in parameters.items() if p.grad is not None}
    bad = [name for name, gradient in given.items() if not bool(torch.isfinite(gradient).all())]
    if bad:
        module = bad[-1]
        where = f"from {module} backwards ({len(bad)} of {len(given)} weights)"
    else:
        module = max(given, key=lambda name: float(given[name].abs().max()))
        where = f"its norm overflows, the largest is that of {module}"
    raise NonFiniteError(
        f"the gradient of the {model} model is not finite at step {step}, {where}; no weight has moved on it. "
        f"Lower its learning rate or set model.dtype to float32",
        stream=f"the {model} gradient", step=step, ids=ids, module=module,
    )  # fmt: skip


def reference_is_start(
    kl_BT: Tensor, loss_mask_BT: Tensor, *, dtype: torch.dtype, ids: Sequence[str], is_exact: bool = True
) -> None:
    """At step 0 policy and reference are the same model: log π − log π_ref must be 0 on every counted token.

    Args:
        is_exact: False where the reference is the policy in int8, which may be off by what that may change.
    """
    gap_BT = torch.where(loss_mask_BT, kl_BT.abs(), 0.0)
    worst = float(gap_BT.max()) if gap_BT.numel() else 0.0
    row = int(gap_BT.max(dim=1).values.argmax()) if gap_BT.numel() else 0
    if not is_exact:
        if not worst <= LARGEST_BOUND_NATS:
            raise GuardError(
                f"KL to the reference is {worst:.3g} nats on a token of sample {ids[row]} at step 0, where the "
                f"reference is the policy in int8 and at most {LARGEST_BOUND_NATS:g} are allowed; set "
                f"ppo.frozen_weights to float"
            )
    elif worst > TOLERANCE[dtype]:
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
