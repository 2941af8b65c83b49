"""A distribution in few numbers: exact moments and up to 64 bins whatever the number of values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

NUM_BINS = 64
_FIELDS = ("edges", "counts", "mean", "std", "minimum", "maximum", "num_nonfinite")


@dataclass(frozen=True, slots=True)
class Histogram:
    """Binned values. The moments are those of the values themselves, not of the bins."""

    edges: list[float]
    """One more than ``counts``, rising. The outermost bins reach to the extremes and may be wide."""
    counts: list[int]
    mean: float
    std: float
    minimum: float
    maximum: float
    num_nonfinite: int = 0
    """Values left out because they were NaN or infinite."""

    @property
    def num_values(self) -> int:
        return sum(self.counts)

    def to_json(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in _FIELDS}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Histogram:
        return cls(**{name: data[name] for name in _FIELDS})


def summarise(values: Sequence[float]) -> Histogram | None:
    """The histogram of any number of values, or None when no finite one is among them.

    The inner bins share the middle 99 % evenly, so that one far outlier does not flatten the picture.
    """
    everything = np.asarray(values, dtype=np.float64).reshape(-1)
    finite = everything[np.isfinite(everything)]
    if finite.size == 0:
        return None
    low, high = float(finite.min()), float(finite.max())
    if low == high:
        margin = max(abs(low), 1.0) * 1e-3
        edges = np.array([low - margin, high + margin])
    else:
        inner_low, inner_high = np.quantile(finite, [0.005, 0.995])
        edges = np.linspace(inner_low, inner_high, NUM_BINS - 1) if inner_low < inner_high else np.array([inner_low])
        edges = np.unique(np.concatenate([[low], edges, [high]]))
    counts, _ = np.histogram(finite, bins=edges)
    return Histogram(
        edges=[float(e) for e in edges],
        counts=[int(c) for c in counts],
        mean=float(finite.mean()),
        std=float(finite.std()),
        minimum=low,
        maximum=high,
        num_nonfinite=int(everything.size - finite.size),
    )
