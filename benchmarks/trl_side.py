"""The TRL side of every comparison: runs where TRL is installed and needs nothing of heedful.

    python trl_side.py OUT     reads OUT/task.json, does its work, writes OUT/trl.json

trl==1.16.0 for reward_vs_trl.py and sft_vs_trl.py, trl==1.12.0 for ppo_vs_trl.py.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import trl
from datasets import Dataset
from sides import Clock, digest
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    TrainerCallback,
)
from transformers.trainer_utils import get_last_checkpoint


class Timed(TrainerCallback):
    """Marks the border of every update."""

    def __init__(self) -> None:
        self.clock = Clock()

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self.clock.mark()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.clock.mark()


class Spent(TrainerCallback):
    """Seconds on the clock and of all cores, of the parts of a training that was stopped too."""

    NAME = "seconds.json"

    def __init__(self, saved: Path | None) -> None:
        self.earlier = json.loads((saved / self.NAME).read_text()) if saved else [0.0, 0.0]
        self.start = time.perf_counter(), time.process_time()

    def so_far(self) -> tuple[float, float]:
        now = time.perf_counter(), time.process_time()
        clock, cores = (e + n - s for e, n, s in zip(self.earlier, now, self.start, strict=True))
        return clock, cores

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        (folder / self.NAME).write_text(json.dumps(self.so_far()), encoding="utf-8")


def pairs(rankings: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Every pair that the ranks do not tie, better answer first, as TRL takes conversations."""
    found = []
    for row in rankings:
        for a, b in itertools.combinations(row["answers"], 2):
            if a["rank"] != b["rank"]:
                better, worse = (a, b) if a["rank"] < b["rank"] else (b, a)
                found.append({"prompt": row["prompt"], "chosen": turn(better), "rejected": turn(worse)})
    return found


def turn(answer: dict[str, Any]) -> list[dict[str, str]]:
    """An answer as a message."""
    return [{"role": "assistant", "content": answer["text"]}]


def shared_settings(task: dict[str, Any], out: Path) -> dict[str, Any]:
    """What every trainer is told alike."""
    return {
        "output_dir": str(out / "trl"), "seed": task["seed"], "use_cpu": True, "bf16": task["bfloat16"],
        "report_to": [], "save_strategy": "no", "gradient_checkpointing": False,
        "learning_rate": task["learning_rate"],
    }  # fmt: skip


def reward(task: dict[str, Any], out: Path) -> dict[str, Any]:
    """Train on all pairs, from where a run of the same task was stopped, then score every held-out answer."""
    tokenizer = AutoTokenizer.from_pretrained(task["model"])
    if tokenizer.pad_token_id is None or tokenizer.pad_token_id == tokenizer.eos_token_id:
        tokenizer.pad_token = next(t for t in tokenizer.all_special_tokens if t != tokenizer.eos_token)
    model = AutoModelForSequenceClassification.from_pretrained(task["model"], num_labels=1, dtype=torch.float32)
    config = trl.RewardConfig(
        **shared_settings(task, out) | {"output_dir": str(out / f"trl-{digest(task)[:12]}"), "save_strategy": "steps"},
        save_steps=8, save_total_limit=1, logging_steps=10, max_length=task["max_tokens"],
        num_train_epochs=task["epochs"], warmup_steps=task["warmup_fraction"],
        per_device_train_batch_size=task["pairs_per_forward"], gradient_accumulation_steps=task["forwards_per_step"],
    )  # fmt: skip
    saved = get_last_checkpoint(config.output_dir) if Path(config.output_dir).is_dir() else None
    spent = Spent(Path(saved) if saved else None)
    trainer = trl.RewardTrainer(
        model=model, args=config, train_dataset=Dataset.from_list(pairs(task["train"])), processing_class=tokenizer,
        callbacks=[spent],
    )  # fmt: skip
    trainer.train(resume_from_checkpoint=saved)
    seconds, core_seconds = spent.so_far()
    model.eval()
    scores = []
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=task["bfloat16"]):
        for row in task["dev"]:
            texts = [
                tokenizer.apply_chat_template(row["prompt"] + turn(a), tokenize=True, return_dict=True)
                for a in row["answers"]
            ]
            batch = tokenizer.pad(texts, return_tensors="pt", padding_side="right")
            scores.append(model(**batch).logits[:, 0].float().tolist())
    num_pairs = round(len(trainer.train_dataset) * task["epochs"])
    return {"seconds": seconds, "core_seconds": core_seconds, "num_pairs": num_pairs, "scores": scores}


def ppo(task: dict[str, Any], out: Path) -> dict[str, Any]:
    """PPO updates, each timed, with the time and the mean length of its rollout."""
    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
    from trl.experimental.ppo import PPOConfig, PPOTrainer, ppo_trainer

    tokenizer = AutoTokenizer.from_pretrained(task["model"], padding_side="left")
    tokenizer.add_special_tokens({"pad_token": task["pad"]})  # TRL takes every pad for padding: no prompt may hold it
    dtype = getattr(torch, task["trl_weights"])
    policy, reference = (AutoModelForCausalLM.from_pretrained(task["model"], dtype=dtype) for _ in range(2))
    scorers = [
        AutoModelForSequenceClassification.from_pretrained(task["model"], num_labels=1, dtype=dtype) for _ in range(2)
    ]
    config = PPOConfig(
        **shared_settings(task, out), logging_steps=1, lr_scheduler_type="constant",
        total_episodes=task["batch"] * (task["warm_up"] + task["updates"]), num_ppo_epochs=1, num_mini_batches=1,
        per_device_train_batch_size=task["batch"], local_rollout_forward_batch_size=task["batch"],
        gradient_accumulation_steps=1, response_length=task["new_tokens"], temperature=1.0,
        stop_token_id=task["end_id"], kl_coef=task["kl_coefficient"], num_sample_generations=0,
    )  # fmt: skip
    timed, decode = Timed(), ppo_trainer.batch_generation
    seconds: list[float] = []
    lengths: list[float] = []

    def watched(model: Any, queries: torch.Tensor, *more: Any) -> Any:
        start = time.perf_counter()
        ids, logits = decode(model, queries, *more)
        seconds.append(time.perf_counter() - start)
        ended = (ids[:, queries.shape[1] :] == (-1 if task["end_id"] is None else task["end_id"])).int()
        past = ended.cumsum(dim=1) - ended  # after the first end token
        lengths.append((past == 0).sum(dim=1).float().mean().item())
        return ids, logits

    ppo_trainer.batch_generation = watched
    data = Dataset.from_list([{"input_ids": row["ids"]} for row in task["prompts"]])
    trainer = PPOTrainer(
        args=config, processing_class=tokenizer, model=policy, ref_model=reference, reward_model=scorers[0],
        value_model=scorers[1], train_dataset=data, eval_dataset=data, callbacks=[timed],
    )  # fmt: skip
    trainer.train()
    return {**timed.clock.per_update(), "phases": {"rollout": seconds}, "answer_tokens": lengths}


def sft(task: dict[str, Any], out: Path) -> dict[str, Any]:
    """Packed supervised fine-tuning, every step timed and its tokens counted."""
    tokenizer = AutoTokenizer.from_pretrained(task["model"])
    tokenizer.add_special_tokens({"pad_token": task["pad"]})
    model = AutoModelForCausalLM.from_pretrained(task["model"], dtype=torch.float32)
    config = trl.SFTConfig(
        **shared_settings(task, out), logging_steps=1, packing=True, max_length=task["row_tokens"],
        max_steps=task["warm_up"] + task["updates"], per_device_train_batch_size=1,
        gradient_accumulation_steps=task["rows_per_step"], lr_scheduler_type="constant",
    )  # fmt: skip
    rows = [{"input_ids": row["ids"], "assistant_masks": row["mask"]} for row in task["samples"]]
    timed = Timed()
    trainer = trl.SFTTrainer(
        model=model, args=config, train_dataset=Dataset.from_list(rows), processing_class=tokenizer, callbacks=[timed]
    )
    collate, tokens = trainer.data_collator, []

    def counting(examples: list[dict[str, Any]]) -> Any:
        tokens.append(sum(len(example["input_ids"]) for example in examples))
        return collate(examples)

    trainer.data_collator = counting
    trainer.train()
    cuts = range(0, len(tokens), task["rows_per_step"])  # batches are fetched in order, some perhaps ahead
    per_step = [sum(tokens[cut : cut + task["rows_per_step"]]) for cut in cuts]
    return {**timed.clock.per_update(), "tokens": per_step[: config.max_steps]}


WORK = {"reward": reward, "ppo": ppo, "sft": sft}


def main() -> None:
    out = Path(sys.argv[1])
    task = json.loads((out / "task.json").read_text(encoding="utf-8"))
    torch.set_num_threads(task["threads"])
    torch.manual_seed(task["seed"])  # new heads are random
    result = WORK[task.get("what", "reward")](task, out)
    (out / "trl.json").write_text(json.dumps({"version": trl.__version__, **result}), encoding="utf-8")


if __name__ == "__main__":
    main()
