"""What a finished run has come to, and where two of them differ."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch

from heedful.runs.metrics import METRICS

TIMINGS = {metric.name for metric in METRICS if metric.is_timing} | {"time"}


def outcome(path: Path) -> dict[str, Any]:
    """All that must be equal: weights, the newest checkpoint, numbers without clocks, sampled answers, results."""
    found: dict[str, Any] = {}
    for stage in sorted((path / "stages").iterdir()):
        for file in sorted(stage.glob("model/**/*")):
            if file.suffix == ".safetensors" or (file.is_file() and file.parent.name == "model"):
                found[str(file.relative_to(path))] = file.read_bytes()  # the adapter's own config names a path
        newest = max(stage.glob("checkpoints/step-????????"), default=stage)  # older ones may be half deleted
        for file in sorted(newest.glob("*.pt")):
            found[f"{stage.name}/{newest.name}/{file.name}"] = torch.load(file, weights_only=True)
        for name in ("metrics.jsonl", "histograms.jsonl", "samples.jsonl"):
            lines = (stage / name).read_text().splitlines() if (stage / name).exists() else []
            found[f"{stage.name}/{name}"] = [
                {key: value for key, value in json.loads(line).items() if key not in TIMINGS} for line in lines
            ]
        results = json.loads((stage / "finished.json").read_text())["results"]
        of_the_run = {k: v for k, v in results.items() if not re.search("seconds|memory|before$|after$", k)}
        found[f"{stage.name}/results"] = of_the_run  # without clocks and paths
    return found


def first_difference(a: Any, b: Any, where: str = "") -> str | None:
    """Where two nested values differ, to the bit."""
    if isinstance(a, torch.Tensor):
        return None if a.dtype == b.dtype and torch.equal(a, b) else where
    if isinstance(a, dict) and isinstance(b, dict):
        if a.keys() != b.keys():
            return f"{where}: keys {sorted(map(str, a.keys() ^ b.keys()))}"
        return next((d for k in a if (d := first_difference(a[k], b[k], f"{where}/{k}"))), None)
    if isinstance(a, (list, tuple)):
        if len(a) != len(b):
            return f"{where}: {len(a)} and {len(b)} items"
        return next((d for i, (x, y) in enumerate(zip(a, b)) if (d := first_difference(x, y, f"{where}/{i}"))), None)
    return None if a == b else f"{where}: {str(a)[:80]} and {str(b)[:80]}"
