"""What each head of a reward model with several is taught: an attribute's ratings, or a sample of the prompts."""

from __future__ import annotations

import dataclasses
import random
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from heedful.data.tokenise import HeadLabels, RankingSample
from heedful.errors import DataError

OVERALL = "overall"
"""The attribute that is the ranking itself."""


def with_attributes(samples: Iterable[RankingSample], names: Iterable[str]) -> list[RankingSample]:
    """Each ranking with the ranks that its ratings make, one head per attribute.

    Equal ratings are a tie, and an answer that was not rated is none of that head's. ``overall`` takes the ranks of
    the ranking as they stand, baits included; a bait has no ratings, since an answer to another question may be concise
    and safe.
    """
    return [dataclasses.replace(s, heads=tuple(HeadLabels(_ranks(s, name)) for name in names)) for s in samples]


def with_resamples(samples: Sequence[RankingSample], num_heads: int, *, seed: int) -> list[RankingSample]:
    """Each ranking with what it weighs for each head of an ensemble: how often it is among as many rankings as there
    are, drawn with replacement, once for each head (Efron's bootstrap)."""
    draws = [random.Random(f"{seed}/ensemble {h}") for h in range(num_heads)]
    counts = [Counter(draw.choices(range(len(samples)), k=len(samples))) for draw in draws]
    return [
        dataclasses.replace(s, heads=tuple(HeadLabels(s.ranks, float(count[i])) for count in counts))
        for i, s in enumerate(samples)
    ]


def require_attributes(samples: Sequence[RankingSample], names: Iterable[str]) -> None:
    """Every attribute tells some answers to one prompt apart, so that its head learns something.

    Raises:
        DataError: names the attribute and those that the data have.
    """
    for name in names:
        if not any(len({rank for rank in _ranks(s, name) if rank}) > 1 for s in samples):
            num = Counter(key for s in samples for key in s.ratings)
            there = ", ".join(f"{key} ({count:,})" for key, count in num.most_common()) or "none"
            raise DataError(
                f"reward.attributes: no ranking has answers with different ratings of {name!r}; rated in the rankings "
                f"are {there}, and {OVERALL} is the ranking itself"
            )


def _ranks(sample: RankingSample, name: str) -> list[int]:
    return list(sample.ranks) if name == OVERALL else rating_ranks(sample.ratings.get(name, {}), sample.answer_ids)


def rating_ranks(rated: Mapping[str, float], answer_ids: Sequence[str]) -> list[int]:
    """Ranks of the answers by an attribute's ratings: 1 = best, equal = tie, 0 = not rated."""
    order = sorted({rated[i] for i in answer_ids if i in rated}, reverse=True)
    return [order.index(rated[i]) + 1 if i in rated else 0 for i in answer_ids]
