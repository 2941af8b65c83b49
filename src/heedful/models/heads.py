"""Several heads on one trunk: what each says of an answer, and the one score that is made of them.

A reward model's folder has one output, which every tool reads; the heads that it was made of lie beside it in one file
for whoever wants to know more.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, final

import torch
from torch import Tensor

from heedful.errors import ModelError

HEADS_FILE = "heads.json"
"""In a reward model's folder. Not a .safetensors file: servers load every one of those as weights of the model."""


@final
@dataclass
class Heads:
    """H rows that read the last hidden state, and how the score is made of them."""

    kind: Literal["attributes", "ensemble"]
    """Each taught an attribute of its own, or all the same on samples of the prompts."""
    names: tuple[str, ...]
    weights: tuple[float, ...]
    """Of each head, in units of its deviation for attributes; the score of an ensemble is the plain mean."""
    weight_HD: Tensor
    """float32"""
    means: tuple[float, ...] = ()
    """Of each head's scores over held-out answers."""
    deviations: tuple[float, ...] = ()
    """Of the same scores within a prompt."""

    def scalars(self, hidden: Tensor) -> Tensor:
        """[..., H]: what each head says at hidden states [..., D], in float32."""
        with torch.autocast(hidden.device.type, enabled=False):
            return hidden.float() @ self.weight_HD.T

    def factors(self, deviations: Sequence[float]) -> list[float]:
        """What each head's scores are multiplied by before they are summed, [H]."""
        if self.kind == "ensemble":
            return list(self.weights)
        return [w / max(d, 1e-6) for w, d in zip(self.weights, deviations, strict=True)]

    def row(self) -> Tensor:
        """[D]: the one row that gives the score."""
        return torch.tensor(self.factors(self.deviations), device=self.weight_HD.device) @ self.weight_HD.detach()

    def disagreement(self, outputs: Sequence[float]) -> float:
        """How far the heads' scores of one answer disagree, in the units of the score they make: the deviation over the
        heads of (x − mean) / deviation, times the mean deviation."""
        standard = [(x - m) / max(d, 1e-6) for x, m, d in zip(outputs, self.means, self.deviations, strict=True)]
        return statistics.stdev(standard) * statistics.fmean(self.deviations)

    def to_json(self) -> dict[str, Any]:
        """Plain data; the weight is exact, a float32 in decimals being read back as the same."""
        plain = {key: getattr(self, key) for key in ("kind", "names", "weights", "means", "deviations")}
        return {**plain, "weight": self.weight_HD.detach().tolist()}


def new_heads(
    kind: Literal["attributes", "ensemble"], weights: dict[str, float], width: int, *, seed: int, device: torch.device
) -> Heads:
    """Heads to be trained, normal with deviation 1/√(D+1) as the head of a new reward model, each its own."""
    draw = torch.Generator().manual_seed(seed)
    weight_HD = torch.randn(len(weights), width, generator=draw) / math.sqrt(width + 1)
    return Heads(kind, tuple(weights), tuple(weights.values()), torch.nn.Parameter(weight_HD.to(device)))


def load_heads(path: Path | str, device: torch.device) -> Heads | None:
    """The heads in a reward model's folder; None where there are none.

    Raises:
        ModelError: the file is damaged.
    """
    file = Path(path) / HEADS_FILE
    if not file.exists():
        return None
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        lists = {key: tuple(content[key]) for key in ("names", "weights", "means", "deviations")}
        weight_HD = torch.tensor(content["weight"], dtype=torch.float32, device=device)
        if {len(weight_HD)} != {len(values) for values in lists.values()} or weight_HD.ndim != 2:
            raise ValueError("not as many rows as names, weights, means and deviations")
        return Heads(content["kind"], weight_HD=weight_HD, **lists)
    except (ValueError, KeyError, TypeError) as error:
        raise ModelError(f"{file} does not hold the heads of a reward model ({error}); save the model again") from None


def head_names(path: Path | str) -> list[str]:
    """Names of the heads in a reward model's folder, [] where there are none; raises as :func:`load_heads`."""
    heads = load_heads(path, torch.device("cpu"))
    return list(heads.names) if heads is not None else []
