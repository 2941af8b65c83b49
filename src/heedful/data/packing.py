"""Samples share rows, so that little of a batch is padding."""

from __future__ import annotations

from collections.abc import Sequence

from heedful.errors import DataError
from heedful.records import TokenSample


def pack(samples: Sequence[TokenSample], max_tokens: int) -> list[list[TokenSample]]:
    """Rows of whole samples, at most ``max_tokens`` ids each: first-fit decreasing, the same rows for the same samples.

    Raises:
        DataError: a sample is longer than a row.
    """
    order = sorted(range(len(samples)), key=lambda index: -len(samples[index].ids))
    if order and len(samples[order[0]].ids) > max_tokens:
        longest = samples[order[0]]
        raise DataError(f"sample {longest.id!r} has {len(longest.ids)} tokens, more than a row of {max_tokens}")
    rows: list[list[TokenSample]] = []
    room = _Room(len(samples), max_tokens)
    for index in order:
        row = room.take(len(samples[index].ids))
        if row == len(rows):
            rows.append([])
        rows[row].append(samples[index])
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
