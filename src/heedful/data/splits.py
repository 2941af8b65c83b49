"""Training and held-out records that share no prompt, not even a near-duplicate one."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TypeVar

from heedful.data.duplicates import group, normalise
from heedful.data.prompts import Prompted, prompt_text
from heedful.errors import DataError

T = TypeVar("T", bound=Prompted)


def split(
    records: Sequence[T], fraction: float, seed: int, *, threshold: float = 0.8
) -> tuple[list[T], list[T]]:
    """(train, held out): about ``fraction`` of the records are held out, whole groups of like prompts at a time.

    The same records and seed give the same two sets whatever the order of the records; each side keeps their order.

    Args:
        threshold: overlap from which two prompts are alike (see :func:`~heedful.data.duplicates.group`); 1 keeps only
            equal prompts together, for prompts made from one template.

    Raises:
        DataError: the fraction is not between 0 and 1, or one side would be empty.
    """
    if not 0 < fraction < 1:
        raise DataError(f"the held-out fraction must lie between 0 and 1, not {fraction:g}")
    texts = [prompt_text(record) for record in records]
    members: dict[int, list[int]] = {}
    for i, number in enumerate(group(texts, threshold)):
        members.setdefault(number, []).append(i)

    def draw(indices: list[int]) -> str:
        return min(hashlib.sha256(f"{seed}\n{normalise(texts[i])}".encode()).hexdigest() for i in indices)

    wanted = max(1, round(fraction * len(records)))
    held_out: set[int] = set()
    for indices in sorted(members.values(), key=draw):
        if len(held_out) + len(indices) <= wanted:
            held_out.update(indices)
    if not held_out:
        raise DataError(
            f"cannot hold out {fraction:.0%} of {len(records)} records: their prompts form {len(members)} groups of "
            "like prompts, all larger than that; add prompts, raise the fraction, or set the threshold to 1"
        )
    if len(held_out) == len(records):
        raise DataError(f"cannot split {len(records)} record(s); add more, or lower the fraction of {fraction:.0%}")
    train = [record for i, record in enumerate(records) if i not in held_out]
    return train, [record for i, record in enumerate(records) if i in held_out]
