"""Every part of PPO on one frozen base: equal to parts that are apart, and none moves another."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from models_tiny import make_tokenizer

from heedful.errors import ModelError
from heedful.models.export import save_policy, save_reward
from heedful.models.load import load_causal, load_tokenizer
from heedful.models.lora import Adapters
from heedful.models.roles import Roles, build_policy, build_roles, build_scalar
from toy_parts import BATCH, IDS

CPU = torch.device("cpu")
LORA = SimpleNamespace(rank=4, alpha=8.0, targets="all-linear", base="float")
NARROW = SimpleNamespace(rank=2, alpha=6.0, targets="q_proj, v_proj", base="float")
ONES = torch.ones_like(IDS)


def move(parameters: dict[str, Any], seed: int = 0) -> None:
    """A known non-zero update."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in parameters.values():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))


@pytest.fixture
def rewards(folder: Callable[..., Path], tmp_path: Path) -> Callable[..., tuple[Path, Path]]:
    """rewards(kind, …) → folders of a policy and of a reward model that was trained on it."""

    def make(
        kind: str = "Llama", *, lora: Any = LORA, dtype: torch.dtype = torch.float32, whole: bool = False
    ) -> tuple[Path, Path]:
        base = folder(kind, name=f"{kind}-sft", seed=5)
        part = build_scalar(base, lora=lora, device=CPU, dtype=dtype, new_head=True)
        if lora is None and not whole:
            part.freeze_trunk()
        move(part.trainable_parameters())
        save_reward(part.model, part.tokenizer, tmp_path / "reward", score_mean=0.3, score_std=2.0)
        return base, tmp_path / "reward"

    return make


def build(policy: Path, reward: Path | None, sharing: Any = "shared", **options: Any) -> Roles:
    options = {"policy_lora": LORA, "value_lora": LORA, "device": CPU, "dtype": torch.float32, **options}
    torch.manual_seed(4)  # new adapters
    return build_roles(policy, reward, sharing=sharing, **options)


def streams(roles: Roles) -> dict[str, torch.Tensor]:
    """What each part says of a batch."""
    found = {"policy": roles.policy.logprobs(BATCH)[0], "reference": roles.reference.logprobs(BATCH)[0],
             "value": roles.value.values(BATCH)}  # fmt: skip
    if roles.reward is not None:
        found["reward"] = roles.reward.scores(IDS, ONES)
    return {name: x.detach() for name, x in found.items()}


def gap(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).abs().max())


@pytest.mark.parametrize("apart", ["separate", "separate without adapters", "two bases"])
@pytest.mark.parametrize("kind", ["Llama", "GPT2", "Qwen2"])
def test_at_the_start_it_is_four_models_apart(kind: str, apart: str, rewards: Any) -> None:
    paths = rewards(kind)
    lora = {} if apart != "separate without adapters" else {"policy_lora": None, "value_lora": None}
    one = streams(build(*paths))
    other = streams(build(*paths, None if apart == "two bases" else "separate", **lora))
    assert one.keys() == other.keys() == {"policy", "reference", "value", "reward"}
    for name in one:
        assert gap(one[name], other[name]) < 1e-5, name
    assert torch.equal(one["policy"], one["reference"])
    assert one["reward"].std() > 0.1  # else equal scores would mean nothing


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_PPO_08_every_kl_at_the_start_is_0_to_the_bit(dtype: torch.dtype, rewards: Any) -> None:
    roles = build(*rewards(dtype=dtype), dtype=dtype)
    hidden, reference = roles.policy.hidden(BATCH), roles.reference.hidden(BATCH)
    assert torch.equal(hidden, reference)
    assert not roles.policy.exact_kl_of(hidden, BATCH, reference, roles.reference.head).any()


def test_separate_parts_share_no_weight(rewards: Any) -> None:
    paths = rewards()
    for lora in (LORA, None):
        roles = build(*paths, "separate", policy_lora=lora, value_lora=lora)
        assert roles.reward is not None
        parts = roles.policy, roles.reference.part, roles.value.part, roles.reward.part
        places = [{p.data_ptr() for p in part.model.parameters()} for part in parts]
        assert len(set.union(*places)) == sum(map(len, places))
        assert torch.equal(roles.policy.logprobs(BATCH)[0], roles.reference.logprobs(BATCH)[0])


def test_the_base_is_held_once_and_frozen(rewards: Any) -> None:
    roles = build(*rewards())
    assert roles.reward is not None
    parts = roles.policy, roles.reference.part, roles.value.part, roles.reward.part
    held = {p.data_ptr(): p for part in parts for p in part.model.parameters()}
    base = sum(p.numel() for p in load_causal(rewards()[0], dtype=torch.float32, device=CPU).parameters())
    adapter = sum(p.numel() for p in roles.policy.trainable_parameters().values())
    assert sum(p.numel() for p in held.values()) == base + 3 * adapter + 2 * 32
    trained = [p for p in held.values() if p.requires_grad]
    assert sum(p.numel() for p in trained) == 2 * adapter + 32
    assert {id(p) for p in trained} == {id(p) for part in (roles.policy, roles.value) for p in
                                        part.trainable_parameters().values()}  # fmt: skip
    assert roles.reference.part.trainable_parameters() == roles.reward.part.trainable_parameters() == {}
    assert all(".lora_" in name and ".default." in name for name in roles.policy.trainable_parameters())
    heads = [name for name in roles.value.trainable_parameters() if ".lora_" not in name]
    assert heads == ["score.weight"]


@pytest.mark.parametrize("who", ["policy", "value"])
def test_a_part_that_moves_moves_no_other(who: str, rewards: Any) -> None:
    roles = build(*rewards())
    models = roles.policy.model, roles.value.part.model
    trained = [p.requires_grad for model in models for p in model.parameters()]
    before = streams(roles)
    move(getattr(roles, who).trainable_parameters())
    after = streams(roles)
    for name in before:
        assert torch.equal(before[name], after[name]) == (name != who), name
    assert trained == [p.requires_grad for model in models for p in model.parameters()]  # no switch has touched it


@pytest.mark.parametrize("recompute", [False, True])
def test_gradients_are_those_of_parts_apart_whatever_acts_meanwhile(recompute: bool, rewards: Any) -> None:
    """The backward comes when the policy's adapter acts; layers that are computed again there must not take that."""
    paths = rewards()
    options = {"value_from": "policy", "activation_checkpointing": recompute}
    found = []
    for sharing in ("shared", None):
        roles = build(*paths, sharing, **options)
        for part in (roles.policy, roles.value):
            move(part.trainable_parameters())
        loss = roles.value.values(BATCH).square().sum() + roles.policy.logprobs(BATCH)[0].square().sum()
        roles.reference.logprobs(BATCH)
        loss.backward()
        trained = [*roles.policy.trainable_parameters().values(), *roles.value.trainable_parameters().values()]
        assert all(p.grad is not None for p in trained)
        found.append([p.grad for p in trained if p.grad is not None])
    assert len(found[0]) == len(found[1])
    for one, other in zip(*found, strict=True):
        assert gap(one, other) < 1e-5 * float(other.abs().max())


def test_a_switch_is_one_assignment_and_an_error_undoes_it(rewards: Any) -> None:
    from peft.tuners.lora import LoraLayer

    roles = build(*rewards())
    layers = [m for m in roles.policy.model.modules() if isinstance(m, LoraLayer)]
    adapters = roles.value.part.adapters
    assert isinstance(adapters, Adapters) and len(layers) == 14
    assert all(layer.active_adapters is adapters.now for layer in layers)
    with pytest.raises(ZeroDivisionError), adapters.acting():
        assert layers[0].active_adapters == ["value"]
        with roles.reference.part.acting():
            assert layers[0].active_adapters == ["no adapter"]
        assert layers[0].active_adapters == ["value"]
        raise ZeroDivisionError
    assert layers[0].active_adapters == ["default"]


def test_on_a_base_of_its_own_a_part_switches_its_adapters_off_the_same_way(rewards: Any) -> None:
    roles = build(*rewards(), None)
    for part in (roles.policy, roles.value.part):
        move(part.trainable_parameters())
    assert not torch.equal(streams(roles)["policy"], streams(roles)["reference"])
    modules = [m for m in roles.value.part.model.modules() if hasattr(m, "_active_adapter")]
    assert len(modules) == 15 and len({id(m._active_adapter) for m in modules}) == 1  # the head is one of them
    trained = [p.requires_grad for p in roles.value.part.model.parameters()]
    with roles.value.part.reference():
        assert [m.active_adapters for m in modules] == [["no adapter"]] * 15
        assert trained == [p.requires_grad for p in roles.value.part.model.parameters()]
    assert [m.active_adapters for m in modules] == [["default"]] * 15
    expected = streams(roles)["reward"]
    with roles.value.part.model.disable_adapter():  # PEFT's own way
        assert torch.equal(roles.value.part.scores(IDS, ONES), expected)


def test_the_values_adapter_is_a_copy_of_the_rewards_whatever_its_shape(rewards: Any) -> None:
    paths = rewards(lora=NARROW)
    roles, apart = build(*paths), build(*paths, "separate")
    adapters = [n for n in roles.value.trainable_parameters() if ".lora_A." in n]
    assert len(adapters) == 4 and len([n for n in roles.policy.trainable_parameters() if ".lora_A." in n]) == 14
    assert gap(streams(roles)["value"], streams(apart)["value"]) < 1e-5
    assert torch.equal(roles.value.part.scores(IDS, ONES).detach(), streams(roles)["reward"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_reward_of_which_the_head_alone_was_trained(dtype: torch.dtype, rewards: Any) -> None:
    paths = rewards(lora=None)
    one, other = (streams(build(*paths, sharing, dtype=dtype)) for sharing in ("shared", "separate"))
    for name in one:
        assert gap(one[name], other[name]) < 1e-5, name


def test_without_a_reward_model(rewards: Any) -> None:
    policy, _ = rewards()
    roles = build(policy, None, value_from="policy")
    assert roles.reward is None and not roles.value.values(BATCH).any()
    before = streams(roles)
    move(roles.value.trainable_parameters())
    assert not torch.equal(streams(roles)["value"], before["value"])
    with pytest.raises(ModelError, match="there is none"):
        build(policy, None)


def test_a_random_head_stands_in_for_a_reward_model(rewards: Any) -> None:
    policy, _ = rewards()
    one = streams(build(policy, policy, new_reward_head=True))
    other = streams(build(policy, policy, "separate", new_reward_head=True))
    assert gap(one["reward"], other["reward"]) < 1e-5 and one["reward"].any()


def test_a_reward_model_that_is_no_adapter_on_this_policy_is_refused(rewards: Any, folder: Any) -> None:
    policy, reward = rewards(lora=None, whole=True)
    with pytest.raises(ModelError, match="not an adapter and a head.*train the reward model from this policy with rew"):
        build(policy, reward)
    policy, reward = rewards()
    other = folder("Llama", name="another", seed=6)
    with pytest.raises(ModelError, match=r"its model\.embed_tokens\.weight is another"):
        build(other, reward)
    larger = folder("Llama", name="larger", seed=5, tokenizer=make_tokenizer(["<a>", "<|im_end|>"]))
    with pytest.raises(ModelError, match="is another"):
        build(larger, reward)
    policy, reward = rewards(lora=NARROW)
    deeper = folder("Llama", name="deeper", seed=5, num_hidden_layers=3)
    with pytest.raises(ModelError, match="not both in this adapter and in the policy"):
        build(deeper, reward)
    policy, reward = rewards(dtype=torch.bfloat16)  # an adapter on the rounded policy
    with pytest.raises(ModelError, match=r"is another.*in the same model\.dtype"):
        build(policy, reward)
    with pytest.raises(ModelError, match="need adapters"):
        build(policy, reward, policy_lora=None)


def test_a_base_that_differs_in_one_weight_is_seen(rewards: Any) -> None:
    from safetensors.torch import load_file, save_file

    policy, reward = rewards()
    build(policy, reward)
    file = policy / "model.safetensors"
    weights = load_file(file)
    weights["model.layers.1.mlp.up_proj.weight"][3, 3] += 1e-3
    save_file(weights, file, metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"layers\.1\.mlp\.up_proj\.weight is another"):
        build(policy, reward)


def test_a_saved_head_is_needed(rewards: Any) -> None:
    from safetensors.torch import load_file, save_file

    policy, reward = rewards()
    weights = load_file(reward / "model.safetensors")
    del weights["score.weight"]
    save_file(weights, reward / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"the weights lack score\.weight"):
        build(policy, reward)


def test_EXP_07_what_is_saved_is_the_policy_merged_and_its_adapter_alone(rewards: Any, tmp_path: Path) -> None:
    import peft

    roles = build(*rewards())
    for part in (roles.policy, roles.value):
        move(part.trainable_parameters())
    expected = streams(roles)["policy"]
    assert save_policy(roles.policy.model, roles.policy.tokenizer, tmp_path / "saved") == 14
    plain = build_policy(tmp_path / "saved", lora=None, device=CPU, dtype=torch.float32)
    assert gap(plain.logprobs(BATCH)[0].detach(), expected) < 1e-5
    assert not any(path.is_dir() for path in (tmp_path / "saved" / "adapter").iterdir())
    adapted = peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "saved" / "adapter").eval()
    logits = adapted(input_ids=IDS[:, :-1]).logits.log_softmax(-1)
    assert gap(logits.gather(-1, IDS[:, 1:, None])[..., 0].detach(), expected) < 1e-5


def test_nothing_but_the_policys_adapter_draws_random_numbers(rewards: Any) -> None:
    """A stream that depends on the mode would make two modes incomparable."""
    paths = rewards()
    after = []
    for sharing in ("shared", "policy alone"):
        if sharing == "shared":
            build(*paths)
        else:
            torch.manual_seed(4)
            build_policy(paths[0], lora=LORA, device=CPU, dtype=torch.float32)
        after.append(torch.rand(()))
    assert after[0] == after[1]


def test_scores_of_texts(rewards: Any) -> None:
    from heedful.records import Message

    paths = rewards()
    prompts, answers = [(Message("user", "Hi"),)] * 2, ["Hello!", "No."]
    found = []
    for sharing in ("shared", "separate"):
        reward = build(*paths, sharing).reward
        assert reward is not None
        found.append(reward.score_texts(prompts, answers, micro_batch_tokens=64))
    assert found[0] == pytest.approx(found[1], abs=1e-5)
    assert load_tokenizer(paths[0]).pad_token_id is not None
