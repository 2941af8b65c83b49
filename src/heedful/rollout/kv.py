"""A key-value cache that grows by many tokens at a time.

transformers' own puts keys and values together anew at every step, a copy of the whole past per token.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

ROOM = 32
"""Tokens by which a layer grows at a time; those not yet there are masked, and cost what real ones cost."""


def growing_cache(config: Any) -> DynamicCache:
    """An empty cache; layers that see the whole past grow by ``ROOM`` tokens, others (windows) are as ever."""
    cache = DynamicCache(config=config)
    cache.layers = [GrowingLayer() if type(layer) is DynamicLayer else layer for layer in cache.layers]
    return cache


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
