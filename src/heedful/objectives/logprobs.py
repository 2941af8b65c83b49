"""Log-probabilities, entropy and exact KL from hidden states, without ever making a [B, T, V] tensor.

Only the counted tokens are looked at. Their logits are made ``chunk_tokens`` rows at a time, used, and forgotten; the
backward makes them again. Between forward and backward only the hidden rows and two numbers per token are kept, N·D
numbers instead of N·V. The matrix products run in the dtype of the hidden states (under autocast: in its dtype),
everything after them in float32.

Dimension letters: B sequences, T tokens, V vocabulary, D hidden width, N counted tokens, C tokens of one chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable

from heedful.objectives import kl
from heedful.objectives.masked import at_least_float32


def token_logprobs(
    hidden_BTD: Float[Tensor, "B T D"],
    weight_VD: Float[Tensor, "V D"],
    targets_BT: Int[Tensor, "B T"],
    loss_mask_BT: Bool[Tensor, "B T"],
    *,
    bias_V: Float[Tensor, "V"] | None = None,
    temperature: float = 1.0,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    chunk_tokens: int = 512,
    with_entropy: bool = False,
) -> tuple[Float[Tensor, "B T"], Float[Tensor, "B T"] | None]:
    """log π(target) of every counted token and, when asked, the entropy −Σ_v π_v log π_v, in nats.

    π = softmax(z / temperature), z = softcap · tanh(logit_scale · (W h + b) / softcap), without the tanh when
    softcap is None. The temperature must be the one that sampled.

    Args:
        hidden_BTD: last hidden states, after the final norm.
        weight_VD: output (unembedding) matrix.
        targets_BT: token ids; never read where the mask is False.
        loss_mask_BT: True = counts.
        bias_V: of the output layer.
        temperature: logits are divided by it.
        logit_scale: factor that some architectures put on the logits.
        softcap: soft limit that some architectures put on the logits.
        chunk_tokens: rows of logits alive at one time; peak memory is about 3 · chunk_tokens · V · 4 bytes.
        with_entropy: also the entropy; it is differentiable too.

    Returns:
        log-probabilities and entropy (or None), float32, exactly 0 at masked places. Gradients go to the hidden states,
        the weight (summed over chunks in float32) and the bias; those that are frozen cost nothing.
    """
    head = _Head(temperature, logit_scale, softcap, chunk_tokens)
    rows_ND = _rows(hidden_BTD, loss_mask_BT)
    logprobs_N, entropy_N = _LogprobsAndEntropy.apply(
        rows_ND, weight_VD, bias_V, targets_BT[loss_mask_BT], head, with_entropy
    )
    return _spread(logprobs_N, loss_mask_BT), _spread(entropy_N, loss_mask_BT) if with_entropy else None


def exact_kl(
    hidden_BTD: Float[Tensor, "B T D"],
    weight_VD: Float[Tensor, "V D"],
    reference_hidden_BTD: Float[Tensor, "B T D2"],
    reference_weight_VD: Float[Tensor, "V D2"],
    loss_mask_BT: Bool[Tensor, "B T"],
    *,
    bias_V: Float[Tensor, "V"] | None = None,
    reference_bias_V: Float[Tensor, "V"] | None = None,
    temperature: float = 1.0,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    chunk_tokens: int = 512,
) -> Float[Tensor, "B T"]:
    """KL(π ‖ π_ref) of the whole next-token distributions at every counted token (nats), as :func:`kl.exact` gives it.

    The other arguments are those of :func:`token_logprobs` and hold for both models. The gradient goes to the hidden
    states, weight and bias of π; the reference gets none.

    Returns:
        float32, exactly 0 at masked places.
    """
    head = _Head(temperature, logit_scale, softcap, chunk_tokens)
    with torch.no_grad():
        reference_ND = _rows(reference_hidden_BTD, loss_mask_BT)
    kl_N = _ExactKL.apply(
        _rows(hidden_BTD, loss_mask_BT), weight_VD, bias_V, reference_ND, reference_weight_VD, reference_bias_V, head
    )
    return _spread(kl_N, loss_mask_BT)


def _rows(hidden_BTD: Tensor, loss_mask_BT: Tensor) -> Tensor:
    """The counted rows, in the dtype in which the head is computed."""
    device = hidden_BTD.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden_BTD.dtype
    return hidden_BTD[loss_mask_BT].to(dtype)


def _spread(x_N: Tensor, loss_mask_BT: Tensor) -> Tensor:
    """Back to [B, T], 0 at masked places."""
    zeros_BT = torch.zeros(loss_mask_BT.shape, dtype=x_N.dtype, device=x_N.device)
    return zeros_BT.masked_scatter(loss_mask_BT, x_N)


def _matmul_float32(a: Tensor, b: Tensor) -> Tensor:
    """a @ b with the result in float32 (float64 for float64)."""
    if a.is_cuda and torch.version.hip is None and a.dtype in (torch.bfloat16, torch.float16):
        return torch.mm(a, b, out_dtype=torch.float32)  # keeps the float32 sum that a bfloat16 result would round
    return at_least_float32(a @ b)


@dataclass(frozen=True)
class _Head:
    """How hidden rows become logits, and how a gradient goes the other way."""

    temperature: float
    logit_scale: float
    softcap: float | None
    chunk_tokens: int

    def __post_init__(self) -> None:
        if self.temperature <= 0:
            raise ValueError(f"temperature is {self.temperature}; must be above 0")
        if self.chunk_tokens < 1:
            raise ValueError(f"chunk_tokens is {self.chunk_tokens}; must be at least 1")

    def chunks(self, num_rows: int) -> Iterator[slice]:
        for start in range(0, num_rows, self.chunk_tokens):
            yield slice(start, min(start + self.chunk_tokens, num_rows))

    def logits(self, rows_CD: Tensor, weight_VD: Tensor, bias_V: Tensor | None) -> Tensor:
        """float32 logits [C, V], scaled, capped and divided by the temperature."""
        logits_CV = _matmul_float32(rows_CD, weight_VD.T)
        if bias_V is not None:
            logits_CV += bias_V
        logits_CV *= self.logit_scale
        if self.softcap is not None:
            logits_CV.div_(self.softcap).tanh_().mul_(self.softcap)
        return logits_CV.div_(self.temperature)

    def slope(self, logits_CV: Tensor) -> Tensor | float:
        """Derivative of :meth:`logits` with respect to W h + b."""
        outer = self.logit_scale / self.temperature
        if self.softcap is None:
            return outer
        return (logits_CV * (self.temperature / self.softcap)).square_().neg_().add_(1).mul_(outer)

    def backward(
        self,
        ctx: Any,
        rows_ND: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        grad_of: Callable[[Tensor, slice], Tensor],
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Gradients of rows, weight and bias.

        ``grad_of(logits_CV, chunk)`` is the gradient of the chunk's logits, which it may overwrite.
        """
        needs_rows, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        dtype = at_least_float32(rows_ND[:0]).dtype
        compute_VD = weight_VD.to(rows_ND.dtype)
        grad_ND = torch.empty_like(rows_ND) if needs_rows else None
        grad_VD = torch.zeros(weight_VD.shape, dtype=dtype, device=rows_ND.device) if needs_weight else None
        grad_V = torch.zeros(weight_VD.shape[0], dtype=dtype, device=rows_ND.device) if needs_bias else None
        for chunk in self.chunks(len(rows_ND)):
            logits_CV = self.logits(rows_ND[chunk], compute_VD, bias_V)
            slope_CV = self.slope(logits_CV)
            grad_CV = grad_of(logits_CV, chunk).mul_(slope_CV)
            if grad_V is not None:
                grad_V += grad_CV.sum(dim=0)
            grad_CV = grad_CV.to(rows_ND.dtype)
            if grad_ND is not None:
                grad_ND[chunk] = grad_CV @ compute_VD
            if grad_VD is not None and grad_VD.dtype == grad_CV.dtype:
                grad_VD.addmm_(grad_CV.T, rows_ND[chunk])
            elif grad_VD is not None:
                grad_VD += _matmul_float32(grad_CV.T, rows_ND[chunk])
        return (
            grad_ND,
            None if grad_VD is None else grad_VD.to(weight_VD.dtype),
            None if grad_V is None or bias_V is None else grad_V.to(bias_V.dtype),
        )


def _no_autocast(x: Tensor) -> torch.autocast:
    """The dtypes here are chosen by hand; autocast would round float32 operands again."""
    return torch.autocast(x.device.type, enabled=False)


class _LogprobsAndEntropy(torch.autograd.Function):
    """With p = softmax(z): d log p_y / dz_j = [j = y] − p_j and dH / dz_j = −p_j (log p_j + H)."""

    @staticmethod
    def forward(
        ctx: Any,
        rows_ND: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        targets_N: Tensor,
        head: _Head,
        with_entropy: bool,
    ) -> tuple[Tensor, Tensor]:
        logprobs_N = at_least_float32(rows_ND.new_zeros(len(rows_ND)))
        lse_N, entropy_N = torch.zeros_like(logprobs_N), torch.zeros_like(logprobs_N)
        with _no_autocast(rows_ND):
            compute_VD = weight_VD.to(rows_ND.dtype)
            for chunk in head.chunks(len(rows_ND)):
                logits_CV = head.logits(rows_ND[chunk], compute_VD, bias_V)
                lse_N[chunk] = logits_CV.logsumexp(dim=-1)
                target_C = logits_CV.gather(1, targets_N[chunk, None]).squeeze(1)
                logprobs_N[chunk] = target_C - lse_N[chunk]
                if with_entropy:
                    probs_CV = logits_CV.sub_(lse_N[chunk, None]).exp_()
                    entropy_N[chunk] = torch.special.entr(probs_CV).sum(dim=-1)
        ctx.save_for_backward(rows_ND, weight_VD, bias_V, targets_N, lse_N, entropy_N)
        ctx.head, ctx.with_entropy = head, with_entropy
        return logprobs_N, entropy_N

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logprobs_N: Tensor, grad_entropy_N: Tensor) -> tuple[Tensor | None, ...]:
        rows_ND, weight_VD, bias_V, targets_N, lse_N, entropy_N = ctx.saved_tensors

        def grad_of(logits_CV: Tensor, chunk: slice) -> Tensor:
            grad_C1, grad_entropy_C1 = grad_logprobs_N[chunk, None], grad_entropy_N[chunk, None]
            probs_CV = logits_CV.sub_(lse_N[chunk, None]).exp_()
            if ctx.with_entropy:
                minus_plogp_CV = torch.special.entr(probs_CV)  # right for p = 0 too
                grad_CV = probs_CV.mul_(-grad_C1 - grad_entropy_C1 * entropy_N[chunk, None])
                grad_CV.addcmul_(minus_plogp_CV, grad_entropy_C1)
            else:
                grad_CV = probs_CV.mul_(-grad_C1)
            return grad_CV.scatter_add_(1, targets_N[chunk, None], grad_C1)

        with _no_autocast(rows_ND):
            return *ctx.head.backward(ctx, rows_ND, weight_VD, bias_V, grad_of), None, None, None


class _ExactKL(torch.autograd.Function):
    """With p = softmax(z): d KL(p ‖ q) / dz_j = p_j (log p_j − log q_j − KL)."""

    @staticmethod
    def forward(
        ctx: Any,
        rows_ND: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        reference_ND: Tensor,
        reference_weight_VD: Tensor,
        reference_bias_V: Tensor | None,
        head: _Head,
    ) -> Tensor:
        kl_N = at_least_float32(rows_ND.new_zeros(len(rows_ND)))
        with _no_autocast(rows_ND):
            compute_VD = weight_VD.to(rows_ND.dtype)
            reference_compute_VD = reference_weight_VD.to(reference_ND.dtype)
            for chunk in head.chunks(len(rows_ND)):
                logits_CV = head.logits(rows_ND[chunk], compute_VD, bias_V)
                reference_CV = head.logits(reference_ND[chunk], reference_compute_VD, reference_bias_V)
                kl_N[chunk] = kl.exact(logits_CV, reference_CV)
        ctx.save_for_backward(rows_ND, weight_VD, bias_V, reference_ND, reference_weight_VD, reference_bias_V, kl_N)
        ctx.head = head
        return kl_N

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_N: Tensor) -> tuple[Tensor | None, ...]:
        rows_ND, weight_VD, bias_V, reference_ND, reference_weight_VD, reference_bias_V, kl_N = ctx.saved_tensors
        reference_compute_VD = reference_weight_VD.to(reference_ND.dtype)

        def grad_of(logits_CV: Tensor, chunk: slice) -> Tensor:
            logp_CV = logits_CV.log_softmax(dim=-1)
            reference_CV = ctx.head.logits(reference_ND[chunk], reference_compute_VD, reference_bias_V)
            probs_CV = logp_CV.exp()
            difference_CV = logp_CV.sub_(reference_CV.log_softmax(dim=-1)).sub_(kl_N[chunk, None])
            return torch.where(probs_CV > 0, probs_CV * difference_CV * grad_N[chunk, None], 0.0)

        with _no_autocast(rows_ND):
            return *ctx.head.backward(ctx, rows_ND, weight_VD, bias_V, grad_of), None, None, None, None
