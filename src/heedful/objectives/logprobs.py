"""Log-probabilities, entropy and exact KL from hidden states, without ever making a [B, T, V] tensor.

Only the counted tokens are looked at. Their logits are made in tiles of some rows and some of the vocabulary that stay
in the processor's cache, used, and forgotten; the backward makes them again. Between forward and backward only the
hidden rows and two numbers per token are kept, N·D numbers instead of N·V. The matrix products run in the dtype of the
hidden states (under autocast: in its dtype), everything after them in float32.

Dimension letters: B sequences, T tokens, V vocabulary, D hidden width, N counted tokens; of a tile C tokens, v of the
vocabulary; K tiles to the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad

from heedful.objectives import kl
from heedful.objectives.masked import at_least_float32

TILES = {"cpu": (512, 2048), "cuda": (2048, 16384)}
"""Rows and columns of a tile by the type of device. A CPU is several times as fast while a tile stays in its cache; a
GPU wants few large products."""
_LEAST = -1e30
"""Log-probability of what is impossible"""


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
    chunk_tokens: int | None = None,
    chunk_vocabulary: int | None = None,
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
        chunk_tokens, chunk_vocabulary: rows and columns of logits alive at one time; peak memory is about 3 · 4 bytes
            each. None = ``TILES`` of the device.
        with_entropy: also the entropy; it is differentiable too.

    Returns:
        log-probabilities and entropy (or None), float32, exactly 0 at masked places. Gradients go to the hidden states,
        the weight (summed over chunks in float32) and the bias; those that are frozen cost nothing.
    """
    head = _Head(temperature, logit_scale, softcap, *_tile(hidden_BTD.device, chunk_tokens, chunk_vocabulary))
    rows_ND, targets_N = _rows(hidden_BTD, loss_mask_BT), _filled(targets_BT[loss_mask_BT])
    logprobs_N, entropy_N = _LogprobsAndEntropy.apply(rows_ND, weight_VD, bias_V, targets_N, head, with_entropy)
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
    chunk_tokens: int | None = None,
    chunk_vocabulary: int | None = None,
) -> Float[Tensor, "B T"]:
    """KL(π ‖ π_ref) of the whole next-token distributions at every counted token (nats), as :func:`kl.exact` gives it.

    The other arguments are those of :func:`token_logprobs` and hold for both models. The gradient goes to the hidden
    states, weight and bias of π; the reference gets none.

    Returns:
        float32, exactly 0 at masked places.
    """
    head = _Head(temperature, logit_scale, softcap, *_tile(hidden_BTD.device, chunk_tokens, chunk_vocabulary))
    with torch.no_grad():
        reference_ND = _rows(reference_hidden_BTD, loss_mask_BT)
    kl_N = _ExactKL.apply(
        _rows(hidden_BTD, loss_mask_BT), weight_VD, bias_V, reference_ND, reference_weight_VD, reference_bias_V, head
    )
    return _spread(kl_N, loss_mask_BT)


def _tile(device: torch.device, chunk_tokens: int | None, chunk_vocabulary: int | None) -> tuple[int, int]:
    rows, columns = TILES.get(device.type, TILES["cpu"])
    return rows if chunk_tokens is None else chunk_tokens, columns if chunk_vocabulary is None else chunk_vocabulary


def _rows(hidden_BTD: Tensor, loss_mask_BT: Tensor) -> Tensor:
    """The counted rows, in the dtype in which the head is computed, and on a CPU rows of 0 after them."""
    device = hidden_BTD.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden_BTD.dtype
    return _filled(hidden_BTD[loss_mask_BT].to(dtype))


def _filled(x_N: Tensor) -> Tensor:
    """Filled up to a multiple of 32 on a CPU, where oneDNN makes kernels for every number of rows and keeps them."""
    num_filled = -len(x_N) % 32 if x_N.device.type == "cpu" else 0
    return pad(x_N, (0, 0) * (x_N.ndim - 1) + (0, num_filled)) if num_filled else x_N


def _spread(x_N: Tensor, loss_mask_BT: Tensor) -> Tensor:
    """Back to [B, T], 0 at masked places; what :func:`_filled` added stays behind."""
    zeros_BT = torch.zeros(loss_mask_BT.shape, dtype=x_N.dtype, device=x_N.device)
    return zeros_BT.masked_scatter(loss_mask_BT, x_N)


def _matmul_float32(a: Tensor, b: Tensor) -> Tensor:
    """a @ b with the result in float32 (float64 for float64)."""
    if a.is_cuda and torch.version.hip is None and a.dtype in (torch.bfloat16, torch.float16):
        return torch.mm(a, b, out_dtype=torch.float32)  # keeps the float32 sum that a bfloat16 result would round
    return at_least_float32(a @ b)


def _add_product(sum_: Tensor, a: Tensor, b: Tensor, *, is_first: bool) -> None:
    """sum_ += a @ b, or = where it is the first; without a float32 copy of a product that is rounded."""
    product = _matmul_float32(a, b) if a.is_cuda else a @ b
    sum_.copy_(product) if is_first else sum_.add_(product)


def _slices(size: int, step: int) -> Iterator[slice]:
    for start in range(0, size, step):
        yield slice(start, min(start + step, size))


def _within(targets_C: Tensor, vocabulary: slice) -> tuple[Tensor, Tensor]:
    """[C]: whether each target is in this part of the vocabulary; [C, 1]: its column there, or 0 where it is not."""
    place_C = targets_C - vocabulary.start
    is_within_C = (place_C >= 0) & (place_C < vocabulary.stop - vocabulary.start)
    return is_within_C, torch.where(is_within_C, place_C, 0)[:, None]


@dataclass(frozen=True)
class _Head:
    """How hidden rows become logits, and how a gradient goes the other way."""

    temperature: float
    logit_scale: float
    softcap: float | None
    chunk_tokens: int
    chunk_vocabulary: int

    def __post_init__(self) -> None:
        if self.temperature <= 0:
            raise ValueError(f"temperature is {self.temperature}; must be above 0")
        for name in ("chunk_tokens", "chunk_vocabulary"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; must be at least 1")

    def tiles(
        self, rows_ND: Tensor, weight_VD: Tensor, bias_V: Tensor | None
    ) -> Iterator[tuple[slice, slice, Tensor, Tensor]]:
        """Rows and vocabulary of each tile, its float32 logits [C, v] and the weight [v, D] that made them.

        All rows of one part of the vocabulary follow each other, so that every weight is read and rounded once.
        """
        for vocabulary in _slices(len(weight_VD), self.chunk_vocabulary):
            weight_vD = weight_VD[vocabulary].to(rows_ND.dtype)
            bias_v = None if bias_V is None else bias_V[vocabulary]
            for chunk in _slices(len(rows_ND), self.chunk_tokens):
                yield chunk, vocabulary, self.logits(rows_ND[chunk], weight_vD, bias_v), weight_vD

    def logits(self, rows_CD: Tensor, weight_vD: Tensor, bias_v: Tensor | None) -> Tensor:
        """float32 logits [C, v], scaled, capped and divided by the temperature."""
        logits_Cv = _matmul_float32(rows_CD, weight_vD.T)
        if bias_v is not None:
            logits_Cv += bias_v
        if self.softcap is not None:
            logits_Cv.mul_(self.logit_scale / self.softcap).tanh_().mul_(self.softcap / self.temperature)
        elif self.logit_scale != self.temperature:
            logits_Cv *= self.logit_scale / self.temperature
        return logits_Cv

    def slope(self, logits_Cv: Tensor) -> Tensor | float:
        """Derivative of :meth:`logits` with respect to W h + b."""
        outer = self.logit_scale / self.temperature
        if self.softcap is None:
            return outer
        return (logits_Cv * (self.temperature / self.softcap)).square_().neg_().add_(1).mul_(outer)

    def backward(
        self,
        ctx: Any,
        rows_ND: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        grad_of: Callable[[Tensor, slice, slice], Tensor],
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Gradients of rows, weight and bias.

        ``grad_of(logits_Cv, rows, vocabulary)`` is the gradient of the tile's logits, which it may overwrite.
        """
        needs_rows, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        options: dict[str, Any] = {"dtype": at_least_float32(rows_ND[:0]).dtype, "device": rows_ND.device}
        new = torch.empty if len(rows_ND) else torch.zeros  # the first tile writes, where there is one
        grad_ND = new(rows_ND.shape, **options) if needs_rows else None
        grad_VD = new(weight_VD.shape, **options) if needs_weight else None
        grad_V = torch.zeros(weight_VD.shape[0], **options) if needs_bias else None
        for chunk, vocabulary, logits_Cv, weight_vD in self.tiles(rows_ND, weight_VD, bias_V):
            slope_Cv = self.slope(logits_Cv)
            grad_Cv = grad_of(logits_Cv, chunk, vocabulary)
            if isinstance(slope_Cv, Tensor) or slope_Cv != 1:
                grad_Cv *= slope_Cv
            if grad_V is not None:
                grad_V[vocabulary] += grad_Cv.sum(dim=0)
            grad_Cv = grad_Cv.to(rows_ND.dtype)
            if grad_ND is not None:
                _add_product(grad_ND[chunk], grad_Cv, weight_vD, is_first=vocabulary.start == 0)
            if grad_VD is not None:
                _add_product(grad_VD[vocabulary], grad_Cv.T, rows_ND[chunk], is_first=chunk.start == 0)
        return (
            None if grad_ND is None else grad_ND.to(rows_ND.dtype),
            None if grad_VD is None else grad_VD.to(weight_VD.dtype),
            None if grad_V is None or bias_V is None else grad_V.to(bias_V.dtype),
        )


def _no_autocast(x: Tensor) -> torch.autocast:
    """The dtypes here are chosen by hand; autocast would round float32 operands again."""
    return torch.autocast(x.device.type, enabled=False)


def _log_probabilities(logits_Cv: Tensor, lse_C: Tensor) -> Tensor:
    """In place; finite, so that 0 · log 0 is 0."""
    return logits_Cv.sub_(lse_C[:, None].clamp(min=_LEAST)).clamp_(min=_LEAST)


class _LogprobsAndEntropy(torch.autograd.Function):
    """With p = softmax(z): d log p_y / dz_j = [j = y] − p_j and dH / dz_j = −p_j (log p_j + H).

    The vocabulary is taken in parts k of probability P_k: log Σ exp z is that of the parts' own, and the entropy is
    Σ_k P_k (H_k − log P_k), H_k being that within the part: sums of positive numbers alone.
    """

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
        num_tiles = -(-len(weight_VD) // head.chunk_vocabulary)
        lse_KN = at_least_float32(rows_ND.new_zeros(num_tiles, len(rows_ND)))
        within_KN, target_N = torch.zeros_like(lse_KN), torch.zeros_like(lse_KN[0])
        with _no_autocast(rows_ND):
            for chunk, vocabulary, logits_Cv, _ in head.tiles(rows_ND, weight_VD, bias_V):
                k = vocabulary.start // head.chunk_vocabulary
                is_within_C, place_C1 = _within(targets_N[chunk], vocabulary)
                target_N[chunk] = torch.where(is_within_C, logits_Cv.gather(1, place_C1)[:, 0], target_N[chunk])
                lse_KN[k, chunk] = logits_Cv.logsumexp(dim=-1)
                if with_entropy:
                    logp_Cv = _log_probabilities(logits_Cv, lse_KN[k, chunk])
                    within_KN[k, chunk] = -(logp_Cv.exp() * logp_Cv).sum(dim=-1)
        lse_N, entropy_N = lse_KN.logsumexp(dim=0), torch.zeros_like(target_N)
        if with_entropy:
            logp_KN = (lse_KN - lse_N).clamp(min=_LEAST)
            entropy_N = (logp_KN.exp() * (within_KN - logp_KN)).sum(dim=0)
        ctx.save_for_backward(rows_ND, weight_VD, bias_V, targets_N, lse_N, entropy_N)
        ctx.set_materialize_grads(False)
        ctx.head = head
        return target_N - lse_N, entropy_N

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logprobs_N: Tensor | None, grad_entropy_N: Tensor | None) -> tuple[Tensor | None, ...]:
        rows_ND, weight_VD, bias_V, targets_N, lse_N, entropy_N = ctx.saved_tensors
        if grad_logprobs_N is None:
            grad_logprobs_N = torch.zeros_like(lse_N)

        def grad_of(logits_Cv: Tensor, chunk: slice, vocabulary: slice) -> Tensor:
            grad_C = grad_logprobs_N[chunk]
            is_within_C, place_C1 = _within(targets_N[chunk], vocabulary)
            logp_Cv = _log_probabilities(logits_Cv, lse_N[chunk])
            if grad_entropy_N is not None:
                grad_entropy_C1 = grad_entropy_N[chunk, None]
                probs_Cv = logp_Cv.exp()
                all_C1 = grad_C[:, None] + grad_entropy_C1 * entropy_N[chunk, None]
                grad_Cv = logp_Cv.mul_(grad_entropy_C1).add_(all_C1).mul_(probs_Cv).neg_()
            else:
                grad_Cv = logp_Cv.exp_().mul_(-grad_C[:, None])
            return grad_Cv.scatter_add_(1, place_C1, torch.where(is_within_C, grad_C, 0.0)[:, None])

        with _no_autocast(rows_ND):
            return *ctx.head.backward(ctx, rows_ND, weight_VD, bias_V, grad_of), None, None, None


class _ExactKL(torch.autograd.Function):
    """With p = softmax(z): d KL(p ‖ q) / dz_j = p_j (log p_j − log q_j − KL).

    Of parts k of the vocabulary it is Σ_k P_k (KL_k + log P_k − log Q_k), KL_k being that within the part.
    """

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
        num_tiles = -(-len(weight_VD) // head.chunk_vocabulary)
        lse_KN = at_least_float32(rows_ND.new_zeros(num_tiles, len(rows_ND)))
        reference_lse_KN, within_KN = torch.zeros_like(lse_KN), torch.zeros_like(lse_KN)
        reference = reference_ND, reference_weight_VD, reference_bias_V
        with _no_autocast(rows_ND):
            tiles = zip(head.tiles(rows_ND, weight_VD, bias_V), head.tiles(*reference), strict=True)
            for (chunk, vocabulary, logits_Cv, _), (_, _, reference_Cv, _) in tiles:
                k = vocabulary.start // head.chunk_vocabulary
                lse_KN[k, chunk], reference_lse_KN[k, chunk] = (x.logsumexp(dim=-1) for x in (logits_Cv, reference_Cv))
                within_KN[k, chunk] = kl.exact(logits_Cv, reference_Cv)
        lse_N, reference_lse_N = lse_KN.logsumexp(dim=0), reference_lse_KN.logsumexp(dim=0)
        logp_KN, logq_KN = lse_KN - lse_N, reference_lse_KN - reference_lse_N
        probs_KN = logp_KN.exp()
        kl_N = torch.where(probs_KN > 0, probs_KN * (within_KN + logp_KN - logq_KN), 0.0).sum(dim=0)
        ctx.save_for_backward(rows_ND, weight_VD, bias_V, *reference, lse_N, reference_lse_N, kl_N)
        ctx.head = head
        return kl_N

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_N: Tensor) -> tuple[Tensor | None, ...]:
        rows_ND, weight_VD, bias_V, *reference, lse_N, reference_lse_N, kl_N = ctx.saved_tensors
        reference_tiles = ctx.head.tiles(*reference)  # in the order of the others

        def grad_of(logits_Cv: Tensor, chunk: slice, _: slice) -> Tensor:
            logp_Cv = logits_Cv.sub_(lse_N[chunk, None])
            logq_Cv = next(reference_tiles)[2].sub_(reference_lse_N[chunk, None])
            probs_Cv = logp_Cv.exp()
            difference_Cv = logp_Cv.sub_(logq_Cv).sub_(kl_N[chunk, None])
            return torch.where(probs_Cv > 0, probs_Cv * difference_Cv * grad_N[chunk, None], 0.0)

        with _no_autocast(rows_ND):
            return *ctx.head.backward(ctx, rows_ND, weight_VD, bias_V, grad_of), None, None, None, None
