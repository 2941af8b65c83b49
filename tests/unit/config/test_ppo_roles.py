"""One word says how the four parts of PPO share weights; what contradicts it is refused."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from heedful.config.ppo import PPOConfig
from heedful.config.recipe import Recipe

STAGES = {"data": {"demonstrations": "d", "rankings": "r"}, "sft": {}, "reward": {}}


def test_without_the_word_nothing_changes():
    config = PPOConfig()
    assert (config.roles, config.lora, config.value_from) == (None, None, "reward")


def test_the_word_alone_switches_and_brings_what_it_needs():
    shared, trunk = PPOConfig(roles="shared"), PPOConfig(roles="trunk")
    assert shared.lora is not None and shared.lora.rank == 16 and shared.value_from == "reward"
    assert trunk.value_from == "trunk" and trunk.lora is None
    assert PPOConfig(roles="trunk", value_from="frozen_trunk").value_from == "frozen_trunk"
    assert PPOConfig(roles="shared", lora={"rank": 3}).lora.rank == 3
    assert PPOConfig(roles="separate", lora={"rank": 3}).lora.rank == 3


@pytest.mark.parametrize("roles", [None, "separate", "shared", "trunk"])
def test_a_resolved_recipe_reads_back(roles):
    config = PPOConfig(roles=roles)
    assert PPOConfig(**config.model_dump()) == config


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        ({"roles": "shared", "value_from": "trunk"}, "value_from: trunk is a head on the policy's trunk"),
        ({"roles": "separate", "value_from": "frozen_trunk"}, "value_from: frozen_trunk is a head"),
        ({"roles": "trunk", "value_from": "policy"}, "value_from: policy is not"),
        ({"roles": "shared", "lora": None}, "lora must not be null"),
        ({"roles": ["shared"]}, "separate"),
    ],
)
def test_contradictions_are_refused(keys, sentence):
    with pytest.raises(ValidationError, match=sentence):
        PPOConfig(**keys)


def test_a_shared_base_needs_a_reward_model_that_is_an_adapter():
    with pytest.raises(ValidationError, match=r"set reward\.lora"):
        Recipe(**STAGES, ppo={"roles": "shared"})
    for reward in ({"lora": {}}, {"train": "head"}):
        Recipe(**{**STAGES, "reward": reward}, ppo={"roles": "shared"})
    elsewhere = {**STAGES, "reward": None, "model": {"reward": "x"}}
    with pytest.raises(ValidationError, match="has yet to train"):
        Recipe(**elsewhere, ppo={"roles": "shared"})
    Recipe(**{**elsewhere, "sft": None, "model": {"reward": "x", "policy": "y"}}, ppo={"roles": "shared"})
    Recipe(**STAGES, ppo={"roles": "shared", "value_from": "policy", "rewards": {"f": {"function": "a:b"}}})


def test_on_a_shared_base_the_reward_model_and_ppo_have_one_form():
    def recipe(reward, base, **ppo):
        stages = {**STAGES, "reward": reward}
        return Recipe(**stages, ppo={"roles": "shared", "lora": {"base": base}, **ppo})

    for base in ("float", "int8", "nf4"):
        recipe({"lora": {"base": base}}, base)
    recipe({"train": "head"}, "float")
    for reward, base in (({"lora": {}}, "nf4"), ({"lora": {"base": "nf4"}}, "float"), ({"train": "head"}, "int8")):
        with pytest.raises(ValidationError, match=r"reward.lora.base \(\w+\) and ppo.lora.base \(\w+\) must"):
            recipe(reward, base)
    recipe({"lora": {}}, "nf4", value_from="policy", rewards={"f": {"function": "a:b"}})  # reads no reward model


@pytest.mark.parametrize(("keys", "acts"), [
    ({"lora": None}, True), ({"lora": {}}, True), ({"lora": {"base": "nf4"}}, False),
    ({"lora": {"base": "nf4"}, "roles": "shared"}, False), ({"lora": {"base": "nf4"}, "roles": "separate"}, True),
    ({"lora": {"base": "nf4"}, "value_from": "policy"}, True), ({"lora": {"base": "nf4"}, "roles": "trunk"}, True),
    ({"lora": {"base": "nf4"}, "value_from": "policy", "rewards": {"f": {"function": "a:b"}}}, False),
    ({"lora": {"base": "nf4"}, "roles": "shared", "rewards": {"own": {"model": "run:reward"}, "more": {"model": "m"}}},
     True),
])  # fmt: skip
def test_frozen_weights_are_named_only_where_some_are_left(keys, acts):
    if acts:
        assert PPOConfig(**keys, frozen_weights="int8").frozen_weights == "int8"
    else:
        with pytest.raises(ValidationError, match=r"frozen_weights has no effect .* it needs lora.base: float"):
            PPOConfig(**keys, frozen_weights="int8")


@pytest.mark.parametrize(("keys", "acts"), [
    ({}, True), ({"roles": "trunk"}, True), ({"lora": {}}, False), ({"lora": {}, "roles": "separate"}, True),
    ({"roles": "shared"}, False), ({"lora": {}, "value_from": "policy"}, True),
    ({"lora": {}, "value_from": "policy", "rewards": {"f": {"function": "a:b"}}}, False),
    ({"roles": "shared", "rewards": {"own": {"model": "run:reward"}, "more": {"model": "m"}}}, True),
])  # fmt: skip
def test_only_frozen_models_of_their_own_can_be_in_main_memory(keys, acts):
    if acts:
        assert PPOConfig(**keys, offload_frozen=True).offload_frozen
    else:
        with pytest.raises(ValidationError, match=r"offload_frozen has no effect .* it needs a frozen model"):
            PPOConfig(**keys, offload_frozen=True)
