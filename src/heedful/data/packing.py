"""Samples share rows, so that little of a batch is padding."""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from heedful.errors import DataError
from heedful.records import TokenSample


def pack(samples: Sequence[TokenSample], max_tokens: int) -> list[list[TokenSample]]:
    """Rows of whole samples, at most ``max_tokens`` ids each: first-fit decreasing, the same rows for the same samples.

    Raises:
        DataError: a sample is longer than a row.
    """
    longest = max(samples, key=lambda sample: len(sample.ids), default=None)
    if longest is not None and len(longest.ids) > max_tokens:
        raise DataError(f"sample {longest.id!r} has {len(longest.ids)} tokens, more than a row of {max_tokens}")
    return [[samples[i] for i in row] for row in first_fit([len(sample.ids) for sample in samples], max_tokens)]


def first_fit(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Rows of indices whose lengths, none above ``max_tokens``, fit: longest first, each where there is room first."""
    rows: list[list[int]] = []
    room = _Room(len(lengths), max_tokens)
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        row = room.take(lengths[index])
        if row == len(rows):
            rows.append([])
        rows[row].append(index)
    return rows


def token_budget_batches(lengths: Sequence[int], micro_batch_tokens: int) -> list[list[int]]:
    """Indices in groups whose padded size, longest length x group size, is within the budget (tokens).

    Longest first, so that a set-up that does not fit in memory fails on its first batch. A sequence longer than the
    budget is alone in its group; every index occurs once.
    """
    groups: list[list[int]] = []
    longest = 0
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        if groups and longest * (len(groups[-1]) + 1) <= micro_batch_tokens:
            groups[-1].append(index)
        else:
            groups.append([index])
            longest = lengths[index]
    return groups


ATTENTION_SLOWER = 2
"""Attention's multiply-adds take this many times longer than others. SmolLM2-135M on a CPU, rows of 128 to 768 tokens:
2.7 (eager, bf16), 1.6 (eager, float32), 1.8 (sdpa, bf16), 1.1 (sdpa, float32); a wrong guess costs little"""


def attention_tokens_of(num_weights: int, layers: int, attention_width: int) -> float:
    """Length of a row at which attention takes as long as the rest of the model.

    In a row of W tokens, attention of width A takes 2 · W · A multiply-adds per token and layer, the rest of the model
    one per weight. It follows from the shape of the model alone, so that the same data give the same rows anywhere.
    """
    return num_weights / (2 * layers * attention_width) / ATTENTION_SLOWER


@dataclass(frozen=True, slots=True)
class Block:
    """A prompt with one or more of its answers, next to each other in a row."""

    ranking: int
    """Its place among the rankings of the batch"""
    answers: tuple[int, ...]
    """Their places in the ranking, rising"""
    num_tokens: int


@dataclass(frozen=True, slots=True)
class RankingShape:
    """What of a ranking matters for its place in a batch."""

    num_prompt_tokens: int
    num_answer_tokens: tuple[int, ...]

    @property
    def longest(self) -> int:
        """Tokens of the prompt with the longest answer."""
        return self.num_prompt_tokens + max(self.num_answer_tokens)

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompt, once, with all answers."""
        return self.num_prompt_tokens + sum(self.num_answer_tokens)


def ranking_rows(shapes: Sequence[RankingShape], attention_tokens: float | None) -> list[list[Block]]:
    """Rows of blocks that hold every answer once; no row is longer than need be.

    Wide rows let more answers share their prompt and leave less padding, but every token attends over its whole row,
    masked or not. R rows of W tokens are taken to cost R · W · (1 + W / ``attention_tokens``), and of some widths from
    the longest sequence on, the cheapest is taken. The same rows for the same shapes.

    Args:
        attention_tokens: length of a row at which attention costs as much as the rest of the model; None = every answer
            in a row of its own; infinite = padding and attention between blocks are not computed, so every ranking is
            a row, its prompt once.
    """
    if attention_tokens is None:
        return [
            [Block(p, (k,), shape.num_prompt_tokens + num)]
            for p, shape in enumerate(shapes)
            for k, num in enumerate(shape.num_answer_tokens)
        ]
    if math.isinf(attention_tokens):
        return [
            [Block(p, tuple(range(len(shape.num_answer_tokens))), shape.num_tokens)] for p, shape in enumerate(shapes)
        ]
    longest = max(shape.longest for shape in shapes)
    widest = min(4 * longest, max(shape.num_tokens for shape in shapes))
    widths = [*range(longest, widest, max(1, longest // 6)), widest]
    found = [_rows_within(shapes, width) for width in widths]
    return min(found, key=lambda rows: padded_tokens(rows) * (1 + row_width(rows) / attention_tokens))


def row_width(rows: Sequence[Sequence[Block]]) -> int:
    """Tokens of the longest row."""
    return max(sum(block.num_tokens for block in row) for row in rows)


def padded_tokens(rows: Sequence[Sequence[Block]]) -> int:
    """Tokens of the rows, all as long as the longest."""
    return len(rows) * row_width(rows)


def ranking_batches(
    shapes: Sequence[RankingShape], micro_batch_tokens: int, attention_tokens: float | None
) -> list[list[int]]:
    """Indices of whole rankings in groups whose :func:`ranking_rows` are within the budget of padded tokens, or of real
    ones where padding is not computed.

    Longest sequence first; a ranking above the budget is alone in its group; every index occurs once.
    """
    groups: list[list[int]] = []
    rest = sorted(range(len(shapes)), key=lambda index: -shapes[index].longest)

    def is_too_much(num: int) -> bool:
        chosen = [shapes[i] for i in rest[:num]]
        if attention_tokens is not None and math.isinf(attention_tokens):
            return sum(shape.num_tokens for shape in chosen) > micro_batch_tokens
        return padded_tokens(ranking_rows(chosen, attention_tokens)) > micro_batch_tokens

    while rest:
        least = itertools.accumulate(shapes[i].num_tokens for i in rest)  # that the first so many can take
        most = sum(1 for _ in itertools.takewhile(lambda num_tokens: num_tokens <= micro_batch_tokens, least))
        num = max(1, bisect.bisect_left(range(1, most + 1), True, key=is_too_much))
        groups.append(rest[:num])
        rest = rest[num:]
    return groups


def _rows_within(shapes: Sequence[RankingShape], width: int) -> list[list[Block]]:
    blocks = []
    for p, shape in enumerate(shapes):
        lengths, num_prompt = shape.num_answer_tokens, shape.num_prompt_tokens
        for answers in first_fit(lengths, width - num_prompt):
            blocks.append(Block(p, tuple(sorted(answers)), num_prompt + sum(lengths[k] for k in answers)))
    return [[blocks[b] for b in row] for row in first_fit([block.num_tokens for block in blocks], width)]


class _Room:
    """Free tokens of every row in a tree of maxima, so that the first row with enough is found in log time."""

    def __init__(self, num_rows: int, max_tokens: int) -> None:
        self._leaves = 1 << max(num_rows - 1, 0).bit_length()
        self._free = [max_tokens] * (2 * self._leaves)

    def take(self, num_tokens: int) -> int:
        """Take the tokens from the first row that has them free; its number."""
        node = 1
        while node < self._leaves:
            node = 2 * node if self._free[2 * node] >= num_tokens else 2 * node + 1
        row = node - self._leaves
        self._free[node] -= num_tokens
        while node := node // 2:
            self._free[node] = max(self._free[2 * node], self._free[2 * node + 1])
        return row
