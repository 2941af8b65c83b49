"""AdamW's moments in main memory, as the plan counts them: room, time, and when they are named as a remedy."""

from __future__ import annotations

import dataclasses

import pytest

from heedful.config.recipe import Recipe
from heedful.plan.fit import MARGIN, remedy
from heedful.plan.machine import CONTEXT_BYTES, Machine, gpu
from heedful.plan.memory import BUCKETS_BYTES, plan_memory
from heedful.plan.parts import Setup
from heedful.plan.shape import NAMED
from heedful.plan.time import HOST_BYTES_PER_SECOND, plan_time
from heedful.plan.workload import of_limits
from heedful.train.moments import BUCKET_BYTES

H200, TWO_CORES = gpu("h200"), Machine("two cores", "cpu", 24 * 2**30, 1.7e12, 24e9)
SHAPE, AWAY = NAMED["7b"], {"offload": True}
BOTH = {"optimizer": AWAY, "value_optimizer": AWAY}
LIMITS = {"sft": {"max_tokens": 512, "micro_batch_tokens": 512}, "reward": {"micro_batch_tokens": 512},
          "ppo": {"micro_batch_tokens": 511, "value_from": "reward", "sampling": {"max_new_tokens": 256}}}  # fmt: skip


def setup(stage, machine=H200, shape=SHAPE, **keys):
    recipe = Recipe.model_validate({
        "model": {"name": "7b", "dtype": "bfloat16", **({"reward": "some/reward"} if stage == "ppo" else {})},
        "data": {"demonstrations": "d.jsonl", "rankings": "r.jsonl", "max_prompt_tokens": 256},
        stage: {**LIMITS[stage], **keys},
    })  # fmt: skip
    return Setup(recipe, shape, shape, machine, of_limits(recipe, shape.max_positions))


def plan(*asked, **keys):
    return plan_memory(setup(*asked, **keys))[0]


def phases(found):
    return {phase.name: phase.parts for phase in found.phases}


def test_two_buckets_are_the_buckets_that_a_step_holds():
    assert BUCKETS_BYTES == 2 * BUCKET_BYTES


def test_they_are_in_main_memory_and_two_buckets_on_the_gpu():
    stay, wait = plan("sft"), plan("sft", optimizer=AWAY)
    assert phases(stay)["train"]["policy: optimizer"] == 8 * SHAPE.num_causal
    assert phases(wait)["train"]["policy: optimizer"] == BUCKETS_BYTES
    assert stay.peak_bytes - wait.peak_bytes == 8 * SHAPE.num_causal - BUCKETS_BYTES
    assert wait.main_memory_bytes - stay.main_memory_bytes == 8 * SHAPE.num_causal
    assert wait.disk_bytes == stay.disk_bytes


def test_moments_of_single_rows_stay():
    """PPO reads few tokens in its steps: of the value's embedding only their rows have moments."""
    keys = {"steps": 10, "prompts_per_step": 8}
    stay, wait = plan("ppo", **keys), plan("ppo", **keys, **BOTH)
    assert wait.main_memory_bytes - stay.main_memory_bytes == 8 * (
        SHAPE.num_causal + SHAPE.num_scalar - 2 * SHAPE.num_embedding
    )
    for part in ("policy", "value"):
        name, all_moments = f"{part}: optimizer", phases(stay)["score"][f"{part}: optimizer"]
        at_home = 8 * ((SHAPE.num_causal if part == "policy" else SHAPE.num_scalar) - SHAPE.num_embedding)
        assert 0 < phases(wait)["score"][name] == all_moments - at_home


def test_each_optimizer_of_ppo_has_its_own_switch():
    stay, both = phases(plan("ppo")), phases(plan("ppo", **BOTH))
    only = phases(plan("ppo", value_optimizer=AWAY))
    for name in ("rollout", "score", "train policy", "train value"):
        assert only[name]["policy: optimizer"] == stay[name]["policy: optimizer"]
    rest = both["rollout"]
    assert both["score"]["value: optimizer"] == rest["value: optimizer"] < 0.1 * stay["score"]["value: optimizer"]
    for part, other in (("policy", "value"), ("value", "policy")):
        parts = both[f"train {part}"]
        assert parts[f"{part}: optimizer"] - rest[f"{part}: optimizer"] == BUCKETS_BYTES
        assert parts[f"{other}: optimizer"] == rest[f"{other}: optimizer"]


def test_few_moments_need_no_more_than_their_own_room():
    keys = {"lora": {"rank": 1, "targets": "q_proj"}}
    stay, wait = plan("sft", **keys), plan("sft", **keys, optimizer=AWAY)
    assert 0 < phases(stay)["train"]["policy: optimizer"] < BUCKETS_BYTES
    assert wait.phases == stay.phases and wait.main_memory_bytes > stay.main_memory_bytes


@pytest.mark.parametrize("stage", ["sft", "reward", "ppo"])
def test_on_a_cpu_nothing_is_moved(stage):
    shape, keys = NAMED["smollm2-135m"], BOTH if stage == "ppo" else {"optimizer": AWAY}
    assert plan(stage, TWO_CORES, shape, **keys) == plan(stage, TWO_CORES, shape)
    stay, wait = (plan_time(setup(stage, TWO_CORES, shape, **k)) for k in ({}, keys))
    assert stay == wait


@pytest.mark.parametrize(("stage", "keys"), [("sft", {}), ("reward", {}), ("ppo", {"epochs": 2, "minibatches": 4})])
def test_they_cross_the_bus_twice_per_update(stage, keys):
    away = BOTH if stage == "ppo" else {"optimizer": AWAY}
    stay, wait = (plan_time(setup(stage, **keys, **k))[0] for k in ({}, away))
    at_home = plan(stage, **keys, **away).main_memory_bytes - plan(stage, **keys).main_memory_bytes
    updates = 8 if stage == "ppo" else 1
    expected = updates * 2 * at_home / HOST_BYTES_PER_SECOND
    assert wait.step_seconds - stay.step_seconds == pytest.approx(expected)


@pytest.mark.parametrize(("stage", "switch"), [
    ("sft", "--sft.optimizer.offload true"), ("reward", "--reward.optimizer.offload true"),
    ("ppo", "--ppo.optimizer.offload true --ppo.value_optimizer.offload true"),
])  # fmt: skip
def test_they_are_named_where_they_make_a_stage_fit(stage, switch):
    """On a device that holds the plan with them and little more; cheaper switches are on already."""
    keys = {"activation_checkpointing": True, "offload_frozen": True} if stage == "ppo" else {}
    keys |= {"micro_batch_tokens": 1} if stage == "reward" else {}
    away = BOTH if stage == "ppo" else {"optimizer": AWAY}
    peak = plan(stage, **keys, **away).peak_bytes
    memory = int((peak + 2**30) / MARGIN / 0.95) + CONTEXT_BYTES
    machine = dataclasses.replace(H200, memory_bytes=memory)
    cure = remedy(setup(stage, machine, **keys), stage)
    assert cure is not None and cure.switches == (switch,) and cure.peak_bytes == peak
    done = remedy(setup(stage, machine, **keys, **away), stage)
    assert done is not None and done.switches == ()


def test_they_are_no_remedy_where_they_are_few():
    machine = dataclasses.replace(H200, memory_bytes=2**30)
    for found in (setup("sft", machine, lora={"rank": 16}), setup("reward", machine, train="head")):
        assert remedy(found, found.recipe.stages[0]) is None
    full = setup("sft", TWO_CORES)
    cure = remedy(full, "sft")
    assert cure is None or not any("offload" in text for text in cure.switches)
