"""What a simulated rater makes of an item; it sees what the JSON interface shows and nothing else."""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from heedful.errors import ConfigError
from heedful.evaluate.gold import Scorer
from heedful.records import Message, Prompt

Utility = Callable[[Sequence[Message], str], float]
"""How good an answer to these messages truly is; differences of about 1 are plain to see."""


@dataclass(frozen=True, slots=True)
class Profile:
    """How a rater's opinion of an answer comes about: its true utility, and what is added to it."""

    noise: float = 0.4
    """Deviation of a normal number, drawn anew for every answer"""
    length_love: float = 0.0
    """For every doubling of the characters that are no white space"""
    position_love: float = 0.0
    """For the first card, falling evenly to 0 for the last"""
    spam: float = 0.0
    """Chance that an item is ranked at random"""
    drift: float = 0.0
    """Added to the noise with every 100 items"""
    tie_width: float = 0.15
    """Answers whose opinions are closer than this to the best of their rank are tied with it"""
    characters_per_second: float = math.inf
    """Reading speed; inf = no time passes"""


PROFILES = {
    "honest": Profile(),
    "noisy": Profile(noise=1.2),
    "length_lover": Profile(length_love=1.0),
    "position_lover": Profile(position_love=1.5),
    "spammer": Profile(spam=1.0),
    "drifter": Profile(drift=0.3),
}


@dataclass
class Rater:
    """A simulated person. The same seed and the same items in the same order give the same rankings."""

    name: str
    profile: Profile
    utility: Utility
    seed: int = 0
    num_ranked: int = field(default=0, init=False)

    def rank(self, task: Mapping[str, Any]) -> dict[str, Any]:
        """The body of a submission for an item as ``GET /api/v1/next`` gives it."""
        rng = self._rng(self.num_ranked)
        opinions = self._opinions(task, rng)
        self.num_ranked += 1
        ranks = to_ranks(opinions, self.profile.tie_width)
        said: dict[str, Any] = {"nonce": task["nonce"], "ranks": ranks, "guideline_version": task["guideline_version"]}
        asks = task["asks"]
        if asks["attributes"]:
            rated = {card: max(1, min(5, round(3 + opinion))) for card, opinion in opinions.items()}
            said["ratings"] = dict.fromkeys(asks["attributes"], rated)
        if asks["strength"] and len(set(ranks.values())) == 2:
            gap = max(opinions.values()) - min(opinions.values())
            said["strength"] = 1 + (gap > 0.7) + (gap > 1.5)
        if asks["reason"] == "required":
            said["reason"] = "By my overall impression."
        return said

    def seconds_for(self, task: Mapping[str, Any]) -> float:
        """How long reading the item takes."""
        texts = [*(turn["content"] for turn in task["prompt"]), *(card["text"] for card in task["cards"])]
        return sum(map(num_characters, texts)) / self.profile.characters_per_second

    def _opinions(self, task: Mapping[str, Any], rng: random.Random) -> dict[str, float]:
        cards, profile = task["cards"], self.profile
        if rng.random() < profile.spam:
            return {card["id"]: rng.gauss(0, 1) for card in cards}
        prompt = [Message(turn["role"], turn["content"]) for turn in task["prompt"]]
        noise = profile.noise + profile.drift * self.num_ranked / 100
        opinions = {}
        for slot, card in enumerate(cards):
            opinion = self.utility(prompt, card["text"]) + rng.gauss(0, noise)
            opinion += profile.length_love * math.log2(1 + num_characters(card["text"]))
            opinion += profile.position_love * (1 - slot / (len(cards) - 1))
            opinions[card["id"]] = opinion
        return opinions

    def _rng(self, number: int) -> random.Random:
        key = f"{self.seed}\x00{self.name}\x00{number}"
        return random.Random(hashlib.sha256(key.encode()).digest())


def num_characters(text: str) -> int:
    """Characters that are no white space: a measure for Chinese as for English."""
    return sum(not character.isspace() for character in text)


def to_ranks(opinions: Mapping[str, float], tie_width: float) -> dict[str, int]:
    """1 = best, without gaps; what is within ``tie_width`` of the best of a rank shares it."""
    ranks: dict[str, int] = {}
    rank, leader = 0, math.inf
    for name in sorted(opinions, key=lambda name: -opinions[name]):
        if rank == 0 or leader - opinions[name] > tie_width:
            rank, leader = rank + 1, opinions[name]
        ranks[name] = rank
    return ranks


def utility_of(scorer: Scorer, known: Sequence[Prompt] = ()) -> Utility:
    """A gold scorer as raters hold it.

    Args:
        known: what people know of the prompts besides their text (category and ``info``, such as a reference answer).
    """
    by_messages = {prompt.messages: prompt for prompt in known}

    def utility(messages: Sequence[Message], answer: str) -> float:
        prompt = by_messages.get(tuple(messages)) or Prompt("", tuple(messages))
        return float(scorer(prompt, answer, finished=True))

    return utility


def raters_of(crowd: Mapping[str, float], utility: Utility, seed: int) -> list[Rater]:
    """So many raters of each profile, named PROFILE-1, PROFILE-2, ….

    Raises:
        ConfigError: no such profile.
    """
    raters = []
    for name, count in crowd.items():
        if name not in PROFILES or count != int(count):
            raise ConfigError(f"{count:g} raters {name!r}: give a whole number of one of {', '.join(PROFILES)}")
        raters += [Rater(f"{name}-{n}", PROFILES[name], utility, seed) for n in range(1, int(count) + 1)]
    return raters
