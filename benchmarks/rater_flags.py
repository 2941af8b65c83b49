"""Does quality control find raters who were planted, and only those? Simulated projects of 30 raters over many seeds.

    python benchmarks/rater_flags.py                     50 seeds, projects with nine planted raters and clean ones
    python benchmarks/rater_flags.py --seeds 5 --items 60 300
    python benchmarks/rater_flags.py --worth_of_length 0.5    longer answers are better more often than not

Answers have a worth (deviation 1 over the answers of a prompt) that is a little higher for longer ones. An honest rater
sees the worth with noise, and has a slight taste of length and position, a tempo and a share of ties of her own; two of
them agree on about 70 % of pairs. Planted raters add to that:

    spammer: random     ranks at random, five times as fast
    spammer: patient    ranks at random at an honest tempo
    spammer: ties       ties everything
    length lover X      X for an answer that is longer by a deviation (1.65 times as long)
    position lover X    X for the first card, falling to 0 for the last
"""

from __future__ import annotations

import argparse
import math
import time
from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np

from heedful.annotate.quality.flags import findings
from heedful.annotate.submitted import Submitted

PLANTED = (
    "spammer: random", "spammer: patient", "spammer: ties", "length lover 0.5", "length lover 1", "length lover 2",
    "position lover 0.5", "position lover 1", "position lover 2",
)  # fmt: skip
CAUGHT_BY = {
    "spammer": {"gold", "agreement", "ties", "speed"}, "length": {"length"}, "position": {"position", "slot"},
}  # fmt: skip
"""First word of a planted rater → the kinds of finding that name what was planted."""
LENGTH_SPREAD = 0.5
"""Deviation of the log length."""
TIE_WIDTH = 0.15
MORE_ON_GOLD = 2.5
"""The right answer of a control item is worth so much more than each of the two baits."""


@dataclass(frozen=True)
class Rater:
    """How a simulated person ranks."""

    name: str
    profile: str
    noise: float
    length: float
    position: float
    tempo: float
    """Seconds per item, times what the text and chance make of it"""


def draw_raters(rng: np.random.Generator, num: int, planted: tuple[str, ...]) -> list[Rater]:
    raters = []
    for i in range(num):
        profile = planted[i] if i < len(planted) else "honest"
        strength = float(profile.split()[-1]) if "lover" in profile else 0.0
        raters.append(
            Rater(
                name=f"r{i:02d}",
                profile=profile,
                noise=rng.uniform(0.5, 1.2),
                length=rng.normal(0, 0.1) + strength * profile.startswith("length"),
                position=rng.normal(0.05, 0.1) + strength * profile.startswith("position"),
                tempo=60 * math.exp(rng.normal(0, 0.35)) * (0.2 if profile == "spammer: random" else 1),
            )
        )
    return raters


@dataclass(frozen=True)
class Item:
    name: str
    worth: np.ndarray
    length: np.ndarray
    """In deviations"""
    gold: bool


def draw_item(
    rng: np.random.Generator, name: str, num_answers: int, worth_of_length: float, gold: bool = False
) -> Item:
    length = rng.normal(size=num_answers)
    worth = worth_of_length * length + math.sqrt(1 - worth_of_length**2) * rng.normal(size=num_answers)
    if gold:  # answer 0 is shorter and right, the last two are fluent baits
        length[0], length[-2:] = -1.0, 1.0
        worth[0] = worth[1:-2].max(initial=0) + 1
        worth[-2:] = np.minimum(worth[-2:], worth[0] - MORE_ON_GOLD)
    return Item(name, worth, length, gold)


def rank(rng: np.random.Generator, rater: Rater, item: Item, slots: np.ndarray) -> list[int]:
    num = len(slots)
    if rater.profile == "spammer: ties":
        return [1] * num
    seen = item.worth + rater.noise * rng.normal(size=num) + rater.length * item.length
    seen += rater.position * (1 - slots / (num - 1))
    if rater.profile.startswith("spammer"):
        seen = rng.normal(size=num)
    order = np.argsort(-seen)
    steps = np.diff(-seen[order]) > TIE_WIDTH
    ranks = np.empty(num, dtype=int)
    ranks[order] = 1 + np.concatenate([[0], np.cumsum(steps)])
    return [int(r) for r in ranks]


def simulate(
    seed: int, *, num_raters: int = 30, items: int = 150, planted: tuple[str, ...] = PLANTED, num_answers: int = 4,
    overlap_share: float = 0.2, gold_rate: float = 0.09, repeat_rate: float = 0.025, worth_of_length: float = 0.25,
) -> tuple[list[Submitted], dict[str, str]]:  # fmt: skip
    """A project in which everybody ranked about ``items`` items, and each rater's profile.

    A share of the items has three raters, the others one, as the queue gives them out by default.

    Args:
        worth_of_length: correlation of worth and log length.
    """
    rng = np.random.default_rng(seed)
    raters = draw_raters(rng, num_raters, planted)
    num_gold, num_repeats = round(items * gold_rate), round(items * repeat_rate)
    places = num_raters * (items - num_gold - num_repeats)
    work: dict[str, list[Item]] = {r.name: [] for r in raters}
    while places > 0:
        item = draw_item(rng, f"i{places}", num_answers, worth_of_length)
        people = min(num_raters, 3 if rng.random() < overlap_share else 1)
        least = sorted(raters, key=lambda r: (len(work[r.name]), rng.random()))[:people]
        for rater in least:
            work[rater.name].append(item)
        places -= people
    golds = [draw_item(rng, f"g{i}", num_answers, worth_of_length, gold=True) for i in range(2 * num_gold)]
    submitted = []
    for rater in raters:
        own = work[rater.name] + [golds[i] for i in rng.choice(len(golds), num_gold, replace=False)]
        todo = [(own[i], 0) for i in rng.permutation(len(own))] + [(item, 1) for item in work[rater.name][:num_repeats]]
        submitted += [_submission(rng, rater, item, at, repetition) for at, (item, repetition) in enumerate(todo)]
    return submitted, {r.name: r.profile for r in raters}


def _submission(rng: np.random.Generator, rater: Rater, item: Item, at: int, repetition: int) -> Submitted:
    answers = [f"a{i}" for i in range(len(item.worth))]
    slots = rng.permutation(len(answers))
    ranks = rank(rng, rater, item, slots)
    characters = [max(20, round(600 * math.exp(LENGTH_SPREAD * z))) for z in item.length]
    seconds = rater.tempo * (sum(characters) / 2400) * math.exp(rng.normal(0, 0.5))
    key = ((answers[0], answers[-2]), (answers[0], answers[-1]))
    return Submitted(
        annotator=rater.name, group_id=item.name, category="chat", round=0, lang="en",
        ranks=dict(zip(answers, ranks)), slots=dict(zip(answers, slots.tolist())),
        num_characters=dict(zip(answers, characters)), policies=dict.fromkeys(answers, "policy"), at=float(at),
        seconds=seconds, repetition=repetition, gold=key if item.gold else None,
    )  # fmt: skip


def caught(profile: str, kinds: set[str]) -> bool:
    """Whether the findings name what was planted."""
    return bool(kinds & CAUGHT_BY.get(profile.split()[0].strip(":"), set()))


def count(seeds: range, **project: Any) -> tuple[Counter[str], Counter[str], Counter[str]]:
    """(raters by profile, of these named rightly, findings by "profile / kind")."""
    num, named, by_kind = Counter[str](), Counter[str](), Counter[str]()
    for seed in seeds:
        submitted, profiles = simulate(seed, **project)
        found: dict[str, set[str]] = {}
        for finding in findings(submitted):
            found.setdefault(finding.rater, set()).add(finding.kind)
        for rater, profile in profiles.items():
            kinds = found.get(rater, set())
            num[profile] += 1
            named[profile] += bool(kinds) if profile == "honest" else caught(profile, kinds)
            by_kind.update(f"{profile} / {kind}" for kind in kinds)
        num["projects"] += 1
        named["projects"] += any(profiles[r] == "honest" for r in found)
    return num, named, by_kind


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=50)
    parser.add_argument("--first_seed", type=int, default=1000, help="the method was tuned on seeds below 100")
    parser.add_argument("--items", type=int, nargs="+", default=[60, 150, 300], help="that every rater ranks")
    parser.add_argument("--worth_of_length", type=float, default=0.25, help="correlation of worth and log length")
    arguments = parser.parse_args()
    for items in arguments.items:
        for planted in (PLANTED, ()):
            start = time.perf_counter()
            num, named, by_kind = count(
                range(arguments.first_seed, arguments.first_seed + arguments.seeds),
                items=items, planted=planted, worth_of_length=arguments.worth_of_length,
            )  # fmt: skip
            print(f"\n{items} items a rater, {len(planted)} of 30 planted ({time.perf_counter() - start:.0f} s)")
            for profile in [p for p in (*planted, "honest", "projects") if num[p]]:
                kinds = ", ".join(
                    f"{name.split(' / ')[1]} {n}" for name, n in by_kind.items() if name.startswith(profile + " /")
                )
                print(f"  {profile:20s} {named[profile]:4d} of {num[profile]:4d} = "
                      f"{named[profile] / num[profile]:6.1%}   {kinds}")  # fmt: skip


if __name__ == "__main__":
    main()
