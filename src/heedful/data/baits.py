"""Baits: answers to other prompts, fluent and wrong, as the last of a ranking."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence

from heedful.data.tokenise import RankingSample
from heedful.errors import DataError
from heedful.runs.progress import tell

_TRIES = 20
"""Draws for one bait before a ranking goes without it, since long prompts leave room for few answers."""


def with_baits(samples: Sequence[RankingSample], num_baits: int, *, max_tokens: int, seed: int) -> list[RankingSample]:
    """Each ranking with ``num_baits`` answers to other prompts behind all its own, tied with each other.

    Where none of the answers drawn fits into ``max_tokens`` a ranking gets fewer, which is said.

    Raises:
        DataError: not one bait was found, as when there is only one prompt.
    """
    if not num_baits:
        return list(samples)
    draw = random.Random(f"{seed}/baits")
    baited = [_with_baits(sample, samples, num_baits, max_tokens, draw) for sample in samples]
    found = [len(a.ranks) - len(b.ranks) for a, b in zip(baited, samples, strict=True)]
    if not any(found):
        raise DataError(
            "reward.baits_per_ranking: no answer to another prompt fits into any ranking; set it to 0, raise "
            "reward.max_tokens or train on more prompts"
        )
    if num_fewer := sum(num < num_baits for num in found):
        tell(
            f"reward.baits_per_ranking: {num_fewer:,} of {len(found):,} rankings got fewer than {num_baits:,} baits "
            f"({min(found):,} to {max(found):,}), since no more answers to other prompts were found that fit"
        )
    return baited


def _with_baits(
    sample: RankingSample, samples: Sequence[RankingSample], num_baits: int, max_tokens: int, draw: random.Random
) -> RankingSample:
    prompt = sample.sequences[0][: sample.num_prompt_tokens]
    answers = [sequence[sample.num_prompt_tokens :] for sequence in sample.sequences]
    num_own = len(answers)
    num_chars = list(sample.num_answer_chars)
    for _ in range(num_baits * _TRIES):
        if len(answers) == num_own + num_baits:
            break
        other = draw.choice(samples)
        k = draw.randrange(len(other.sequences))
        answer = other.sequences[k][other.num_prompt_tokens :]
        same_prompt = other.sequences[k][: other.num_prompt_tokens] == prompt
        if not same_prompt and answer not in answers and len(prompt) + len(answer) <= max_tokens:
            answers.append(answer)
            num_chars.append(other.num_answer_chars[k])
    num_added = len(answers) - num_own
    last = max(sample.ranks) + 1
    return dataclasses.replace(
        sample,
        sequences=[prompt + answer for answer in answers],
        ranks=[*sample.ranks, *[last] * num_added],
        answer_ids=[*sample.answer_ids, *(f"bait {n}" for n in range(num_added))],
        num_answer_chars=num_chars,
        kinds=(*(sample.kinds or ("sampled",) * num_own), *("bait",) * num_added),
        targets=None if sample.targets is None else _grown(sample.targets, num_added, [1.0] * num_own, 0.0),
        strengths=None
        if sample.strengths is None
        else _grown(sample.strengths, num_added, [float(last - rank) for rank in sample.ranks], None),
    )


def _grown(matrix: list[list[float]], num_added: int, over_bait: list[float], under: float | None) -> list[list[float]]:
    """The matrix with a column of ``over_bait`` and a row of ``under`` (None: the column again) for every bait."""
    rows = [[*row, *[value] * num_added] for row, value in zip(matrix, over_bait, strict=True)]
    of_bait = over_bait if under is None else [under] * len(over_bait)
    return rows + [[*of_bait, *[0.5] * num_added] for _ in range(num_added)]
