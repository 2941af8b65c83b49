"""PPO with every part on one base learns what it learns with parts apart, and resumes to the bit."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from heedful.config.ppo import PPOConfig
from heedful.config.section import LoraConfig
from heedful.data.chat import end_token_ids
from heedful.errors import GuardError
from heedful.models.export import save_reward
from heedful.models.load import load_scalar, load_tokenizer
from heedful.models.lora import add_lora
from heedful.models.parts import ScalarModel
from heedful.models.roles import Roles, build_roles, build_scalar
from heedful.models.value import Value
from heedful.rollout.hf import HFEngine
from heedful.rollout.score import LearnedReward, Scoring
from heedful.runs.folder import StageFolder
from heedful.train.forensics import Recorder, read
from heedful.train.selftest import run_self_test
from toy_parts import CPU, disturb, model_folder, prompts
from toy_ppo import StopsAtTheThird, largest_gap, train, weights

LORA = LoraConfig(rank=4)
STEPS = {"steps": 4, "epochs": 2, "minibatches": 2, "lora": LORA, "kl": {"in_loss": "exact", "in_reward": "exact"}}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A policy and a reward model that is an adapter on it."""
    path = tmp_path_factory.mktemp("shared")
    policy = model_folder(path / "policy")
    torch.manual_seed(7)
    part = build_scalar(policy, lora=LORA, device=CPU, dtype=torch.float32, new_head=True)
    disturb(part)
    save_reward(part.model, part.tokenizer, path / "reward", score_mean=0.3, score_std=2.0)
    return policy, path / "reward"


def build(folders, sharing="shared", **options):
    torch.manual_seed(4)  # new adapters
    options = {"policy_lora": LORA, "value_lora": LORA, "device": CPU, "dtype": torch.float32, **options}
    return build_roles(*folders, sharing=sharing, **options)


def scalar_with_the_rewards_adapter(folders):
    """A model of its own on the policy's weights, put together by hand."""
    policy_path, reward_path = folders
    model = load_scalar(policy_path, dtype=torch.float32, device=CPU, head="new")
    model = add_lora(model, rank=LORA.rank, alpha=LORA.alpha, targets=LORA.targets, task="scalar")
    part = ScalarModel(model, load_tokenizer(reward_path), CPU, torch.float32)
    saved = load_file(reward_path / "adapter" / "adapter_model.safetensors")
    with torch.no_grad():
        for name, parameter in part.trainable_parameters().items():
            parameter.copy_(saved[name.replace(".modules_to_save.default", "").replace(".default", "")])
    return part


def on_four_bases(folders):
    """The same adapters, every part on a base of its own."""
    apart = build(folders, "separate")
    value, reward = (scalar_with_the_rewards_adapter(folders) for _ in range(2))
    return Roles(apart.policy, apart.reference, Value(value), reward)  # a scalar model reads texts too


def of_value(found):
    """Trained weights of the value by their place, which the two ways name differently."""
    short = {"base_model.model.": "", ".modules_to_save.default": "", ".default.": ".", ".value.": "."}
    named = {}
    for name, x in found.items():
        for old, new in short.items():
            name = name.replace(old, new) if name.startswith("value/") else name
        named[name] = x
    return named


def judge(roles):
    return {"rewards": [LearnedReward(roles.reward, micro_batch_tokens=256)]}


@pytest.mark.parametrize("recompute", [False, True])
def test_after_several_steps_it_is_where_parts_apart_are(folders, tmp_path, recompute):
    one, other = build(folders, activation_checkpointing=recompute), on_four_bases(folders)
    start = weights(one)
    assert largest_gap(of_value(start), of_value(weights(other))) == 0
    rows = [train(roles, tmp_path / name, activation_checkpointing=recompute, **judge(roles), **STEPS)
            for name, roles in (("one", one), ("other", other))]  # fmt: skip
    assert largest_gap(of_value(weights(one)), of_value(weights(other))) < 1e-5
    moved = weights(one)
    assert all(not torch.equal(start[name], moved[name]) for name in start)
    for a, b in zip(*rows, strict=True):
        same = [n for n in a if n.startswith("ppo/") and "second" not in n]
        assert {n: a[n] for n in same} == pytest.approx({n: b[n] for n in same}, rel=1e-4, abs=1e-4)
        assert abs(a["ppo/raw_score/reward_model"]) > 0


def test_after_several_steps_it_is_what_lora_has_always_been(folders, tmp_path):
    """With a value that starts as the policy nothing but the number of bases is another."""
    one, other = (build(folders, sharing, value_from="policy") for sharing in ("shared", None))
    for a, b in zip(
        one.value.trainable_parameters().values(), other.value.trainable_parameters().values(), strict=True
    ):
        a.data.copy_(b.data)  # the first weights of the value's adapter are drawn
    assert largest_gap(of_value(weights(one)), of_value(weights(other))) == 0
    for name, roles in (("one", one), ("other", other)):
        train(roles, tmp_path / name, value_from="policy", **judge(roles), **STEPS)
    assert largest_gap(of_value(weights(one)), of_value(weights(other))) < 1e-5
    assert largest_gap(weights(one), weights(build(folders, value_from="policy"))) > 1e-3


def test_RES_05_a_resumed_run_is_the_straight_one_to_the_bit(folders, tmp_path):
    checkpoint = {"every_steps": 1, "keep": 2}
    options = {**STEPS, "checkpoint": checkpoint, "ema_decay": 0.5, "seed": 3}
    straight = build(folders)
    train(straight, tmp_path / "straight", **judge(straight), **options)
    broken = build(folders)
    stops = StopsAtTheThird(broken.reward, micro_batch_tokens=256)
    with pytest.raises(KeyboardInterrupt):
        train(broken, tmp_path / "broken", rewards=[stops], **options)
    resumed = build(folders)
    train(resumed, tmp_path / "broken", **judge(resumed), **options)
    assert largest_gap(weights(straight), weights(resumed)) == 0


def test_a_checkpoint_holds_adapters_and_a_head_alone(folders, tmp_path):
    roles = build(folders)
    train(roles, tmp_path, **judge(roles), **{**STEPS, "steps": 2, "checkpoint": {"every_steps": 1}})
    (folder,) = tmp_path.rglob("step-*")
    for part in ("policy", "value"):
        names = torch.load(folder / f"{part}.pt", weights_only=True)["weights"]
        assert names and all(".lora_" in name or name == "score.weight" for name in names)


def test_a_replay_file_gives_other_parts_the_weights(folders, tmp_path):
    roles, stage = build(folders), StageFolder(tmp_path, "ppo", 3)
    for part in (roles.policy, roles.value):
        disturb(part)
    with pytest.raises(GuardError), Recorder(stage, roles, PPOConfig(roles="shared", lora=LORA)):
        raise GuardError("as if")
    (file,) = stage.path.glob("replay-*.pt")
    fresh = build(folders)
    read(file).put_weights(fresh)
    assert largest_gap(weights(fresh), weights(roles)) == 0


def test_every_proof_holds(folders):
    roles = build(folders)
    config = PPOConfig(roles="shared", lora=LORA, prompts_per_step=6, sampling={"max_new_tokens": 8})
    engine = HFEngine(roles.policy, end_token_ids(roles.policy.tokenizer))
    scoring = Scoring([LearnedReward(roles.reward, micro_batch_tokens=256)])
    proofs = run_self_test(roles, scoring, prompts(roles.policy.tokenizer), config, engine, seed=0)
    assert all(p.passed for p in proofs), [str(p) for p in proofs if not p.passed]
    assert len(proofs) == 12
    assert not any(p.grad is not None for p in roles.policy.model.parameters())
