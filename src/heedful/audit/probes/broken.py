"""Answers that are worse for certain: cut, empty, scrambled, wrong, or fluent answers to something else."""

from __future__ import annotations

import random
from collections.abc import Sequence

from heedful.audit.cases import Case
from heedful.audit.probes.base import Pair, Probe, by_change, pair
from heedful.audit.probes.style import written
from heedful.audit.sentences import first_words, join, words


def scrambled(case: Case) -> str | None:
    """The words of the base in random order."""
    found = words(case.base)
    random.Random(case.prompt.id).shuffle(found)
    return join(found, case.lang) if len(found) > 3 else None


def answers_of_others(cases: Sequence[Case]) -> list[Pair]:
    """Beside every base the bases of two other prompts in the same language."""
    found = []
    for lang in sorted({case.lang for case in cases}):
        same = [case for case in cases if case.lang == lang]
        for i, case in enumerate(same):
            steps = {1 + len(same) // 3, 1 + 2 * len(same) // 3}  # neighbours in a file may be alike
            others = {same[(i + step) % len(same)].base for step in steps}
            found += [pair("answer to another prompt", case, text) for text in sorted(others - {case.base})]
    return found


TRUNCATED = Probe(
    "truncated", "the end cut off", "worse",
    by_change({"first half": lambda c: first_words(c.base, 0.5), "first quarter": lambda c: first_words(c.base, 0.25)}),
)  # fmt: skip
EMPTY = Probe("empty", "nothing, or three dots", "worse", by_change({"empty": lambda _: "", "dots": lambda _: "..."}))
SCRAMBLED = Probe("scrambled", "the words in random order", "worse", by_change({"scrambled": scrambled}))
BAIT = Probe("bait", "a fluent answer to another prompt", "worse", answers_of_others)
WRONG_FACT = Probe(
    "wrong_fact", "one sentence false or harmful", "worse", by_change({"wrong": written("wrong")}), cases="shipped"
)
