"""Every recipe that ships loads, keeps the arithmetic of its source, and trains: three PPO steps on a toy model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from heedful import pipeline
from heedful.config.read import load_recipe
from heedful.runs.reader import RunTable, read_stage
from toy_parts import CPU, model_folder

ROOT = Path(__file__).resolve().parents[2]
SHIPPED = sorted(path.stem for path in (ROOT / "recipes").glob("*.yaml"))

SIZES: dict[str, Any] = {
    "steps": 3, "prompts_per_step": 8, "micro_batch_tokens": 512, "sampling.max_new_tokens": 8,
    "checkpoint.every_steps": 3,
}  # fmt: skip
"""What makes three steps quick; every other setting of the ppo section is the recipe's own."""

SMALLER: dict[str, dict[str, Any]] = {
    "rlhf-in-practice": {"value_warmup_steps": 1, "kl.guard.window_steps": 1},
    "ppo-and-reward-design": {"best.every_steps": 2, "best.num_prompts": 4},
    "engineering-pains": {"value_warmup_steps": 1, "overlong_from_tokens": 6, "samples_per_prompt": 2},
    "instructgpt": {"ptx.prompts_per_step": 4},
    "ppo-max": {"value_warmup_steps": 1, "ptx.prompts_per_step": 4},
}
"""Sizes of a recipe's own options that do not fit three small steps."""

SHOWN: dict[str, set[str]] = {
    "quickstart": {"ppo/clip_fraction", "ppo/kl_coefficient"},
    "rlhf-in-practice": {"ppo/kl_exact_nats", "ppo/kl_loss_nats", "ppo/kl_guard", "ppo/kl_outlier_rate"},
    "ppo-and-reward-design": {"ppo/validation_score", "ppo/gold_mean"},
    "deepspeed-chat": {"ppo/raw_score/reward_model"},
    "engineering-pains": {"ppo/num_skipped_minibatches", "ppo/value_loss"},
    "instructgpt": {"ppo/ptx_loss_nats"},
    "ppo-max": {"ppo/ptx_loss_nats", "ppo/raw_score/reward_model"},
}
"""Numbers that the special options of a recipe put into the log."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A policy, and a reward model with a card that passes the gate."""
    from heedful.models.export import save_reward
    from heedful.models.roles import build_scalar
    from heedful.records import RewardCard

    folder = tmp_path_factory.mktemp("models")
    policy, reward = model_folder(folder / "policy"), folder / "reward"
    part = build_scalar(policy, lora=None, device=CPU, dtype=torch.float32, new_head=True)
    with torch.no_grad():  # a new head gives tiny scores, and running statistics of nothing
        part.model.score.weight.mul_(20)
    card = RewardCard("reward", 0.9, 0.8, 1.0, 10, 10, score_mean=0.3, score_std=2.0)
    save_reward(part.model, part.tokenizer, reward, score_mean=0.3, score_std=2.0, card=card)
    return {"policy": policy, "reward": reward}


@pytest.fixture(scope="module")
def run_of(models, toy_data, tmp_path_factory):
    """The ppo stage of a recipe by name: its numbers and its results; each is run once."""
    made: dict[str, tuple[RunTable, dict[str, Any]]] = {}
    output = tmp_path_factory.mktemp("runs")

    def run(name: str) -> tuple[RunTable, dict[str, Any]]:
        if name not in made:
            of_ppo = {**SIZES, **SMALLER.get(name, {})}
            values = {
                "output": output, "model.name": models["policy"], "model.dtype": "float32", "model.device": "cpu",
                "model.policy": models["policy"], "model.reward": models["reward"], "sft": "null", "reward": "null",
                "data.demonstrations": toy_data / "demonstrations.jsonl", "data.rankings": "null",
                "data.prompts": toy_data / "prompts.jsonl", "data.heldout_prompts": toy_data / "heldout.jsonl",
                **{f"ppo.{key}": value for key, value in of_ppo.items()},
            }  # fmt: skip
            recipe = load_recipe(name, [word for key, value in values.items() for word in (f"--{key}", str(value))])
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr("heedful.report.build.write_report", lambda path: path)
                pipeline.run(recipe, only="ppo")
            made[name] = read_stage(output / name / "stages/03-ppo"), pipeline.results(output / name)["ppo"]
        return made[name]

    return run


def test_every_recipe_has_a_row():
    assert set(SHOWN) == set(SHIPPED)


@pytest.mark.parametrize("name", SHIPPED)
def test_it_loads_by_its_name_and_says_where_it_is_from(name):
    assert load_recipe(name).name == name
    header = (ROOT / "recipes" / f"{name}.yaml").read_text().split("name:")[0]
    if name != "quickstart":
        for part in ("# Source: ", "# As published: ", "# Ours: "):
            assert part in header, f"{name} lacks {part!r}"


@pytest.mark.parametrize("name", SHIPPED)
def test_three_steps_train_and_log_what_the_recipe_is_about(run_of, name):
    table, results = run_of(name)
    config = load_recipe(name).ppo
    assert table.last_step == 2 and table.warnings == []
    assert SHOWN[name] <= set(table.names), f"missing: {SHOWN[name] - set(table.names)}"
    assert results["gate"].startswith("passed")
    warmup = SMALLER.get(name, {}).get("value_warmup_steps", 0)
    updates = dict(zip(*table.column("ppo/num_policy_updates"), strict=True))
    assert [updates[step] for step in range(warmup)] == [0] * warmup
    assert all(updates[step] == config.epochs * config.minibatches for step in range(warmup, 3))
    assert results["kept"] == ("best" if config.best else "average" if config.ema_decay else "last")


def test_scores_are_scaled_as_the_sources_say(run_of):
    scaled, raw = "ppo/score/reward_model", "ppo/raw_score/reward_model"
    table = run_of("deepspeed-chat")[0]  # not at all
    assert table.column(scaled)[1] == table.column(raw)[1]
    table = run_of("engineering-pains")[0]  # by the step: mean 0 in every one
    assert table.column(scaled)[1] == pytest.approx([0, 0, 0], abs=1e-6) and any(table.column(raw)[1])
    table = run_of("ppo-max")[0]  # by all answers so far: mean 0 in the first step only
    assert table.column(scaled)[1][0] == pytest.approx(0, abs=1e-6) and abs(table.column(scaled)[1][2]) > 1e-6


def test_the_sources_arithmetic_holds():
    """Numbers that a source gives in another form than the recipe's keys."""
    config = load_recipe("instructgpt").ppo
    assert config.steps * config.samples_per_step == 256_000  # episodes
    assert config.samples_per_minibatch == 64
    assert config.ptx.prompts_per_step == 8 * config.samples_per_minibatch  # eight examples per episode
    assert config.optimizer.warmup_fraction * config.steps == 10  # iterations
    config = load_recipe("deepspeed-chat").ppo
    assert config.samples_per_minibatch == 4 * 8  # per device, devices
    assert config.optimizer.warmup_fraction * config.steps == 100
    config = load_recipe("ppo-max").ppo
    assert config.samples_per_minibatch == 32 and config.steps * config.epochs * config.minibatches == 10_000
