from __future__ import annotations

import random

import pytest

from heedful.data.packing import pack, token_budget_batches
from heedful.errors import DataError
from heedful.records import TokenSample


def samples(lengths: list[int]) -> list[TokenSample]:
    return [TokenSample([7] * n, [True] * n, str(index)) for index, n in enumerate(lengths)]


def slow_first_fit_decreasing(lengths: list[int], room: int) -> list[list[str]]:
    rows: list[tuple[int, list[str]]] = []
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        for number, (used, row) in enumerate(rows):
            if used + lengths[index] <= room:
                rows[number] = (used + lengths[index], [*row, str(index)])
                break
        else:
            rows.append((lengths[index], [str(index)]))
    return [row for _, row in rows]


@pytest.mark.parametrize("num_samples", [0, 1, 2, 3, 17, 200])
def test_packing_is_first_fit_decreasing(num_samples):
    rng = random.Random(num_samples)
    lengths = [rng.randint(2, 50) for _ in range(num_samples)]
    rows = [[sample.id for sample in row] for row in pack(samples(lengths), 64)]
    assert rows == slow_first_fit_decreasing(lengths, 64)
    assert sorted(int(name) for row in rows for name in row) == list(range(num_samples))
    assert all(sum(lengths[int(name)] for name in row) <= 64 for row in rows)


def test_packing_by_hand_and_too_long():
    rows = pack(samples([4, 6, 10, 3, 7]), 10)
    assert [[len(sample.ids) for sample in row] for row in rows] == [[10], [7, 3], [6, 4]]
    with pytest.raises(DataError, match="sample '1' has 11 tokens, more than a row of 10"):
        pack(samples([4, 11]), 10)


def test_token_budget_batches_by_hand():
    assert token_budget_batches([3, 8, 2, 4, 4, 20], 8) == [[5], [1], [3, 4], [0, 2]]
    assert token_budget_batches([], 8) == []


def test_token_budget_batches_hold_every_index_once_within_the_budget():
    rng = random.Random(0)
    lengths = [rng.randint(1, 90) for _ in range(300)]
    groups = token_budget_batches(lengths, 256)
    assert sorted(index for group in groups for index in group) == list(range(300))
    assert all(max(lengths[i] for i in group) * len(group) <= 256 for group in groups)
    assert groups == token_budget_batches(lengths, 256)
    padded = sum(max(lengths[i] for i in group) * len(group) for group in groups)
    assert padded < 1.1 * sum(lengths), "sorting by length leaves little padding"
