"""PPO with frozen weights in int8, or on a base in 4 bits: where the KL starts; it trains, and resumes to the bit."""

from __future__ import annotations

import json

import pytest
import torch

from heedful.config.ppo import PPOConfig
from heedful.config.section import LoraConfig
from heedful.data.chat import end_token_ids
from heedful.errors import GuardError
from heedful.models.export import save_reward
from heedful.models.frozen import is_quantised
from heedful.models.load import load_tokenizer
from heedful.models.quantise import Rounding
from heedful.models.roles import build_roles, build_scalar
from heedful.rollout.hf import HFEngine
from heedful.rollout.score import LearnedReward, Scoring
from heedful.train import guard
from heedful.train.selftest import require, run_self_test
from toy_parts import CPU, disturb, model_folder, prompts
from toy_ppo import StopsAtTheThird, largest_gap, train, weights

LORA = LoraConfig(rank=4)
STEPS = {"steps": 4, "epochs": 2, "minibatches": 2, "kl": {"in_loss": "exact", "in_reward": "exact"}}
NF4 = LoraConfig(rank=4, base="nf4")
WAYS = [("shared", LORA), (None, LORA), (None, None), ("shared", NF4), ("separate", NF4)]
NAMES = ["shared", "two bases", "full", "shared on nf4", "separate on nf4"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A policy and, by the form of base, a reward model that is an adapter on it."""
    path = tmp_path_factory.mktemp("int8")
    policy = model_folder(path / "policy")
    rewards = {}
    for lora in (LORA, NF4):
        torch.manual_seed(7)
        part = build_scalar(policy, lora=lora, device=CPU, dtype=torch.float32, new_head=True)
        disturb(part)
        rewards[lora.base] = path / lora.base
        save_reward(part.model, part.tokenizer, rewards[lora.base], score_mean=0.3, score_std=2.0)
    return policy, rewards


def build(folders, sharing, lora):
    torch.manual_seed(4)  # new adapters
    policy, rewards = folders
    base = "float" if lora is None else lora.base
    rounding = Rounding(prompts(load_tokenizer(policy)), frozen="int8" if base == "float" else "float")
    return build_roles(policy, rewards[base], sharing=sharing, policy_lora=lora, value_lora=lora, device=CPU,
                       dtype=torch.float32, rounding=rounding)  # fmt: skip


def judge(roles):
    return {"rewards": [LearnedReward(roles.reward, micro_batch_tokens=256)]}


def self_test(roles, sharing, lora):
    config = PPOConfig(roles=sharing, lora=lora, prompts_per_step=6, sampling={"max_new_tokens": 8})
    engine = HFEngine(roles.policy, end_token_ids(roles.policy.tokenizer))
    scoring = Scoring(judge(roles)["rewards"])
    found = run_self_test(roles, scoring, prompts(roles.policy.tokenizer), config, engine, seed=0)
    return {proof.name: proof for proof in found}


@pytest.mark.parametrize(("sharing", "lora"), WAYS, ids=NAMES)
def test_every_proof_holds_and_says_where_the_kl_starts(folders, sharing, lora):
    found = self_test(build(folders, sharing, lora), sharing, lora)
    require(found.values())
    says = found["reference is policy"].measured
    if lora is not None:
        assert says == "k1, k2, k3, abs, exact are 0"
    else:
        assert says.startswith("the reference is the policy in int8: the KL starts at ") and " 0 nats" not in says


def test_another_reference_still_fails(folders):
    roles = build(folders, None, None)
    with torch.no_grad():
        for parameter in roles.policy.trainable_parameters().values():
            parameter.add_(0.1 * torch.randn(parameter.shape))
    proof = self_test(roles, None, None)["reference is policy"]
    assert not proof.passed and "set ppo.frozen_weights to float" in str(proof)


def test_PPO_08_the_guard_of_the_first_step_knows_both_kinds():
    mask_BT = torch.tensor([[True, True]])
    kl_BT = torch.tensor([[0.01, -0.3]])
    guard.reference_is_start(kl_BT, mask_BT, dtype=torch.float32, ids=("a",), is_exact=False)
    with pytest.raises(GuardError, match="same model"):
        guard.reference_is_start(kl_BT, mask_BT, dtype=torch.float32, ids=("a",))
    for gone in (3.0, float("nan")):
        with pytest.raises(GuardError, match="sample a at step 0, where the reference is the policy in int8"):
            guard.reference_is_start(
                torch.tensor([[0.0, gone]]), mask_BT, dtype=torch.float32, ids=("a",), is_exact=False
            )


@pytest.mark.parametrize(("sharing", "lora"), WAYS, ids=NAMES)
def test_RES_05_a_resumed_run_is_the_straight_one_to_the_bit(folders, tmp_path, sharing, lora):
    checkpoint = {"every_steps": 1, "keep": 2}
    options = {**STEPS, "lora": lora, "checkpoint": checkpoint, "seed": 3}
    straight = build(folders, sharing, lora)
    start = weights(straight)
    rows = train(straight, tmp_path / "straight", **judge(straight), **options)
    assert largest_gap(start, weights(straight)) > 1e-3
    first = rows[0].get("scalars", rows[0])["ppo/kl_nats"]
    assert first == 0 if lora is not None else 0 < abs(first) < 0.1, json.dumps(rows[0])[:300]
    broken = build(folders, sharing, lora)
    stops = StopsAtTheThird(broken.reward, micro_batch_tokens=256)
    with pytest.raises(KeyboardInterrupt):
        train(broken, tmp_path / "broken", rewards=[stops], **options)
    resumed = build(folders, sharing, lora)
    train(resumed, tmp_path / "broken", **judge(resumed), **options)
    assert largest_gap(weights(straight), weights(resumed)) == 0
    assert is_quantised(resumed.reference.part.model)
