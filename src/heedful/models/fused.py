"""Norms, gated layers and rotations of Llama's kind that keep or move less; what they compute stays the same.

In eager mode autograd keeps what every small operation needs: of a norm its input and the normalised input, both in
float32, of what follows a cast of its output for each product that reads it, of a gated layer the activation beside
the gate that it can be made from again. Here a norm keeps its input and one number per token and gives its output in
the precision of the products that read it, and a gated layer keeps its two products. The rotation of queries and keys
by their positions makes its halves in place:

    norm     y = w x r,  r = (mean x² + ε)^(−1/2)        dx = r (w dy − x r · mean(w dy · x r)),  dw = Σ dy · x r
    gated    h = silu(g) u                               dg = dh u · silu'(g),  du = dh · silu(g)
    rotated  y = (a c − b s, b c + a s),  x = (a, b)     dx = (da c + db s, db c − da s),  dy = (da, db)

Forward the numbers are those of the model's own layers to the bit (a trial decides, once per model); backward they
differ by rounding, since the products that read a norm add their gradients in the precision of the norm's output.

Shapes: D width of a token, F width of the gated layer.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from heedful.models.hardware import autocast
from heedful.models.llamas import are_llamas

_ROTATE, _OURS = "apply_rotary_pos_emb", "is_heedfuls"
"""What the modules of transformers call it, and what ours has"""


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_D: Tensor, epsilon: float, dtype: torch.dtype | None) -> Tensor:
        """[…, D] in ``dtype``; None = as the model has it. Rounds where Llama's norm does."""
        wide = x.float()
        scale = wide.square().mean(-1, keepdim=True).add_(epsilon).rsqrt_()
        normed = (wide * scale).to(x.dtype)
        y = normed.mul_(weight_D) if normed.dtype == weight_D.dtype else normed * weight_D
        ctx.save_for_backward(x, weight_D, scale)
        return y.to(dtype or y.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        x, weight_D, scale = ctx.saved_tensors
        wide = gradient.to(torch.float32, copy=True)
        normed, weight_32 = x.float() * scale, weight_D.float()
        both = wide * normed
        of_weight = both.flatten(0, -2).sum(dim=0).to(weight_D.dtype) if ctx.needs_input_grad[1] else None
        along = (both @ weight_32)[..., None].div_(-x.shape[-1])
        of_x = wide.mul_(weight_32).addcmul_(normed, along).mul_(scale)
        return of_x.to(x.dtype), of_weight, None, None


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        """silu(gate) · up, […, F]"""
        ctx.save_for_backward(gate, up)
        return functional.silu(gate).mul_(up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        of_up = functional.silu(gate).mul_(gradient)
        return torch.ops.aten.silu_backward(gradient * up, gate), of_up


class _Rotated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """[…, W]; cos and sin are of both halves."""
        ctx.save_for_backward(cos, sin)
        ctx.dtype = x.dtype
        wide = x.to(torch.promote_types(x.dtype, cos.dtype))
        y = wide * cos
        (of_a, of_b), (a, b), (sin_a, sin_b) = (t.chunk(2, dim=-1) for t in (y, wide, sin))
        of_a -= b * sin_a
        of_b += a * sin_b
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        wide = gradient.to(torch.promote_types(gradient.dtype, cos.dtype))
        of_x = wide * cos
        (of_a, of_b), (da, db), (sin_a, sin_b) = (t.chunk(2, dim=-1) for t in (of_x, wide, sin))
        of_a += db * sin_b
        of_b -= da * sin_a
        return of_x.to(ctx.dtype), None, None


def fuse(base: Any, device: torch.device, dtype: torch.dtype) -> int:
    """Let a transformers model's norms, gates and rotations compute as above, where they are Llama's word by word.

    Norms inside a layer give their output in the compute precision where the hidden states stay the same to the bit:
    where nothing but matrix products, which would cast it, reads them. The rotation, a function of all models of the
    architecture, is the same to the bit. Returns the number of layers that were changed.
    """
    _let_rotate(sys.modules[type(base.base_model).__module__])
    found = [(inside, module, type(module)) for inside, module in _found(base.base_model)]
    if not found:
        return 0
    expected = _states(base, device, dtype)
    classes = {(kind, forward): _with_forward(kind, forward)
               for kind in {kind for *_, kind in found} for forward in (_gated, _norm, _early_norm)}  # fmt: skip
    for early in (True, False) if dtype != torch.float32 else (False,):
        for inside, module, kind in found:
            forward = _gated if hasattr(module, "down_proj") else _early_norm if inside and early else _norm
            module.__class__ = classes[kind, forward]
        if torch.equal(_states(base, device, dtype), expected):
            return len(found)
    for _, module, kind in found:
        module.__class__ = kind
    return 0


def _with_forward(kind: type[nn.Module], forward: Callable[[Any, Tensor], Tensor]) -> type[nn.Module]:
    """A class, since a method of the instance would refer to it: only the garbage collector would free such a model."""
    return type(kind.__name__, (kind,), {"forward": forward, "__module__": __name__})


def add_rows_of_tied_embedding(base: Any) -> None:
    """Let the gradient of an embedding that is the output layer too be added to that layer's, row by row.

    As a matrix of its own it would be one more of that size, at the end of a backward, nearly all of it zeros.
    """
    embedding, head = base.get_input_embeddings(), base.get_output_embeddings()
    if isinstance(embedding, nn.Embedding) and head is not None and head.weight is embedding.weight:
        embedding.sparse = True


def _found(trunk: nn.Module) -> Iterator[tuple[bool, Any]]:
    """Norms and gated layers as Llama has them, with whether they are parts of a layer and not of a part of it.

    None of those that were changed before: parts share models.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer
    from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

    sources = {kind: inspect.getsource(kind.forward) for kind in (LlamaRMSNorm, LlamaMLP)}
    for parent in trunk.modules():
        inside = isinstance(parent, GradientCheckpointingLayer)
        for module in parent.children():
            kind = type(module)
            if kind.__module__.startswith("transformers.models."):
                source = inspect.getsource(kind.forward)
                if source == sources[LlamaRMSNorm] or (source == sources[LlamaMLP] and _is_silu(module.act_fn)):
                    yield inside, module


def _is_silu(activation: Any) -> bool:
    return type(activation).__name__ in ("SiLU", "SiLUActivation")


def _let_rotate(home: Any) -> None:
    """Swap the rotation of this architecture's module, where it and what it calls are Llama's word by word."""
    if are_llamas(home, _ROTATE, "rotate_half") and not hasattr(rotate := getattr(home, _ROTATE), _OURS):
        setattr(home, _ROTATE, _rotating(rotate))


def _rotating(rotate: Any) -> Any:
    @functools.wraps(rotate)
    def rotated(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
        cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
        return _Rotated.apply(q, cos, sin), _Rotated.apply(k, cos, sin)

    setattr(rotated, _OURS, True)
    return rotated


def _norm(self: Any, x: Tensor) -> Tensor:
    y: Tensor = _Norm.apply(x, self.weight, self.variance_epsilon, None)
    return y


def _early_norm(self: Any, x: Tensor) -> Tensor:
    dtype = torch.get_autocast_dtype(x.device.type) if torch.is_autocast_enabled(x.device.type) else None
    y: Tensor = _Norm.apply(x, self.weight, self.variance_epsilon, dtype)
    return y


def _gated(self: Any, x: Tensor) -> Tensor:
    y: Tensor = self.down_proj(_Gated.apply(self.gate_proj(x), self.up_proj(x)))
    return y


@torch.no_grad()
def _states(base: Any, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Last hidden states of two short sequences, one with padding."""
    vocabulary = base.config.get_text_config().vocab_size
    ids_24 = (torch.arange(8, device=device).view(2, 4) * 37 + 5) % vocabulary
    mask_24 = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1]], device=device)
    with autocast(device, dtype):
        states: Tensor = base.base_model(input_ids=ids_24, attention_mask=mask_24, use_cache=False).last_hidden_state
    return states
