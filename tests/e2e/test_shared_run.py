"""A whole run with adapters in every stage and all parts of PPO on one base; one word changes back."""

from __future__ import annotations

import json

import pytest
import torch

from heedful import pipeline
from heedful.config.read import load_recipe
from heedful.errors import ModelError
from heedful.models.roles import build_policy
from heedful.models.shared import SharedParts, shared_parts
from heedful.pipeline.check import check
from toy_parts import CPU

RATE = "{learning_rate: 0.02, schedule: constant, warmup_fraction: 0.0}"
RECIPE = f"""
name: shared
model: {{name: MODEL, dtype: float32, device: cpu}}
data: {{demonstrations: DATA/demonstrations.jsonl, rankings: DATA/rankings.jsonl, prompts: DATA/prompts.jsonl,
       heldout_prompts: DATA/prompts.jsonl}}
sft: {{epochs: 1, optimizer: {RATE}, lora: {{rank: 4}}}}
reward: {{epochs: 1, min_accuracy: 0.0, optimizer: {RATE}, lora: {{rank: 4}}}}
ppo: {{steps: 2, prompts_per_step: 4, sampling: {{max_new_tokens: 6}}, roles: shared, optimizer: {RATE}}}
"""


@pytest.fixture(scope="module")
def file(toy_model, toy_data, tmp_path_factory):
    path = tmp_path_factory.mktemp("shared") / "recipe.yaml"
    path.write_text(RECIPE.replace("MODEL", str(toy_model)).replace("DATA", str(toy_data)))
    return path


@pytest.fixture(scope="module")
def run(file):
    """The stages' folder of a finished run."""
    pipeline.run(load_recipe(file, ["--output", str(file.parent / "runs")]))
    return file.parent / "runs/shared/stages"


@pytest.fixture
def built(monkeypatch):
    """How often a shared base was made."""
    made = []

    def counting(*paths, **options) -> SharedParts:
        made.append(paths)
        return shared_parts(*paths, **options)

    monkeypatch.setattr("heedful.models.roles.shared_parts", counting)
    return made


def test_the_self_test_runs_before_anything_is_trained(file, tmp_path, built):
    found = check(load_recipe(file, ["--output", str(tmp_path)]))
    assert len(built) == 1 and "reward model" in found.stand_ins
    assert found.passed, [str(p) for p in found.proofs if not p.passed]


def test_a_whole_run(run):
    rows = [json.loads(line) for line in (run / "03-ppo/metrics.jsonl").read_text().splitlines()]
    assert rows[0]["ppo/kl_nats"] == 0 and rows[0]["ppo/explained_variance"] < 1
    assert len(rows) == 2 and rows[1]["ppo/kl_nats"] != 0
    saved = [build_policy(run / f"{stage}/model", lora=None, device=CPU, dtype=torch.float32).model.state_dict()
             for stage in ("01-sft", "03-ppo")]  # fmt: skip
    moved = {name for name in saved[0] if not torch.equal(saved[0][name], saved[1][name])}
    assert len(moved) == 14 and all("proj" in name for name in moved)
    assert sorted(p.name for p in (run / "03-ppo/model/adapter").glob("adapter_*")) == [
        "adapter_config.json", "adapter_model.safetensors"]  # fmt: skip


@pytest.mark.parametrize("roles", ["separate", "trunk"])
def test_one_word_takes_another_way_from_the_same_models(file, run, roles, built):
    """Before anything has moved the first step is the same in every mode, values aside."""
    models = ["--sft", "null", "--reward", "null", "--model.policy", str(run / "01-sft/model"), "--model.reward",
              str(run / "02-reward/model"), "--ppo.accept_weak_reward", "true"]  # fmt: skip
    there = ["--output", str(file.parent / roles), "--ppo.roles", roles]
    pipeline.run(load_recipe(file, [*models, *there]))
    stages = run, file.parent / roles / "shared/stages"
    first, other = (json.loads((s / "03-ppo/metrics.jsonl").read_text().splitlines()[0]) for s in stages)
    assert not built
    for name in ("ppo/score_mean", "ppo/answer_tokens_mean", "ppo/kl_nats", "ppo/entropy_nats"):
        assert first[name] == pytest.approx(other[name], abs=1e-5), name
    assert (first["ppo/value_mean"] == pytest.approx(other["ppo/value_mean"], abs=1e-5)) == (roles == "separate")


def test_a_reward_model_of_another_policy_is_refused_in_one_sentence(file, run, toy_model, tmp_path):
    models = ["--sft", "null", "--reward", "null", "--model.policy", str(toy_model), "--model.reward",
              str(run / "02-reward/model"), "--ppo.accept_weak_reward", "true", "--output", str(tmp_path)]  # fmt: skip
    with pytest.raises(ModelError, match=r"train the reward model from this policy with reward\.lora"):
        pipeline.run(load_recipe(file, models))
