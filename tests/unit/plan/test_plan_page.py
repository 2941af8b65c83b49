"""The tables of docs/13-plan.md are what the plan says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from heedful.config.recipe import Recipe
from heedful.plan.fit import verdict
from heedful.plan.machine import GPUS, gpu
from heedful.plan.memory import plan_memory
from heedful.plan.parts import Setup
from heedful.plan.shape import NAMED
from heedful.plan.workload import of_limits

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "13-plan.md").read_text(encoding="utf-8")
GIB = 2**30
LORA = {"rank": 16}
MODES = {
    "SFT, all weights": {"sft": {}},
    "SFT, adapters": {"sft": {"lora": LORA}},
    "PPO, all weights": {"ppo": {}},
    "PPO, all weights, `offload_frozen`": {"ppo": {"offload_frozen": True}},
    "PPO, all weights, both offloads": {"ppo": {"offload_frozen": True, **{
        name: {"offload": True} for name in ("optimizer", "value_optimizer")}}},
    "PPO, adapters": {"ppo": {"lora": LORA}},
    "PPO, `roles: shared`": {"ppo": {"roles": "shared"}},
}
LIMITS = {"sft": {"max_tokens": 512, "micro_batch_tokens": 512},
          "ppo": {"prompts_per_step": 64, "micro_batch_tokens": 511, "sampling": {"max_new_tokens": 256}}}  # fmt: skip
WORDS = {"fits": "yes", "tight": "tight", "does not fit": "no"}


def row(size: str, mode: str) -> str:
    """A line of the table: what a stage needs, in which phase, and where that fits."""
    ((stage, keys),) = MODES[mode].items()
    recipe = Recipe.model_validate({
        "model": {"name": size, "dtype": "bfloat16", "reward": "some/reward"},
        "data": {"demonstrations": "d.jsonl", "rankings": "r.jsonl", "max_prompt_tokens": 256},
        stage: {**LIMITS[stage], **keys},
    })  # fmt: skip
    shape, machine = NAMED[size], gpu("a100-80g")
    plan = plan_memory(Setup(recipe, shape, shape, machine, of_limits(recipe, shape.max_positions)))[0]
    working = plan.largest
    state = sum(n for name, n in working.parts.items() if name.endswith(("parameters", "gradients", "optimizer")))
    sharded = working.total_bytes - state + state // 8
    fits = [WORDS[verdict(plan.peak_bytes, gpu(name).usable_bytes)] for name in ("rtx-4090", "a100-80g")]
    eight = WORDS[verdict(sharded, machine.usable_bytes)]
    return (
        f"| {size} | {mode} | {working.total_bytes / GIB:.0f} ({working.name}) | {fits[0]} | {fits[1]} "
        f"| {sharded / GIB:.0f} ({eight}) |"
    )


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("size", ["1.5b", "7b", "13b", "70b"])
def test_the_table_of_sizes_is_the_plan(size, mode):
    assert row(size, mode) in PAGE


def test_the_seven_billion_by_hand():
    """The page's sum: 16 bytes for policy and value, 4 for reference and reward, 2 for the engine."""
    ((policy, scalar),) = re.findall(r"policy ([\d.]+) and value ([\d.]+) GB at 16 bytes", PAGE)
    assert float(policy) == pytest.approx(16 * NAMED["7b"].num_causal / 1e9, abs=0.5)
    assert float(scalar) == pytest.approx(16 * NAMED["7b"].num_scalar / 1e9, abs=0.5)


def test_every_listed_gpu_is_on_the_page():
    for name in GPUS:
        assert f"`{name}`" in PAGE
