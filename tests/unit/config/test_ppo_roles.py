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
