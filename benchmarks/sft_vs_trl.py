"""Supervised fine-tuning with packing by heedful and by TRL's SFTTrainer: tokens per second on the same samples.

    python -m venv trl && trl/bin/pip install trl==1.16.0
    python benchmarks/sft_vs_trl.py demonstrations.jsonl --trl_python trl/bin/python --out compared

Both sides get the same token ids and masks, pack them into rows of --row_tokens, train all weights (kept in float32,
computed in bfloat16 where the machine has it), and take about as many tokens per optimizer step. Samples of a row do
not see each other on either side. A side's tokens are those of its samples, without padding; tokens per second are the
median over the steps after the warm-up. Each side is a process of its own; peak memory is that of the whole process.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import sides

SIDES = ("heedful", "trl")


def task_of(asked: argparse.Namespace) -> dict[str, Any]:
    """All that a side must know."""
    from heedful.data import tokenise
    from heedful.data.load import load_demonstrations
    from heedful.models import hardware
    from heedful.models.load import load_tokenizer, resolve

    path = resolve(asked.model)
    tokenizer = load_tokenizer(path)
    records = load_demonstrations(asked.demonstrations)
    samples = tokenise.demonstrations(records, tokenizer, max_tokens=asked.row_tokens).samples
    num = asked.prompts_per_step * (asked.warm_up + asked.updates)
    if len(samples) < num:
        raise SystemExit(f"{asked.demonstrations} has {len(samples)} samples that fit a row; {num} are needed")
    samples = samples[:num]
    rows_per_step = sum(len(s.ids) for s in samples) // (asked.warm_up + asked.updates) // asked.row_tokens
    if not rows_per_step:
        raise SystemExit("the samples of a step do not fill a row; raise --prompts_per_step or lower --row_tokens")
    return {
        "what": "sft", "model": str(path),
        "samples": [{"ids": s.ids, "mask": list(map(int, s.loss_mask))} for s in samples],
        "prompts_per_step": asked.prompts_per_step, "row_tokens": asked.row_tokens,
        "rows_per_step": rows_per_step, "warm_up": asked.warm_up, "updates": asked.updates, "pad": tokenizer.pad_token,
        "learning_rate": asked.learning_rate, "seed": asked.seed, "threads": asked.threads,
        "bfloat16": "bfloat16" in str(hardware.compute_dtype(hardware.device("cpu"), "auto")),
    }  # fmt: skip


def heedful_side(task: dict[str, Any], out: Path, keys: dict[str, Any]) -> dict[str, Any]:
    """Train by ``train_sft``; the times are those of its log."""
    import torch

    import heedful
    from heedful.config.recipe import SFTConfig
    from heedful.models.hardware import seed_everything
    from heedful.models.roles import build_policy
    from heedful.records import TokenSample
    from heedful.runs.folder import StageFolder
    from heedful.runs.reader import read_stage
    from heedful.train.sft import train_sft

    torch.set_num_threads(task["threads"])
    seed_everything(task["seed"])
    samples = [TokenSample(row["ids"], list(map(bool, row["mask"])), f"s{n}") for n, row in enumerate(task["samples"])]
    config = SFTConfig(**{
        "epochs": 1, "prompts_per_step": task["prompts_per_step"],
        "packing": True, "micro_batch_tokens": task["row_tokens"], "checkpoint": {"every_steps": 10**9},
        "optimizer": {"learning_rate": task["learning_rate"], "schedule": "constant"}, **keys,
    })  # fmt: skip
    policy = build_policy(
        task["model"], lora=config.lora, device=torch.device("cpu"),
        dtype=torch.bfloat16 if task["bfloat16"] else torch.float32,
    )  # fmt: skip
    stage = StageFolder(out / f"heedful-{time.time_ns()}", "sft", 1)  # never one that holds a checkpoint
    train_sft(policy, samples, [], config, stage, seed=task["seed"])
    log = read_stage(stage.path)
    seconds, speed = log.column("run/seconds")[1], log.column("sft/tokens_per_second")[1]
    return {"version": heedful.__version__, "seconds": seconds, "tokens": [a * b for a, b in zip(seconds, speed)]}


def table(task: Mapping[str, Any], results: Mapping[str, Mapping[str, Any]]) -> str:
    """The sides beside each other, and heedful as a multiple of TRL."""
    speeds = {
        side: statistics.median([n / s for n, s in zip(r["tokens"], r["seconds"])][task["warm_up"] :])
        for side, r in results.items()
    }
    columns: list[list[str]] = [[
        "", "tokens per second", "times TRL's, tokens per second", "tokens per step", "seconds per step", "peak memory",
        "times TRL's, peak memory",
    ]]  # fmt: skip
    trl = results.get("trl")
    for side, result in results.items():
        columns.append([
            sides.title(side, result), f"{speeds[side]:.1f}", f"{speeds[side] / speeds['trl']:.2f}" if trl else "",
            f"{statistics.mean(result['tokens'][task['warm_up'] :]):.0f}",
            f"{statistics.median(result['seconds'][task['warm_up'] :]):.2f}",
            f"{result['peak_memory_bytes'] / 2**30:.2f} GiB",
            f"{result['peak_memory_bytes'] / trl['peak_memory_bytes']:.2f}" if trl else "",
        ])  # fmt: skip
    return sides.table(columns)


def main() -> None:
    parser = sides.parser(__doc__, out="sft_vs_trl", trl="trl==1.16.0", sides=SIDES)
    parser.add_argument("demonstrations", nargs="?", help="conversations, in any format that heedful reads")
    parser.add_argument("--prompts_per_step", type=int, default=16, help="demonstrations per optimizer step")
    parser.add_argument("--row_tokens", type=int, default=1024, help="of a packed row; longer samples are left out")
    parser.add_argument("--updates", type=int, default=5, help="that count")
    parser.add_argument("--warm_up", type=int, default=2, help="updates before those")
    parser.add_argument("--learning_rate", type=float, default=2e-5)
    asked = parser.parse_args()
    if asked.side:
        task = sides.read(asked.out, "task")
        sides.leave(asked.out, asked.side, heedful_side(task, asked.out, json.loads(asked.heedful)))
        return
    if asked.demonstrations is None:
        parser.error("name a file of demonstrations")
    task = task_of(asked)
    print(table(task, sides.run(asked, task, SIDES, script=__file__)))


if __name__ == "__main__":
    main()
