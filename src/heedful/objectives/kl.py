"""Per-token KL divergence: estimators from sampled tokens, and the exact value from logits. All in nats.

Dimension letters: B sequences, T tokens, V vocabulary.
"""

from __future__ import annotations

from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from heedful.objectives.masked import at_least_float32

Kind = Literal["k1", "k2", "k3", "abs"]

_MAX_EXPONENT = 20.0


def estimate(
    logprobs_BT: Float[Tensor, "B T"], reference_logprobs_BT: Float[Tensor, "B T"], kind: Kind = "k1"
) -> Float[Tensor, "B T"]:
    """Estimate of KL(π ‖ π_ref) from tokens sampled from π, with ρ = log π − log π_ref (Schulman 2020, kl-approx).

    ======  ===================  ===============================  =================================================
    kind    value                as a value (reward penalty, log)  as a loss (its gradient)
    ======  ===================  ===============================  =================================================
    k1      ρ                    unbiased, may be negative         expected gradient 0: never put it in a loss
    k2      ρ²/2                 biased, small for small ρ, ≥ 0    unbiased: exactly the gradient of the KL
    k3      e^(−ρ) − 1 + ρ       unbiased, ≥ 0, low variance       biased: the gradient of KL(π_ref ‖ π)
    abs     the size of ρ        biased, ≥ 0                      biased
    ======  ===================  ===============================  =================================================

    So the penalty in the reward is k1 (or k3), and a KL term in the loss is k2. Beyond −ρ = 20 the exponential of k3
    goes on as its tangent: finite in float32, still growing, and its gradient keeps its sign (a clamp would turn it
    round).

    Raises:
        ValueError: unknown ``kind``.
    """
    rho_BT = at_least_float32(logprobs_BT) - at_least_float32(reference_logprobs_BT)
    if kind == "k1":
        return rho_BT
    if kind == "k2":
        return rho_BT**2 / 2
    if kind == "k3":
        exponent_BT = (-rho_BT).clamp(max=_MAX_EXPONENT)
        beyond_BT = (-rho_BT - _MAX_EXPONENT).clamp(min=0)
        tangent = torch.tensor(_MAX_EXPONENT, dtype=rho_BT.dtype, device=rho_BT.device).exp()
        return torch.expm1(exponent_BT) + tangent * beyond_BT + rho_BT
    if kind == "abs":
        return rho_BT.abs()
    raise ValueError(f"unknown KL estimator {kind!r}; choose k1, k2, k3 or abs")


def exact(
    logits_BTV: Float[Tensor, "*batch V"], reference_logits_BTV: Float[Tensor, "*batch V"]
) -> Float[Tensor, "*batch"]:
    """KL(π ‖ π_ref) = Σ_v π_v (log π_v − log π_ref,v) of two sets of logits, over the last dimension.

    For logits that are small enough to exist; :func:`heedful.objectives.logprobs.exact_kl` works from hidden states.
    A token that π excludes (logit −∞) adds nothing, whatever the reference says of it.
    """
    logp_BTV = torch.log_softmax(at_least_float32(logits_BTV), dim=-1)
    logq_BTV = torch.log_softmax(at_least_float32(reference_logits_BTV), dim=-1)
    possible_BTV = logp_BTV > float("-inf")
    difference_BTV = torch.where(possible_BTV, logp_BTV, 0.0) - torch.where(possible_BTV, logq_BTV, 0.0)
    return (logp_BTV.exp() * difference_BTV).sum(dim=-1)
