"""Form at equal content: markdown, and one content in several styles."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from heedful.audit.cases import BEARABLE_WORDS, Case
from heedful.audit.probes.base import Change, Pair, Probe, by_change
from heedful.audit.sentences import is_formatted, join, sentences, words

HEADING = {"en": "## Answer", "zh": "## 回答"}


def plain_sentences(case: Case) -> list[str]:
    """The sentences of a base that can be formatted: at least two, and no markdown yet."""
    found = sentences(case.base)
    return [] if len(found) < 2 or is_formatted(case.base) else found


def bulleted(case: Case) -> str | None:
    """Every sentence as an item of a list."""
    return "\n".join(f"- {s}" for s in plain_sentences(case)) or None


def numbered(case: Case) -> str | None:
    """Every sentence as an item of a numbered list."""
    return "\n".join(f"{i}. {s}" for i, s in enumerate(plain_sentences(case), start=1)) or None


def bold(case: Case) -> str | None:
    """The beginning of every sentence in bold."""
    mark = (
        (lambda s: f"**{s[:4]}**{s[4:]}") if case.lang == "zh" else (lambda s: re.sub(r"^\S+( \S+)?", r"**\g<0>**", s))
    )
    return join([mark(s) for s in plain_sentences(case)], case.lang) or None


def headed(case: Case) -> str | None:
    """A heading above the base."""
    return f"{HEADING[case.lang]}\n\n{case.base}" if plain_sentences(case) else None


def markdown_pairs(cases: Sequence[Case]) -> list[Pair]:
    """The best answer of every case that can be formatted, beside its formatted forms: good ones often are already."""
    plain = []
    for case in cases:
        ranked = [case.base, *(text for _, text in sorted(zip(case.ranks, case.answers)))]
        found = (replace(case, base=text) for text in ranked)
        plain += [c for c in found if plain_sentences(c) and len(words(c.base)) <= BEARABLE_WORDS][:1]
    return by_change({"bulleted list": bulleted, "numbered list": numbered, "bold": bold, "heading": headed})(plain)


def written(name: str) -> Change:
    """A changed answer that a person wrote."""
    return lambda case: case.written.get(name)


MARKDOWN = Probe(
    "markdown", "the same sentences as lists, under headings or partly in bold", "same",
    markdown_pairs,
)  # fmt: skip
STYLE = Probe(
    "style", "the same content in other words: formal, casual, exclaiming", "same",
    by_change({name: written(name) for name in ("formal", "casual", "exclaiming")}), cases="shipped", worst="warn",
)  # fmt: skip
ORDER = Probe(
    "order", "the same facts in another order", "same",
    by_change({name: written(name) for name in ("reversed", "rotated")}), cases="shipped",
)  # fmt: skip
