"""A reward model by heedful and one by TRL's RewardTrainer: the same rankings, base model, rate and threads, one table.

    python -m venv trl && trl/bin/pip install trl==1.16.0
    python benchmarks/reward_vs_trl.py train.jsonl dev.jsonl --trl_python trl/bin/python --out compared
    python benchmarks/reward_vs_trl.py train.jsonl dev.jsonl --trl_python trl/bin/python --out quick --rankings 6

Each side is a process of its own that trains on `train`, scores every answer of `dev` and leaves its scores in
OUT/heedful.json or OUT/trl.json; with `--only` the sides run apart, and what is there is compared at the end. TRL gets
all pairs of every ranking, as many per optimizer step as heedful sees on average, renders and tokenises them itself
(trl_side.py), and scores at its last token that is no padding; everything not named here is each side's own default.
Both sides' scores become cards by the same function. Seconds are those of tokenising and training, on the clock and
summed over cores (which other work on the machine does not lengthen); peak memory is that of the whole process, with
loading and scoring.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import sides

from heedful.data.load import load_rankings
from heedful.data.pairs import judged_answers, training_ranks, without_controls
from heedful.evaluate.reward_card import ScoredRanking, build_card
from heedful.records import Accuracy, Message, Ranking

SIDES = ("heedful", "trl")


def rows(rankings: Sequence[Ranking]) -> list[dict[str, Any]]:
    """The rankings as either side reads them: answers that say something, with their ranks."""
    found = []
    for ranking in without_controls(rankings):
        ranks = training_ranks(ranking)
        answers = [{"text": a.text, "rank": ranks[a.id]} for a in judged_answers(ranking, Counter())]
        prompt = [message.to_json() for message in ranking.prompt]
        if len({answer["rank"] for answer in answers}) > 1:
            found.append({"id": ranking.group_id, "prompt": prompt, "answers": answers})
    return found


def num_pairs(rankings: Sequence[Mapping[str, Any]]) -> int:
    """Pairs that the ranks do not tie."""
    return sum(a["rank"] != b["rank"] for row in rankings for a, b in itertools.combinations(row["answers"], 2))


def task_of(asked: argparse.Namespace) -> dict[str, Any]:
    """All that a side must know; results belong together when their tasks are the same."""
    from heedful.models import hardware
    from heedful.models.load import resolve

    train, dev = rows(load_rankings(asked.train))[: asked.rankings], rows(load_rankings(asked.dev))
    num_steps = max(1, len(train) // asked.prompts_per_step)
    pairs_per_step = max(asked.pairs_per_forward, num_pairs(train) / num_steps)
    return {
        "model": str(resolve(asked.model)), "train": train, "dev": dev, "max_tokens": asked.max_tokens,
        "learning_rate": asked.learning_rate, "epochs": asked.epochs, "threads": asked.threads, "seed": asked.seed,
        "warmup_fraction": 0.1, "prompts_per_step": asked.prompts_per_step,
        "pairs_per_forward": asked.pairs_per_forward,
        "forwards_per_step": round(pairs_per_step / asked.pairs_per_forward),
        "bfloat16": "bfloat16" in str(hardware.compute_dtype(hardware.device("cpu"), "auto")),
    }  # fmt: skip


def heedful_side(task: dict[str, Any], out: Path, keys: dict[str, Any]) -> dict[str, Any]:
    """Train by ``train_reward`` and score as the product scores texts."""
    import torch

    import heedful
    from heedful.config.reward import RewardConfig
    from heedful.data import tokenise
    from heedful.models.hardware import seed_everything
    from heedful.models.roles import Reward, build_scalar
    from heedful.records import Answer
    from heedful.runs.folder import StageFolder
    from heedful.train.reward import train_reward

    torch.set_num_threads(task["threads"])
    seed_everything(task["seed"])
    never = 10**9
    config = RewardConfig(**{
        "epochs": task["epochs"], "prompts_per_step": task["prompts_per_step"], "max_tokens": task["max_tokens"],
        "optimizer": {"learning_rate": task["learning_rate"], "warmup_fraction": task["warmup_fraction"]},
        "checkpoint": {"every_steps": never}, "evaluate_every_steps": never, **keys,
    })  # fmt: skip
    dtype = torch.bfloat16 if task["bfloat16"] else torch.float32
    model = build_scalar(
        Path(task["model"]), lora=config.lora, device=torch.device("cpu"), dtype=dtype, new_head=True,
        seed=task["seed"],
    )  # fmt: skip

    def ranking(row: dict[str, Any]) -> Ranking:
        answers = tuple(Answer(f"a{k}", answer["text"]) for k, answer in enumerate(row["answers"]))
        ranks = {f"a{k}": answer["rank"] for k, answer in enumerate(row["answers"])}
        return Ranking(row["id"], tuple(Message(**m) for m in row["prompt"]), answers, consensus=ranks)

    start, core_start = time.perf_counter(), time.process_time()
    records = [ranking(row) for row in task["train"]]
    samples = tokenise.rankings(
        records, [training_ranks(r) for r in records], model.tokenizer, max_tokens=config.max_tokens
    ).samples
    stage = StageFolder(out / f"heedful-{time.time_ns()}", "reward", 2)  # never one that holds a checkpoint
    shortest = min(samples, key=lambda s: sum(map(len, s.sequences)))  # a look at the end is part of the training
    train_reward(model, samples, [shortest], config, stage, seed=task["seed"])
    seconds, core_seconds = time.perf_counter() - start, time.process_time() - core_start
    prompts = [[Message(**m) for m in row["prompt"]] for row in task["dev"] for _ in row["answers"]]
    texts = [answer["text"] for row in task["dev"] for answer in row["answers"]]
    flat = iter(Reward(model).score_texts(prompts, texts, micro_batch_tokens=config.micro_batch_tokens))
    trained = [{"answers": [{"rank": rank} for rank in s.ranks]} for s in samples]
    return {
        "version": heedful.__version__, "seconds": seconds, "core_seconds": core_seconds,
        "num_pairs": round(num_pairs(trained) * task["epochs"]),
        "scores": [[next(flat) for _ in row["answers"]] for row in task["dev"]],
    }  # fmt: skip


def table(dev: Sequence[Mapping[str, Any]], results: Mapping[str, Mapping[str, Any]], *, seed: int = 0) -> str:
    """The sides beside each other; every accuracy with its 95 % interval, which resamples prompts."""
    columns: list[list[str]] = [[
        "", "accuracy, prompts weighted", "accuracy, pairs weighted", "where the shorter answer wins",
        "where the longer answer wins", "length alone", "held-out pairs, prompts", "pairs trained",
        "seconds, of all cores", "pairs per second, of all cores", "peak memory",
    ]]  # fmt: skip
    for side, result in results.items():
        scored = [
            ScoredRanking(scores, [a["rank"] for a in row["answers"]], [len(a["text"]) for a in row["answers"]])
            for row, scores in zip(dev, result["scores"], strict=True)
        ]
        card = build_card(scored, model=side, seed=seed)
        columns.append([
            sides.title(side, result), _share(card.accuracy, card.accuracy_low, card.accuracy_high),
            _share(card.over_pairs, card.over_pairs_low, card.over_pairs_high), _part(card.shorter_wins),
            _part(card.longer_wins), _share(card.length_accuracy), f"{card.num_pairs}, {card.num_prompts}",
            f"{result['num_pairs']}", f"{result['seconds']:.0f}, {result['core_seconds']:.0f}",
            f"{result['num_pairs'] / result['seconds']:.2f}, {result['num_pairs'] / result['core_seconds']:.2f}",
            f"{result['peak_memory_bytes'] / 2**30:.2f} GiB",
        ])  # fmt: skip
    return sides.table(columns)


def _share(value: float | None, low: float | None = None, high: float | None = None) -> str:
    if value is None:
        return "no such pair"
    return f"{value:.1%}" + ("" if low is None or high is None else f" [{low:.1%}, {high:.1%}]")


def _part(found: Accuracy | None) -> str:
    return _share(None) if found is None else f"{_share(found.value, found.low, found.high)} ({found.num_pairs} pairs)"


def main() -> None:
    parser = sides.parser(__doc__, out="reward_vs_trl", trl="trl==1.16.0", sides=SIDES)
    parser.add_argument("train", nargs="?", help="rankings to train on, in any format that heedful reads")
    parser.add_argument("dev", nargs="?", help="rankings to compare on")
    parser.add_argument("--rankings", type=int, help="so many to train on, for a quick try")
    parser.add_argument("--max_tokens", type=int, default=800, help="longer answers are left out of the training")
    parser.add_argument("--learning_rate", type=float, default=2e-5)
    parser.add_argument("--epochs", type=float, default=1.0)
    parser.add_argument(
        "--pairs_per_forward", type=int, default=4, help="of TRL; heedful packs rankings into a budget of tokens"
    )
    parser.add_argument("--prompts_per_step", type=int, default=8, help="rankings per optimizer step")
    asked = parser.parse_args()
    if asked.side:
        task = sides.read(asked.out, "task")
        sides.leave(asked.out, asked.side, heedful_side(task, asked.out, json.loads(asked.heedful)))
        return
    if asked.train is None or asked.dev is None:
        parser.error("name the two files of rankings")
    task = task_of(asked)
    print(table(task["dev"], sides.run(asked, task, SIDES, script=__file__), seed=asked.seed))


if __name__ == "__main__":
    main()
