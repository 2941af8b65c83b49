"""Per-token KL divergence: estimators from sampled tokens, and the exact value from logits. All in nats.

Dimension letters: B sequences, T tokens, V vocabulary.
"""

from __future__ import annotations

from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from heedful.batches import LossOut
from heedful.objectives import masked
from heedful.objectives.masked import at_least_float32

Kind = Literal["k1", "k2", "k3", "abs"]

_MAX_EXPONENT = 20.0
_DEVIATION_PER_MAD = 1.4826  # of a normal distribution


def estimate(
    logprobs_BT: Float[Tensor, "B T"], reference_logprobs_BT: Float[Tensor, "B T"], kind: Kind = "k1"
) -> Float[Tensor, "B T"]:
    """Estimate of KL(π ‖ π_ref) from tokens sampled from π, with ρ = log π − log π_ref (Schulman 2020, kl-approx).

    ======  ===============  =====================  ============================  ====================================
    kind    value            mean over tokens       in the reward: push on the    in the loss: its mean gradient
                                                    token itself, E[∇log π · k]
    ======  ===============  =====================  ============================  ====================================
    k1      ρ                KL                     ∇KL                           0
    k2      ρ²/2             near KL for small ρ    0 to first order in ρ         ∇KL
    k3      e^(−ρ) − 1 + ρ   KL                     ∇KL − ∇KL(π_ref ‖ π), which   ∇KL(π_ref ‖ π)
                                                    is 0 to first order in ρ
    abs     the size of ρ    no KL (first order)    not ∇KL                       ∇ Σ_v, the sizes of π_v − π_ref,v
    exact   Σ_v π_v ρ_v      KL, without noise      0: the same for all tokens    ∇KL
    ======  ===============  =====================  ============================  ====================================

    An answer's KL is the sum of KL_s over its tokens, and a token moves it twice: its own KL_t, and, by choosing where
    the answer goes, all later KL_s. With K_t = KL of the state in which token t is chosen, its exact gradient is

        ∇ E[Σ_t K_t]  =  E[ Σ_t ∇K_t ]  +  E[ Σ_t ∇log π_t · Σ_{s>t} K_s ]
                         own               later

    A penalty in the reward gives E[Σ_t ∇log π_t · Σ_{s≥t} k_s]: *later* with k's mean value (third column), *own* with
    its push on the token itself (fourth). A loss term on the current token gives *own* alone (last column). So

    - reward alone: k1 is complete. exact lacks *own* wholly, k2 and k3 to first order; abs has both wrong.
    - loss alone: k2 and exact are *own* and lack *later* wholly (on answers of one token there is none). k3 and abs
      follow another divergence; k1 does nothing.
    - both: the reward takes the KL of later tokens only (:func:`heedful.objectives.shaping.of_later_tokens`), or the
      push on the token itself would come on top. Complete are k2 or exact in the loss with k1, k3 or exact in the
      reward.

    Beyond −ρ = 20 the exponential of k3 goes on as its tangent: finite in float32, still growing, and its gradient
    keeps its sign (a clamp would turn it round).

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


def loss_term(
    logprobs_BT: Float[Tensor, "B T"],
    reference_logprobs_BT: Float[Tensor, "B T"],
    old_logprobs_BT: Float[Tensor, "B T"],
    loss_mask_BT: Bool[Tensor, "B T"],
    *,
    kind: Literal["k2", "k3", "abs"],
    weights_B: Float[Tensor, "B"],
    denominator: float | Tensor,
) -> LossOut:
    """Σ β_b · sg(π / π_old) · k / denominator: the KL of the current tokens as a loss, from sampled tokens.

    The tokens come from π_old and the mean gradient of an estimator holds under π, hence the ratio; it is a weight only
    (sg = no gradient), since its own gradient would add what a penalty in the reward gives. On the first minibatch it
    is 1. The logarithm of the ratio is limited to 20.

    Args:
        logprobs_BT: of the policy now, with gradient.
        reference_logprobs_BT: no gradient flows into them.
        old_logprobs_BT: of the policy that sampled.
        loss_mask_BT: True = sampled by the policy.
        kind: k2 follows the KL, k3 and abs other divergences; see :func:`estimate`.
        weights_B: β of each answer, no gradient.
        denominator: counted tokens of the whole step, or [B, 1]; see :func:`heedful.objectives.masked.mean`.

    Returns:
        loss, and the metric ``kl_loss_nats`` (the mean without β), which adds up over micro-batches.

    Raises:
        ValueError: k1, whose mean gradient is 0, or an unknown ``kind``.
    """
    if kind not in ("k2", "k3", "abs"):
        raise ValueError(f"{kind!r} is no KL loss; choose k2, k3 or abs (the mean gradient of k1 is 0)")
    logprobs_BT = masked.counted(logprobs_BT, loss_mask_BT)
    log_ratio_BT = logprobs_BT.detach() - old_logprobs_BT.detach()
    ratio_BT = log_ratio_BT.clamp(max=_MAX_EXPONENT).exp()
    kl_BT = ratio_BT * estimate(logprobs_BT, reference_logprobs_BT.detach(), kind)
    return exact_loss_term(kl_BT, loss_mask_BT, weights_B=weights_B, denominator=denominator)


def exact_loss_term(
    kl_BT: Float[Tensor, "B T"],
    loss_mask_BT: Bool[Tensor, "B T"],
    *,
    weights_B: Float[Tensor, "B"],
    denominator: float | Tensor,
) -> LossOut:
    """Σ β_b · KL / denominator: the exact KL of the current tokens as a loss.

    It needs no ratio: in each state it looks at all tokens, not at the one that was sampled.

    Args:
        kl_BT: KL(π ‖ π_ref) in the state of each token, with gradient;
            :func:`heedful.objectives.logprobs.exact_kl`.
        loss_mask_BT: True = sampled by the policy.
        weights_B: β of each answer, no gradient.
        denominator: counted tokens of the whole step, or [B, 1]; see :func:`heedful.objectives.masked.mean`.

    Returns:
        loss, and the metric ``kl_loss_nats`` (the mean without β), which adds up over micro-batches.
    """
    loss = masked.mean(weights_B.detach()[:, None] * kl_BT, loss_mask_BT, denominator=denominator)
    return LossOut(loss, {"kl_loss_nats": masked.mean(kl_BT.detach(), loss_mask_BT, denominator=denominator)})


@torch.no_grad()
def outlier_weights(
    kl_B: Float[Tensor, "B"], *, threshold: float, slope: float, max_weight: float
) -> Float[Tensor, "B"]:
    """min(1 + slope · max(z − threshold, 0), max_weight) with z = (KL − median) / (1.4826 · MAD): factors on β.

    MAD is the median absolute deviation from the median; outliers do not move it as they would a standard deviation.
    Only answers far *above* the median weigh more.

    Args:
        kl_B: KL of each answer of the step (nats).
        threshold: robust deviations from which an answer is an outlier.
        slope: weight added per deviation beyond it.
        max_weight: the largest weight.

    Returns:
        float32 weights of at least 1; all 1 for fewer than four answers or when MAD is 0. Without gradient.
    """
    kl_B = at_least_float32(kl_B)
    ones_B = torch.ones_like(kl_B)
    if len(kl_B) < 4:
        return ones_B
    median = kl_B.quantile(0.5)
    deviation = _DEVIATION_PER_MAD * (kl_B - median).abs().quantile(0.5)
    beyond_B = (kl_B - median) / torch.where(deviation > 0, deviation, torch.inf) - threshold
    return (ones_B + slope * beyond_B.clamp(min=0)).clamp(max=max_weight)
