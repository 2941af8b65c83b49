"""Does PPO find the best policy there is? The product's own training on worlds whose optimum is known.

    python benchmarks/known_optimum.py                               the two placements of the KL that must reach 99 %
    python benchmarks/known_optimum.py --placements all --tasks random     and what every other placement leaves out
    python benchmarks/known_optimum.py --placements k1+none --steps 30     a look (two placements: k1+none exact+exact)

A placement is written in_reward+in_loss. Each run is `train_ppo` with the roles, engine and experience of the product;
the reward is a source like any other. What is compared with the optimum is the policy as it would be saved. Every
result is a line of --results as soon as it is there, and is not computed again.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import io
import json
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from enumerable import MAX_NEW_TOKENS, PROMPTS, TASKS, Judge, World, prompts, save_policy, tokenizer, world
from expected_gradient import limit, tree
from torch import Tensor

from heedful.config.ppo import KLConfig, PPOConfig, SamplingConfig
from heedful.config.section import CheckpointConfig, PolicyOptimizer, ValueOptimizer
from heedful.data.chat import end_token_ids
from heedful.models.roles import Roles, build_roles
from heedful.rollout.hf import HFEngine
from heedful.rollout.score import Scoring
from heedful.runs.folder import StageFolder
from heedful.train.ppo import train_ppo

BETAS = (0.5, 0.7, 1.0)
REQUIRED = ("k1+none", "exact+exact")
COMPLETE = ("k1+exact", "k3+exact", "k1+k2", "k3+k2", "exact+k2")
INCOMPLETE = (
    "exact+none", "k2+none", "k3+none", "abs+none", "none+exact", "none+k2", "none+k3", "none+abs", "none+k1",
)  # fmt: skip
LEFT_OUT = {
    "k1+none": "nothing",
    "exact+exact": "nothing",
    **dict.fromkeys(COMPLETE, "nothing"),
    "exact+none": "own, wholly",
    "k2+none": "own, to first order in ρ",
    "k3+none": "own, to first order in ρ",
    "abs+none": "own and later are of another quantity",
    "none+exact": "later, wholly",
    "none+k2": "later, wholly",
    "none+k3": "later, wholly; own is of KL(π_ref ‖ π)",
    "none+abs": "later, wholly; own is of Σ of the sizes of π − π_ref",
    "none+k1": "everything (refused by the recipe; run without any KL)",
}


@dataclass(frozen=True)
class Row:
    """One run."""

    placement: str
    task: str
    beta: float
    steps: int
    samples: int
    share: float
    """(J(π) − J(π_ref)) / (J* − J(π_ref))"""
    distance_nats: float
    """KL(π ‖ π*) per answer"""
    kl_nats: float
    """KL(π ‖ π_ref) per answer"""
    theory_share: float
    """share where the placement's expected gradient leads; see expected_gradient.py"""
    theory_distance_nats: float
    optimum_kl_nats: float
    """KL(π* ‖ π_ref) per answer"""
    seconds: float


def settings(beta: float, placement: str, *, steps: int, samples: int, **changes: Any) -> PPOConfig:
    """One update a step, rates down to 0, weights averaged; nothing but the KL holds the policy."""
    in_reward, in_loss = placement.split("+")
    kl: dict[str, Any] = {"coefficient": beta, "in_reward": in_reward, "in_loss": in_loss}
    if placement == "none+k1":  # its expected gradient is that of no KL at all, and nothing in the product computes it
        kl = {"coefficient": 0.0, "in_reward": "none", "in_loss": "none"}
    rate: dict[str, Any] = {"schedule": "linear", "warmup_fraction": 0.02, "beta2": 0.99}
    return PPOConfig(**{
        "steps": steps, "prompts_per_step": len(PROMPTS), "samples_per_prompt": samples // len(PROMPTS),
        "micro_batch_tokens": 10**6, "sampling": SamplingConfig(max_new_tokens=MAX_NEW_TOKENS), "kl": KLConfig(**kl),
        "score_scaling": "none", "score_clip": None, "missing_end_penalty": 0.0, "lam": 1.0,
        "value_from": "policy", "value_clip": None,
        "optimizer": PolicyOptimizer(learning_rate=3e-3, **rate),
        "value_optimizer": ValueOptimizer(learning_rate=6e-3, **rate), "ema_decay": 0.97, "self_test": False,
        "checkpoint": CheckpointConfig(every_steps=10**6), "sample_rows": 1, "histogram_every_steps": 10**6, **changes,
    })  # fmt: skip


def fresh_roles(folder: Path) -> Roles:
    """Policy, reference, and a value model of its own that starts at zero."""
    return build_roles(
        folder, None, policy_lora=None, value_lora=None, value_from="policy", device=torch.device("cpu"),
        dtype=torch.float32, attention="eager",
    )  # fmt: skip


def compare(world: World, logprobs_N: Tensor, reference_N: Tensor, beta: float) -> tuple[float, float]:
    """Share of the attainable objective, and KL(π ‖ π*)."""
    best_N = world.optimum(reference_N, beta)
    base, top, own = (world.objective(x, reference_N, beta) for x in (reference_N, best_N, logprobs_N))
    return (own - base) / (top - base), world.expected(logprobs_N, logprobs_N - best_N)


def run(placement: str, task: str, beta: float, *, seed: int = 0, theory: bool = True, **options: Any) -> Row:
    """Train one policy and compare it with the optimum."""
    words = tokenizer()
    w = world(words, TASKS[task])
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as temporary, contextlib.redirect_stderr(io.StringIO()):
        folder = Path(temporary)
        roles, config = fresh_roles(save_policy(folder / "model")), settings(beta, placement, **options)
        reference_N = w.logprobs(roles.policy)
        states = tree(w, roles.policy)
        engine = HFEngine(roles.policy, end_token_ids(words), batch_size=config.samples_per_step)
        scoring = Scoring([Judge(words, TASKS[task])])
        stage = StageFolder(folder / "ppo", "ppo", 0)
        train_ppo(roles, scoring, prompts(words), config, stage, seed=seed, engine=engine)
        policy_N = w.logprobs(roles.policy)
    share, distance = compare(w, policy_N, reference_N, beta)
    expected = expected_distance = float("nan")
    if theory:
        expected, expected_distance = compare(w, limit(w, states, beta, *placement.split("+")), reference_N, beta)
    best_N = w.optimum(reference_N, beta)
    return Row(
        placement, task, beta, config.steps, config.samples_per_step, share, distance,
        w.expected(policy_N, policy_N - reference_N), expected, expected_distance,
        w.expected(best_N, best_N - reference_N), time.perf_counter() - start,
    )  # fmt: skip


def table(rows: Sequence[Row]) -> str:
    """Markdown, one line a run."""
    lines = [
        "| in_reward | in_loss | task | β | steps | share of the attainable | KL(π ‖ π*) | KL(π ‖ π_ref) | of π* | "
        "in theory: share | KL(π ‖ π*) | left out of the gradient |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for r in rows:
        in_reward, in_loss = r.placement.split("+")
        lines.append(
            f"| {in_reward} | {in_loss} | {r.task} | {r.beta:g} | {r.steps} | {r.share:.2%} | {r.distance_nats:.4f} | "
            f"{r.kl_nats:.3f} | {r.optimum_kl_nats:.3f} | {r.theory_share:.2%} | {r.theory_distance_nats:.4f} | "
            f"{LEFT_OUT[r.placement]} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--placements", nargs="+", default=list(REQUIRED), help="in_reward+in_loss …, or all")
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), choices=list(TASKS))
    parser.add_argument("--betas", nargs="+", type=float, default=list(BETAS))
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--samples", type=int, default=512, help="answers per step")
    parser.add_argument("--results", type=Path, help="a .jsonl file that keeps every result")
    chosen = parser.parse_args()
    placements = [*REQUIRED, *COMPLETE, *INCOMPLETE] if chosen.placements == ["all"] else chosen.placements
    if unknown := set(placements) - set(LEFT_OUT):
        parser.error(f"unknown placement {sorted(unknown)[0]}; choose from {', '.join(LEFT_OUT)}")
    known: dict[tuple[str, str, float, int, int], Row] = {}
    if chosen.results and chosen.results.exists():
        for line in chosen.results.read_text().splitlines():
            row = Row(**json.loads(line))
            known[row.placement, row.task, row.beta, row.steps, row.samples] = row
    wanted = [(p, t, b, chosen.steps, chosen.samples) for p in placements for t in chosen.tasks for b in chosen.betas]
    for number, key in enumerate(wanted, 1):
        placement, task, beta, steps, samples = key
        if key not in known:
            known[key] = row = run(placement, task, beta, steps=steps, samples=samples)
            if chosen.results:
                with chosen.results.open("a") as file:
                    file.write(json.dumps(dataclasses.asdict(row)) + "\n")
        row = known[key]
        print(
            f"{number}/{len(wanted)} {placement} {task} β={beta:g}: share {row.share:.2%} (in theory "
            f"{row.theory_share:.2%}), KL to the optimum {row.distance_nats:.4f} nats, {row.seconds:.0f} s", flush=True
        )  # fmt: skip
    print("\n" + table([known[key] for key in wanted]))


if __name__ == "__main__":
    main()
