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
from typing import Any, Literal, final, get_args

import torch
from torch import Tensor

from heedful.errors import ModelError
from heedful.models.load import HEAD_NAMES, saved_tensors

HEADS_FILE = "heads.json"
"""In a reward model's folder. Not a .safetensors file: servers load every one of those as weights of the model."""
Kind = Literal["attributes", "ensemble"]
_OWN_ROWS = tuple(f"{name}.weight" for name in HEAD_NAMES)


@final
@dataclass
class Heads:
    """H rows that read the last hidden state, and how the score is made of them."""

    kind: Kind
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
    kind: Kind, weights: dict[str, float], width: int, *, seed: int, device: torch.device
) -> Heads:
    """Heads to be trained, normal with deviation 1/√(D+1) as the head of a new reward model, each its own."""
    draw = torch.Generator().manual_seed(seed)
    weight_HD = torch.randn(len(weights), width, generator=draw) / math.sqrt(width + 1)
    return Heads(kind, tuple(weights), tuple(weights.values()), torch.nn.Parameter(weight_HD.to(device)))


def load_heads(path: Path | str, device: torch.device) -> Heads | None:
    """The heads in a reward model's folder; None where there are none.

    Raises:
        ModelError: the file is damaged, or its heads do not make the folder's own score.
    """
    file = Path(path) / HEADS_FILE
    if not file.exists():
        return None
    own = [read() for name, read in saved_tensors(Path(path)).items() if name in _OWN_ROWS]
    try:
        heads = _read(json.loads(file.read_text(encoding="utf-8")))
        _require_score(heads, own)
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise ModelError(f"{file} does not hold the heads of a reward model ({error}); save the model again") from None
    heads.weight_HD = heads.weight_HD.to(device)
    return heads


def _read(content: Any) -> Heads:
    """The heads in a file's content, sound by themselves."""
    names, lists = content["names"], {key: content[key] for key in ("weights", "means", "deviations")}
    weight_HD = torch.tensor(content["weight"], dtype=torch.float32)
    if {len(weight_HD)} != {len(values) for values in (names, *lists.values())} or weight_HD.ndim != 2:
        raise ValueError("not as many rows as names, weights, means and deviations")
    if content["kind"] not in get_args(Kind):
        raise ValueError(f"its kind is {content['kind']!r}, not {' or '.join(get_args(Kind))}")
    if not all(isinstance(name, str) for name in names) or len(set(names)) < len(names):
        raise ValueError("the names must be texts, each another")
    for key, values in lists.items():
        if not all(type(value) in (int, float) and math.isfinite(value) for value in values):
            raise ValueError(f"the {key} must be finite numbers")
    if min(lists["deviations"]) <= 0 or not weight_HD.isfinite().all():
        raise ValueError("a deviation is not above 0, or a row not finite")
    return Heads(content["kind"], tuple(names), weight_HD=weight_HD, **{k: tuple(v) for k, v in lists.items()})


def _require_score(heads: Heads, own: Sequence[Tensor]) -> None:
    """The heads' row is that of the folder's one output, as nearly as the sum over the heads can be rounded."""
    made_D, terms_D = heads.row(), torch.tensor(heads.factors(heads.deviations)).abs() @ heads.weight_HD.abs()
    if len(own) != 1 or own[0].shape != (1, len(made_D)):
        raise ValueError(f"rows of {len(made_D)} numbers do not fit the model's own head")
    allowed_D = 4 * len(heads.names) * torch.finfo(own[0].dtype).eps * terms_D
    if not ((made_D - own[0][0].float()).abs() <= allowed_D).all():
        raise ValueError("what they make is not the model's own score")


def head_names(path: Path | str) -> list[str]:
    """Names of the heads in a reward model's folder, [] where there are none; raises as :func:`load_heads`."""
    heads = load_heads(path, torch.device("cpu"))
    return list(heads.names) if heads is not None else []
