"""Plans of whole stages: what is held, which phase is the largest, what fits and what helps."""

from __future__ import annotations

import dataclasses
import math

import pytest

from heedful.config.recipe import Recipe
from heedful.errors import ConfigError
from heedful.plan.activations import Batch, Training, trunk
from heedful.plan.fit import MARGIN, checkpoint_disk, not_yet, remedy, verdict
from heedful.plan.machine import CONTEXT_BYTES, GPUS, Machine, gpu
from heedful.plan.memory import plan_memory, ppo_models
from heedful.plan.parts import Setup
from heedful.plan.shape import NAMED
from heedful.plan.time import plan_time
from heedful.plan.workload import of_limits, of_ppo, padded

GIB = 2**30
DATA = {"demonstrations": "d.jsonl", "rankings": "r.jsonl", "max_prompt_tokens": 256}


def setup(shape="7b", machine=None, *, sft=None, reward=None, ppo=None, **model):
    sections = {"sft": sft, "reward": reward, "ppo": ppo}
    recipe = Recipe.model_validate({
        "model": {"name": shape, "dtype": "bfloat16", "reward": "some/reward", **model}, "data": DATA,
        **{name: section for name, section in sections.items() if section is not None},
    })  # fmt: skip
    base = NAMED[shape]
    return Setup(recipe, base, base, machine or gpu("a100-80g"), of_limits(recipe, base.max_positions))


def stage(found, name):
    return next(plan for plan in plan_memory(found) if plan.stage == name)


def test_full_fine_tuning_holds_16_bytes_per_parameter():
    plan = stage(setup(sft={"micro_batch_tokens": 512, "max_tokens": 512}), "sft")
    parts = plan.largest.parts
    num = NAMED["7b"].num_causal
    assert parts["policy: parameters"] + parts["policy: gradients"] + parts["policy: optimizer"] == 16 * num
    assert 16 * num < plan.peak_bytes < 20 * num
    assert plan.disk_bytes["checkpoints"] == 2 * 12 * num  # the old one goes when the new one is complete


def test_an_embedding_that_is_no_output_layer_has_moments_for_the_tokens_that_were_read():
    few = {"steps": 2, "prompts_per_step": 4, "sampling": {"max_new_tokens": 64}}
    shape = NAMED["smollm2-135m"]
    small = setup("smollm2-135m", ppo=few)
    parts = stage(small, "ppo").largest.parts
    tokens = 2 * 4 * (256 + 64 - 1)
    distinct = 35 * math.sqrt(tokens)  # fewer than there are tokens, and than half of the vocabulary
    assert distinct < min(tokens, shape.vocabulary / 2)
    left_out = (1 - distinct / shape.vocabulary) * shape.num_embedding
    assert parts["policy: optimizer"] == 8 * shape.num_causal  # the tied layer gives every word a gradient
    assert parts["value: optimizer"] == pytest.approx(8 * (shape.num_scalar - left_out), abs=8)
    longer = setup("smollm2-135m", ppo={**few, "steps": 1000})
    assert stage(longer, "ppo").largest.parts["value: optimizer"] == 8 * shape.num_scalar
    under_adapters = setup("smollm2-135m", ppo={**few, "lora": {"rank": 4}, "roles": "separate"})
    adapters = shape.num_lora(4, "all-linear") + shape.width
    assert stage(under_adapters, "ppo").largest.parts["value: optimizer"] == 8 * adapters


def test_adapters_hold_the_base_in_the_compute_precision():
    plan = stage(setup(sft={"micro_batch_tokens": 512, "max_tokens": 512, "lora": {"rank": 16}}), "sft")
    num, adapters = NAMED["7b"].num_causal, NAMED["7b"].num_lora(16, "all-linear")
    parts = plan.largest.parts
    assert parts["policy: parameters"] == 2 * num + 4 * adapters
    assert parts["policy: optimizer"] == 8 * adapters
    in_float32 = stage(setup(sft={"lora": {"rank": 16}}, dtype="float32"), "sft")
    assert in_float32.largest.parts["policy: parameters"] == 4 * num + 4 * adapters


@pytest.mark.parametrize(
    ("ppo", "parts"),
    [
        ({}, ["policy", "reference", "value", "reward"]),
        ({"value_from": "policy"}, ["policy", "reference", "value", "reward"]),
        ({"value_from": "trunk"}, ["policy", "reference", "reward"]),
        ({"lora": {"rank": 8}}, ["policy", "value"]),
        ({"lora": {"rank": 8}, "value_from": "policy"}, ["policy", "value", "reward"]),
        ({"lora": {"rank": 8}, "roles": "separate"}, ["policy", "reference", "value", "reward"]),
        ({"roles": "shared"}, ["policy", "value", "reward"]),
        ({"value_from": "trunk", "rewards": {"f": {"function": "m:f"}}}, ["policy", "reference"]),
    ],
)
def test_the_models_that_ppo_holds(ppo, parts):
    assert [model.part for model in ppo_models(setup(ppo=ppo))] == parts


def test_on_one_base_the_weights_are_there_once():
    num, adapters = NAMED["7b"].num_causal, NAMED["7b"].num_lora(16, "all-linear")
    held = {m.part: m.held_bytes for m in ppo_models(setup(ppo={"roles": "shared"}))}
    head = 4 * 4096
    assert held == {"policy": 2 * num + 4 * adapters, "value": 4 * adapters + head, "reward": 4 * adapters + head}
    optimizers = [name for name in stage(setup(ppo={"roles": "shared"}), "ppo").largest.parts if "optimizer" in name]
    assert optimizers == ["policy: optimizer", "value: optimizer"]


@pytest.mark.parametrize("frozen", ["float", "int8"])
@pytest.mark.parametrize("value_from", ["policy", "trunk"])
@pytest.mark.parametrize(("lora", "roles"), [
    (None, None), ({"rank": 4}, None), ({"rank": 4}, "shared"), ({"rank": 4, "base": "nf4"}, None),
    ({"rank": 4, "base": "nf4"}, "shared"), ({"rank": 4, "base": "nf4"}, "separate"),
])  # fmt: skip
def test_they_are_the_models_that_roles_builds(toy_model, lora, roles, value_from, frozen):
    """Counted on the real parts: every storage once."""
    import torch

    from heedful.models.frozen import FrozenLinear
    from heedful.models.quantise import Rounding
    from heedful.models.roles import build_roles
    from heedful.plan.shape import read_shape

    nf4 = bool(lora and "base" in lora)
    if (roles and value_from == "trunk") or (nf4 and frozen == "int8"):
        pytest.skip("a contradiction, which the recipe refuses")
    shape = read_shape(toy_model)
    section = {"value_from": value_from, "lora": lora, "roles": roles, "rewards": {"f": {"function": "m:f"}},
               "frozen_weights": frozen}  # fmt: skip
    recipe = Recipe.model_validate({"model": {"name": "toy", "dtype": "bfloat16"}, "data": DATA, "ppo": section})
    found = Setup(recipe, shape, shape, gpu("h200"), of_limits(recipe, shape.max_positions))
    assert recipe.ppo is not None
    settings = recipe.ppo.lora
    parts = build_roles(
        toy_model, None, policy_lora=settings, value_lora=settings, value_from=value_from, sharing=roles,
        device=torch.device("cpu"), dtype=torch.bfloat16, rounding=Rounding(frozen=frozen),
    )  # fmt: skip
    models = [parts.policy.model, parts.reference.part.model, parts.value.part.model]
    weights = {p.data_ptr(): p.nbytes for model in models for p in model.parameters()}
    rounded = [layer for model in models for layer in model.modules() if isinstance(layer, FrozenLinear)]
    assert bool(rounded) == (nf4 or frozen == "int8")
    weights |= {b.data_ptr(): b.nbytes for layer in rounded for b in layer.buffers()}
    planned = sum(model.held_bytes for model in ppo_models(found))
    heads = 4 * shape.width * 4  # float32 heads, PEFT's original among them
    assert abs(sum(weights.values()) - planned) <= heads


SMALL = {"activation_checkpointing": True}


@pytest.mark.parametrize(("ppo", "is_beside"), [
    (SMALL, True), ({**SMALL, "roles": "shared"}, True), ({}, False), ({**SMALL, "value_from": "trunk"}, False),
    ({**SMALL, "epochs": 2}, False), ({**SMALL, "minibatches": 2}, False), ({**SMALL, "prompts_per_step": 64}, False),
])  # fmt: skip
def test_a_value_whose_forward_is_kept_is_counted_beside_the_policy(ppo, is_beside):
    """And costs less than a twentieth of the peak: 16 answers of 122 tokens by SmolLM2-135M with all weights."""
    two_cores = Machine("two cores", "cpu", 24 * GIB, 1.7e12, 24e9)
    found = setup("smollm2-135m", two_cores,
                  ppo={"prompts_per_step": 16, "sampling": {"max_new_tokens": 32}, "micro_batch_tokens": 4096, **ppo})
    assert found.recipe.ppo is not None
    found = dataclasses.replace(found, work=dataclasses.replace(found.work, ppo=of_ppo(found.recipe.ppo, 91)))
    plan = stage(found, "ppo")
    (beside,) = {phase.parts.get("value: activations", 0) for phase in plan.phases
                 if phase.name in ("self-test", "train policy", "train policy and value")}  # fmt: skip
    assert (beside > 0) == is_beside
    if is_beside:
        full, tokens = "roles" not in ppo, 16 * 122
        inputs = 30 * tokens * 576 * (4 if full else 2)
        assert inputs < beside < 1.15 * inputs  # the last norm and the rotary angles too
        assert beside < 0.05 * (plan.peak_bytes - beside)


def test_the_self_test_is_a_batch_of_the_longest_before_there_are_moments():
    two_cores = Machine("two cores", "cpu", 24 * GIB, 1.7e12, 24e9)
    found = setup("smollm2-135m", two_cores, ppo={"prompts_per_step": 8, "sampling": {"max_new_tokens": 32}})
    work = of_ppo(found.recipe.ppo, 231, [30] * 20, in_pieces=True)
    assert (work.largest.row_tokens, work.in_self_test.row_tokens) == (61, 262)
    found = dataclasses.replace(found, work=dataclasses.replace(found.work, ppo=work))
    phases = {phase.name: phase.parts for phase in stage(found, "ppo").phases}
    assert "policy: optimizer" in phases["train policy"] and "policy: optimizer" not in phases["self-test"]
    assert phases["self-test"]["activations"] > 2.5 * phases["train policy"]["activations"]
    untested = setup("smollm2-135m", two_cores, ppo={"self_test": False})
    assert "self-test" not in {phase.name for phase in stage(untested, "ppo").phases}


def test_int8_holds_a_byte_per_weight_of_what_is_not_trained():
    shape, adapters = NAMED["7b"], NAMED["7b"].num_lora(16, "all-linear")
    int8 = {"frozen_weights": "int8"}
    rows = 32 * (5 * 4096 + 2 * 11008)  # 4 products to the width of attention, gate and way up, way down
    linear = shape.num_linear_weights
    held = {m.part: m.held_bytes for m in ppo_models(setup(ppo={"roles": "shared", **int8}))}
    assert held["policy"] == linear + 2 * rows + 2 * (shape.num_causal - linear) + 4 * adapters
    full = {m.part: m.held_bytes for m in ppo_models(setup(ppo=int8))}
    output = shape.num_embedding  # is not the embedding, and is cast
    assert full["reference"] == linear + 2 * rows + 2 * output + 4 * (shape.num_causal - linear - output)
    assert full["policy"] == 4 * shape.num_causal  # is trained
    phases = {phase.name: phase.parts for phase in stage(setup(ppo={"roles": "shared", **int8}), "ppo").phases}
    assert phases["train policy"]["cast of a rounded weight"] == 2 * 4096 * 11008
    two_cores = Machine("two cores", "cpu", 24 * GIB, 1.7e12, 24e9)
    on_cpu = stage(setup("smollm2-135m", two_cores, ppo={"lora": {"rank": 16}, **int8}), "ppo").phases[-1].parts
    assert on_cpu["weights before int8"] == 2 * NAMED["smollm2-135m"].num_causal


def test_int8_is_named_where_it_makes_a_stage_fit():
    found = setup("7b", gpu("l40s"), ppo={"lora": {"rank": 16}, "micro_batch_tokens": 512})
    cure = remedy(found, "ppo")
    assert cure is not None and cure.switches == ("--ppo.frozen_weights int8",)
    done = setup("7b", gpu("l40s"), ppo={"lora": {"rank": 16}, "micro_batch_tokens": 512, "frozen_weights": "int8"})
    assert remedy(done, "ppo") is not None and stage(done, "ppo").peak_bytes == cure.peak_bytes


def test_frozen_models_that_wait_are_there_for_the_scoring_alone():
    def phases(machine, **keys):
        found = stage(setup("7b", machine, ppo={"value_from": "reward", **keys}), "ppo")
        return {phase.name: phase.parts for phase in found.phases}, found

    reference, reward = "reference: parameters", "reward: parameters"
    there, plan = phases(gpu("h200"))
    assert all({reference, reward} <= parts.keys() for parts in there.values())
    both = there["score"][reference] + there["score"][reward]
    waiting, away = phases(gpu("h200"), offload_frozen=True)
    assert away.main_memory_bytes - plan.main_memory_bytes == both and away.disk_bytes == plan.disk_bytes
    for name, parts in waiting.items():
        rest = {key: size for key, size in there[name].items() if key not in (reference, reward)}
        assert parts == (there[name] if name == "score" else rest)
    exact, _ = phases(gpu("h200"), offload_frozen=True, kl={"in_reward": "exact"})
    assert {reference, reward} <= exact["train policy"].keys() and reference not in exact["rollout"]
    on_cpu, away = phases(Machine("two cores", "cpu", 24 * GIB, 1.7e12, 24e9), offload_frozen=True)
    assert away.main_memory_bytes == 0 and reference not in on_cpu["train policy"]
    found = [checkpoint_disk([x]) for x in (plan, away)]
    assert found[1] - found[0] == away.disk_bytes["models that wait"] == both


def test_frozen_models_that_wait_are_the_first_remedy_that_is_named():
    keys = {"micro_batch_tokens": 511, "sampling": {"max_new_tokens": 256}}  # one row
    plain, away = (setup("7b", ppo={**keys, "offload_frozen": x}) for x in (False, True))
    between = (stage(plain, "ppo").peak_bytes + stage(away, "ppo").peak_bytes) / 2 / MARGIN
    machine = dataclasses.replace(plain.machine, memory_bytes=int(between / 0.95) + CONTEXT_BYTES)
    cure = remedy(dataclasses.replace(plain, machine=machine), "ppo")
    assert cure is not None and cure.switches == ("--ppo.offload_frozen true",)
    assert cure.peak_bytes == stage(away, "ppo").peak_bytes
    nothing_to_move = setup("70b", gpu("t4"), ppo={**keys, "roles": "shared"})
    assert remedy(nothing_to_move, "ppo") is None


def test_a_base_in_few_bits():
    """4 bits per weight and a scale of 2 bytes per 64: 4.25; it is there in float first."""
    shape, adapters = NAMED["7b"], NAMED["7b"].num_lora(16, "all-linear")
    linear = shape.num_linear_weights
    for key, section in (("sft", {"lora": {"base": "nf4"}}), ("ppo", {"roles": "shared", "lora": {"base": "nf4"}})):
        phases = {phase.name: phase.parts for phase in stage(setup(**{key: section}), key).phases}
        held = linear * 17 // 32 + 2 * (shape.num_causal - linear) + 4 * adapters
        trained = phases["train" if key == "sft" else "train policy"]
        assert trained["policy: parameters"] == held
        assert phases["load"]["policy: float weights"] == 2 * shape.num_causal + 4 * adapters
        assert trained["cast of a rounded weight"] == (4 + 2) * 4096 * 11008
    apart = {m.part: m for m in ppo_models(setup(ppo={"roles": "separate", "lora": {"base": "nf4"}}))}
    assert apart["policy"].form == apart["reference"].form == apart["value"].form == "nf4"
    assert apart["reward"].form == "float"
    on_cpu = Machine("two cores", "cpu", 24 * GIB, 1.7e12, 24e9)
    base = {"roles": "shared", "lora": {"base": "int8"}}
    assert "weights before int8" not in stage(setup("smollm2-135m", on_cpu, ppo=base), "ppo").phases[-1].parts


@pytest.mark.parametrize(("key", "section", "switches"), [
    ("sft", {}, "--sft.lora.base nf4"),
    ("ppo", {"roles": "shared", "activation_checkpointing": True}, "--ppo.lora.base nf4 --reward.lora.base nf4"),
    ("ppo", {"activation_checkpointing": True}, None),
])  # fmt: skip
def test_4_bits_are_named_where_they_make_a_stage_fit(key, section, switches):
    """A device that holds the plan with 4 bits and no larger one. Where the reward is read from the value's base 4 bits
    are not offered: they move its scores."""
    def on(machine, base="float"):
        lora = {"rank": 16, "base": base}
        return setup("7b", machine, **{key: {"micro_batch_tokens": 512, **section, "lora": lora}})

    section = {**section, "max_tokens": 2048, "micro_batch_tokens": 2048} if key == "sft" else section
    if switches is None:
        found = remedy(on(gpu("a100-80g")), key)
        assert found is None or not any("nf4" in text for text in found.switches)
        return
    peaks = {base: stage(on(gpu("h200"), base), key).peak_bytes for base in ("float", "int8", "nf4")}
    assert peaks["nf4"] < peaks["int8"] <= peaks["float"]
    usable = (peaks["nf4"] + 0.1 * (peaks["int8"] - peaks["nf4"])) / 0.9
    found = remedy(on(dataclasses.replace(gpu("h200"), memory_bytes=int(usable / 0.95) + CONTEXT_BYTES)), key)
    assert found is not None and found.switches == (switches,) and found.peak_bytes == peaks["nf4"]


def test_the_peak_is_the_largest_phase_and_not_the_sum():
    plan = stage(setup(ppo={"lora": {"rank": 16}}), "ppo")
    assert [phase.name for phase in plan.phases] == ["rollout", "score", "train policy", "train value"]
    assert plan.peak_bytes == max(phase.total_bytes for phase in plan.phases)
    rollout = plan.phases[0].parts
    assert "policy: gradients" not in rollout
    cache = 2 * 32 * 4096 * 2 * 32 * (256 + 128)  # keys and values, layers, width, bytes, answers, tokens
    assert cache < rollout["key-value cache"] < 1.1 * cache


def test_answers_decoded_together_cost_memory_and_save_time():
    def ppo(together):
        return {"prompts_per_step": 256, "sampling": {"answers_together": together}, "lora": {"rank": 16}}

    few, many, all_at_once = (setup(ppo=ppo(n)) for n in (64, 256, 1024))
    cache = [stage(x, "ppo").phases[0].parts["key-value cache"] for x in (few, many, all_at_once)]
    assert cache[1] == 4 * cache[0] and cache[2] == cache[1]  # a step has 256 answers
    seconds = [plan_time(x)[-1].phases[0].seconds for x in (few, many, all_at_once)]
    assert seconds[1] < 0.6 * seconds[0] and seconds[2] == seconds[1]


def test_checkpointing_keeps_the_inputs_of_the_layers():
    shape, batch = NAMED["7b"], Batch(4, 512, 512)
    kept = {r: trunk(shape, batch, Training(recompute=r), s=2, kernel="sdpa") for r in (False, True)}
    assert kept[True] < kept[False] / 6
    assert kept[True] > shape.layers * batch.tokens * shape.width * 4


def test_more_tokens_and_a_larger_vocabulary_need_more():
    ppo = {"lora": {"rank": 16}, "micro_batch_tokens": 2048}
    usual = setup(ppo=ppo)
    longer = setup(ppo={**ppo, "micro_batch_tokens": 8192})
    assert stage(longer, "ppo").peak_bytes > stage(usual, "ppo").peak_bytes
    base = dataclasses.replace(usual.base, vocabulary=2 * usual.base.vocabulary)
    wide = dataclasses.replace(usual, base=base, reward=base)
    assert 1 < stage(wide, "ppo").peak_bytes / stage(usual, "ppo").peak_bytes < 1.1  # never [B, T, V]


def test_a_remedy_is_the_cheapest_that_fits():
    found = setup(sft={}, ppo={})
    assert verdict(stage(found, "sft").peak_bytes, found.machine.usable_bytes) == "does not fit"
    cure = remedy(found, "sft")
    assert cure is not None and cure.switches == ("--sft.lora.rank 16",)
    assert cure.peak_bytes < 0.9 * found.machine.usable_bytes
    small = setup("opt-1.3b", sft={"micro_batch_tokens": 512, "max_tokens": 512})
    cure = remedy(small, "sft")
    assert cure is not None and cure.switches == ()
    assert remedy(setup("70b", gpu("l4"), ppo={}), "ppo") is None


def test_a_micro_batch_of_one_row_comes_before_anything_else():
    found = setup("opt-1.3b", gpu("rtx-4090"), sft={"micro_batch_tokens": 32768, "max_tokens": 1024}, attention="eager")
    cure = remedy(found, "sft")
    assert cure is not None and cure.switches[0] == "--sft.micro_batch_tokens 1024"


def test_what_heedful_lacks_is_named_apart():
    found = setup(machine=gpu("a100-80g", 8), sft={})
    more = not_yet(found, "sft")
    assert set(more) == {"sharded over 8 devices"}
    assert more["sharded over 8 devices"] < found.machine.usable_bytes < stage(found, "sft").peak_bytes


def test_an_unknown_gpu_names_the_list():
    with pytest.raises(ConfigError, match="'a1000' is not in the list; it has a100-40g"):
        gpu("a1000")
    assert all(g.usable_bytes < g.memory_bytes for g in GPUS.values())


def test_micro_batches_within_a_budget():
    assert padded(16, 100, 30, 450) == Batch(4, 100, 120, 4)
    assert padded(16, 600, 30, 450) == Batch(1, 600, 30, 16)  # one alone exceeds it
    assert padded(4, 100, 100, 10_000) == Batch(4, 100, 400, 1)


def test_time_grows_with_the_model_and_shrinks_with_the_machine():
    ppo = {"lora": {"rank": 16}, "steps": 10}
    small, large = (plan_time(setup(s, ppo=ppo))[-1] for s in ("opt-1.3b", "opt-13b"))
    assert [w.phase for w in small.phases] == ["rollout", "score", "train policy", "train value"]
    assert 5 < large.phases[2].seconds / small.phases[2].seconds < 15
    faster = plan_time(setup("opt-13b", gpu("h100-80g"), ppo=ppo))[-1]
    assert faster.step_seconds < large.step_seconds
    assert small.total_seconds == pytest.approx(10 * small.step_seconds)


def test_operations_of_a_step_are_6_per_weight_and_token():
    found = plan_time(setup(sft={"max_tokens": 128, "prompts_per_step": 4}))[0]
    tokens, weights = 4 * 128, NAMED["7b"].num_linear_weights + NAMED["7b"].num_embedding
    # the output layer is made once more in the backward, attention comes on top
    assert found.phases[0].operations == pytest.approx(6 * tokens * weights, rel=0.05)


def test_disk_holds_every_model_and_the_checkpoints_of_one_stage():
    plans = plan_memory(setup("opt-1.3b", sft={}, reward={}))
    num = NAMED["opt-1.3b"].num_causal
    assert checkpoint_disk(plans) == pytest.approx((4 + 4 + 24) * num, rel=0.01)


def test_time_on_two_cores_is_that_of_a_quiet_machine():
    """SmolLM2-135M, batch 16, 76 tokens of which 32 are new, all weights: seconds per phase as they were measured."""
    two_cores = Machine("two cores", "cpu", 24 * GIB, 1.7e12, 24e9)
    ppo = {"prompts_per_step": 16, "sampling": {"max_new_tokens": 32}}
    found = setup("smollm2-135m", two_cores, ppo=ppo)
    found = dataclasses.replace(found, work=dataclasses.replace(found.work, ppo=of_ppo(found.recipe.ppo, 45)))
    seconds = {work.phase: work.seconds for work in plan_time(found)[-1].phases}
    measured = {"rollout": 3.6, "score": 1.8, "train policy": 4.0, "train value": 3.3}
    assert seconds == pytest.approx(measured, rel=0.25)


def test_libraries_and_holes_in_the_heap_are_of_a_cpu():
    cpu = Machine("cpu", "cpu", 24 * GIB, 1.7e12, 24e9)
    ppo = {"lora": {"rank": 16}}
    on_cpu, on_gpu = (
        {name for phase in stage(setup("smollm2-135m", machine, ppo=ppo), "ppo").phases for name in phase.parts}
        for machine in (cpu, gpu("l4"))
    )
    assert {"libraries", "holes in the heap"} <= on_cpu
    assert "holes in the heap" not in on_gpu
    assert stage(setup("smollm2-135m", gpu("l4"), ppo=ppo), "ppo").largest.parts["libraries"] == 0
