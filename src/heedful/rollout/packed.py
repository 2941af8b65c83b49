"""What makes the engine's copy of a model faster on CPUs than the model itself: its layout of weights, its attention.

Decoding multiplies a few rows by every weight once per token. PyTorch's product brings a bfloat16 weight into the order
that the CPU's kernels read at every call; here that is done once per change of weights. Attention whose queries share
keys (grouped queries) is one product per group of heads: the keys and values of the whole cache need not be copied for
every head at every step.
"""

from __future__ import annotations

import functools
import itertools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from heedful.models.frozen import is_product
from heedful.models.llamas import are_llamas

GROUPED = "heedful_grouped"


JOINED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Layers beside each other that read one tensor, by their names in Llama and what is built like it."""


class PackedLinear(nn.Module):
    """A linear layer whose weight lies in the order that oneDNN's kernels read; empty until ``pack`` is called."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.bias = layer.bias
        self._is_transposed = not isinstance(layer, nn.Linear)
        self._packed: Tensor | None = None

    def pack(self, weight: Tensor) -> None:
        """Take over a weight as the layer that this one stands for would hold it, rounded to bfloat16."""
        self._packed = None  # two packed weights at a time would be one too many
        weight_OI = weight.detach().to(torch.bfloat16)
        weight_OI = (weight_OI.t() if self._is_transposed else weight_OI).contiguous()
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight_OI)

    def let_go(self) -> None:
        """Empty again."""
        self._packed = None

    @property
    def weight(self) -> Tensor:
        """The plain weight, made anew: for models that look at the weights of their layers."""
        assert self._packed is not None
        weight_OI = self._packed.to_dense()
        return weight_OI.t() if self._is_transposed else weight_OI

    def forward(self, x: Tensor) -> Tensor:
        """x Wᵀ + b, in bfloat16 with float32 sums."""
        product: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, self.bias, "none", [], "")
        return product


class JoinedLinear:
    """Several linear layers that read the same tensor as one :class:`PackedLinear`, which each takes its columns of."""

    def __init__(self, layers: Sequence[nn.Linear]) -> None:
        weight = layers[0].weight
        sizes = [layer.out_features for layer in layers]
        with_bias = any(layer.bias is not None for layer in layers)
        whole = nn.Linear(weight.shape[1], sum(sizes), bias=with_bias, device="meta")  # its weight is never there
        bias = nn.Parameter(torch.zeros(sum(sizes), dtype=weight.dtype), requires_grad=False)
        if with_bias:
            whole.bias = bias
        self.whole = PackedLinear(whole)
        ends = list(itertools.accumulate(sizes))
        self.columns = [slice(end - size, end) for end, size in zip(ends, sizes, strict=True)]
        views = [bias[columns] if layer.bias is not None else None
                 for layer, columns in zip(layers, self.columns, strict=True)]  # fmt: skip
        self.parts = [JoinedPart(self, n, view) for n, view in enumerate(views)]
        self._given: dict[int, Tensor] = {}
        self._read: tuple[Tensor, Tensor] | None = None
        self._num_left = 0

    def pack(self, place: int, weight: Tensor) -> None:
        """Take over the weight of one layer; the whole is made anew with the last of them."""
        self._given[place] = weight.detach().to(torch.bfloat16)
        if len(self._given) == len(self.parts):
            self.whole.pack(torch.cat([self._given[n] for n in range(len(self.parts))]))
            self._given = {}

    def product(self, x: Tensor) -> Tensor:
        """The whole product, made once for the layers that read ``x`` one after the other."""
        if self._read is None or self._read[0] is not x:
            self._read, self._num_left = (x, self.whole(x)), len(self.parts)
        product = self._read[1]
        self._num_left -= 1
        if self._num_left == 0:
            self._read = None
        return product


class JoinedPart(nn.Module):
    """One layer of a :class:`JoinedLinear`."""

    def __init__(self, joined: JoinedLinear, place: int, bias: Tensor | None) -> None:
        super().__init__()
        self.joined, self._place = joined, place
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)
        """A view of the whole's"""

    def pack(self, weight: Tensor) -> None:
        """See :meth:`PackedLinear.pack`."""
        self.joined.pack(self._place, weight)

    def let_go(self) -> None:
        """Of the whole."""
        self.joined.whole.let_go()

    @property
    def weight(self) -> Tensor:
        """See :attr:`PackedLinear.weight`."""
        return self.joined.whole.weight[self.joined.columns[self._place]]

    def forward(self, x: Tensor) -> Tensor:
        """Its columns of the product of all."""
        return self.joined.product(x)[..., self.joined.columns[self._place]]


@functools.cache
def can_pack() -> bool:
    """Whether this build of PyTorch on this CPU packs weights and then multiplies as a plain layer does; tried out."""
    generator = torch.Generator().manual_seed(0)
    try:
        for rows, inputs, outputs in ((1, 40, 24), (7, 24, 100), (64, 100, 40)):
            x_BI, weight_OI, bias_O = (
                torch.randn(*shape, generator=generator).bfloat16()
                for shape in ((rows, inputs), (outputs, inputs), (outputs,))
            )
            layer = nn.Linear(inputs, outputs, dtype=torch.bfloat16)
            layer.bias.data = bias_O
            packed = PackedLinear(layer)
            packed.pack(weight_OI)
            expected_BO = (x_BI.float() @ weight_OI.float().t() + bias_O.float()).bfloat16()
            if not torch.equal(packed.weight, weight_OI):
                return False
            torch.testing.assert_close(packed(x_BI), expected_BO, rtol=2**-7, atol=2**-7)
    except (AttributeError, RuntimeError, TypeError, AssertionError):
        return False
    return True


def pack_layers(model: nn.Module) -> int:
    """Put empty packed layers in the place of every linear layer (GPT-2's too); how many there are.

    Layers that read one tensor are packed as one.
    """
    found = {
        name: module
        for name, module in model.named_modules()
        if is_product(module) and module.weight.dtype == torch.bfloat16  # some are kept in float32
    }
    packed: dict[str, nn.Module] = {}
    for name, group in itertools.product(found, JOINED):
        parent, _, child = name.rpartition(".")
        names = [f"{parent}.{sibling}" for sibling in group]
        layers = [found[sibling] for sibling in names if type(found.get(sibling)) is nn.Linear]
        if child == group[0] and len(layers) == len(names) and len({layer.in_features for layer in layers}) == 1:
            packed.update(zip(names, JoinedLinear(layers).parts, strict=True))
    for name, module in found.items():
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, packed.get(name) or PackedLinear(module))
    return len(found)


def takers(model: nn.Module) -> dict[str, Callable[[Tensor], Any]]:
    """What takes over a new value of each weight, by the weight's name in the plain model."""
    found: dict[str, Callable[[Tensor], Any]] = {name: own.copy_ for name, own in model.state_dict().items()}
    layers = ((name, m) for name, m in model.named_modules() if isinstance(m, (PackedLinear, JoinedPart)))
    return {**found, **{f"{name}.weight": layer.pack for name, layer in layers}}


def group_queries(model: Any) -> bool:
    """Let the model attend by :func:`grouped_attention` where that computes what its own code does; whether it does.

    That is so for models in eager attention whose function for it is Llama's, word by word, as most are generated.
    """
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import eager_mask
    config = model.config.get_text_config()
    heads = getattr(config, "num_attention_heads", 1)
    if (
        config._attn_implementation != "eager"
        or getattr(config, "num_key_value_heads", None) in (None, heads)
        or not are_llamas(sys.modules[type(model).__module__], "eager_attention_forward")
    ):
        return False
    AttentionInterface.register(GROUPED, grouped_attention)
    AttentionMaskInterface.register(GROUPED, eager_mask)
    model.config._attn_implementation = GROUPED
    return True


def grouped_attention(
    module: nn.Module,
    query_BHTD: Tensor,
    key_BGSD: Tensor,
    value_BGSD: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    **_: Any,
) -> tuple[Tensor, None]:
    """softmax(scaling · Q Kᵀ + mask) V as [B, T, H, D]; H heads of queries share G heads of keys and values.

    Rounds where transformers' eager attention does.
    """
    batch, heads, queries, width = query_BHTD.shape
    groups, length = key_BGSD.shape[1:3]
    query_BGND = query_BHTD.reshape(batch, groups, -1, width)
    scores_BGNS = torch.matmul(query_BGND, key_BGSD.transpose(2, 3)).mul_(scaling)
    if attention_mask is not None:  # [B, 1, T, S]
        scores_BGNS.view(batch, groups, -1, queries, length).add_(attention_mask[:, :, None])
    weights_BGNS = torch.softmax(scores_BGNS, dim=-1, dtype=torch.float32).to(query_BHTD.dtype)
    mixed_BGND = torch.matmul(weights_BGNS, value_BGSD)
    return mixed_BGND.view(batch, heads, queries, -1).transpose(1, 2).contiguous(), None
