"""The start-up self-test: a sound set-up passes and is left as it was; every fault fails the proof made for it."""

from __future__ import annotations

import random
import weakref

import numpy
import pytest
import torch

from heedful.config.ppo import KLConfig, PPOConfig, SamplingConfig
from heedful.config.section import LoraConfig
from heedful.data.chat import end_token_ids
from heedful.errors import GuardError
from heedful.models.parts import ScalarModel
from heedful.models.roles import Reference, build_roles
from heedful.models.value import Value
from heedful.rollout.engine import Sampling
from heedful.rollout.hf import HFEngine
from heedful.rollout.scaling import Running
from heedful.rollout.score import LearnedReward, Scoring
from heedful.train import proofs
from heedful.train.selftest import require, run_self_test
from toy_parts import CHATML, CPU, disturb, model_folder, prompts, roles

LORA = LoraConfig(rank=4)


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    return tmp_path_factory.mktemp("selftest-models")


class Length:
    """The reward is the length of the answer."""

    name, weight = "length", 1.0

    def __call__(self, prompts, completions):
        return [float(len(c.ids)) for c in completions]


def config(**options):
    return PPOConfig(**{"prompts_per_step": 6, "sampling": SamplingConfig(max_new_tokens=8), "micro_batch_tokens": 256,
                        **options})  # fmt: skip


def scoring_of(parts):
    sources = [Length()]
    if parts.reward is not None:
        sources.append(LearnedReward(parts.reward, micro_batch_tokens=256))
    return Scoring(sources, {"length": Running()})


def run(parts, *, asked=None, engine=None, scoring=None, **options):
    """The proofs by name."""
    asked = asked or prompts(parts.policy.tokenizer)
    engine = engine or HFEngine(parts.policy, end_token_ids(parts.policy.tokenizer))
    found = run_self_test(parts, scoring or scoring_of(parts), asked, config(**options), engine, seed=0)
    assert [p.name for p in found] == list(proofs.ALL)
    return {p.name: p for p in found}


def failed(found):
    return [name for name, proof in found.items() if not proof.passed]


FLOAT, HALF = torch.float32, torch.bfloat16


@pytest.mark.parametrize("value_from, lora, dtype", [
    ("reward", None, FLOAT), ("reward", LORA, HALF), ("reward", LORA, FLOAT), ("policy", None, HALF),
    ("policy", LORA, FLOAT), ("trunk", None, FLOAT), ("trunk", LORA, HALF), ("frozen_trunk", None, HALF),
])  # fmt: skip
def test_a_sound_setup_passes(models, value_from, lora, dtype):
    parts = roles(models, lora=lora, dtype=dtype, value_from=value_from)
    found = run(parts, kl=KLConfig(in_reward="exact", in_loss="exact"), entropy_coefficient=0.01)
    assert failed(found) == [], [str(found[name]) for name in failed(found)]
    assert all(p.measured and p.bound and not p.advice and p.seconds >= 0 for p in found.values())
    assert found["first ratio is 1"].measured == "the ratio differs from 1 by 0, clip fraction 0"
    assert found["reference is policy"].measured == "k1, k2, k3, abs, exact are 0"
    require(found.values())


@pytest.mark.parametrize("temperature", [0.5, 2.0])
def test_every_temperature_passes(models, temperature):
    parts = roles(models)
    assert failed(run(parts, sampling=SamplingConfig(max_new_tokens=8, temperature=temperature))) == []


@pytest.mark.parametrize("lora", [None, LORA], ids=["full", "lora"])
def test_it_leaves_no_trace(models, lora):
    parts = roles(models, lora=lora)
    scoring = scoring_of(parts)
    seen = prompts(parts.policy.tokenizer)
    engine = HFEngine(parts.policy, end_token_ids(parts.policy.tokenizer))
    sides = {"policy": parts.policy, "value": parts.value.part, "reference": parts.reference.part,
             "reward": parts.reward.part}  # fmt: skip
    trained = {f"{side}/{n}": p for side, part in sides.items() for n, p in part.model.named_parameters()}
    for parameter in trained.values():
        if parameter.requires_grad:
            parameter.grad = torch.full_like(parameter, 3.0)
    before = {name: (p.detach().clone(), p.requires_grad) for name, p in trained.items()}
    modes = {side: [m.training for m in part.model.modules()] for side, part in sides.items()}
    streams = torch.get_rng_state(), random.getstate(), numpy.random.get_state()[1].copy(), scoring.state_dict()
    spoken = {name: x.clone() for name, x in engine._model.state_dict().items()}

    run_self_test(parts, scoring, seen, config(), engine, seed=0)

    for name, parameter in trained.items():
        assert torch.equal(parameter, before[name][0]) and parameter.requires_grad == before[name][1], name
        assert parameter.grad is None or bool((parameter.grad == 3.0).all()), name
    assert modes == {side: [m.training for m in part.model.modules()] for side, part in sides.items()}
    assert torch.equal(streams[0], torch.get_rng_state()) and streams[1] == random.getstate()
    assert (streams[2] == numpy.random.get_state()[1]).all() and streams[3] == scoring.state_dict()
    engine.sync(parts.policy, version=0)  # it rests
    assert all(torch.equal(x, engine._model.state_dict()[name]) for name, x in spoken.items())
    assert scoring.state_dict()["length"]["num"] == 0


def test_the_same_seed_finds_the_same(models):
    first, second = (run(roles(models)) for _ in range(2))
    assert [p.measured for p in first.values() if "peak" not in p.measured] == [
        p.measured for p in second.values() if "peak" not in p.measured
    ]


# Memory.


@pytest.mark.parametrize("micro_batch_tokens, minibatches, rows", [(256, 1, 5), (1, 1, 1), (9999, 1, 6), (9999, 2, 3)])
def test_the_dry_run_takes_the_largest_batch_that_the_run_can_meet(models, micro_batch_tokens, minibatches, rows):
    parts = roles(models)
    seen = []
    hidden = parts.policy.hidden
    parts.policy.hidden = lambda batch: (seen.append(tuple(batch.inputs_BT.shape)), hidden(batch))[1]
    longest = max(len(ids) for _, ids in prompts(parts.policy.tokenizer))
    run(parts, micro_batch_tokens=micro_batch_tokens, minibatches=minibatches)
    assert (rows, longest + 8 - 1) in seen and max(n * t for n, t in seen) == rows * (longest + 8 - 1)


@pytest.mark.parametrize(("options", "are_held_together"), [
    ({}, True), ({"activation_checkpointing": False}, False), ({"epochs": 2}, False), ({"minibatches": 2}, False),
    ({"micro_batch_tokens": 256}, False),
])  # fmt: skip
def test_the_dry_run_holds_the_graphs_that_a_step_holds(models, monkeypatch, options, are_held_together):
    """That of the value while the policy's is at work, where a step of the largest batch keeps both."""
    parts = roles(models, value_from="policy")
    held, seen = [], []
    values, hidden = Value.values, parts.policy.hidden

    def of_value(*asked):
        found = values(*asked)
        if torch.is_grad_enabled():
            held.append(weakref.ref(found))
        return found

    def of_policy(batch):
        if torch.is_grad_enabled() and not seen:
            seen.append(any(found() is not None for found in held))
        return hidden(batch)

    monkeypatch.setattr(Value, "values", of_value)
    parts.policy.hidden = of_policy
    run(parts, **{"micro_batch_tokens": 9999, "activation_checkpointing": True, "value_from": "policy", **options})
    assert held and seen == [are_held_together]


@pytest.mark.parametrize(
    "error",
    [torch.OutOfMemoryError("CUDA out of memory"), MemoryError(),
     RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried")],
    ids=["cuda", "python", "cpu"],
)  # fmt: skip
def test_memory_that_runs_out_is_told_with_the_options_to_lower(models, error):
    parts = roles(models)
    trunk = parts.value.part if isinstance(error, MemoryError) else parts.policy
    hidden = trunk.hidden

    def limited(batch):
        if batch.inputs_BT.shape[0] * batch.inputs_BT.shape[1] > 200 and torch.is_grad_enabled():
            raise error
        return hidden(batch)

    trunk.hidden = limited
    found = run(parts, micro_batch_tokens=256)
    proof = found["longest batch fits"]
    assert "longest batch fits" in failed(found) and "out of memory (largest batch: 5 × 49 tokens)" in proof.measured
    assert proof.advice.startswith("lower ppo.micro_batch_tokens (now 256), or set ppo.activation_checkpointing")
    assert "--ppo.lora.rank" in proof.advice and "lower ppo.sampling.max_new_tokens (now 8)" in proof.advice
    smaller = run(parts, micro_batch_tokens=128)
    assert failed(smaller) == []


def test_another_fault_is_not_taken_for_memory(models):
    parts = roles(models)
    parts.policy.hidden = lambda batch: (_ for _ in ()).throw(RuntimeError("a fault of ours"))
    with pytest.raises(RuntimeError, match="a fault of ours"):
        run(parts)


def test_an_answer_that_the_model_has_no_positions_for(models):
    found = run(roles(models), sampling=SamplingConfig(max_new_tokens=250))
    assert failed(found) == ["longest batch fits"]  # the answers of the test itself are short
    assert "longer than the 256 positions of this model" in found["longest batch fits"].measured


def test_a_gradient_that_is_not_finite(models):
    parts = roles(models)
    head = parts.value.part._head
    head.weight.register_hook(lambda gradient: gradient * float("nan"))
    found = run(parts)
    assert failed(found) == ["longest batch fits"]
    assert "the gradient is not finite" in found["longest batch fits"].measured


# Sampler, trainer, reference.


class Elsewhere:
    """The engine, but at a temperature of its own."""

    def __init__(self, engine, temperature):
        self._engine, self._temperature = engine, temperature
        self.sync, self.rest = engine.sync, engine.rest

    def generate(self, requests, sampling, **options):
        return self._engine.generate(requests, Sampling(sampling.max_new_tokens, self._temperature), **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_ROL_01_a_sampler_at_another_temperature(models, dtype):
    parts = roles(models, dtype=dtype)
    engine = Elsewhere(HFEngine(parts.policy, end_token_ids(parts.policy.tokenizer)), 0.8)
    found = run(parts, engine=engine)
    assert failed(found) == ["sampler is trainer"]


def test_a_sampler_with_other_weights(models):
    parts, other = roles(models), roles(models)
    disturb(other.policy, scale=0.02)
    engine = HFEngine(other.policy, end_token_ids(other.policy.tokenizer))
    sync = engine.sync
    engine.sync = lambda policy, *, version: sync(other.policy, version=version)
    assert failed(run(parts, engine=engine)) == ["sampler is trainer"]


def test_PPO_08_dropout_that_is_left_on(models):
    parts = roles(models)
    trunk = parts.policy.base.model
    embedding = trunk.embed_tokens
    engine = HFEngine(parts.policy, end_token_ids(parts.policy.tokenizer))
    engine.sync = engine.rest = lambda *_, **__: None  # it speaks without
    trunk.embed_tokens = torch.nn.Sequential(embedding, torch.nn.Dropout(0.1))
    parts.policy.model.train()
    found = run(parts, engine=engine)
    assert {"first ratio is 1", "reference is policy"} <= set(failed(found))
    assert "dropout" in found["first ratio is 1"].advice


def test_adapters_that_do_not_start_at_zero(models):
    parts = roles(models, lora=LORA)
    disturb(parts.policy, scale=0.01)
    found = run(parts)
    assert failed(found) == ["reference is policy"]
    with pytest.raises(GuardError, match="self-test: reference is policy: .* new adapters must start at zero"):
        require(found.values())


def test_a_reference_from_another_folder(models, tmp_path):
    parts = roles(models)
    other = roles(tmp_path)
    disturb(other.policy, scale=0.01)
    object.__setattr__(parts, "reference", Reference(other.policy))
    assert failed(run(parts)) == ["reference is policy"]


def test_a_value_that_is_no_number(models):
    parts = roles(models)
    parts.value.part._head.weight.data[0, 3] = float("nan")
    found = run(parts)
    assert failed(found) == ["longest batch fits", "values and entropy"]
    assert "the value model is damaged" in found["values and entropy"].advice


def test_a_policy_without_a_choice(models):
    parts = roles(models)
    for part in (parts.policy, parts.reference.part):
        part.base.lm_head.weight.data *= 1e5
    assert "values and entropy" in failed(run(parts))


# Tokens and ends.


def retold(parts, template, **special):
    """The parts with another chat template in the policy's tokenizer."""
    for name, token in special.items():
        setattr(parts.policy.tokenizer, name, token)
    parts.policy.tokenizer.chat_template = template
    return parts


@pytest.mark.parametrize("times", [0, 1, 2, 3])
def test_a_template_that_doubles_the_begin_token(models, times):
    parts = retold(roles(models), f"{{{{ bos_token * {times} }}}}" + CHATML, bos_token="<|endoftext|>")
    found = run(parts)
    assert failed(found) == (["one begin token"] if times > 1 else [])
    if times > 1:
        assert f"starts with {times} begin tokens" in found["one begin token"].measured


def test_a_begin_token_that_a_prompt_lacks(models):
    from tokenizers import processors

    parts = retold(roles(models), CHATML, bos_token="<|endoftext|>")
    asked = prompts(parts.policy.tokenizer)
    parts.policy.tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]
    )
    assert failed(run(parts)) == []  # heedful's own encoding puts it there
    assert failed(run(parts, asked=asked)) == ["one begin token"]


def test_a_generation_prompt_that_is_not_how_turns_begin(models):
    parts = retold(roles(models), CHATML.replace("'<|im_start|>assistant\n'", "'<|im_start|>assistant:'"))
    found = run(parts)
    assert failed(found) == ["template round trip"]
    assert "with an answer the template writes prompt 'p0' differently" in found["template round trip"].measured


def test_prompts_of_another_template(models):
    parts = roles(models)
    asked = prompts(parts.policy.tokenizer)
    retold(parts, CHATML.replace("m['content']", "m['content'] + '!'"))
    assert "template round trip" in failed(run(parts, asked=asked))


def test_a_thinking_tag_that_the_generation_prompt_opens_is_no_fault(models):
    parts = retold(roles(models), CHATML.replace("assistant\n' }}", "assistant\n<think>\n' }}"))
    assert failed(run(parts)) == []


def test_an_end_token_that_is_the_padding(models):
    parts = roles(models)
    parts.policy.pad_id = end_token_ids(parts.policy.tokenizer)[0]
    found = run(parts)
    assert failed(found) == ["end token"] and "'<|im_end|>' is the padding too" in found["end token"].measured


def test_an_end_token_that_the_model_has_no_row_for(models):
    parts = roles(models)
    parts.policy.tokenizer.add_special_tokens({"eos_token": "<|a new end|>"})
    engine = HFEngine(parts.policy, [0])
    found = run(parts, engine=engine)
    assert "end token" in failed(found) and "is beyond the 260 rows of the model" in found["end token"].measured


def test_an_end_that_the_policy_never_says(models):
    parts = roles(models)
    ends = end_token_ids(parts.policy.tokenizer)
    for part in (parts.policy, parts.reference.part):
        part.base.lm_head.weight.data *= 3
        part.base.lm_head.weight.data[list(ends)] = 0
    found = run(parts)
    assert failed(found) == ["answers end"] and "none of 6 sampled answers ends" in found["answers end"].measured


def test_a_value_model_of_another_vocabulary(models, tmp_path):
    policy, reward = models / "Llama-policy", model_folder(tmp_path / "reward", scalar=True, shift=3)
    options = {"policy_lora": None, "value_lora": None, "device": CPU, "dtype": torch.float32}
    found = run(build_roles(policy, reward, **options))
    assert failed(found) == ["one vocabulary"] and "tokens have different ids" in found["one vocabulary"].measured
    # a value on the policy's trunk does not care what the reward model's ids mean
    assert failed(run(build_roles(policy, reward, value_from="trunk", **options))) == []


# The reward.


def misread(change):
    """ScalarModel's reading of the last token with a change of the hidden column or of the mask."""

    def outputs(self, ids_NT, mask_NT):
        mask_NT, column_N = change(mask_NT)
        hidden_NTD = self._trunk(ids_NT, mask_NT, (mask_NT.cumsum(-1) - 1).clamp(min=0))
        return self._read_head(hidden_NTD[torch.arange(len(ids_NT)), column_N])

    return outputs


MISREADINGS = {
    "the last column": lambda m: (m, torch.full((len(m),), -1)),
    "as many columns as tokens": lambda m: (m, m.sum(-1) - 1),
    "one token early": lambda m: (m, (m.cumsum(-1) - 1).clamp(min=0).argmax(-1) - 1),
    "pads attended": lambda m: (torch.ones_like(m), (m.cumsum(-1) - 1).clamp(min=0).argmax(-1)),
}


@pytest.mark.parametrize(
    "fault, dtype", [*((fault, HALF) for fault in MISREADINGS), ("pads attended", FLOAT), ("the last column", FLOAT)]
)
def test_a_reward_that_is_read_at_the_wrong_token(models, monkeypatch, fault, dtype):
    parts = roles(models, dtype=dtype)
    monkeypatch.setattr(ScalarModel, "outputs", misread(MISREADINGS[fault]))
    assert failed(run(parts)) == ["reward read at the end"]


def test_a_reading_with_the_right_column_passes(models, monkeypatch):
    parts = roles(models)
    right = misread(lambda m: (m, (m.cumsum(-1) - 1).clamp(min=0).argmax(-1)))
    monkeypatch.setattr(ScalarModel, "outputs", right)
    assert failed(run(parts)) == []


def test_a_reward_that_is_no_number_is_named(models):
    parts = roles(models)

    class Broken(Length):
        def __call__(self, prompts, completions):
            return [float("nan"), *super().__call__(prompts, completions)[1:]]

    found = run(parts, scoring=Scoring([Broken()]))
    assert failed(found) == ["rewards are numbers"]
    assert "reward 'length' gave nan for prompt 'p0'" in found["rewards are numbers"].measured
    assert found["reward read at the end"].measured == "no model judges"


def test_the_first_failure_is_the_one_that_is_raised(models):
    parts = roles(models)
    parts.policy.pad_id = end_token_ids(parts.policy.tokenizer)[0]
    parts.value.part._head.weight.data[0, 3] = float("nan")
    with pytest.raises(GuardError) as caught:
        require(run(parts).values())
    said = str(caught.value)
    assert said.startswith("the set-up fails its self-test: end token: '<|im_end|>' is the padding too; it must be: ")
    assert "give the tokenizer" in said and "--ppo.self_test false" in said and "\n" not in said
