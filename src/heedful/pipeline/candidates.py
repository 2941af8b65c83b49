"""Who answers which prompt, which answers are worth ranking, and the rankings that people are given."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from heedful.data.duplicates import alike
from heedful.data.strata import draw
from heedful.records import Answer, Prompt, Ranking

BAIT = "bait"
"""Kind of such an answer, and its policy: it is nobody's try at this prompt."""
_TRIES = 200
"""Answers drawn from for one bait."""


@dataclass(frozen=True)
class Source:
    """A policy at a temperature."""

    name: str
    """What answers are marked with"""
    model: str
    temperature: float
    weight: float
    """Its part of the answers, relative to the others'"""


@dataclass(frozen=True)
class Sampled:
    """One answer that a source gave."""

    source: str
    text: str
    is_cut: bool


def deal(
    prompts: Sequence[Prompt], sources: Sequence[Source], num_answers: Mapping[str, int], seed: int
) -> dict[str, list[Source]]:
    """By prompt id who gives its answers.

    All in all each source gives its part, to within one answer; sources of equal weight take turns, so that a prompt
    is answered by as many as there is room for, and who meets whom is drawn anew each time.
    """
    counts = dict.fromkeys(sources, 0)
    dealt: dict[str, list[Source]] = {prompt.id: [] for prompt in prompts}
    for asked, given in dealt.items():
        order = sorted(sources, key=lambda source: draw(seed, "deal", asked, source.name))
        for _ in range(num_answers[asked]):
            taken = min(order, key=lambda source: ((counts[source] + 1) / source.weight, given.count(source)))
            counts[taken] += 1
            given.append(taken)
    return dealt


def differing(answers: Mapping[int, Sampled], threshold: float) -> list[int]:
    """The sample indices of the answers that are not empty and not nearly the same as one that is kept before."""
    kept: list[int] = []
    for index, answer in sorted(answers.items()):
        usable = answer.text.strip() and "\x00" not in answer.text  # which no database can hold
        if usable and not any(alike(answer.text, answers[k].text, threshold) for k in kept):
            kept.append(index)
    return kept


def with_baits(prompts: Sequence[Prompt], rate: float, seed: int) -> set[str]:
    """The ids of the prompts, that share of them, whose last answer shall be a bait."""
    ranked = sorted(prompts, key=lambda prompt: draw(seed, "bait", prompt.id))
    return {prompt.id for prompt in ranked[: round(rate * len(prompts))]}


def rankings_of(
    prompts: Sequence[Prompt], answers: Mapping[str, Sequence[Sampled]], baited: set[str], *,
    round: int, seed: int, threshold: float,
) -> list[Ranking]:  # fmt: skip
    """What people are to rank: a prompt and its answers, as far as there are two or more.

    Of round 1 and later the group id names the round, so that a prompt may be asked again.
    """
    found, baits = [], _Baits(prompts, answers, seed, threshold)
    for prompt in prompts:
        given = [_answer(n, a, a.source) for n, a in enumerate(answers[prompt.id], 1)]
        if prompt.id in baited and (bait := baits.of(prompt, [a.text for a in given])):
            given.append(_answer(len(given) + 1, bait, BAIT, BAIT))
        if len(given) >= 2:
            found.append(Ranking(
                f"{prompt.id}-r{round}" if round else prompt.id, prompt.messages, tuple(given),
                category=prompt.category, lang=str(prompt.info.get("lang", "")), round=round, source=prompt.source,
                info=dict(prompt.info),
            ))  # fmt: skip
    return found


def _answer(number: int, given: Sampled, policy: str, kind: str = "sampled") -> Answer:
    return Answer(f"a{number}", given.text, policy=policy, kind=kind, flags=("cut",) if given.is_cut else ())


class _Baits:
    """Answers to other prompts, fluent and wrong: whole ones to prompts of the same category where there are any."""

    def __init__(
        self, prompts: Sequence[Prompt], answers: Mapping[str, Sequence[Sampled]], seed: int, threshold: float
    ) -> None:
        self._given = [(p, answer) for p in prompts for answer in answers[p.id]]
        self._seed, self._threshold = seed, threshold

    def of(self, prompt: Prompt, own: Sequence[str]) -> Sampled | None:
        """One that is like none of the prompt's own answers; None where none of those drawn is."""
        rng = random.Random(draw(self._seed, "bait of", prompt.id))
        drawn = [self._given[i] for i in rng.sample(range(len(self._given)), min(len(self._given), _TRIES))]
        for asked, answer in sorted(drawn, key=lambda d: (d[1].is_cut, d[0].category != prompt.category)):
            if asked.id != prompt.id and not any(alike(answer.text, text, self._threshold) for text in own):
                return answer
        return None


def with_gold(
    rankings: Sequence[Ranking], controls: Sequence[Ranking], rate: float, seed: int
) -> tuple[list[Ranking], int]:
    """The rankings with so many control items among them that these make up ``rate`` of all, in a drawn order, and how
    many controls that would take (there may be fewer)."""
    wanted = round(len(rankings) * rate / (1 - rate))
    ranked = sorted(controls, key=lambda control: draw(seed, "gold", control.group_id))
    return sorted([*rankings, *ranked[:wanted]], key=lambda r: draw(seed, "order", r.group_id)), wanted
