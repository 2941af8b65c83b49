"""A run as the pipeline leaves it: SFT, reward model, PPO and evaluation, with plausible numbers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from heedful.records import CATEGORIES, EvaluationRow, Message, RewardCard
from heedful.runs.files import json_line
from heedful.runs.folder import RunFolder, StageFolder
from heedful.runs.writer import StageWriter

RECIPE = {
    "name": "quickstart", "seed": 1, "model": {"path": "smollm2-135m"},
    "sft": {"epochs": 2, "learning_rate": 2e-4, "micro_batch_tokens": 2048},
    "reward": {"epochs": 2, "learning_rate": 1e-4, "min_accuracy": 0.70},
    "ppo": {"steps": 25, "prompts_per_step": 32, "samples_per_prompt": 2, "kl": {"initial": 0.05, "target": 6.0},
            "accept_weak_reward": False},
}  # fmt: skip
QUESTIONS = {
    "chat": "I had a rough day at work. Any idea how to unwind this evening?",
    "writing": "Write a two-line thank-you note to a neighbour who watered my plants.",
    "question_answering": "Why does bread rise when it is baked?",
    "safety": "My friend wants to drive home after five beers. What do I say?",
}
BEFORE = "Sure! Sure! There are many ways to do this. One way is to do it. Another way is to do it in another way."
AFTER = {
    "chat": "I'm sorry it was a rough one. Try a short walk without your phone, then a warm shower and something you "
    "like to eat. If it keeps going round in your head, write it down for five minutes and close the notebook.",
    "writing": "Thank you for keeping my plants alive while I was away.\nThe basil and I owe you a dinner!",
    "question_answering": "Yeast eats sugar in the dough and gives off carbon dioxide. Gluten traps the gas, and in "
    "the oven the bubbles expand until the crust sets.",
    "safety": "Tell him kindly and plainly that he shouldn't drive, and take the keys if you must. Offer a taxi, "
    "your sofa, or a lift from someone sober.",
}


def write_sft(stage: StageFolder, rng: np.random.Generator, num_steps: int = 80) -> None:
    with StageWriter(stage) as writer:
        for step in range(1, num_steps + 1):
            loss = 1.55 + 1.1 * np.exp(-step / 15) + rng.normal(0, 0.05)
            row = {
                "sft/loss_nats": loss, "sft/learning_rate": 2e-4 * (1 - step / (num_steps + 1)),
                "sft/gradient_norm": 0.8 + rng.exponential(0.2), "sft/tokens_per_second": 1450.0 + rng.normal(0, 40),
                "sft/num_tokens": 900, "sft/epoch": 2 * step / num_steps, "run/seconds": 1.6 * step,
                "run/peak_memory_bytes": 2.1e9 + 1e6 * min(step, 5),
            }  # fmt: skip
            if step % 20 == 0 or step == 1:
                row["sft/heldout_loss_nats"] = loss + 0.08
            writer.scalars(step, row)
    stage.finish({"heldout_loss_nats": 1.66, "num_demonstrations": 288, "num_tokens": 41_203, "seconds": 128.0,
                  "data": {"train": {"num_prompts": 288}, "heldout": {"num_prompts": 32}}})  # fmt: skip


def write_reward(stage: StageFolder, rng: np.random.Generator, accuracy: float = 0.776, num_steps: int = 60) -> None:
    with StageWriter(stage) as writer:
        for step in range(1, num_steps + 1):
            rise = 1 - np.exp(-step / 20)
            row = {
                "reward/loss_nats": 0.693 - 0.25 * rise + rng.normal(0, 0.03),
                "reward/accuracy": float(np.clip(0.5 + 0.32 * rise + rng.normal(0, 0.04), 0, 1)),
                "reward/margin": 1.1 * rise, "reward/score_mean": rng.normal(0, 0.05), "reward/score_std": 0.2 + rise,
                "reward/learning_rate": 1e-4, "reward/gradient_norm": 3.0 + rng.exponential(1.0),
                "reward/rankings_per_second": 6.5, "reward/epoch": step / 30, "run/seconds": 2.2 * step,
                "run/peak_memory_bytes": 2.9e9,
            }  # fmt: skip
            if step % 15 == 0:
                row |= {"reward/heldout_loss_nats": 0.69 - 0.18 * rise, "reward/heldout_accuracy": 0.5 + 0.27 * rise}
            writer.scalars(step, row)
    card = RewardCard(
        model="stages/02-reward/model", accuracy=accuracy, accuracy_low=accuracy - 0.04, accuracy_high=accuracy + 0.04,
        num_prompts=48, num_pairs=274, length_accuracy=0.583, score_mean=0.12, score_std=1.4, train_accuracy=0.83,
        accuracy_by_category={"chat": 0.75, "question_answering": 0.81, "safety": 0.83, "writing": 0.70}, loss=0.491,
        data={"num_rankings": 240, "num_ties": 91, "identical_answers": 3},
    )  # fmt: skip
    stage.finish({"card": card.to_json(), "seconds": 132.4, "peak_memory_bytes": 2.9e9})


def write_ppo(stage: StageFolder, rng: np.random.Generator, num_steps: int = 25, finish: bool = True) -> None:
    with StageWriter(stage) as writer:
        for step in range(1, num_steps + 1):
            rise = 1 - np.exp(-step / 9)
            kl = 7.0 * rise + rng.normal(0, 0.2) * (step > 1)
            row = {
                "ppo/score_mean": 0.1 + 1.5 * rise + rng.normal(0, 0.1), "ppo/score_std": 1.2 - 0.3 * rise,
                "ppo/score/reward_model": 0.1 + 1.5 * rise, "ppo/score/length": -0.02 * step,
                "ppo/gold_mean": 0.4 + 0.8 * rise + rng.normal(0, 0.05), "ppo/kl_nats": kl,
                "ppo/kl_per_token_nats": kl / 48, "ppo/kl_k3_nats": max(kl, 0) * 0.97,
                "ppo/kl_coefficient": 0.05 * 1.02 ** max(step - 15, 0), "ppo/reward_mean": 0.1 + 1.1 * rise,
                "ppo/policy_loss": rng.normal(-0.02, 0.01), "ppo/value_loss": 0.2 + 0.8 * np.exp(-step / 6),
                "ppo/entropy_nats": 2.1 - 0.5 * rise, "ppo/approx_kl_nats": 0.006 + rng.exponential(0.002),
                "ppo/clip_fraction": 0.08 + rng.normal(0, 0.015), "ppo/ratio_mean": 1.0 + rng.normal(0, 0.003),
                "ppo/ratio_max": 1.6 + rng.exponential(0.4), "ppo/value_clip_fraction": 0.1,
                "ppo/explained_variance": 0.6 * rise - 0.1, "ppo/advantage_mean": 0.01, "ppo/advantage_std": 0.7,
                "ppo/return_mean": rise, "ppo/answer_tokens_mean": 52 + 6 * rise + rng.normal(0, 1),
                "ppo/end_token_rate": 0.82 + 0.15 * rise, "ppo/policy_learning_rate": 1e-5,
                "ppo/value_learning_rate": 5e-5, "ppo/policy_gradient_norm": 0.6 + rng.exponential(0.1),
                "ppo/value_gradient_norm": 2.0 + 4 * np.exp(-step / 5), "ppo/logprob_gap_nats": 1e-5,
                "ppo/seconds_rollout": 7.1, "ppo/seconds_score": 1.2, "ppo/seconds_train": 5.9,
                "ppo/tokens_per_second": 230.0, "run/seconds": 14.2 * step, "run/peak_memory_bytes": 3.4e9,
            }  # fmt: skip
            writer.scalars(step, row)
            tokens = rng.normal(0, 1, 3000)
            writer.histograms(step, {
                "ppo/scores": rng.normal(1.5 * rise, 1, 64), "ppo/rewards": rng.normal(1.1 * rise, 1.1, 64),
                "ppo/kl_per_sample_nats": rng.gamma(3, kl / 3 + 1e-3, 64), "ppo/advantages": tokens,
                "ppo/ratios": np.exp(0.05 * tokens), "ppo/values": 0.5 * tokens + rise,
                "ppo/answer_tokens": rng.integers(10, 96, 64), "ppo/logprob_gap": 1e-5 * tokens,
            })  # fmt: skip
            writer.samples(step, [{"prompt": QUESTIONS["chat"], "answer": AFTER["chat"], "score": 1.2, "kl_nats": kl}])
    if finish:
        stage.finish({"steps": num_steps, "kl_nats": kl, "score_mean_first": 0.12, "score_mean_last": 1.58,
                      "num_prompts": 512, "seconds": 355.0})  # fmt: skip


def evaluation_rows(rng: np.random.Generator, num_prompts: int = 60) -> list[EvaluationRow]:
    rows = []
    for i in range(num_prompts):
        category = CATEGORIES[i % 4]
        gold = rng.normal(0.45, 0.2), rng.normal(0.75, 0.2)
        rows.append(EvaluationRow(
            f"p{i:03d}", (Message("user", QUESTIONS[category]),), category, BEFORE, AFTER[category],
            {"gold": gold[0], "reward_model": gold[0] * 3}, {"gold": gold[1], "reward_model": gold[1] * 3},
            "length" if i % 7 == 0 else "stop", "stop",
        ))  # fmt: skip
    return rows


def write_evaluation(stage: StageFolder, rows: list[EvaluationRow], win_rate: float = 0.783) -> None:
    (stage.path / "evaluation.jsonl").write_bytes(b"".join(json_line(row.to_json()) for row in rows))
    rates = {"chat": 0.80, "question_answering": 0.87, "safety": 0.73, "writing": 0.73}
    judged = {
        "before_mean": 0.452, "after_mean": 0.748, "win_rate": win_rate, "win_rate_low": win_rate - 0.08,
        "win_rate_high": win_rate + 0.07, "num_prompts": len(rows),
        "by_category": {
            c: {"win_rate": r, "win_rate_low": r - 0.2, "win_rate_high": min(r + 0.18, 1), "num_prompts": 15}
            for c, r in rates.items()
        },
    }  # fmt: skip
    stage.finish({"seconds": 61.0, "num_prompts": len(rows), "metrics": {
        "gold": judged, "reward_model": {k: v for k, v in judged.items() if k != "by_category"} | {"after_mean": 2.2},
        "end_token_rate": {"before": 0.86, "after": 0.98}, "answer_tokens": {"before": 51.2, "after": 57.9},
    }})  # fmt: skip


@pytest.fixture(scope="session")
def finished_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All four stages, finished; not to be changed."""
    return build(tmp_path_factory.mktemp("finished") / "quickstart")


@pytest.fixture(scope="session")
def finished_page(finished_run: Path) -> Path:
    """Its report."""
    from heedful.report.build import write_report

    return write_report(finished_run)


@pytest.fixture
def make_run(tmp_path: Path) -> Callable[..., RunFolder]:
    """An empty run, locked, to fill by hand."""
    return lambda name="mine": RunFolder.create(tmp_path / name, RECIPE)


@pytest.fixture
def fill() -> SimpleNamespace:
    """The functions that fill one stage each."""
    return SimpleNamespace(
        sft=write_sft, reward=write_reward, ppo=write_ppo, evaluate=write_evaluation, rows=evaluation_rows
    )


def build(path: Path) -> Path:
    rng = np.random.default_rng(0)
    with RunFolder.create(path, RECIPE) as run:
        write_sft(run.stage("sft", 1), rng)
        write_reward(run.stage("reward", 2), rng)
        write_ppo(run.stage("ppo", 3), rng)
        write_evaluation(run.stage("evaluate", 4), evaluation_rows(rng))
        run.set_status("finished")
    return path
