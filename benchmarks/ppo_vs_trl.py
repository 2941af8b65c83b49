"""PPO by heedful and by TRL's PPOTrainer: the same model, prompts, batch and lengths, update by update, one table.

    python -m venv trl && trl/bin/pip install torch==2.13.0 transformers==5.24.0 trl==1.12.0
    python benchmarks/ppo_vs_trl.py prompts.jsonl --trl_python trl/bin/python --new_tokens 32 --out compared
    python benchmarks/ppo_vs_trl.py prompts.jsonl --new_tokens 32 --out compared --only shared --only trunk

trl 1.12 is the last version with PPO. Sides are TRL and heedful's three ways to hold the four models (`ppo.roles`);
each is a process of its own, and what --only leaves out is taken from OUT. All start from one language model: the
policy, the reference, and with a random head the reward and the value (in `trunk` the value is a head on the policy),
since a trained reward costs the same. TRL trains all weights of policy and value, heedful too in `separate` and
`trunk`; `shared` trains adapters. One epoch, one minibatch, sampling at temperature 1 without cuts. Computation is in
bfloat16 where the machine has it: heedful keeps trained weights in float32, TRL as --trl_weights says; in bfloat16
weights (the default) all its phases are fast and small, with float32 ones only its update computes in bfloat16.

Seconds are medians over the updates after the warm-up, on the clock and summed over cores (which other work on the
machine does not lengthen); peak memory is that of the whole process, with loading. The share is of the speed of a
large matrix product, measured first; an update counts what it must multiply, for policy and value together, without
the forwards that the scoring has made.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import sides

HEEDFUL = ("separate", "shared", "trunk")
SIDES = (*HEEDFUL, "trl")


def task_of(asked: argparse.Namespace) -> dict[str, Any]:
    """All that a side must know."""
    from heedful.data import tokenise
    from heedful.data.chat import end_token_ids
    from heedful.data.load import load_prompts
    from heedful.models import hardware
    from heedful.models.load import load_tokenizer, resolve

    path = resolve(asked.model)
    tokenizer = load_tokenizer(path)
    found = tokenise.prompts(load_prompts(asked.prompts), tokenizer, max_prompt_tokens=asked.max_prompt_tokens)
    num = asked.batch * (asked.warm_up + asked.updates)
    if len(found.samples) < asked.batch:
        raise SystemExit(f"{asked.prompts} has {len(found.samples)} prompts that fit, a batch has {asked.batch}")
    return {
        "what": "ppo", "model": str(path),
        "prompts": [{"prompt": record.to_json(), "ids": ids} for record, ids in found.samples[:num]],
        "batch": asked.batch, "new_tokens": asked.new_tokens, "warm_up": asked.warm_up, "updates": asked.updates,
        "end_id": None if asked.full_length else end_token_ids(tokenizer)[0], "pad": tokenizer.pad_token,
        "learning_rate": asked.learning_rate, "kl_coefficient": 0.05, "seed": asked.seed, "threads": asked.threads,
        "bfloat16": "bfloat16" in str(hardware.compute_dtype(hardware.device("cpu"), "auto")),
        "trl_weights": asked.trl_weights,
    }  # fmt: skip


def heedful_side(task: dict[str, Any], out: Path, roles_mode: str, keys: dict[str, Any]) -> dict[str, Any]:
    """Train by ``train_ppo`` and time every update from one hand-over of the weights to the next."""
    import torch
    from ceilings import Weights, kept_forwards, matrix_operations_per_second, training_operations

    import heedful
    from heedful.config.ppo import PPOConfig
    from heedful.models.hardware import seed_everything
    from heedful.models.roles import build_roles
    from heedful.records import Prompt

    torch.set_num_threads(task["threads"])
    seed_everything(task["seed"])
    dtype = torch.bfloat16 if task["bfloat16"] else torch.float32
    ceiling = matrix_operations_per_second(dtype)
    config = PPOConfig(**{
        "roles": roles_mode, "steps": task["warm_up"] + task["updates"], "prompts_per_step": task["batch"],
        "sampling": {"max_new_tokens": task["new_tokens"]}, "kl": {"coefficient": task["kl_coefficient"]},
        "optimizer": {"learning_rate": task["learning_rate"]},
        "value_optimizer": {"learning_rate": task["learning_rate"]}, "checkpoint": {"every_steps": 10**9}, **keys,
    })  # fmt: skip
    roles = build_roles(
        task["model"], task["model"], policy_lora=config.lora, value_lora=config.lora, value_from=config.value_from,
        device=torch.device("cpu"), dtype=dtype, new_reward_head=True, sharing=config.roles,
        activation_checkpointing=config.activation_checkpointing, offload_frozen=config.offload_frozen,
    )  # fmt: skip
    prompts = [(Prompt.from_json(row["prompt"]), row["ids"]) for row in task["prompts"]]
    folder = out / f"{roles_mode}-{time.time_ns()}"  # never one that holds a checkpoint
    clock, log = sides.train_ppo(roles, config, prompts, folder, end_id=task["end_id"], seed=task["seed"])
    phases = {phase: log.column(f"ppo/{name}")[1] for name, phase in sides.PHASES.items()}
    answer_tokens = log.column("ppo/answer_tokens_mean")[1]
    weights = Weights.of(roles.policy)
    lengths = [len(row["ids"]) for row in task["prompts"]]
    prompt_tokens, kept = statistics.mean(lengths), kept_forwards(config, max(lengths) + task["new_tokens"] - 1)
    operations = [
        config.epochs * training_operations(
            weights, read=task["batch"] * (prompt_tokens + n), counted=task["batch"] * n, full=config.lora is None,
            trunks=2 if config.value_from in ("reward", "policy") else 1, kept=kept,
        )
        for n in answer_tokens
    ]  # fmt: skip
    return {
        "version": heedful.__version__, **clock.per_update(), "phases": phases, "answer_tokens": answer_tokens,
        "training_share": [n / seconds / ceiling for n, seconds in zip(operations, phases["training"])],
    }  # fmt: skip


def table(task: Mapping[str, Any], results: Mapping[str, Mapping[str, Any]]) -> str:
    """The sides beside each other, and every one's speed and memory as a multiple of TRL's."""
    columns: list[list[str]] = [[
        "", "seconds per update", *[f"of which {phase}" for phase in sides.PHASES.values()],
        "training's share of the matrix product", "seconds of all cores", "samples per second", "times TRL's, seconds",
        "times TRL's, seconds of all cores", "peak memory", "times TRL's, peak memory", "tokens per answer",
    ]]  # fmt: skip

    def middle(values: Sequence[float]) -> float:
        return statistics.median(values[task["warm_up"] :])

    trl = results.get("trl")
    for side, result in results.items():
        seconds, cores, memory = middle(result["seconds"]), middle(result["core_seconds"]), result["peak_memory_bytes"]
        known = {phase: f"{middle(values):.2f}" for phase, values in result["phases"].items()}
        share = f"{middle(result['training_share']):.1%}" if "training_share" in result else ""
        columns.append([
            sides.title(side, result), f"{seconds:.2f}", *[known.get(phase, "") for phase in sides.PHASES.values()],
            share, f"{cores:.2f}", f"{task['batch'] / seconds:.3f}",
            f"{middle(trl['seconds']) / seconds:.2f}" if trl else "",
            f"{middle(trl['core_seconds']) / cores:.2f}" if trl else "", f"{memory / 2**30:.2f} GiB",
            f"{memory / trl['peak_memory_bytes']:.2f}" if trl else "", f"{middle(result['answer_tokens']):.1f}",
        ])  # fmt: skip
    return sides.table(columns)


def main() -> None:
    parser = sides.parser(__doc__, out="ppo_vs_trl", trl="trl==1.12.0", sides=SIDES)
    parser.add_argument("prompts", nargs="?", help="prompts, in any format that heedful reads")
    parser.add_argument("--batch", type=int, default=16, help="answers per update, one for each prompt")
    parser.add_argument("--new_tokens", type=int, default=32, help="limit of an answer")
    parser.add_argument("--full_length", action="store_true", help="no answer ends before the limit")
    parser.add_argument("--max_prompt_tokens", type=int, default=512, help="longer prompts are left out")
    parser.add_argument("--updates", type=int, default=5, help="that count")
    parser.add_argument("--warm_up", type=int, default=2, help="updates before those")
    parser.add_argument("--learning_rate", type=float, default=1e-6)
    parser.add_argument("--trl_weights", choices=("bfloat16", "float32"), default="bfloat16")
    asked = parser.parse_args()
    if asked.side:
        task = sides.read(asked.out, "task")
        sides.leave(asked.out, asked.side, heedful_side(task, asked.out, asked.side, json.loads(asked.heedful)))
        return
    if asked.prompts is None:
        parser.error("name a file of prompts")
    task = task_of(asked)
    print(table(task, sides.run(asked, task, SIDES, script=__file__)))


if __name__ == "__main__":
    main()
