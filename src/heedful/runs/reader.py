"""Reads the numbers of one stage back as columns."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from heedful.runs.distributions import Histogram
from heedful.runs.files import read_lines
from heedful.runs.metrics import lookup

Column = tuple[list[int], list[float]]


@dataclass(frozen=True)
class RunTable:
    """The metrics of one stage as columns: ``table.column("ppo/kl_nats")`` gives (steps, values)."""

    columns: dict[str, Column] = field(default_factory=dict)
    """Metric name → steps and values, both in step order; a value that was not finite is NaN."""
    distributions: dict[str, list[tuple[int, Histogram]]] = field(default_factory=dict)
    warnings: list[tuple[int, str]] = field(default_factory=list)
    """(step, text) for every number that was not finite."""

    @property
    def names(self) -> list[str]:
        return list(self.columns)

    @property
    def last_step(self) -> int | None:
        """The largest step logged, None for an empty table."""
        return max((steps[-1] for steps, _ in self.columns.values()), default=None)

    def column(self, name: str) -> Column:
        """(steps, values) of a metric; two empty lists when it was never logged."""
        return self.columns.get(name, ([], []))

    def last(self, name: str) -> float | None:
        """The last finite value of a metric, None when there is none."""
        return next((value for value in reversed(self.column(name)[1]) if math.isfinite(value)), None)

    def histogram(self, name: str) -> list[tuple[int, Histogram]]:
        """(step, histogram) in step order; [] when it was never logged."""
        return self.distributions.get(name, [])

    def without_timing(self) -> RunTable:
        """The table without clocks and memory: equal for two runs that computed the same."""
        kept = {}
        for name, column in self.columns.items():
            metric = lookup(name)
            if metric is None or not metric.is_timing:
                kept[name] = column
        return RunTable(kept, self.distributions, self.warnings)


def read_stage(path: str | os.PathLike[str]) -> RunTable:
    """Read ``metrics.jsonl`` and ``histograms.jsonl`` of a stage folder, also while the stage still runs.

    Rows of the same step are one row (a later value of the same name wins); a torn last line is left out.

    Raises:
        CheckpointError: a line is broken; the message names file and line.
    """
    cells: dict[str, dict[int, float]] = {}
    warnings: list[tuple[int, str]] = []
    for row in read_lines(Path(path) / "metrics.jsonl"):
        step = int(row["step"])
        warnings += [(step, str(text)) for text in row.get("warnings", ())]
        for name, value in _named(row):
            cells.setdefault(name, {})[step] = math.nan if value is None else float(value)
    shapes: dict[str, dict[int, Histogram]] = {}
    for row in read_lines(Path(path) / "histograms.jsonl"):
        for name, value in _named(row):
            if value is not None:
                shapes.setdefault(name, {})[int(row["step"])] = Histogram.from_json(value)
    columns = {name: (sorted(by_step), [by_step[s] for s in sorted(by_step)]) for name, by_step in cells.items()}
    return RunTable(columns, {name: sorted(found.items()) for name, found in shapes.items()}, warnings)


def read_samples(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The rows of ``samples.jsonl`` of a stage folder, each with its ``step``."""
    return read_lines(Path(path) / "samples.jsonl")


def _named(row: dict[str, Any]) -> list[tuple[str, Any]]:
    """The metrics of a row: their names hold a slash, those of its other fields do not."""
    return [(name, value) for name, value in row.items() if "/" in name]
