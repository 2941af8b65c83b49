"""The TRL side of reward_vs_trl.py: runs where trl==1.16.0 is installed and needs nothing of heedful.

    python trl_side.py OUT     reads OUT/task.json, trains, scores, writes OUT/trl.json
"""

from __future__ import annotations

import itertools
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
import trl
from datasets import Dataset
from transformers import AutoModelForSequenceClassification, AutoTokenizer
from trl import RewardConfig, RewardTrainer


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


def main() -> None:
    out = Path(sys.argv[1])
    task = json.loads((out / "task.json").read_text(encoding="utf-8"))
    torch.set_num_threads(task["threads"])
    torch.manual_seed(task["seed"])  # the head is random
    tokenizer = AutoTokenizer.from_pretrained(task["model"])
    if tokenizer.pad_token_id is None or tokenizer.pad_token_id == tokenizer.eos_token_id:
        tokenizer.pad_token = next(t for t in tokenizer.all_special_tokens if t != tokenizer.eos_token)
    model = AutoModelForSequenceClassification.from_pretrained(task["model"], num_labels=1, dtype=torch.float32)
    config = RewardConfig(
        output_dir=str(out / "trl"), seed=task["seed"], use_cpu=True, bf16=task["bfloat16"], report_to=[],
        save_strategy="no", logging_steps=10, gradient_checkpointing=False, max_length=task["max_tokens"],
        learning_rate=task["learning_rate"], num_train_epochs=task["epochs"], warmup_steps=task["warmup_fraction"],
        per_device_train_batch_size=task["pairs_per_forward"], gradient_accumulation_steps=task["forwards_per_step"],
    )  # fmt: skip
    start, core_start = time.perf_counter(), time.process_time()
    trainer = RewardTrainer(
        model=model, args=config, train_dataset=Dataset.from_list(pairs(task["train"])), processing_class=tokenizer
    )
    trainer.train()
    seconds, core_seconds = time.perf_counter() - start, time.process_time() - core_start
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
    result = {
        "version": trl.__version__, "seconds": seconds, "core_seconds": core_seconds, "num_pairs": num_pairs,
        "scores": scores,
    }  # fmt: skip
    (out / "trl.json").write_text(json.dumps(result), encoding="utf-8")


if __name__ == "__main__":
    main()
