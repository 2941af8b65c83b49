"""What a machine reaches at its best, and how much there is to multiply by and to read."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from heedful.config.ppo import PPOConfig
from heedful.models.parts import LanguageModel
from heedful.rollout.experience import Trained, graphs_to_keep, is_single_update, partition


@dataclass(frozen=True)
class Weights:
    """What decoding multiplies by, in numbers of weights."""

    trunk: int
    head: int
    bytes_each: int

    @classmethod
    def of(cls, policy: LanguageModel) -> Weights:
        """Of the trunk and of the output layer."""
        head = policy.base.get_output_embeddings().weight.numel()
        return cls(trunk_weights(policy.base), head, policy.dtype.itemsize)


def trunk_weights(model: Any) -> int:
    """Of the matrices of a transformers model's trunk but adapters; embeddings are looked up, not multiplied by."""
    trunk = model.base_model
    embeddings = {id(p) for m in trunk.modules() if isinstance(m, nn.Embedding) for p in m.parameters()}
    matrices = [p for n, p in trunk.named_parameters() if p.dim() == 2 and ".lora_" not in n]
    return sum(p.numel() for p in matrices if id(p) not in embeddings)


def training_operations(
    weights: Weights, *, read: float, counted: float, trunks: int, full: bool, kept: Collection[Trained] = ()
) -> float:
    """Multiplications and additions that an update needs, attention left out.

    A forward takes two per weight and token read, or counted where the weight is the output layer's; a backward as many
    for the activations, and where all weights are trained as many again for those.

    Args:
        kept: whose forward is not the update's (see :func:`kept_forwards`).
    """
    passes = 3 if full else 2
    forwards = passes * trunks - min(len(kept), trunks), passes - ("policy" in kept)
    return 2 * (forwards[0] * weights.trunk * read + forwards[1] * weights.head * counted)


def kept_forwards(config: PPOConfig, row_tokens: int) -> set[Trained]:
    """Whose forward, of the only update, the scoring makes, with rows of up to so many tokens."""
    cut = partition([row_tokens] * config.samples_per_step, config, torch.Generator())
    return graphs_to_keep(config, policy_moves=True) if is_single_update(cut, config) else set()


def bound_seconds(
    prompt_tokens: Sequence[int], answer_tokens: Sequence[int], weights: Weights, speeds: Mapping[str, float], *,
    cache_bytes: int = 0,
) -> dict[str, float]:  # fmt: skip
    """The least that a decoding can take: of reading alone, of multiplying alone, and of both step by step.

    Args:
        cache_bytes: of the keys and values of one token; 0 leaves them out.
    """
    both = weights.trunk + weights.head
    steps = range(max(answer_tokens))
    alive = [[p + t for p, n in zip(prompt_tokens, answer_tokens, strict=True) if n > t] for t in steps]
    weight_bytes = both * weights.bytes_each  # of one step, whatever its rows
    reading = [(weight_bytes + cache_bytes * sum(lengths)) / speeds["bytes_per_second"] for lengths in alive]
    multiplying = [2 * len(lengths) * both / speeds["flops"] for lengths in alive]
    prefill = 2 * (sum(prompt_tokens) - len(prompt_tokens)) * weights.trunk / speeds["flops"]
    return {
        "bandwidth": sum(reading), "matrix": prefill + sum(multiplying),
        "step by step": prefill + sum(map(max, reading, multiplying)),
    }  # fmt: skip


def timed(run: Callable[[], Any]) -> tuple[Any, float, float]:
    """What a call gives, its seconds on the clock and its seconds summed over cores."""
    _finish()
    start, core_start = time.perf_counter(), time.process_time()
    made = run()
    _finish()
    return made, time.perf_counter() - start, time.process_time() - core_start


def _finish() -> None:
    """Work on a GPU goes on after the call that asked for it."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


CPU = torch.device("cpu")


def matrix_operations_per_second(dtype: torch.dtype, device: torch.device = CPU) -> float:
    """Of a matrix product; multiply-adds count twice."""
    size = 8192 if device.type == "cuda" else 1024  # a GPU is not busy with less
    matrix = torch.randn(size, size, dtype=dtype, device=device)
    return 2 * size**3 / _best(lambda: torch.mm(matrix, matrix), device)


def bytes_per_second(device: torch.device = CPU) -> float:
    """Of a copy larger than any cache; every byte is read and written."""
    block = torch.zeros(2**30 if device.type == "cuda" else 2**28, dtype=torch.uint8, device=device)
    target = torch.empty_like(block)
    return 2 * block.nbytes / _best(lambda: target.copy_(block), device)


def _best(run: Callable[[], Any], device: torch.device) -> float:
    """Seconds of the fastest of a few runs; the first warms up. A GPU needs some time to reach its clock."""
    return min([timed(run)[1] for _ in range(100 if device.type == "cuda" else 7)][1:])
