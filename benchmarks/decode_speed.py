"""Decoding by heedful's engine and by transformers' `generate`: the same prompts, weights and answer lengths.

    python benchmarks/decode_speed.py prompts.jsonl --model smollm2-135m --samples 64 --new_tokens 128

heedful decodes first. Its answers end at any of a random choice of tokens (--end_share of the vocabulary), so that
lengths are random up to the limit; `generate` then decodes as many tokens for every prompt (its rows are stopped at
those lengths). Both draw at temperature 1 from all tokens, in bfloat16 where the machine has it; each keeps its own
attention kernel. Repeats alternate and have other lengths each; figures are medians.

The bounds are what this machine cannot beat: it reads all weights once per decoding step at the bandwidth measured by
a copy, and multiplies at the speed measured by a matrix product (both measured in this very run). A step takes at
least the longer of the two for the rows that still decode, a prefill its multiplications. Attention is not counted.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import statistics
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import sides
import torch
from ceilings import Weights, bound_seconds, bytes_per_second, matrix_operations_per_second, timed

from heedful.data import tokenise
from heedful.data.load import load_prompts
from heedful.models import hardware
from heedful.models.load import load_causal, resolve
from heedful.models.parts import LanguageModel
from heedful.models.roles import build_policy
from heedful.rollout.engine import Request, Sampling
from heedful.rollout.hf import HFEngine

SIDES = ("heedful", "transformers")
LINES = [
    "", "tokens, longest answer", "seconds, heedful", "seconds, transformers", "times as fast",
    "tokens per second, heedful", "tokens per second, transformers",
    *[f"share of the {bound}, {side}" for bound in ("bandwidth", "matrix product", "bound of every step")
      for side in SIDES],
]  # fmt: skip


def engine_with_ends(policy: LanguageModel, share: float, seed: int) -> HFEngine:
    """heedful's engine, for which a random share of the vocabulary ends an answer."""
    vocabulary = policy.base.config.get_text_config().vocab_size
    ends = random.Random(seed).sample(range(vocabulary), round(share * vocabulary))
    return HFEngine(policy, ends or [-1])


def generate(model: Any, prompts: Sequence[list[int]], lengths: Sequence[int], pad_id: int) -> None:
    """transformers' own decoding of one batch, its rows stopped at these lengths."""
    from transformers import StoppingCriteria, StoppingCriteriaList

    class AtLengths(StoppingCriteria):
        def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
            return torch.tensor([input_ids.shape[1] - width >= n for n in lengths])

    width = max(map(len, prompts))
    ids = torch.tensor([[pad_id] * (width - len(p)) + list(p) for p in prompts])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
    out = model.generate(
        input_ids=ids, attention_mask=mask, max_new_tokens=max(lengths), do_sample=True, temperature=1.0, top_k=0,
        top_p=1.0, eos_token_id=None, pad_token_id=pad_id, stopping_criteria=StoppingCriteriaList([AtLengths()]),
    )  # fmt: skip
    if out.shape[1] - width != max(lengths):
        raise SystemExit("transformers' generate did not decode the lengths that it was given")


def compare(asked: argparse.Namespace, samples: int, share: float) -> dict[str, Any]:
    """Decode ``samples`` prompts by both, as often as asked; medians of the repeats."""
    device = torch.device("cpu")
    dtype = hardware.compute_dtype(device, asked.dtype)
    path = resolve(asked.model)
    policy = build_policy(path, lora=None, device=device, dtype=dtype, trained=False, weights=dtype)
    peer = load_causal(path, dtype=dtype, device=device, attention=asked.peer_attention)
    engine = engine_with_ends(policy, share, asked.seed)
    found = tokenise.prompts(load_prompts(asked.prompts), policy.tokenizer, max_prompt_tokens=asked.max_prompt_tokens)
    prompts = [ids for _, ids in itertools.islice(itertools.cycle(found.samples), samples)]
    requests = [Request("", n, ids) for n, ids in enumerate(prompts)]
    sampling = Sampling(asked.new_tokens)
    rows: list[dict[str, Any]] = []
    for repeat in range(asked.repeats + 1):
        answers, seconds, core = timed(partial(engine.generate, requests, sampling, seed=asked.seed + repeat))
        lengths = [len(answer.ids) for answer in answers]
        _, peer_seconds, peer_core = timed(partial(generate, peer, prompts, lengths, policy.pad_id))
        if repeat:  # the first warms both up
            rows.append({
                "tokens": sum(lengths), "longest": max(lengths), "heedful": seconds, "transformers": peer_seconds,
                "ratio": peer_seconds / seconds, "core_ratio": peer_core / core, "lengths": lengths,
            })  # fmt: skip
    return {"prompts": [len(p) for p in prompts], "rows": rows, "weights": Weights.of(policy)}


def column(title: str, found: Mapping[str, Any], speeds: Mapping[str, float]) -> list[str]:
    """The figures of one batch size."""
    rows, weights = found["rows"], found["weights"]
    bounds = [bound_seconds(found["prompts"], row["lengths"], weights, speeds) for row in rows]

    def middle(name: str) -> float:
        return statistics.median(row[name] for row in rows)

    def tokens_per_second(side: str) -> float:
        return statistics.median(row["tokens"] / row[side] for row in rows)

    def share(bound: str, side: str) -> str:
        return f"{statistics.median(b[bound] / row[side] for b, row in zip(bounds, rows)):.1%}"

    return [
        title, f"{middle('tokens'):.0f}, {middle('longest'):.0f}", *[f"{middle(side):.2f}" for side in SIDES],
        f"{middle('ratio'):.2f} ({middle('core_ratio'):.2f} of all cores)",
        *[f"{tokens_per_second(side):.1f}" for side in SIDES],
        *[share(bound, side) for bound in ("bandwidth", "matrix", "step by step") for side in SIDES],
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompts", help="prompts, in any format that heedful reads; they are repeated where too few")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--samples", type=int, default=64, help="decoded together")
    parser.add_argument("--new_tokens", type=int, default=128, help="limit of an answer")
    parser.add_argument("--end_share", type=float, default=0.02, help="of the vocabulary, at which an answer ends")
    parser.add_argument("--max_prompt_tokens", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--peer_attention", default="sdpa", help="of transformers, whose default it is")
    parser.add_argument("--threads", type=int, default=int(os.environ.get("OMP_NUM_THREADS", 0)) or os.cpu_count() or 1)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    speeds = {
        "flops": matrix_operations_per_second(hardware.compute_dtype(torch.device("cpu"), asked.dtype)),
        "bytes_per_second": bytes_per_second(),
    }
    print(
        f"matrix product {speeds['flops'] / 1e9:.0f} GFLOP/s, bandwidth {speeds['bytes_per_second'] / 1e9:.1f} GB/s, "
        f"{asked.threads} threads"
    )
    columns: list[list[str]] = [LINES]
    for samples, share in ((asked.samples, asked.end_share), (1, 0.0)):
        columns.append(column(f"{samples} together", compare(asked, samples, share), speeds))
    print(sides.table(columns))


if __name__ == "__main__":
    main()
