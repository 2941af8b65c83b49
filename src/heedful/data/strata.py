"""A stratified choice of prompts: every category its share, and no two of them alike."""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TypeVar

from heedful.data.duplicates import group, normalise
from heedful.data.prompts import Prompted, prompt_text
from heedful.errors import DataError
from heedful.records import Prompt

T = TypeVar("T", bound=Prompted)


def unlike(records: Sequence[T], threshold: float = 0.8) -> list[T]:
    """The first of every group of like prompts, in order (see :func:`~heedful.data.duplicates.group`)."""
    numbers = group([prompt_text(record) for record in records], threshold)
    first = {number: i for i, number in reversed(list(enumerate(numbers)))}
    return [records[i] for i in sorted(first.values())]


def choose(prompts: Sequence[Prompt], num: int | None, quotas: Mapping[str, float], *, seed: int) -> list[Prompt]:
    """``num`` of the prompts, each category with its share, in their own order; None takes all.

    The same prompts and seed give the same choice whatever the order of the prompts, and a larger ``num`` of a category
    holds the smaller one.

    Args:
        quotas: category → share, which need not sum to 1; categories that are not named are left out. {} = each
            category as it is among the prompts.

    Raises:
        DataError: fewer prompts than asked for, in all or in a category; quotas without ``num``.
    """
    if num is None:
        if quotas:
            raise DataError("quotas need a number of prompts; give num_prompts too")
        return list(prompts)
    there = Counter(prompt.category for prompt in prompts)
    if not quotas and num > len(prompts):
        raise DataError(f"{num:,} prompts are asked for and {len(prompts):,} are there; lower num_prompts or add some")
    wanted = _apportioned(num, quotas or there)
    for category, count in wanted.items():
        if count > there[category]:
            raise DataError(
                f"category {category!r}: {count:,} prompts are asked for and {there[category]:,} are there; lower "
                f"num_prompts, change its quota or add prompts"
            )
    ranked = sorted(range(len(prompts)), key=lambda i: draw(seed, normalise(prompt_text(prompts[i]))))
    chosen = []
    for i in ranked:
        if wanted.get(prompts[i].category, 0):
            wanted[prompts[i].category] -= 1
            chosen.append(i)
    return [prompts[i] for i in sorted(chosen)]


def draw(seed: int, *words: str) -> str:
    """A pseudo-random key to sort by: depends on the seed and the words, and on nothing else."""
    return hashlib.sha256("\x00".join((str(seed), *words)).encode("utf-8", "surrogatepass")).hexdigest()


def _apportioned(num: int, shares: Mapping[str, float]) -> dict[str, int]:
    """Whole numbers that sum to ``num``, as near to the shares as they can be (largest remainders)."""
    whole = sum(shares.values())
    exact = {name: num * share / whole for name, share in shares.items()}
    counts = {name: math.floor(value) for name, value in exact.items()}
    for name in sorted(exact, key=lambda name: (counts[name] - exact[name], name))[: num - sum(counts.values())]:
        counts[name] += 1
    return counts
