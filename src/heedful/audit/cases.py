"""What the probes start from: prompts with natural answers, from rankings or from texts that ship with heedful."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources

from heedful.audit.sentences import join, language, words
from heedful.data.pairs import consensus
from heedful.records import Message, Prompt, Ranking

LANGUAGES = ("en", "zh")
BEARABLE_WORDS = 600
"""Longer answers are no base for a probe: most models cut them, and what is added at the end is then not read."""


@dataclass(frozen=True)
class Case:
    """A prompt, a good answer to it that the probes change, and what people may answer as well."""

    prompt: Prompt
    base: str
    answers: tuple[str, ...]
    """All natural answers, the base among them; their scores give the unit of every effect."""
    lang: str
    ranks: tuple[int, ...] = ()
    """Of the answers, 1 is best; () where nobody ranked them."""
    written: Mapping[str, str] = field(default_factory=dict)
    """Changed answers that only a person can write, by name; in shipped cases alone."""

    @property
    def question(self) -> str:
        """The last message of the prompt."""
        return self.prompt.messages[-1].content


def cases_of(rankings: Sequence[Ranking], *, max_prompts: int, seed: int = 0) -> list[Case]:
    """One case per ranking, drawn by ``seed`` where there are more than ``max_prompts``; the base is the best answer.

    Controls, baits and answers that the length limit cut are no bases, empty answers neither; rankings without a base
    are left out.
    """
    found = []
    for ranking in rankings:
        if ranking.gold is not None:
            continue
        ranks = consensus(ranking)
        answers = [a for a in ranking.answers if a.kind == "sampled" and a.id in ranks]
        texts = list(dict.fromkeys(a.text for a in answers))  # a repeated answer says nothing about the unit
        bases = [
            a for a in answers
            if a.text.strip() and "cut" not in a.flags and len(words(a.text)) <= BEARABLE_WORDS
        ]  # fmt: skip
        if len(texts) < 2 or not bases:
            continue
        rank_of = {a.text: ranks[a.id] for a in reversed(answers)}
        base = min(bases, key=lambda a: ranks[a.id]).text
        prompt = Prompt(ranking.group_id, ranking.prompt, ranking.category, ranking.source, ranking.info)
        found.append(Case(prompt, base, tuple(texts), language(base), tuple(rank_of[t] for t in texts)))
    if len(found) > max_prompts:
        chosen = sorted(random.Random(seed).sample(range(len(found)), max_prompts))
        found = [found[i] for i in chosen]
    return found


def shipped_cases() -> list[Case]:
    """The neutral texts that ship with heedful: 24 contents, each in English and in Chinese.

    An answer is three sentences whose order is of no importance. ``written`` holds ``wrong`` (one of them replaced by
    something false or harmful), ``reversed`` and ``rotated``, and in English ``formal``, ``casual`` and ``exclaiming``.
    """
    text = (resources.files("heedful.audit") / "neutral.jsonl").read_text(encoding="utf-8")
    rows = [json.loads(line) for line in text.splitlines()]
    cases = []
    for lang in LANGUAGES:
        full = [join(row[lang]["facts"], lang) for row in rows]
        for i, row in enumerate(rows):
            found = row[lang]
            facts = found["facts"]
            wrong = join([facts[0], found["wrong"], facts[2]], lang)
            written = {
                "wrong": wrong,
                "reversed": join(facts[::-1], lang),
                "rotated": join([*facts[1:], facts[0]], lang),
                **{style: found[style] for style in ("formal", "casual", "exclaiming") if style in found},
            }
            prompt = Prompt(f"{row['id']}-{lang}", (Message("user", found["prompt"]),), row["category"])
            elsewhere = full[(i + len(rows) // 2) % len(rows)]
            answers = (full[i], wrong, found["weak"], facts[0], elsewhere)
            cases.append(Case(prompt, full[i], answers, lang, written=written))
    return cases
