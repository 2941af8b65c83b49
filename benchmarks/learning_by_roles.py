"""Does PPO learn as well on one base as on separate ones? The same policy, reward and seeds, only `ppo.roles` differs.

    python benchmarks/learning_by_roles.py POLICY REWARD --seeds 5 --jobs 2 --threads 1 --out learned

POLICY is an SFT model and REWARD a reward model that was trained on it with adapters, as `roles: shared` asks; both are
the quickstart's (`heedful quickstart --reward.lora.rank 16`). The recipe is the quickstart's PPO in each --mode. What
counts is the gold score, which training never sees, of every training answer when it was sampled: the mean of the last
steps, paired by seed, and the seconds of training until the mean of three steps reaches what every run of every mode
reaches. Runs that are there already are read, not repeated.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import itertools
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import sides
import yaml

from heedful.data.load import load_prompts
from heedful.data.shipped import data_path
from heedful.evaluate.panel import utility
from heedful.runs.reader import read_samples, read_stage

RECIPE = Path(__file__).parents[1] / "recipes" / "quickstart.yaml"
MODES = ("separate", "shared", "trunk")
LAST = 3
"""Steps whose mean counts"""


class Run(NamedTuple):
    """What one run learned."""

    gold: list[float]
    """Mean gold score of the answers of every step"""
    seconds: list[float]
    """Of training, at the end of every step"""
    kl_nats: float
    peak_bytes: int

    def last(self) -> float:
        return statistics.mean(self.gold[-LAST:])

    def smooth(self) -> list[float]:
        """Means of three steps, the first of them at the third step."""
        return [statistics.mean(self.gold[i - LAST + 1 : i + 1]) for i in range(LAST - 1, len(self.gold))]

    def seconds_to(self, gold: float) -> float:
        """When the mean of three steps reached it for the first time."""
        return next(self.seconds[i + LAST - 1] for i, mean in enumerate(self.smooth()) if mean >= gold)


def train(asked: argparse.Namespace, mode: str, seed: int) -> Path:
    """Run one recipe, and say where."""
    quickstart = yaml.safe_load(RECIPE.read_text(encoding="utf-8"))
    ppo = {**quickstart["ppo"], "roles": mode, "sample_rows": quickstart["ppo"]["prompts_per_step"]}
    if asked.steps:
        ppo["steps"] = asked.steps
    recipe = {
        "name": f"{mode}-{seed}", "output": str(asked.out), "seed": seed, "ppo": {**ppo, "accept_weak_reward": True},
        "model": {"name": str(asked.policy), "reward": str(asked.reward)},
        "data": {"prompts": quickstart["data"]["prompts"]},
    }  # fmt: skip
    return sides.run_recipe(recipe, threads=asked.threads)


def read(folder: Path) -> Run:
    prompts = {p.id: p for p in load_prompts(data_path("package:prompts_train"))}
    gold: dict[int, list[float]] = {}
    for row in read_samples(folder):
        score = utility(prompts[row["prompt_id"]], row["answer"], finished=row["finish_reason"] == "stop")
        gold.setdefault(row["step"], []).append(score)
    results = json.loads((folder / "finished.json").read_text(encoding="utf-8"))["results"]
    return Run(
        [statistics.mean(scores) for _, scores in sorted(gold.items())],
        list(itertools.accumulate(read_stage(folder).column("run/seconds")[1])),
        results["kl_nats_last"], results["peak_memory_bytes"],
    )  # fmt: skip


def table(found: dict[str, list[Run]], seeds: Sequence[int]) -> str:
    """A row a mode: the mean over seeds, and what differs from the first mode within a seed."""
    from scipy.stats import t

    target = min(max(run.smooth()) for runs in found.values() for run in runs)
    first = next(iter(found.values()))
    columns: list[list[str]] = [[
        "", "gold score, first steps", "gold score, last steps", "difference within a seed [95 %]", "KL, last, nats",
        f"seconds to gold {target:.2f}", "seconds in all", "peak memory, GiB",
    ]]  # fmt: skip
    for mode, runs in found.items():
        differences = [a.last() - b.last() for a, b in zip(runs, first, strict=True)]
        half = statistics.stdev(differences) / len(seeds) ** 0.5 * t.ppf(0.975, len(seeds) - 1)
        mean = statistics.mean(differences)
        columns.append([
            mode, f"{statistics.mean(run.smooth()[0] for run in runs):.2f}",
            ", ".join(f"{run.last():.2f}" for run in runs) + f"; mean {statistics.mean(r.last() for r in runs):.2f}",
            "" if runs is first else f"{mean:+.2f} [{mean - half:+.2f}, {mean + half:+.2f}]",
            f"{statistics.mean(run.kl_nats for run in runs):.1f}",
            ", ".join(f"{run.seconds_to(target):.0f}" for run in runs),
            f"{statistics.median(run.seconds[-1] for run in runs):.0f}",
            f"{max(run.peak_bytes for run in runs) / 2**30:.2f}",
        ])  # fmt: skip
    return sides.table(columns)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("policy", type=Path)
    parser.add_argument("reward", type=Path)
    parser.add_argument("--mode", choices=MODES, action="append", help="may be repeated; separate and shared otherwise")
    parser.add_argument("--seeds", type=int, default=5, help="so many, 0 and on; at least 2")
    parser.add_argument("--steps", type=int, help="fewer than the quickstart's")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time; their seconds then say less")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("learned"))
    asked = parser.parse_args()
    modes, seeds = asked.mode or ["separate", "shared"], range(asked.seeds)
    with concurrent.futures.ThreadPoolExecutor(asked.jobs) as pool:
        # one seed of every mode at a time, so that they share what else the machine does
        futures = {(mode, seed): pool.submit(train, asked, mode, seed) for seed in seeds for mode in modes}
        folders = {key: future.result() for key, future in futures.items()}
    print(table({mode: [read(folders[mode, seed]) for seed in seeds] for mode in modes}, seeds))


if __name__ == "__main__":
    main()
