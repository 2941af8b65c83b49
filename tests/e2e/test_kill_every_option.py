"""PPO with every option on that has a state of its own, killed fifty times: it ends as the uninterrupted run."""

from __future__ import annotations

import json

import pytest
import torch
from killing import Run, kill_and_compare, straight_run
from outcome import first_difference

from toy_parts import CPU, disturb

RECIPE = """
name: toy
model: {{name: "{model}", policy: "{model}", reward: "{reward}", dtype: float32, device: cpu}}
data: {{demonstrations: "{data}/demonstrations.jsonl", prompts: "{data}/prompts.jsonl"}}
ppo:
  steps: 8
  prompts_per_step: 5  # of 16: no epoch is a whole number of steps
  samples_per_prompt: 2
  micro_batch_tokens: 256
  epochs: 2
  minibatches: 2
  sampling: {{max_new_tokens: 6}}
  kl:
    coefficient: 0.05
    target: 0.02
    horizon: 20
    in_reward: exact
    in_loss: exact
    guard: {{window_steps: 1, score_rise: 0.01, kl_rise_nats: 0.0001, factor: 2.0}}
    outliers: {{threshold: 1.0}}
    stop_above_nats: {stop_above}
  rewards:
    own: {{model: "run:reward", scaling: running}}
    other: {{model: "{other}", weight: 0.5, scaling: card}}
    short: {{function: "attempt:brevity", weight: 0.2, scaling: running}}
  skip_ratio_above: {skip_above}
  entropy_coefficient: 0.01
  ptx: {{coefficient: 0.5, prompts_per_step: 3}}
  roles: {roles}
  value_from: {value_from}
  value_warmup_steps: 1
  optimizer: {{learning_rate: {rate}, schedule: cosine, warmup_fraction: 0.2}}
  value_optimizer: {{learning_rate: 1e-3}}
  lora: {lora}
  ema_decay: 0.7
  offload_frozen: true
  best: {{every_steps: 2, num_prompts: 4}}
  accept_weak_reward: true
  checkpoint: {{every_steps: 2, keep: 2}}
"""
KINDS = {
    "full": {"roles": "null", "value_from": "reward", "lora": "null", "rate": "3e-3", "stop_above": 0.003,
             "skip_above": 1.002},
    "lora and trunk": {"roles": "null", "value_from": "trunk", "lora": "{rank: 4}", "rate": "1e-2", "stop_above": 0.003,
                       "skip_above": 1.0005},
    "shared": {"roles": "shared", "value_from": "reward", "lora": "{rank: 4}", "rate": "1.3e-2", "stop_above": 0.003,
               "skip_above": 1.0005},
}  # fmt: skip


def new_run(processes, folder, recipe):
    return Run(processes, folder, recipe, draws_report=False)


@pytest.fixture(scope="module")
def rewards(toy_model, tmp_path_factory):
    """Reward models with cards, one of them an adapter on the policy."""
    from heedful.config.section import LoraConfig
    from heedful.models.export import save_reward
    from heedful.models.roles import build_scalar
    from heedful.records import RewardCard

    folder = tmp_path_factory.mktemp("rewards")
    for name, seed in (("reward", 0), ("other", 9), ("adapter", 0)):
        lora = LoraConfig(rank=4) if name == "adapter" else None
        torch.manual_seed(seed)  # adapters are drawn from the common stream
        part = build_scalar(toy_model, lora=lora, device=CPU, dtype=torch.float32, new_head=True, seed=seed)
        disturb(part)
        card = RewardCard(name, 0.8, 0.7, 0.9, 10, 10, score_mean=0.3, score_std=2.0)
        save_reward(part.model, part.tokenizer, folder / name, score_mean=0.3, score_std=2.0, card=card)
    return folder


@pytest.fixture(scope="module")
def straight(processes, toy_model, toy_data, rewards, tmp_path_factory):
    """kind → recipe, seconds and outcome of its uninterrupted run, made once."""
    made = {}

    def of(kind):
        if kind not in made:
            reward = rewards / ("adapter" if kind == "shared" else "reward")
            models = {"model": toy_model, "reward": reward, "other": rewards / "other"}
            recipe = RECIPE.format(data=toy_data, **models, **KINDS[kind])
            folder = tmp_path_factory.mktemp("straight")
            made[kind] = recipe, *straight_run(lambda name: new_run(processes, folder / name, recipe))
        return made[kind]

    return of


@pytest.mark.parametrize("kind", KINDS)
def test_every_option_with_a_state_is_at_work(straight, kind):
    """Otherwise equal ends would prove nothing."""
    _, run, _, found = straight(kind)
    rows = [json.loads(line) for line in (run.path / "stages/03-ppo/metrics.jsonl").read_text().splitlines()]
    seen = {name: {row[name] for row in rows if name in row} for name in sorted({n for row in rows for n in row})}
    assert max(seen["ppo/kl_guard"]) > 1 and len(seen["ppo/kl_coefficient"]) > 4
    assert max(seen["ppo/kl_weight_max"]) > 1
    assert seen["ppo/stopped_early"] == {0.0, 1.0} and max(seen["ppo/num_skipped_minibatches"]) > 0
    assert len(seen["ppo/validation_score"]) == 4 and len(seen["ppo/ptx_loss_nats"]) == 7
    assert {"ppo/entropy_bonus_nats", "ppo/kl_loss_nats", "ppo/raw_score/short", "ppo/score/other"} <= seen.keys()
    assert found["03-ppo/results"]["kept"] == "best"
    data = found["03-ppo/step-00000008/data.pt"]
    assert data["epoch"] > 0 and data["offset"] > 0


@pytest.mark.parametrize(
    ("kind", "num_kills"), [pytest.param("full", 50, marks=pytest.mark.slow), ("lora and trunk", 10), ("shared", 10)]
)
def test_RES_04_RES_05_RES_07_kills_at_random_moments_with_every_option_on(
    processes, straight, tmp_path, kind, num_kills
):
    recipe, _, seconds, expected = straight(kind)
    runs = kill_and_compare(
        lambda name: new_run(processes, tmp_path / name, recipe), expected, seconds, num_kills, seed=7, kills_per_run=10
    )
    assert sum(run.num_open_rollouts for run in runs) > num_kills // 4
    assert not any(run.rollout_bytes() for run in runs)  # nothing is left of unfinished rollouts


def test_the_comparison_sees_every_state(straight):
    """Each number and weight in the last state, moved a little, is seen."""
    _, _, _, found = straight("full")
    states = {name: value for name, value in found.items() if name.endswith(".pt")}
    assert {name.rsplit("/", 1)[1] for name in states} >= {
        "policy.pt", "value.pt", "kl.pt", "data.pt", "scoring.pt", "keeper.pt", "ptx.pt", "trail.pt", "random.pt",
    }  # fmt: skip
    num_leaves = 0
    for name, value in states.items():
        for changed in _each_leaf_moved(value):
            num_leaves += 1
            assert first_difference(value, changed, name)
    assert num_leaves > 100


def _each_leaf_moved(value):
    """Copies of a nested value in which one leaf is another."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from ({**value, key: changed} for changed in _each_leaf_moved(inner))
    elif isinstance(value, (list, tuple)):
        for i, inner in list(enumerate(value))[:20]:
            yield from ([*value[:i], changed, *value[i + 1 :]] for changed in _each_leaf_moved(inner))
    elif isinstance(value, torch.Tensor):
        changed = value.clone()
        if changed.is_floating_point():
            changed.view(-1)[-1] = torch.nextafter(changed.view(-1)[-1], torch.tensor(torch.inf, dtype=value.dtype))
        else:
            changed.view(-1)[-1] += 1
        yield changed
    else:
        yield f"not {value}"
