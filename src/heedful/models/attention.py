"""Attention within the pieces of one row of tokens, for transformers' eager attention on the CPU.

Where an architecture's eager attention is Llama's word by word, pieces of about one length are taken together, long
ones in blocks of queries that leave out the keys after them, and the backward makes the probabilities again from
queries and keys, so that none are kept. Elsewhere, and with dropout, the model's own function is asked piece by piece.
It is the same arithmetic, but for the order of sums:

    S = scaling Q Kᵀ + mask,  P = softmax(S),  O = P V
    dV = Pᵀ dO,  dP = dO Vᵀ,  dS = P (dP − Σ dP P),  dQ = scaling dS K,  dK = scaling dSᵀ Q

oneDNN makes kernels for every shape it meets and keeps them, 2 MB for a new length in attention, so lengths are rounded
up. What fills them is the first token after the pieces, which is hidden and gets no gradient.

Dimension letters: N tokens of the row, H key heads, R query heads of each, W width of a head, P pieces of a group,
Q, K their rounded numbers of queries and keys.
"""

from __future__ import annotations

import functools
import itertools
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad

from heedful.models.llamas import are_llamas

ROW = "row_of_pieces"
"""The keyword that goes with a forward through every layer to its attention, and again where layers are recomputed."""

PIECE_STEP = 32
"""What the tokens of a piece are a multiple of in its attention."""

_EAGER = "eager_attention_forward"
"""What the modules of transformers call their eager attention."""

_BLOCK = 128
"""The most queries of a piece that are taken at once."""

_GROUP_PAIRS = 2**17
"""Pairs of a query and a key up to which pieces are taken together."""


@dataclass(frozen=True)
class Piece:
    """Tokens next to each other in the row, which see themselves and their prompt, another piece, if they have one."""

    start: int
    length: int
    prompt: Piece | None = None

    @property
    def seen(self) -> list[Piece]:
        return [self] if self.prompt is None else [self.prompt, self]


@dataclass(frozen=True)
class Row:
    """A row of ``num_tokens`` in the compute precision: the tokens of its pieces, one after the other, and others."""

    pieces: Sequence[Piece]
    num_tokens: int
    dtype: torch.dtype

    @property
    def num_real(self) -> int:
        """The tokens of its pieces; there is at least one other."""
        return self.pieces[-1].start + self.pieces[-1].length

    @functools.cached_property
    def groups(self) -> list[_Group]:
        def shape(block: tuple[Tensor, Tensor]) -> tuple[int, int]:
            queries, keys = block
            return _rounded(len(queries)), _rounded(len(keys))

        found = []
        for (num_queries, num_keys), same in itertools.groupby(sorted(_blocks(self.pieces), key=shape), shape):
            blocks, num = list(same), max(1, _GROUP_PAIRS // (num_queries * num_keys))
            for some in (blocks[i : i + num] for i in range(0, len(blocks), num)):
                found.append(_group(some, num_queries, num_keys, self.num_real, self.dtype))
        return found

    @functools.cached_property
    def mask(self) -> Tensor:
        """[1, 1, T, T], for the longest piece: 0, or the lowest number where the key is after the query."""
        width = max(sum(x.length for x in piece.seen) for piece in self.with_rest) + PIECE_STEP
        return _mask(torch.ones(1, 1, width, width, dtype=torch.bool).triu_(1), self.dtype)

    @property
    def with_rest(self) -> list[Piece]:
        """Its pieces, and its other tokens as one more."""
        return [*self.pieces, Piece(self.num_real, self.num_tokens - self.num_real)]

    @functools.cached_property
    def query_slots(self) -> Tensor:
        """Of every token of a piece, among the queries of all groups."""
        joined = torch.cat([x.queries_PQ.flatten() for x in self.groups])
        slots = joined.new_empty(self.num_tokens).index_copy_(0, joined, torch.arange(len(joined)))
        return slots[: self.num_real]


@dataclass(frozen=True)
class _Group:
    """Tokens of pieces, or of blocks of them, that are taken together; the last ones fill the shape."""

    queries_PQ: Tensor
    keys_PK: Tensor
    mask: Tensor
    """[P or 1, Q, 1, K]: 0, or the lowest number where the key is after the query or fills"""

    def parts(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[H·P, Q·R, W], [H·P, K, W] and [H·P, K, W] of the states [H, N, R or 1, W] of all tokens."""
        return _together(query, self.queries_PQ), _together(key, self.keys_PK), _together(value, self.keys_PK)

    def probabilities(self, q: Tensor, k: Tensor, scaling: float) -> tuple[Tensor, Tensor]:
        """[H·P, Q·R, K] in the precision of the states, and in float32."""
        scores = (q @ k.transpose(1, 2)).mul_(scaling)
        num, num_queries = self.queries_PQ.shape
        scores.view(-1, num, num_queries, q.shape[1] // num_queries, k.shape[1]).add_(self.mask)
        wide = torch.softmax(scores, -1, dtype=torch.float32)
        return wide.to(q.dtype), wide


def _blocks(pieces: Sequence[Piece]) -> Iterator[tuple[Tensor, Tensor]]:
    """Queries and keys, as numbers of tokens."""
    for piece in pieces:
        *prompt, own = (torch.arange(x.start, x.start + x.length) for x in piece.seen)
        for end in range(_BLOCK, piece.length + _BLOCK, _BLOCK):
            yield own[end - _BLOCK : end], torch.cat([*prompt, own[:end]])


def _group(
    blocks: Sequence[tuple[Tensor, Tensor]], num_queries: int, num_keys: int, filler: int, dtype: torch.dtype
) -> _Group:
    queries_PQ = torch.stack([pad(q, (0, num_queries - len(q)), value=filler) for q, _ in blocks])
    keys_PK = torch.stack([pad(k, (0, num_keys - len(k)), value=filler) for _, k in blocks])
    before = torch.tensor([len(k) - len(q) for q, k in blocks])
    before = before[:1] if bool((before == before[0]).all()) else before
    is_after = torch.arange(num_keys) > (before[:, None] + torch.arange(num_queries))[..., None]
    return _Group(queries_PQ, keys_PK, _mask(is_after, dtype)[:, :, None])


def _mask(is_hidden: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros(is_hidden.shape, dtype=dtype).masked_fill_(is_hidden, torch.finfo(dtype).min)


def _rounded(length: int) -> int:
    return -(-length // PIECE_STEP) * PIECE_STEP


class _InGroups(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, row: Row, scaling: float) -> Tensor:
        """[1, N, heads, W] of states [1, heads, N, W]"""
        ctx.save_for_backward(query, key, value)
        ctx.row, ctx.scaling = row, scaling
        states = [_by_key_head(x, key.shape[1]) for x in (query, key, value)]
        found = []
        for group in row.groups:
            q, k, v = group.parts(*states)
            found.append(_apart(group.probabilities(q, k, scaling)[0] @ v, states[0]))
        return _row_of(found, row.query_slots, row.num_tokens)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value = ctx.saved_tensors
        with torch.autocast("cpu", enabled=False):  # the dtypes are those of the forward
            return *_gradients(query, key, value, gradient, ctx.row, ctx.scaling), None, None


def _gradients(
    query: Tensor, key: Tensor, value: Tensor, gradient: Tensor, row: Row, scaling: float
) -> tuple[Tensor, ...]:
    """Of queries, keys and values, from that of the result."""
    states = [_by_key_head(x, key.shape[1]) for x in (query, key, value)]
    of_real = pad(gradient[:, : row.num_real], (0, 0, 0, 0, 0, 1))  # what fills has no gradient
    of_out = _by_key_head(of_real.transpose(1, 2), key.shape[1])
    found = []
    # a token is the key of several pieces or blocks, or of one; [N, H·W], as sums of whole rows are quick
    of_key, of_value = (torch.zeros(row.num_tokens, len(x) * x.shape[-1]) for x in states[1:])
    for group in row.groups:
        q, k, v = group.parts(*states)
        of_o = _together(of_out, group.queries_PQ)
        p, wide = group.probabilities(q, k, scaling)
        of_wide = (of_o @ v.transpose(1, 2)).float()
        of_scores = torch.ops.aten._softmax_backward_data(of_wide, wide, -1, torch.float32).to(q.dtype)
        of_scores.mul_(scaling)
        found.append(_apart(of_scores @ k, states[0]))
        for sum_, part in ((of_key, of_scores.transpose(1, 2) @ q), (of_value, p.transpose(1, 2) @ of_o)):
            rows = _apart(part, states[1]).transpose(0, 1).flatten(1)
            sum_.index_add_(0, group.keys_PK.flatten(), rows.float())
    of_query = _row_of(found, row.query_slots, row.num_tokens)
    of_keys = (x.to(key.dtype).view(1, row.num_tokens, len(states[1]), -1) for x in (of_key, of_value))
    return of_query.transpose(1, 2), *(x.transpose(1, 2) for x in of_keys)


def _by_key_head(states: Tensor, num_key_heads: int) -> Tensor:
    """[H, N, R, W] of [1, H·R, N, W]"""
    return states[0].unflatten(0, (num_key_heads, -1)).transpose(1, 2)


def _together(states: Tensor, tokens_PT: Tensor) -> Tensor:
    """[H·P, T·R, W] of [H, N, R, W]"""
    found = states.index_select(1, tokens_PT.flatten())
    return found.view(len(states) * len(tokens_PT), -1, states.shape[-1])


def _apart(part: Tensor, states: Tensor) -> Tensor:
    """[H, P·T, R, W] of [H·P, T·R, W], for H and R of the states that it was made from"""
    return part.view(len(states), -1, states.shape[2], part.shape[-1])


def _row_of(parts: list[Tensor], slots: Tensor, num_tokens: int) -> Tensor:
    """[1, N, H·R, W], 0 for tokens of no piece, of the slots of all groups [H, P·T, R, W]"""
    joined = torch.cat(parts, dim=1)
    found = joined.new_empty(num_tokens, len(joined), *joined.shape[2:])
    found[: len(slots)] = joined.index_select(1, slots).transpose(0, 1)
    found[len(slots) :] = 0
    return found.flatten(1, 2)[None]


def let_attention_read_rows(trunk: Any) -> None:
    """Wrap the eager attention of this architecture: told a row it attends within its pieces, else it is as ever.

    Not an implementation of ours that is switched on for a forward: a backward that recomputes layers looks the
    implementation up again, when the forward is over.

    Raises:
        AttributeError: the architecture has no such function.
    """
    home = sys.modules[type(trunk).__module__]
    whole = getattr(home, _EAGER)
    if hasattr(whole, ROW):
        return
    takes_groups = keeps_no_probabilities(trunk)

    @functools.wraps(whole)
    def attention(
        module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, *args: Any, **kwargs: Any
    ) -> Any:
        row: Row | None = kwargs.pop(ROW, None)
        if row is None:
            return whole(module, query, key, value, attention_mask, *args, **kwargs)
        if takes_groups and attention_mask is row.mask and not args and not kwargs.get("dropout"):
            states = (x.to(row.dtype) for x in (query, key, value))
            return _InGroups.apply(*states, row, kwargs["scaling"]), None
        found = []
        for piece in row.with_rest:
            num_before = piece.seen[0].length if piece.prompt else 0
            q = _filled([query.narrow(2, piece.start, piece.length)])
            k, v = (_filled([states.narrow(2, x.start, x.length) for x in piece.seen]) for states in (key, value))
            mask = attention_mask[:, :, num_before : num_before + q.shape[2], : k.shape[2]]
            found.append(whole(module, q, k, v, mask, *args, **kwargs)[0][:, : piece.length])
        return torch.cat(found, dim=1), None

    setattr(attention, ROW, True)
    setattr(home, _EAGER, attention)


def keeps_no_probabilities(trunk: Any) -> bool:
    """Whether attention of this architecture is taken in groups."""
    return are_llamas(sys.modules[type(trunk).__module__], _EAGER)


def _filled(parts: list[Tensor]) -> Tensor:
    """Parts of [1, heads, tokens, width] one after the other, up to a multiple of ``PIECE_STEP`` tokens."""
    whole = parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)
    return pad(whole, (0, 0, 0, _rounded(whole.shape[2]) - whole.shape[2]))
