"""Whole rankings in one pass against the same data as separate pairs: pairs per second, and do the gradients agree?

    python benchmarks/ranking_speed.py rankings.jsonl --model smollm2-135m --rankings 4 --repeats 3

Every ranking has K = 5 answers, hence ten pairs. As rankings they take five encodings (or one row that shares the
prompt), as pairs twenty. Both ways give the mean Bradley-Terry loss over the same pairs. Times are medians over repeats
that alternate, in one process; the gradients are compared in float32 too.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import statistics
import time
from collections.abc import Sequence

import torch

from heedful.config.reward import RewardConfig
from heedful.data import tokenise
from heedful.data.load import load_rankings
from heedful.data.pairs import consensus
from heedful.data.tokenise import RankingSample
from heedful.models import hardware
from heedful.models.load import resolve
from heedful.models.parts import ScalarModel
from heedful.models.roles import build_scalar
from heedful.objectives import preference
from heedful.train.reward import micro_batches

K = 5


def as_pairs(samples: Sequence[RankingSample]) -> list[RankingSample]:
    """Every pair of every ranking as a ranking of two."""
    found = []
    for s in samples:
        for i, j in itertools.combinations(range(len(s.sequences)), 2):
            picked = {
                f.name: [getattr(s, f.name)[k] for k in (i, j)]
                for f in dataclasses.fields(s)
                if isinstance(getattr(s, f.name), (list, tuple)) and len(getattr(s, f.name)) == len(s.sequences)
            }
            found.append(dataclasses.replace(s, **{**picked, "group_id": f"{s.group_id}/{i}-{j}"}))
    return found


def gradient(model: ScalarModel, samples: Sequence[RankingSample], config: RewardConfig, share: bool) -> float:
    """One forward and backward over all samples; seconds."""
    model.model.zero_grad(set_to_none=True)
    start = time.perf_counter()
    for batch in micro_batches(samples, config, model.pad_id, share_prompts=share):
        scores_PK = model.ranking_scores(batch)
        preference.ranking(scores_PK, batch.ranks_PK, batch.mask_PK, denominator=len(samples)).loss.backward()
    return time.perf_counter() - start


def gradients(model: ScalarModel) -> torch.Tensor:
    """All of them in one vector."""
    return torch.cat([p.grad.flatten() for p in model.trainable_parameters().values() if p.grad is not None])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", help="rankings, some of five answers")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--rankings", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--micro_batch_tokens", type=int, default=2048)
    asked = parser.parse_args()
    cpu = hardware.device("auto")
    config = RewardConfig(micro_batch_tokens=asked.micro_batch_tokens)
    for dtype in (hardware.compute_dtype(cpu, "auto"), torch.float32):
        model = build_scalar(resolve(asked.model), lora=None, device=cpu, dtype=dtype, new_head=True)
        records = [r for r in load_rankings(asked.file) if len(r.answers) == K]
        samples = tokenise.rankings(
            records[: 4 * asked.rankings], [consensus(r) for r in records[: 4 * asked.rankings]], model.tokenizer,
            max_tokens=1024, max_prompt_tokens=512,
        ).samples  # fmt: skip
        samples = [s for s in samples if len(set(s.ranks)) == K][: asked.rankings]
        pairs = as_pairs(samples)
        ways = {"shared prompt": (samples, True), "K encodings": (samples, False), "separate pairs": (pairs, False)}
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        found: dict[str, torch.Tensor] = {}
        repeats = asked.repeats if dtype != torch.float32 else 1
        for _ in range(repeats):
            for name, (rows, share) in ways.items():
                seconds[name].append(gradient(model, rows, config, share))
                found[name] = gradients(model)
        base = statistics.median(seconds["separate pairs"])
        size = found["separate pairs"].abs().max()
        for name, times in seconds.items():
            median = statistics.median(times)
            gap = float((found[name] - found["separate pairs"]).abs().max() / size)
            print(
                f"{dtype} {name}: {len(pairs) / median:.2f} pairs/s, {base / median:.2f} × separate pairs, "
                f"gradient gap {gap:.1e} of the largest entry ({len(samples)} rankings, {len(pairs)} pairs)", flush=True
            )  # fmt: skip


if __name__ == "__main__":
    main()
