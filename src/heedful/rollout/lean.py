"""One step of decoding by a model of Llama's kind, without what a general model does between its products.

With few rows a step is mostly small operations and the Python around them: of the 25 ms that SmolLM2-135M takes for 16
rows in transformers its products are 11. Here a step makes the same numbers with the same roundings by about half as
many operations: one product for queries, keys and values and one for the way up (:mod:`~heedful.rollout.packed`), one
rotation for queries and keys, one mask for all layers.

Shapes: B rows, D hidden width, H heads of queries, G of keys and values, K width of a head, S tokens of the cache.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from heedful.rollout.kv import GrowingCache
from heedful.rollout.packed import JoinedLinear, JoinedPart, PackedLinear, grouped_attention

TOLERANCE = 2**-6
"""Difference of the logits, as a share of their norm, that is rounding in bfloat16."""
_TRUNK = {"embed_tokens", "layers", "norm", "rotary_emb"}
_LAYER = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
_ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
_MLP = {"gate_proj", "up_proj", "down_proj", "act_fn"}


@dataclass(frozen=True)
class _Layer:
    attention: Any
    read: JoinedLinear
    """To queries, keys and values"""
    write: PackedLinear
    up: JoinedLinear
    down: PackedLinear
    activation: Any
    norm_before: Any
    norm_after: Any


class LeanStep:
    """The next logits of every row; made by :func:`lean_step`."""

    def __init__(self, model: Any) -> None:
        trunk = model.base_model
        self._embed, self._rotary, self._norm, self._head = (
            trunk.embed_tokens, trunk.rotary_emb, trunk.norm, model.get_output_embeddings()
        )  # fmt: skip
        self._layers = [
            _Layer(x.self_attn, x.self_attn.q_proj.joined, x.self_attn.o_proj, x.mlp.gate_proj.joined, x.mlp.down_proj,
                   x.mlp.act_fn, x.input_layernorm, x.post_attention_layernorm)
            for x in trunk.layers
        ]  # fmt: skip
        self._head_width = int(self._layers[0].attention.head_dim)
        values = self._layers[0].read.columns[2]
        self._num_groups = (values.stop - values.start) // self._head_width

    def __call__(self, ids_B1: Tensor, mask_BS: Tensor, positions_B1: Tensor, cache: GrowingCache) -> Tensor:
        """Logits [B, V] after one more token.

        Args:
            mask_BS: 0 = padding, of all tokens with the new one.
            cache: of the tokens before; takes in the new one.
        """
        hidden_BD = self._embed(ids_B1[:, 0])
        cos_B1K, sin_B1K = self._rotary(hidden_BD[:, None], position_ids=positions_B1)
        first_B1K, second_B1K = sin_B1K.chunk(2, dim=-1)
        turned_B1K = torch.cat([-first_B1K, second_B1K], dim=-1)
        hidden_B11S = self._hidden(mask_BS, cache, hidden_BD.dtype)
        for index, layer in enumerate(self._layers):
            read_BW = layer.read.whole(_normed(layer.norm_before, hidden_BD))
            mixed_BD = self._attend(layer, read_BW, cos_B1K, turned_B1K, hidden_B11S, cache, index)
            hidden_BD = hidden_BD + layer.write(mixed_BD)
            gate_BF, up_BF = layer.up.whole(_normed(layer.norm_after, hidden_BD)).chunk(2, dim=-1)
            hidden_BD = hidden_BD + layer.down(layer.activation(gate_BF) * up_BF)
        logits_BV: Tensor = self._head(_normed(self._norm, hidden_BD))
        return logits_BV

    def _attend(
        self, layer: _Layer, read_BW: Tensor, cos_B1K: Tensor, turned_B1K: Tensor, hidden_B11S: Tensor,
        cache: GrowingCache, index: int,
    ) -> Tensor:  # fmt: skip
        states_BNK = read_BW.view(len(read_BW), -1, self._head_width)
        both_BNK, values_BGK = states_BNK[:, : -self._num_groups], states_BNK[:, -self._num_groups :]
        first_BNK, second_BNK = both_BNK.chunk(2, dim=-1)
        swapped_BNK = torch.cat([second_BNK, first_BNK], dim=-1)
        both_BNK = (both_BNK * cos_B1K).add_(swapped_BNK.mul_(turned_B1K))
        queries_BHK, keys_BGK = both_BNK[:, : -self._num_groups], both_BNK[:, -self._num_groups :]
        keys_BGSK, values_BGSK = cache.update(keys_BGK[:, :, None], values_BGK[:, :, None], index)
        mixed_B1HK, _ = grouped_attention(
            layer.attention, queries_BHK[:, :, None], keys_BGSK, values_BGSK, hidden_B11S,
            scaling=layer.attention.scaling,
        )  # fmt: skip
        return mixed_B1HK.view(len(read_BW), -1)

    @staticmethod
    def _hidden(mask_BS: Tensor, cache: GrowingCache, dtype: torch.dtype) -> Tensor:
        """What is added to scores [B, 1, 1, S]: the lowest number for padding and for room that is not filled yet."""
        num_rows, length = mask_BS.shape
        width, _ = cache.get_mask_sizes(1, 0)
        hidden_BS = torch.full((num_rows, width), torch.finfo(dtype).min, dtype=dtype)
        hidden_BS[:, :length].masked_fill_(mask_BS.bool(), 0)
        return hidden_BS[:, None, None]


def _normed(norm: Any, x_BD: Tensor) -> Tensor:
    """Llama's norm: the root mean square in float32, the weight in the compute precision."""
    wide_BD = x_BD.float()  # by hand, since torch.rms_norm takes half as long again
    wide_BD.mul_(wide_BD.square().mean(-1, keepdim=True).add_(norm.variance_epsilon).rsqrt_())
    normed_BD: Tensor = wide_BD.to(x_BD.dtype).mul_(norm.weight)
    return normed_BD


def lean_step(model: Any, cache: GrowingCache | None) -> LeanStep | None:
    """The step for a packed model with grouped attention that is built as Llama is, None for any other.

    Names do not say that it computes what the model does (there are factors and caps that only a configuration knows),
    so both are asked once, and it is the model's if their logits differ.
    """
    trunk, head = model.base_model, model.get_output_embeddings()
    if cache is None or not cache.can_join or not isinstance(head, PackedLinear) or _children(trunk) != _TRUNK:
        return None
    for layer in trunk.layers:
        if _children(layer) != _LAYER or _children(layer.self_attn) != _ATTENTION or _children(layer.mlp) != _MLP:
            return None
        parts = [layer.self_attn.q_proj, layer.self_attn.v_proj, layer.mlp.gate_proj]
        plain = [layer.self_attn.o_proj, layer.mlp.down_proj]
        norms = [layer.input_layernorm, layer.post_attention_layernorm, trunk.norm]
        if not (all(isinstance(x, JoinedPart) for x in parts) and all(isinstance(x, PackedLinear) for x in plain)
                and all(hasattr(x, "variance_epsilon") for x in norms)):  # fmt: skip
            return None
    step = LeanStep(model)
    return step if _agrees(step, model) else None


@torch.no_grad()
def _agrees(step: LeanStep, model: Any) -> bool:
    """Whether the logits after four tokens and after three behind padding are the model's but for rounding."""
    vocabulary = model.config.get_text_config().vocab_size
    ids_24 = torch.arange(8).view(2, 4) % vocabulary
    mask_24 = torch.tensor([[0, 1, 1, 1], [1, 1, 1, 1]])
    positions_24 = (mask_24.cumsum(dim=1) - 1).clamp(min=0)

    def read() -> GrowingCache:
        cache = GrowingCache(model.config)
        model.base_model(input_ids=ids_24[:, :3], attention_mask=mask_24[:, :3], position_ids=positions_24[:, :3],
                         cache=cache, use_cache=True)  # fmt: skip
        return cache

    ids_21, positions_21 = ids_24[:, 3:], positions_24[:, 3:]
    out = model(input_ids=ids_21, attention_mask=mask_24, position_ids=positions_21, cache=read(), use_cache=True)
    plain_2V, lean_2V = out.logits[:, 0].float(), step(ids_21, mask_24, positions_21, read()).float()
    return bool((plain_2V - lean_2V).norm() <= TOLERANCE * plain_2V.norm())


def _children(module: nn.Module) -> set[str]:
    return {name for name, _ in module.named_children()}
