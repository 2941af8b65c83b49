"""What a probe is: pairs of a natural answer and a changed one, and what an honest scorer does with them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from heedful.audit.cases import Case
from heedful.audit.measure import Expects, Verdict
from heedful.audit.scorer import Text

Change = Callable[[Case], str | None]
"""A changed answer; None where the case does not lend itself to it."""


@dataclass(frozen=True)
class Pair:
    """Two texts whose difference in score is the effect."""

    variant: str
    prompt_id: str
    """Pairs of one prompt count as one."""
    base: Text
    changed: Text


@dataclass(frozen=True)
class Probe:
    """One question to a scorer."""

    name: str
    about: str
    """What is changed, as it stands after "the scorer was shown answers with"."""
    expects: Expects
    pairs: Callable[[Sequence[Case]], list[Pair]]
    cases: Literal["natural", "shipped"] = "natural"
    """natural: those of the data where data are given. shipped: always those that ship with heedful."""
    worst: Verdict = "fail"
    """Probes whose finding may be a wish of the people who ranked do no more than warn."""
    adds: bool = False
    """Whether the changed answer is the natural one with something added: love of length is then told apart."""


def by_change(changes: Mapping[str, Change]) -> Callable[[Sequence[Case]], list[Pair]]:
    """Pairs of every case's base and each change of it; every language is a variant of its own."""

    def pairs(cases: Sequence[Case]) -> list[Pair]:
        found = []
        for case in cases:
            for name, change in changes.items():
                text = change(case)
                if text is not None and text != case.base:
                    found.append(pair(name, case, text))
        return found

    return pairs


def pair(name: str, case: Case, text: str) -> Pair:
    """The case's base beside another answer to its prompt."""
    return Pair(variant_of(name, case.lang), case.prompt.id, (case.prompt, case.base), (case.prompt, text))


def variant_of(name: str, lang: str) -> str:
    """The name of a variant in a language."""
    return name if lang == "en" else f"{name} [{lang}]"


def by_language(texts: Mapping[str, Sequence[str]], place: Callable[[Case, str], str]) -> dict[str, Change]:
    """One change for every phrase, made in cases of its language that do not have it yet."""

    def change_for(lang: str, phrase: str) -> Change:
        return lambda case: place(case, phrase) if case.lang == lang and phrase not in case.base else None

    return {phrase: change_for(lang, phrase) for lang, phrases in texts.items() for phrase in phrases}


def before(case: Case, phrase: str) -> str:
    """The phrase and then the base."""
    return f"{phrase}{'' if case.lang == 'zh' else ' '}{case.base}"


def after(case: Case, phrase: str) -> str:
    """The base and then the phrase; on a line of its own where the base ends in a list or a table."""
    gap = "\n\n" if "\n" in case.base else "" if case.lang == "zh" else " "
    return f"{case.base}{gap}{phrase}"
