"""One content in English and in Chinese: the language that was asked for, and the other one."""

from __future__ import annotations

from collections.abc import Sequence

from heedful.audit.cases import LANGUAGES, Case
from heedful.audit.probes.base import Pair, Probe


def _twins(cases: Sequence[Case]) -> list[tuple[str, Case, Case]]:
    """(content, English, Chinese)."""
    by_lang = {
        lang: {case.prompt.id.removesuffix(f"-{lang}"): case for case in cases if case.lang == lang}
        for lang in LANGUAGES
    }
    return [(name, case, by_lang["zh"][name]) for name, case in by_lang["en"].items() if name in by_lang["zh"]]


def as_asked(cases: Sequence[Case]) -> list[Pair]:
    """Prompt and answer in Chinese beside prompt and answer in English."""
    return [
        Pair("Chinese for English", name, (en.prompt, en.base), (zh.prompt, zh.base)) for name, en, zh in _twins(cases)
    ]


def not_as_asked(cases: Sequence[Case]) -> list[Pair]:
    """The answer in the other language than the prompt, beside the one in its own."""
    found = []
    for name, en, zh in _twins(cases):
        found.append(Pair("Chinese answer to English", name, (en.prompt, en.base), (en.prompt, zh.base)))
        found.append(Pair("English answer to Chinese", name, (zh.prompt, zh.base), (zh.prompt, en.base)))
    return found


LANGUAGE = Probe(
    "language", "prompt and answer in Chinese instead of English", "same", as_asked, cases="shipped", worst="warn"
)
OTHER_LANGUAGE = Probe(
    "other_language", "the answer in the other language than the prompt", "worse", not_as_asked, cases="shipped"
)
