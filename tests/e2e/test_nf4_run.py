"""SFT, reward model and PPO with adapters on one base in 4 bits: each measures it and goes on from what was saved."""

from __future__ import annotations

import json

import torch

from heedful import pipeline
from heedful.config.read import load_recipe
from heedful.models.frozen import is_quantised
from heedful.models.roles import build_policy
from toy_parts import CPU

RECIPE = """
name: nf4
model: {name: MODEL, dtype: float32, device: cpu}
data: {demonstrations: DATA/demonstrations.jsonl, rankings: DATA/rankings.jsonl, prompts: DATA/prompts.jsonl}
sft: {epochs: 1, lora: {rank: 4, base: nf4}}
reward: {epochs: 1, lora: {rank: 4, base: nf4}}
ppo: {steps: 2, prompts_per_step: 4, sampling: {max_new_tokens: 6}, accept_weak_reward: true, roles: shared,
      lora: {rank: 4, base: nf4}, optimizer: {learning_rate: 0.02, schedule: constant, warmup_fraction: 0.0}}
"""


def test_every_stage(toy_model, toy_data, tmp_path, capsys):
    text = RECIPE.replace("MODEL", str(toy_model)).replace("DATA", str(toy_data))
    (tmp_path / "recipe.yaml").write_text(text)
    pipeline.run(load_recipe(tmp_path / "recipe.yaml", ["--output", str(tmp_path)]))
    said = "".join(capsys.readouterr())
    assert "policy in nf4: log-probs of" in said and "reward in nf4: scores of" in said
    for folder in sorted((tmp_path / "nf4/stages").iterdir()):
        results = json.loads((folder / "finished.json").read_text())["results"]
        assert results["rounding"].keys() == {"reward" if "reward" in folder.name else "policy"}
        if "ppo" in folder.name:
            first = json.loads((folder / "metrics.jsonl").read_text().splitlines()[0])
            assert first["ppo/kl_nats"] == 0
            saved = build_policy(folder / "model", lora=None, trained=False, device=CPU, dtype=torch.float32)
            assert not is_quantised(saved.model)
