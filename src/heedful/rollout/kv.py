"""A key-value cache that grows by many tokens at a time.

transformers' own puts keys and values together anew at every step, a copy of the whole past per token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

ROOM = 32
"""Tokens by which a layer grows at a time; those not yet there are masked, and cost what real ones cost."""


class GrowingCache(DynamicCache):
    """A cache whose layers over the whole past grow by ``ROOM`` tokens; others (windows) are transformers' own."""

    def __init__(self, config: Any) -> None:
        super().__init__(config=config)
        self.layers = [GrowingLayer() if type(layer) is DynamicLayer else layer for layer in self.layers]

    @property
    def can_join(self) -> bool:
        """Whether all layers see the whole past, so that rows can be put together."""
        return all(type(layer) is GrowingLayer for layer in self.layers)

    def joined(self, caches: Sequence[GrowingCache]) -> GrowingCache:
        """This empty cache with the rows of several, flush right: shorter ones begin with columns of zeros."""
        longest = max(cache.get_seq_length() for cache in caches)
        layers: Sequence[Any] = self.layers
        for index, layer in enumerate(layers):
            parts: list[Any] = [cache.layers[index] for cache in caches]
            layer.update(*(torch.cat([_flush_right(p, what, longest) for p in parts]) for what in ("keys", "values")))
            for part in parts:
                part.keys = part.values = None  # one layer at a time is held twice
        return self


def _flush_right(layer: Any, what: str, width: int) -> Tensor:
    length = layer.get_seq_length()
    return functional.pad(getattr(layer, what)[:, :, :length], (0, 0, width - length, 0))


class GrowingLayer(DynamicLayer):
    """Keys and values [B, G, S + rest, D] of one layer; the rest is zeros, which the mask must hide.

    The whole is given to attention, not its first S tokens: products copy what does not lie in one piece.
    """

    def __init__(self, **_: Any) -> None:
        super().__init__()
        self._length = 0

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Take in the keys and values [B, G, T, D] of new tokens; all there are."""
        start, self._length = self._length, self._length + key_states.shape[2]
        keys, values = self.keys, self.values
        if keys is None or values is None or self._length > keys.shape[2]:
            keys, values = self._grown(keys, key_states, start), self._grown(values, value_states, start)
            self.keys, self.values, self.is_initialized = keys, values, True
        keys[:, :, start : self._length] = key_states
        values[:, :, start : self._length] = value_states
        return keys, values

    def _grown(self, old: Tensor | None, new: Tensor, length: int) -> Tensor:
        batch, groups, _, width = new.shape
        whole = new.new_zeros(batch, groups, _with_room(self._length), width)
        if old is not None:
            whole[:, :, :length] = old[:, :, :length]
        return whole

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """How many keys attention is given once that many more tokens are there, and at which position they begin."""
        return _with_room(self._length + query_length), 0

    def get_seq_length(self) -> int:
        """Tokens seen."""
        return self._length


def _with_room(length: int) -> int:
    return -(-length // ROOM) * ROOM
