"""How scores are spread, over all answers and within each group of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Spread:
    """A distribution in eight numbers."""

    num: int
    mean: float
    std: float
    """of the values themselves (divided by their number)"""
    min: float
    p5: float
    p50: float
    p95: float
    max: float

    def to_json(self) -> dict[str, float]:
        return dataclasses.asdict(self)


def spread(values: Sequence[float]) -> Spread:
    """The distribution of at least one finite value."""
    numbers = np.asarray(values, dtype=np.float64)
    low, p5, p50, p95, high = np.quantile(numbers, [0.0, 0.05, 0.5, 0.95, 1.0])
    return Spread(
        len(numbers), float(numbers.mean()), float(numbers.std()), float(low), float(p5), float(p50), float(p95),
        float(high),
    )  # fmt: skip


def by_group(values: Sequence[float], groups: Sequence[str]) -> dict[str, Spread]:
    """The distribution within every group that has a name, the largest groups first."""
    found: dict[str, list[float]] = {}
    for value, group in zip(values, groups, strict=True):
        if group:
            found.setdefault(group, []).append(value)
    return {group: spread(found[group]) for group in sorted(found, key=lambda g: (-len(found[g]), g))}


def table(spreads: Mapping[str, Spread]) -> list[str]:
    """Lines of a table, one row a group; names are cut at 32 characters."""
    width = max([len("scores of"), *(len(name[:32]) for name in spreads)])
    names = [field.name for field in dataclasses.fields(Spread)]
    lines = [f"{'scores of':<{width}}" + "".join(f"{name:>9}" for name in names)]
    for name, found in spreads.items():
        numbers = "".join(f"{value:>9.3f}" for value in dataclasses.astuple(found)[1:])
        lines.append(f"{name[:32]:<{width}}{found.num:>9,}{numbers}")
    return lines
