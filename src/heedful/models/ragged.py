"""Batches without their padding: the trunk computes one row of all the real tokens, one sequence after another.

Embeddings, norms, projections and MLPs act on every token alone; attention alone must know where a sequence ends, and
is told the pieces: a sequence, a sample of a packed row, or an answer with the piece that is its prompt
(``models/attention.py``). That is for eager attention on the CPU, where time goes with the number of tokens; elsewhere
that many small kernels were never measured, and rows stay as they are.

oneDNN makes kernels for every shape it meets and keeps them: about 6 MB for a new number of tokens in the products of a
135M model. So it is rounded up, or a long run would grow for ever.

Dimension letters: B sequences, T tokens with padding, N real tokens of all sequences, D hidden width.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from heedful.models.attention import ROW, Piece, Row, keeps_no_probabilities, let_attention_read_rows

_MIN_PADDING = 8
"""Tokens of padding per sequence that pay for attention in pieces."""

ROW_STEP, WIDTH_STEP = 64, 16
"""What the tokens of the row are a multiple of, and the tokens of rows that keep their padding."""

_WINDOWS = ("sliding_window", "attention_chunk_size")


def widened(config: Any, x_BT: Tensor) -> Tensor:
    """A batch that keeps its padding, with columns of it up to a multiple of ``WIDTH_STEP`` on a CPU."""
    if x_BT.device.type != "cpu":
        return x_BT
    width = x_BT.shape[1]
    limits = [getattr(config, name, None) or math.inf for name in ("max_position_embeddings", "sliding_window")]
    filled = max(width, min(-(-width // WIDTH_STEP) * WIDTH_STEP, *limits))
    return pad(x_BT, (0, int(filled) - width))


def is_worth_it(trunk: Any, attention_mask_BT: Tensor, *, packed: bool = False) -> bool:
    """Whether the padding of this batch (0 in its mask), attention over whole packed rows, or keeping its probabilities
    costs more than attention in pieces, which sees no windows."""
    config = trunk.config.get_text_config()
    if attention_mask_BT.ndim != 2 or attention_mask_BT.device.type != "cpu" or not is_possible(config):
        return False
    num_rows, width = attention_mask_BT.shape
    if any((window := getattr(config, name, None)) is not None and window < width for name in _WINDOWS):
        return False
    num_real = int(attention_mask_BT.count_nonzero())
    if packed or keeps_no_probabilities(trunk):
        return num_real > 0
    return num_rows * width - num_real >= num_rows * _MIN_PADDING


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
    let_attention_read_rows(trunk)
    places_N = marks_BT.flatten().nonzero()[:, 0]
    num_filled = ROW_STEP - len(places_N) % ROW_STEP  # at least one, which attention needs
    row = Row(_pieces(marks_BT, prompts_BT), len(places_N) + num_filled, dtype)
    row_1N, positions_1N = (pad(x_BT.flatten()[places_N], (0, num_filled))[None] for x_BT in (ids_BT, position_ids_BT))
    out = trunk(
        input_ids=row_1N,
        attention_mask=row.mask,  # a mask of four dimensions is passed on as it is
        position_ids=positions_1N,
        use_cache=False,
        **{ROW: row},
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
