"""Padded batches without their padding: the trunk computes one row of all the real tokens, one sequence after another.

Embeddings, norms, projections and MLPs act on every token alone; attention alone must know where a sequence ends, and
is told the lengths. It then takes the sequences one by one, with the model's own function: the same arithmetic as with
padding. That is for eager attention on the CPU, where time goes with the number of tokens; elsewhere that many small
kernels were never measured, and padding stays.

oneDNN makes kernels for every shape it meets and keeps them: about 6 MB for a new number of tokens in the products of a
135M model, 2 MB for a new length in its attention. So both are rounded up, or a long run would grow for ever.

Dimension letters: B sequences, T tokens with padding, N real tokens of all sequences, D hidden width.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

_LENGTHS = "lengths_of_sequences"
"""The keyword that goes with a forward through every layer to its attention, and again where layers are recomputed."""

_EAGER = "eager_attention_forward"
"""What the modules of transformers call their eager attention."""

_MIN_PADDING = 8
"""Tokens of padding per sequence that pay for attention in pieces."""

ROW_STEP, PIECE_STEP = 64, 16
"""What the tokens of the row are a multiple of, and those of a sequence in its attention or in padded batches."""

_WINDOWS = ("sliding_window", "attention_chunk_size")


def is_worth_it(config: Any, attention_mask_BT: Tensor) -> bool:
    """Whether the padding of this batch (0 in its mask) costs more than attention in pieces, which sees no windows."""
    if attention_mask_BT.ndim != 2 or attention_mask_BT.device.type != "cpu" or config._attn_implementation != "eager":
        return False
    num_rows, width = attention_mask_BT.shape
    if any((window := getattr(config, name, None)) is not None and window < width for name in _WINDOWS):
        return False
    return num_rows * width - int(attention_mask_BT.count_nonzero()) >= num_rows * _MIN_PADDING


def last_hidden_states(
    trunk: Any, ids_BT: Tensor, attention_mask_BT: Tensor, position_ids_BT: Tensor, dtype: torch.dtype
) -> Tensor:
    """Last hidden states [B, T, D] of a transformers trunk, computed on the real tokens alone, 0 on padding.

    Right only for a trunk that :func:`can_be_ragged`; ``dtype`` is the compute precision.
    """
    _let_attention_read_lengths(trunk)
    places_N = attention_mask_BT.flatten().nonzero()[:, 0]
    num_filled = -len(places_N) % ROW_STEP
    lengths = [length for length in [*attention_mask_BT.count_nonzero(dim=1).tolist(), num_filled] if length]
    width = max(lengths) + PIECE_STEP
    hidden_later = torch.full((width, width), torch.finfo(dtype).min, dtype=dtype).triu(1)
    row_1N, positions_1N = (pad(x_BT.flatten()[places_N], (0, num_filled))[None] for x_BT in (ids_BT, position_ids_BT))
    out = trunk(
        input_ids=row_1N,
        attention_mask=hidden_later[None, None],  # a mask of four dimensions is passed on as it is
        position_ids=positions_1N,
        use_cache=False,
        **{_LENGTHS: lengths},
    )
    hidden_ND = out.last_hidden_state[0, : len(places_N)]
    flat = hidden_ND.new_zeros(attention_mask_BT.numel(), hidden_ND.shape[1]).index_copy(0, places_N, hidden_ND)
    return flat.view(*attention_mask_BT.shape, -1)


@torch.no_grad()
def can_be_ragged(trunk: Any, dtype: torch.dtype, *, vocabulary: int, tolerance: float) -> bool:
    """Whether a small batch comes out without padding as it does with it.

    It does not where positions come from the mask, where attention has biases or loses the lengths, and where states
    run on from token to token (recurrent models).

    Args:
        vocabulary: number of token ids.
        tolerance: the largest difference, as a share of the hidden states' norm.
    """
    ids_34 = torch.arange(1, 13).view(3, 4) % vocabulary
    mask_34 = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [1, 1, 1, 0]])
    positions_34 = torch.arange(4).expand(3, 4)
    try:
        found = last_hidden_states(trunk, ids_34, mask_34, positions_34, dtype)[mask_34 > 0].float()
    except Exception:  # whatever an architecture cannot do with one row: it has the padded way
        return False
    padded = trunk(input_ids=ids_34, attention_mask=mask_34, position_ids=positions_34, use_cache=False)
    expected = padded.last_hidden_state[mask_34 > 0].float()
    return bool((found - expected).norm() <= tolerance * expected.norm())


def _let_attention_read_lengths(trunk: Any) -> None:
    """Wrap the eager attention of this architecture: told lengths it attends within each, else it is as ever.

    Not an implementation of ours that is switched on for a forward: a backward that recomputes layers looks the
    implementation up again, when the forward is over.

    Raises:
        AttributeError: the architecture has no such function.
    """
    home = sys.modules[type(trunk).__module__]
    whole = getattr(home, _EAGER)
    if hasattr(whole, _LENGTHS):
        return

    @functools.wraps(whole)
    def attention(
        module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, *args: Any, **kwargs: Any
    ) -> Any:
        lengths = kwargs.pop(_LENGTHS, None)
        if lengths is None:
            return whole(module, query, key, value, attention_mask, *args, **kwargs)
        pieces = []
        for length, *piece in zip(lengths, *(x.split(lengths, dim=2) for x in (query, key, value)), strict=True):
            num_filled = -length % PIECE_STEP
            q, k, v = (pad(x, (0, 0, 0, num_filled)) for x in piece) if num_filled else piece
            mask = attention_mask[:, :, : q.shape[2], : q.shape[2]]
            pieces.append(whole(module, q, k, v, mask, *args, **kwargs)[0][:, :length])
        return torch.cat(pieces, dim=1), None

    setattr(attention, _LENGTHS, True)
    setattr(home, _EAGER, attention)
