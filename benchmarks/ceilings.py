"""What a machine reaches at its best, and how much there is to multiply by and to read."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from heedful.models.parts import LanguageModel


@dataclass(frozen=True)
class Weights:
    """What decoding multiplies by, in numbers of weights."""

    trunk: int
    head: int
    bytes_each: int

    @classmethod
    def of(cls, policy: LanguageModel) -> Weights:
        """Matrices of the trunk but adapters, and the output layer; an embedding is looked up, not multiplied by."""
        model = policy.base
        embedding = model.get_input_embeddings().weight.numel()
        matrices = [p for n, p in model.base_model.named_parameters() if p.dim() == 2 and ".lora_" not in n]
        trunk = sum(p.numel() for p in matrices) - embedding
        return cls(trunk, model.get_output_embeddings().weight.numel(), policy.dtype.itemsize)


def training_operations(weights: Weights, *, read: float, counted: float, trunks: int, full: bool) -> float:
    """Multiplications and additions that an update needs, attention left out.

    A forward takes two per weight and token read, or counted where the weight is the output layer's; a backward as many
    for the activations, and where all weights are trained as many again for those.
    """
    passes = 3 if full else 2
    return 2 * passes * (trunks * weights.trunk * read + weights.head * counted)


def timed(run: Callable[[], Any]) -> tuple[Any, float, float]:
    """What a call gives, its seconds on the clock and its seconds summed over cores."""
    start, core_start = time.perf_counter(), time.process_time()
    made = run()
    return made, time.perf_counter() - start, time.process_time() - core_start


def matrix_operations_per_second(dtype: torch.dtype) -> float:
    """Of a matrix product; multiply-adds count twice."""
    matrix = torch.randn(1024, 1024, dtype=dtype)
    return 2 * 1024**3 / _best(lambda: torch.mm(matrix, matrix))


def bytes_per_second() -> float:
    """Of a copy larger than any cache; every byte is read and written."""
    block = torch.zeros(2**28, dtype=torch.uint8)
    target = torch.empty_like(block)
    return 2 * block.nbytes / _best(lambda: target.copy_(block))


def _best(run: Callable[[], Any]) -> float:
    """Seconds of the fastest of a few runs; the first warms up."""
    return min([timed(run)[1] for _ in range(7)][1:])
