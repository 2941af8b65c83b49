"""The plan's peak memory against the measured one, on ten recipes and more: stages, modes, adapters, lengths, batches.

    python benchmarks/plan_vs_peak.py --model smollm2-135m --prompts prompts.jsonl --out planned
    python benchmarks/plan_vs_peak.py --model smollm2-135m --prompts prompts.jsonl --out planned --only shared --steps 4

Every recipe is run by `heedful run` in a process of its own for a few steps on the quickstart's data, PPO on PROMPTS
(any format that heedful reads; long and short ones mixed say most); both numbers are those of its own report
(`memory` in a stage's results). PPO takes the reward models that two of the recipes train. Results that are there
already are read, not repeated.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import sides

from heedful.data.load import load_demonstrations, load_rankings
from heedful.data.shipped import data_path

_DATA = {"sft": {"demonstrations": "package:demonstrations"}, "reward": {"rankings": "package:rankings"}}
_LOAD: dict[str, Any] = {"sft": load_demonstrations, "reward": load_rankings}

REWARDS = {"all": "reward, all weights", "adapters": "reward, adapters", "nf4": "reward, adapters on nf4"}
"""The recipes whose models PPO takes."""


def recipes(steps: int) -> dict[str, dict[str, Any]]:
    """By name: the section of the recipe that is run."""
    lora: dict[str, Any] = {"rank": 16, "alpha": 32}
    on_nf4 = {**lora, "base": "nf4"}
    sft = {"prompts_per_step": 16, "micro_batch_tokens": 768, "max_tokens": 160}
    reward = {"prompts_per_step": 8, "micro_batch_tokens": 512, "max_tokens": 160}
    ppo: dict[str, Any] = {"steps": steps, "prompts_per_step": 16, "sampling": {"max_new_tokens": 32}}
    longer = {**ppo, "sampling": {"max_new_tokens": 128}}
    return {
        REWARDS["all"]: {"reward": reward},
        REWARDS["adapters"]: {"reward": {**reward, "lora": lora}},
        REWARDS["nf4"]: {"reward": {**reward, "lora": on_nf4}},
        "SFT, all weights": {"sft": sft},
        "SFT, all weights, packing": {"sft": {**sft, "packing": True}},
        "SFT, adapters": {"sft": {**sft, "lora": lora}},
        "SFT, adapters on nf4": {"sft": {**sft, "lora": on_nf4}},
        "PPO, separate": {"ppo": {**ppo, "roles": "separate"}},
        "PPO, separate, 128 new tokens": {"ppo": {**longer, "roles": "separate"}},
        "PPO, separate, 32 answers in 2 minibatches": {
            "ppo": {**ppo, "roles": "separate", "prompts_per_step": 32, "minibatches": 2}
        },
        "PPO, separate, activation checkpointing": {
            "ppo": {**ppo, "roles": "separate", "activation_checkpointing": True}
        },
        "PPO, trunk": {"ppo": {**ppo, "roles": "trunk"}},
        "PPO, trunk, 128 new tokens": {"ppo": {**longer, "roles": "trunk"}},
        "PPO, separate, adapters": {"ppo": {**ppo, "roles": "separate", "lora": lora}},
        "PPO, shared": {"ppo": {**ppo, "roles": "shared", "lora": lora}},
        "PPO, shared, 128 new tokens": {"ppo": {**longer, "roles": "shared", "lora": lora}},
        "PPO, shared, base in nf4": {"ppo": {**ppo, "roles": "shared", "lora": on_nf4}},
        "PPO, shared, activation checkpointing": {
            "ppo": {**ppo, "roles": "shared", "lora": lora, "activation_checkpointing": True}
        },
    }


def recipe_of(asked: argparse.Namespace, name: str, section: dict[str, Any]) -> dict[str, Any]:
    """The whole recipe around its one section."""
    ((stage, keys),) = section.items()
    model, added = {"name": str(asked.model)}, {}
    if stage == "ppo":
        data = {"prompts": str(asked.prompts)}
        on_nf4 = keys.get("lora", {}).get("base") == "nf4"
        reward = _folder(asked.out, REWARDS["all" if keys["roles"] != "shared" else "nf4" if on_nf4 else "adapters"])
        model["reward"] = str(next(reward.glob("stages/*reward")) / "model")
        added = {"accept_weak_reward": True}
    else:
        data = _DATA[stage]
        num_prompts = len(_LOAD[stage](data_path(next(iter(data.values())))))
        added = {"epochs": 4 * asked.steps * keys["prompts_per_step"] / num_prompts}
    return {
        "name": _folder(asked.out, name).name, "output": str(asked.out), "model": model, "data": data,
        stage: {**keys, **added},
    }  # fmt: skip


def _folder(out: Path, name: str) -> Path:
    return out / name.replace(",", "").replace(" ", "-").lower()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m", help="alias or folder")
    parser.add_argument("--prompts", type=Path, required=True, help="what PPO answers")
    parser.add_argument("--steps", type=int, default=4, help="of PPO; four times as many of the others")
    parser.add_argument("--only", action="append", metavar="PART", help="recipes whose names have this in them")
    parser.add_argument("--out", type=Path, default=Path("plan_vs_peak"))
    asked = parser.parse_args()
    columns = [["", "plan, GiB", "measured, GiB", "error", "phase"]]
    for name, section in recipes(asked.steps).items():
        if asked.only and not any(part in name for part in asked.only) and name not in REWARDS.values():
            continue
        finished = sides.run_recipe(recipe_of(asked, name, section)) / "finished.json"
        memory = json.loads(finished.read_text(encoding="utf-8"))["results"]["memory"]
        planned, measured = memory["planned_bytes"] / 2**30, memory["measured_bytes"] / 2**30
        columns.append([name, f"{planned:.2f}", f"{measured:.2f}", f"{memory['error']:+.0%}", memory["phase"]])
        print("  ".join(columns[-1]), flush=True)
    print("\n".join(["", "| " + " | ".join(columns[0]) + " |", *("| " + " | ".join(c) + " |" for c in columns[1:])]))


if __name__ == "__main__":
    main()
