"""A run of PPO with its frozen weights in int8: measured, shown, kept in the results, and saved without them."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file

from heedful import pipeline
from heedful.config.read import load_recipe
from heedful.models.export import save_reward
from heedful.models.roles import build_policy, build_scalar
from heedful.pipeline.check import check
from toy_parts import CPU

RECIPE = """
name: int8
model: {name: MODEL, policy: MODEL, reward: REWARD, dtype: float32, device: cpu}
data: {prompts: DATA/prompts.jsonl}
ppo: {steps: 2, prompts_per_step: 4, sampling: {max_new_tokens: 6}, accept_weak_reward: true, frozen_weights: int8,
      optimizer: {learning_rate: 0.02, schedule: constant, warmup_fraction: 0.0},
      rewards: {own: {model: run:reward}, other: {model: REWARD}}}
"""


@pytest.fixture(scope="module")
def file(toy_model, toy_data, tmp_path_factory):
    path = tmp_path_factory.mktemp("int8")
    part = build_scalar(toy_model, lora=None, device=CPU, dtype=torch.float32, new_head=True)
    save_reward(part.model, part.tokenizer, path / "reward", score_mean=0.3, score_std=2.0)
    text = RECIPE.replace("MODEL", str(toy_model)).replace("DATA", str(toy_data)).replace("REWARD", f"{path}/reward")
    (path / "recipe.yaml").write_text(text)
    return path / "recipe.yaml"


def run(file, path, *more):
    """The stage's folder, its results and its first row of metrics."""
    pipeline.run(load_recipe(file, ["--output", str(path), *more]))
    (folder,) = (path / "int8/stages").iterdir()
    results = json.loads((folder / "finished.json").read_text())["results"]
    return folder, results, json.loads((folder / "metrics.jsonl").read_text().splitlines()[0])


def test_under_adapters(file, toy_model, tmp_path, capsys):
    folder, results, first = run(file, tmp_path, "--ppo.lora.rank", "4")
    assert first["ppo/kl_nats"] == 0
    assert results["rounding"].keys() == {"reference", "reward", "rewards.other"}
    assert 0 < results["rounding"]["reference"]["logprob_error_mean_nats"] < 0.05
    assert "reference in int8: log-probs of" in "".join(capsys.readouterr())
    # every saved weight is the original one, or that and its adapter's update
    part = build_policy(toy_model, lora=None, device=CPU, dtype=torch.float32)
    saved, update = (load_file(folder / "model" / name) for name in
                     ("model.safetensors", "adapter/adapter_model.safetensors"))  # fmt: skip
    config = json.loads((folder / "model/adapter/adapter_config.json").read_text())
    moved = 0
    for name, original in part.model.named_parameters():
        key = f"base_model.model.{name.removesuffix('.weight')}"
        if f"{key}.lora_A.weight" in update:
            delta = update[f"{key}.lora_B.weight"] @ update[f"{key}.lora_A.weight"] * config["lora_alpha"] / config["r"]
            moved += bool(delta.any())
            assert torch.allclose(saved[name], original + delta, rtol=0, atol=1e-6), name
        elif name in saved:
            assert torch.equal(saved[name], original), name
    assert moved == 14


def test_with_all_weights(file, tmp_path):
    _, results, first = run(file, tmp_path)
    assert 0 < abs(first["ppo/kl_nats"]) < 0.1  # of answers of 6 tokens
    assert 0 < results["rounding"]["reference"]["kl_mean_nats"] < 1e-3


@pytest.mark.parametrize("rank", [None, 4])
def test_the_self_test_alone(file, tmp_path, rank):
    more = [] if rank is None else ["--ppo.lora.rank", str(rank)]
    found = check(load_recipe(file, ["--output", str(tmp_path), *more]))
    assert found.passed, [str(p) for p in found.proofs if not p.passed]
    (kl,) = (proof for proof in found.proofs if proof.name == "reference is policy")
    assert kl.measured.startswith("the reference is the policy in int8") == (rank is None)
