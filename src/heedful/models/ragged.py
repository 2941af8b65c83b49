"""Batches without their padding: the trunk computes one row of all the real tokens, one sequence after another.

Embeddings, norms, projections and MLPs act on every token alone; attention alone must know where a sequence ends, and
is told the pieces: a sequence, a sample of a packed row, or an answer with the piece that is its prompt. It then takes
them one by one, with the model's own function: the same arithmetic as with padding or a mask of blocks, and no more of
it than is needed. That is for eager attention on the CPU, where time goes with the number of tokens; elsewhere that
many small kernels were never measured, and rows stay as they are.

oneDNN makes kernels for every shape it meets and keeps them: about 6 MB for a new number of tokens in the products of a
135M model, 2 MB for a new length in its attention. So both are rounded up, or a long run would grow for ever.

Dimension letters: B sequences, T tokens with padding, N real tokens of all sequences, D hidden width.
"""

from __future__ import annotations

import functools
import math
import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

_PIECES = "pieces_of_row"
"""The keyword that goes with a forward through every layer to its attention, and again where layers are recomputed."""

_EAGER = "eager_attention_forward"
"""What the modules of transformers call their eager attention."""

_MIN_PADDING = 8
"""Tokens of padding per sequence that pay for attention in pieces."""

ROW_STEP, PIECE_STEP = 64, 16
"""What the tokens of the row are a multiple of, and those of a sequence in its attention or in padded batches."""

_WINDOWS = ("sliding_window", "attention_chunk_size")


@dataclass(frozen=True)
class Piece:
    """Tokens next to each other in the row, which see themselves and their prompt, another piece, if they have one."""

    start: int
    length: int
    prompt: Piece | None = None


def widened(config: Any, x_BT: Tensor) -> Tensor:
    """A batch that keeps its padding, with columns of it up to a multiple of ``PIECE_STEP`` on a CPU."""
    if x_BT.device.type != "cpu":
        return x_BT
    width = x_BT.shape[1]
    limits = [getattr(config, name, None) or math.inf for name in ("max_position_embeddings", "sliding_window")]
    filled = max(width, min(-(-width // PIECE_STEP) * PIECE_STEP, *limits))
    return pad(x_BT, (0, int(filled) - width))


def is_worth_it(config: Any, attention_mask_BT: Tensor, *, packed: bool = False) -> bool:
    """Whether the padding of this batch (0 in its mask), or attention over whole packed rows, costs more than attention
    in pieces, which sees no windows."""
    if attention_mask_BT.ndim != 2 or attention_mask_BT.device.type != "cpu" or not is_possible(config):
        return False
    num_rows, width = attention_mask_BT.shape
    if any((window := getattr(config, name, None)) is not None and window < width for name in _WINDOWS):
        return False
    return packed or num_rows * width - int(attention_mask_BT.count_nonzero()) >= num_rows * _MIN_PADDING


def is_possible(config: Any) -> bool:
    """Whether attention of this kind can be taken in pieces."""
    return bool(config._attn_implementation == "eager")


def last_hidden_states(
    trunk: Any,
    ids_BT: Tensor,
    marks_BT: Tensor,
    position_ids_BT: Tensor,
    dtype: torch.dtype,
    *,
    prompts_BT: Tensor | None = None,
) -> Tensor:
    """Last hidden states [B, T, D] of a transformers trunk, computed on the real tokens alone, 0 on padding.

    Right only for a trunk that :func:`can_be_ragged`.

    Args:
        marks_BT: 0 = padding, else the number of the token's piece within its row.
        dtype: the compute precision.
        prompts_BT: the number of the piece that is the prompt of the token's, its own number for none.
    """
    _let_attention_read_pieces(trunk)
    places_N = marks_BT.flatten().nonzero()[:, 0]
    pieces = _pieces(marks_BT, prompts_BT)
    num_filled = -len(places_N) % ROW_STEP
    if num_filled:
        pieces.append(Piece(len(places_N), num_filled))
    width = max(x.length + (x.prompt.length if x.prompt else 0) for x in pieces) + PIECE_STEP
    hidden_later = torch.full((width, width), torch.finfo(dtype).min, dtype=dtype).triu(1)
    row_1N, positions_1N = (pad(x_BT.flatten()[places_N], (0, num_filled))[None] for x_BT in (ids_BT, position_ids_BT))
    out = trunk(
        input_ids=row_1N,
        attention_mask=hidden_later[None, None],  # a mask of four dimensions is passed on as it is
        position_ids=positions_1N,
        use_cache=False,
        **{_PIECES: pieces},
    )
    hidden_ND = out.last_hidden_state[0, : len(places_N)]
    flat = hidden_ND.new_zeros(marks_BT.numel(), hidden_ND.shape[1]).index_copy(0, places_N, hidden_ND)
    return flat.view(*marks_BT.shape, -1)


def _pieces(marks_BT: Tensor, prompts_BT: Tensor | None) -> list[Piece]:
    """In the order of the row that the real tokens make."""
    is_real_BT = marks_BT > 0
    rows_BT = torch.arange(len(marks_BT))[:, None] * (int(marks_BT.max()) + 1)
    names, counts = torch.unique_consecutive((marks_BT + rows_BT)[is_real_BT], return_counts=True)
    starts = (counts.cumsum(0) - counts).tolist()
    prompts = names if prompts_BT is None else (prompts_BT + rows_BT)[is_real_BT][starts]
    found: dict[int, Piece] = {}
    for name, start, length, prompt in zip(names.tolist(), starts, counts.tolist(), prompts.tolist(), strict=True):
        found[name] = Piece(start, length, None if prompt == name else found[prompt])
    return list(found.values())


@torch.no_grad()
def can_be_ragged(trunk: Any, dtype: torch.dtype, *, vocabulary: int, tolerance: float, with_prompts: bool) -> bool:
    """Whether a small batch comes out in pieces as it does with padding.

    It does not where positions come from the mask, where attention has biases or loses the pieces, and where states
    run on from token to token (recurrent models).

    Args:
        vocabulary: number of token ids.
        tolerance: the largest difference, as a share of the hidden states' norm.
        with_prompts: pieces have prompts.
    """
    ids_34 = torch.arange(1, 13).view(3, 4) % vocabulary
    mask_34 = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [1, 1, 1, 0]])
    positions_34 = torch.arange(4).expand(3, 4)
    asked = ids_34, mask_34, positions_34
    prompts: Tensor | None = None
    where = mask_34 > 0
    if with_prompts:  # the same sequences in one row: the first token of each is its prompt, of one and of two answers
        marks_34 = torch.tensor([[1, 2, 2, 2], [3, 4, 0, 0], [5, 6, 7, 0]])
        prompts = torch.tensor([[1, 1, 1, 1], [3, 3, 0, 0], [5, 5, 5, 0]])[where][None]
        positions = torch.tensor([[0, 1, 2, 3], [0, 1, 0, 0], [0, 1, 1, 0]])[where][None]
        asked = ids_34[where][None], marks_34[where][None], positions
    try:
        found = last_hidden_states(trunk, *asked, dtype, prompts_BT=prompts)
    except Exception:  # whatever an architecture cannot do with one row: it has the padded way
        return False
    padded = trunk(input_ids=ids_34, attention_mask=mask_34, position_ids=positions_34, use_cache=False)
    expected = padded.last_hidden_state[where].float()
    found = found.flatten(0, 1)[asked[1].flatten() > 0].float()
    if with_prompts:  # the second answer of the third prompt does not see the first
        alone = trunk(input_ids=ids_34[2:, [0, 2]], position_ids=positions_34[2:, :2], use_cache=False)
        expected[-1] = alone.last_hidden_state[0, 1].float()
    return bool((found - expected).norm() <= tolerance * expected.norm())


def _let_attention_read_pieces(trunk: Any) -> None:
    """Wrap the eager attention of this architecture: told pieces it attends within each, else it is as ever.

    Not an implementation of ours that is switched on for a forward: a backward that recomputes layers looks the
    implementation up again, when the forward is over.

    Raises:
        AttributeError: the architecture has no such function.
    """
    home = sys.modules[type(trunk).__module__]
    whole = getattr(home, _EAGER)
    if hasattr(whole, _PIECES):
        return

    @functools.wraps(whole)
    def attention(
        module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, *args: Any, **kwargs: Any
    ) -> Any:
        pieces = kwargs.pop(_PIECES, None)
        if pieces is None:
            return whole(module, query, key, value, attention_mask, *args, **kwargs)
        found = []
        for piece in pieces:
            seen = [x for x in (piece.prompt, piece) if x is not None]
            num_before = sum(x.length for x in seen[:-1])
            q = _filled([query.narrow(2, piece.start, piece.length)])
            k, v = (_filled([states.narrow(2, x.start, x.length) for x in seen]) for states in (key, value))
            mask = attention_mask[:, :, num_before : num_before + q.shape[2], : k.shape[2]]
            found.append(whole(module, q, k, v, mask, *args, **kwargs)[0][:, : piece.length])
        return torch.cat(found, dim=1), None

    setattr(attention, _PIECES, True)
    setattr(home, _EAGER, attention)


def _filled(parts: list[Tensor]) -> Tensor:
    """Parts of [1, heads, tokens, width] one after the other, up to a multiple of ``PIECE_STEP`` tokens."""
    whole = parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)
    num_filled = -whole.shape[2] % PIECE_STEP
    return pad(whole, (0, 0, 0, num_filled)) if num_filled else whole
