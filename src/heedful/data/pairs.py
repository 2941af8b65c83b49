"""Judgements become a consensus, a consensus becomes preference pairs; and how far the judges agree.

Rules, in this order:
1. One person counts once per ranking: a repeated judgement of the same annotator replaces the earlier one.
2. Every pair of answers is put to the vote of those who ranked both; more than half of the decided votes wins.
3. Answers stand by pairs won minus pairs lost (Copeland). Where that is equal (a cycle, or tied votes) the lower mean
   rank stands first, and where that is equal too the answers are tied.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import combinations

from heedful.records import Answer, Judgement, PreferencePair, Ranking


def judgements_once(ranking: Ranking) -> list[Judgement]:
    """The last judgement of each annotator: a double submit counts once, a changed mind replaces the old one."""
    return list({judgement.annotator: judgement for judgement in ranking.rankings}.values())


def consensus(ranking: Ranking) -> dict[str, int]:
    """Rank by answer id: 1 = best, equal = tie, no gaps. Answers that nobody ranked are absent.

    A consensus that the ranking carries is taken as it is; otherwise see the rules at the top of this file.
    """
    if ranking.consensus is not None:
        return _without_gaps({name: Fraction(rank) for name, rank in ranking.consensus.items()})
    judgements = judgements_once(ranking)
    places: dict[str, list[Fraction]] = {}
    for judgement in judgements:
        ranks = _without_gaps({name: Fraction(rank) for name, rank in judgement.ranks.items()})
        worst = max(ranks.values(), default=1)
        for name, rank in ranks.items():
            places.setdefault(name, []).append(Fraction(rank - 1, max(1, worst - 1)))
    won = dict.fromkeys(places, 0)
    for first, second in combinations(places, 2):
        wins, losses, _ = votes(judgements, first, second)
        won[first] += (wins > losses) - (wins < losses)
        won[second] += (losses > wins) - (losses < wins)
    keys = {name: (-won[name], sum(seen, Fraction(0)) / len(seen)) for name, seen in places.items()}
    order = sorted(set(keys.values()))
    return {a.id: order.index(keys[a.id]) + 1 for a in ranking.answers if a.id in keys}


def _without_gaps(ranks: dict[str, Fraction]) -> dict[str, int]:
    order = sorted(set(ranks.values()))
    return {name: order.index(rank) + 1 for name, rank in ranks.items()}


def votes(judgements: Iterable[Judgement], first: str, second: str) -> tuple[int, int, int]:
    """(first better, second better, tied) among the judgements that ranked both."""
    wins = losses = ties = 0
    for judgement in judgements:
        a, b = judgement.ranks.get(first), judgement.ranks.get(second)
        if a is not None and b is not None:
            wins, losses, ties = wins + (a < b), losses + (a > b), ties + (a == b)
    return wins, losses, ties


def training_ranks(ranking: Ranking) -> dict[str, int]:
    """The consensus, with baits that nobody ranked behind all answers."""
    ranks = consensus(ranking)
    last = max(ranks.values(), default=0) + 1
    return ranks | {a.id: last for a in ranking.answers if a.kind == "bait" and a.id not in ranks}


def without_controls(rankings: Iterable[Ranking]) -> list[Ranking]:
    """What may be trained on: no control items, and no answers with a known place in the others."""
    kept = [ranking for ranking in rankings if ranking.gold is None]
    return [dataclasses.replace(r, answers=tuple(a for a in r.answers if a.kind != "gold")) for r in kept]


def same_answers(contents: Mapping[str, Hashable], ranks: Mapping[str, int]) -> list[tuple[list[str], list[str]]]:
    """The ids of answers with one content, group by group, and those of each group that count.

    Of identical answers with one rank the first stays; with different ranks none, since nothing tells them apart.
    """
    same: dict[Hashable, list[str]] = {}
    for answer_id, content in contents.items():
        same.setdefault(content, []).append(answer_id)
    return [(ids, ids[:1] if len({ranks[answer_id] for answer_id in ids}) == 1 else []) for ids in same.values()]


def judged_answers(ranking: Ranking, num_dropped: Counter[str]) -> list[Answer]:
    """The answers that say something: those that :func:`training_ranks` ranks and whose texts tell them apart.

    Args:
        num_dropped: counts the others, by reason.
    """
    ranks = training_ranks(ranking)
    texts = {answer.id: answer.text for answer in ranking.answers if answer.id in ranks}
    kept = {answer_id for _, counted in same_answers(texts, ranks) for answer_id in counted}
    num_dropped += Counter(not_ranked=len(ranking.answers) - len(texts), identical_answers=len(texts) - len(kept))
    return [answer for answer in ranking.answers if answer.id in kept]


def gold_ranks(control: Ranking) -> dict[str, int]:
    """Ranks by answer id that agree with a control item's own (better, worse) pairs; other answers are absent."""
    pairs = control.gold or ()
    ranks = {answer_id: 1 for pair in pairs for answer_id in pair}
    for _ in ranks:  # the longest chain has at most so many links
        for better, worse in pairs:
            ranks[worse] = max(ranks[worse], ranks[better] + 1)
    return ranks


def strength(ranking: Ranking, better: Answer, worse: Answer) -> float | None:
    """By how much an answer is better, as the data say: the margin of a pair, or the difference of judge scores."""
    margin: float | None = ranking.info.get("margin") if len(ranking.answers) == 2 else None
    if margin is None and better.score is not None and worse.score is not None:
        margin = better.score - worse.score
    return margin


def to_pairs(ranking: Ranking, *, min_agree_fraction: float = 0.0) -> list[PreferencePair]:
    """All pairs of answers that the consensus does not tie, better one first. Equal texts make no pair.

    Args:
        min_agree_fraction: pairs on which a smaller part of the votes agrees with the consensus (ties count one half)
            are left out.
    """
    ranks = consensus(ranking)
    judgements = judgements_once(ranking)
    ranked = sorted((a for a in ranking.answers if a.id in ranks), key=lambda a: ranks[a.id])
    pairs = []
    for better, worse in combinations(ranked, 2):
        if ranks[better.id] == ranks[worse.id] or better.text == worse.text:
            continue
        wins, losses, ties = votes(judgements, better.id, worse.id)
        num_votes = wins + losses + ties
        agree = (wins + ties / 2) / num_votes if num_votes else 1.0
        if agree < min_agree_fraction:
            continue
        margin = strength(ranking, better, worse)
        pairs.append(
            PreferencePair(
                group_id=ranking.group_id,
                prompt=ranking.prompt,
                chosen=better.text,
                rejected=worse.text,
                margin=margin,
                category=ranking.category,
                source=ranking.source,
                round=ranking.round,
                num_votes=num_votes,
                agree_fraction=agree,
                bait="bait" in (better.kind, worse.kind),
            )
        )
    return pairs


@dataclass(frozen=True)
class Agreement:
    """How far people agree who judged the same pair of answers."""

    num_pairs: int
    """Pairs of answers that two or more people judged."""
    num_comparisons: int
    """Pairs of people on pairs of answers."""
    observed: float
    """Share of comparisons with the same verdict (first, second or tie)."""
    kappa: float | None
    """Cohen's kappa; only when exactly two people judged, and not where chance alone would agree fully."""


def agreement(rankings: Sequence[Ranking]) -> Agreement | None:
    """Agreement over all rankings with two or more judges; None when there is none."""
    people: set[str] = set()
    verdicts: list[tuple[int, int]] = []
    num_pairs = 0
    for ranking in rankings:
        judgements = sorted(judgements_once(ranking), key=lambda j: j.annotator)
        for first, second in combinations([a.id for a in ranking.answers], 2):
            given = [
                (j.ranks[first] > j.ranks[second]) - (j.ranks[first] < j.ranks[second])
                for j in judgements
                if first in j.ranks and second in j.ranks
            ]
            if len(given) > 1:
                num_pairs += 1
                people.update(j.annotator for j in judgements)
                verdicts += combinations(given, 2)
    if not verdicts:
        return None
    observed = sum(a == b for a, b in verdicts) / len(verdicts)
    kappa = None
    if len(people) == 2:
        left, right = (Counter(side) for side in zip(*verdicts))
        chance = sum(left[v] * right[v] for v in left) / len(verdicts) ** 2
        kappa = (observed - chance) / (1 - chance) if chance < 1 else None
    return Agreement(num_pairs, len(verdicts), observed, kappa)
