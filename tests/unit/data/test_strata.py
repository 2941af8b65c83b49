"""A stratified choice holds its shares, does not depend on the order, and grows by adding."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from heedful.data.duplicates import alike, group
from heedful.data.strata import choose, unlike
from heedful.errors import DataError
from heedful.records import Message, Prompt

COLOURS = ["red", "blue", "green", "gold", "grey", "pink", "teal", "navy", "rose", "lime"]


def prompts(**counts: int) -> list[Prompt]:
    return [
        Prompt(f"{category}{i}", (Message("user", f"{category} {i * 7919}: say {COLOURS[i % 10]}"),), category)
        for category, count in counts.items() for i in range(count)
    ]  # fmt: skip


def test_each_category_gets_its_share():
    there = prompts(chat=50, safety=30, writing=20)
    as_they_are = Counter(p.category for p in choose(there, 10, {}, seed=0))
    assert as_they_are == {"chat": 5, "safety": 3, "writing": 2}
    asked = Counter(p.category for p in choose(there, 10, {"safety": 3, "writing": 1}, seed=0))
    assert asked == {"safety": 8, "writing": 2} or asked == {"safety": 7, "writing": 3}
    assert sum(asked.values()) == 10 and choose(there, None, {}, seed=0) == there


def test_the_choice_depends_on_seed_and_prompts_alone_and_grows_by_adding():
    there = prompts(chat=40, safety=40)
    shuffled = random.Random(1).sample(there, len(there))
    few, many = ({p.id for p in choose(part, n, {}, seed=3)} for part, n in ((there, 10), (shuffled, 30)))
    assert few == {p.id for p in choose(shuffled, 10, {}, seed=3)} and few < many
    assert few != {p.id for p in choose(there, 10, {}, seed=4)}
    assert [p.id for p in choose(there, 30, {}, seed=3)] == [p.id for p in there if p.id in many]


@pytest.mark.parametrize("num, quotas, sentence", [
    (60, {}, "60 prompts are asked for and 50 are there"),
    (20, {"safety": 1}, "category 'safety': 20 prompts are asked for and 10 are there"),
    (5, {"poetry": 1, "chat": 1}, "category 'poetry'"),
    (None, {"chat": 1}, "quotas need a number"),
])  # fmt: skip
def test_what_is_not_there_is_refused(num, quotas, sentence):
    with pytest.raises(DataError, match=sentence):
        choose(prompts(chat=40, safety=10), num, quotas, seed=0)


def test_like_prompts_count_once_and_the_first_stays():
    there = [Prompt(str(i), (Message("user", text),)) for i, text in enumerate([
        "How do I bake bread at home without an oven?", "What is the capital of France?",
        "how do I bake bread  at home without an oven??",
        "怎样在家里做面包而不用烤箱呢？", "怎样在家里做面包而不用烤箱呢?",
    ])]  # fmt: skip
    assert [p.id for p in unlike(there)] == ["0", "1", "3"]
    assert len(unlike(there, threshold=1)) == 4  # width and case do not count, the second question mark does


def test_two_texts_are_alike_as_they_are_in_a_group():
    long = "The quick brown fox jumps over the lazy dog while the cat sleeps in the warm sun"
    turned = long[20:] + long[:20]
    for other, expected in ((long + "!", True), (long.upper(), True), (turned, True), (long[:40], False)):
        assert alike(long, other) == expected == (len(set(group([long, other]))) == 1), other
    assert alike("Ａ b", "a  B", threshold=1) and not alike("a b c", "a b d", threshold=1)
