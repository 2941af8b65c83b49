"""Whole rankings in one pass against the same data as separate pairs: pairs per second, and do the gradients agree?

    python benchmarks/ranking_speed.py rankings.jsonl --model smollm2-135m --rankings 8 --repeats 3

By default every ranking has K = 5 answers, hence ten pairs. As rankings they take five encodings (packed into rows or
padded), as pairs twenty. All ways give the mean Bradley-Terry loss over the same pairs. Times are processor seconds
(medians over repeats that alternate, in one process, one forward and backward over all), memory the largest that the
process had while that way ran; the gradients are compared in float32 too.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import statistics
import threading
import time
from collections.abc import Sequence

import torch

from heedful.config.reward import RewardConfig
from heedful.data import tokenise
from heedful.data.load import load_rankings
from heedful.data.pairs import consensus
from heedful.data.tokenise import RankingSample
from heedful.models import hardware, packing
from heedful.models.load import resolve
from heedful.models.parts import ScalarModel
from heedful.models.roles import build_scalar
from heedful.objectives import preference
from heedful.train.reward import micro_batches


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


@dataclasses.dataclass
class Cost:
    """What one forward and backward over all samples took."""

    seconds: float
    peak_gib: float
    """Of the whole process"""
    padded_tokens: int
    real_tokens: int


def gradient(
    model: ScalarModel, samples: Sequence[RankingSample], config: RewardConfig, attention_tokens: float | None
) -> Cost:
    """Leaves the gradients in the model."""
    for p in model.trainable_parameters().values():
        p.grad = torch.zeros_like(p)
    padded = real = 0
    start = time.process_time()
    with Peak() as peak:
        for batch in micro_batches(samples, config, model.pad_id, attention_tokens=attention_tokens):
            scores_PK = model.ranking_scores(batch)
            preference.ranking(scores_PK, batch.ranks_PK, batch.mask_PK, denominator=len(samples)).loss.backward()
            padded += batch.ids_RT.numel()
            real += int((batch.attention_mask_RT > 0).sum())
    return Cost(time.process_time() - start, peak.gib, padded, real)


class Peak:
    """The largest resident memory inside, looked at every 20 milliseconds (Linux)."""

    gib = 0.0

    def __enter__(self) -> Peak:
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._done.wait(0.02):
            with open("/proc/self/statm") as file:
                self.gib = max(self.gib, int(file.read().split()[1]) * 4096 / 2**30)

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()


def gradients(model: ScalarModel) -> torch.Tensor:
    """All of them in one vector."""
    return torch.cat([p.grad.flatten() for p in model.trainable_parameters().values() if p.grad is not None])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", help="rankings")
    parser.add_argument("--answers", type=int, default=5, help="take rankings of this many answers; 0 = any")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--rankings", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--micro_batch_tokens", type=int, default=2048)
    parser.add_argument("--attention", default="auto")
    asked = parser.parse_args()
    cpu = hardware.device("auto")
    config = RewardConfig(micro_batch_tokens=asked.micro_batch_tokens)
    for dtype in (hardware.compute_dtype(cpu, "auto"), torch.float32):
        model = build_scalar(
            resolve(asked.model), lora=None, device=cpu, dtype=dtype, new_head=True, attention=asked.attention
        )
        records = [r for r in load_rankings(asked.file) if asked.answers in (0, len(r.answers))]
        samples = tokenise.rankings(
            records, [consensus(r) for r in records], model.tokenizer, max_tokens=1024, max_prompt_tokens=512
        ).samples
        samples = [s for s in samples if len(set(s.ranks)) == len(s.ranks)][: asked.rankings]
        pairs = as_pairs(samples)
        packed = packing.attention_tokens(model)
        ways = {"packed": (samples, packed), "padded": (samples, None), "separate pairs": (pairs, None)}
        costs: dict[str, list[Cost]] = {name: [] for name in ways}
        found: dict[str, torch.Tensor] = {}
        for _ in range(asked.repeats if dtype != torch.float32 else 1):
            for name, (rows, attention_tokens) in ways.items():
                costs[name].append(gradient(model, rows, config, attention_tokens))
                found[name] = gradients(model)
        seconds = {name: statistics.median(cost.seconds for cost in of) for name, of in costs.items()}
        size = found["separate pairs"].abs().max()
        print(f"{dtype}, {len(samples)} rankings, {len(pairs)} pairs, attention_tokens {packed}")
        for name, (cost, *_) in costs.items():
            gap = float((found[name] - found["separate pairs"]).abs().max() / size)
            print(
                f"  {name}: {len(pairs) / seconds[name]:.2f} pairs/s, "
                f"{seconds['separate pairs'] / seconds[name]:.2f} x separate pairs, {seconds[name]:.1f} s, "
                f"{cost.padded_tokens} tokens of which {cost.real_tokens} real, {cost.peak_gib:.2f} GiB, "
                f"gradients differ by {gap:.1e} of the largest entry", flush=True
            )  # fmt: skip


if __name__ == "__main__":
    main()
