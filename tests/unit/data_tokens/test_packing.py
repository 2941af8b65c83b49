from __future__ import annotations

import random

import pytest

from heedful.data.packing import (
    RankingShape,
    pack,
    padded_tokens,
    ranking_batches,
    ranking_rows,
    row_width,
    token_budget_batches,
)
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


def shapes(num: int) -> list[RankingShape]:
    rng = random.Random(num)
    return [
        RankingShape(rng.randint(1, 60), tuple(rng.randint(1, 90) for _ in range(rng.randint(1, 5))))
        for _ in range(num)
    ]


def held(rows):
    """(ranking, answer) of everything in the rows."""
    return sorted((block.ranking, k) for row in rows for block in row for k in block.answers)


@pytest.mark.parametrize("attention_tokens", [None, 1.0, 100.0, 1e9])
@pytest.mark.parametrize("num", [1, 2, 9, 40])
def test_ranking_rows_hold_every_answer_once_with_its_prompt(num, attention_tokens):
    asked = shapes(num)
    rows = ranking_rows(asked, attention_tokens)
    assert held(rows) == [(p, k) for p, s in enumerate(asked) for k in range(len(s.num_answer_tokens))]
    for block in (block for row in rows for block in row):
        s = asked[block.ranking]
        assert block.num_tokens == s.num_prompt_tokens + sum(s.num_answer_tokens[k] for k in block.answers)
        assert list(block.answers) == sorted(block.answers)
    assert max(s.longest for s in asked) <= row_width(rows) <= 4 * max(s.longest for s in asked)
    assert rows == ranking_rows(asked, attention_tokens)


def test_ranking_rows_share_a_prompt_where_it_pays():
    """A long prompt of short answers is encoded once, a short prompt of long answers is not."""
    long_prompt, long_answers = RankingShape(300, (10, 10, 10, 10)), RankingShape(10, (300, 300, 300, 300))
    assert [block.answers for row in ranking_rows([long_prompt], 500.0) for block in row] == [(0, 1, 2, 3)]
    assert [block.answers for row in ranking_rows([long_answers], 500.0) for block in row] == [(0,), (1,), (2,), (3,)]
    assert len(ranking_rows([long_answers], 1e9)) == 1, "where attention is for nothing, prompts are saved"
    some = RankingShape(50, (400, 80, 90, 100, 110))
    assert held([row for row in ranking_rows([some], 500.0) if len(row[0].answers) == 1]) == [(0, 0)]


def test_packing_rankings_saves_padding_and_cost():
    asked = shapes(60)
    apart = sum(s.num_prompt_tokens * len(s.num_answer_tokens) + sum(s.num_answer_tokens) for s in asked)
    rows = ranking_rows(asked, 400.0)
    assert padded_tokens(rows) < apart < 0.75 * padded_tokens(ranking_rows(asked, None))


@pytest.mark.parametrize("attention_tokens", [None, 200.0])
def test_ranking_batches_hold_every_ranking_once_within_the_budget(attention_tokens):
    asked = shapes(80)
    groups = ranking_batches(asked, 700, attention_tokens)
    assert sorted(i for group in groups for i in group) == list(range(80))
    sizes = [padded_tokens(ranking_rows([asked[i] for i in group], attention_tokens)) for group in groups]
    assert all(size <= 700 or len(group) == 1 for size, group in zip(sizes, groups, strict=True))
    assert sum(len(group) > 1 for group in groups) > len(groups) / 2
    assert ranking_batches(asked, 1, attention_tokens) == [
        [i] for i in sorted(range(80), key=lambda i: -asked[i].longest)
    ]
    assert len(ranking_batches(asked, 10**6, attention_tokens)) == 1 and ranking_batches([], 9, attention_tokens) == []
