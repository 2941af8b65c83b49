"""Whole PPO steps on a tiny model: what must not change anything doesn't, and what is wrong is caught by name."""

from __future__ import annotations

import json
import math

import pytest
import torch

from heedful.config.ppo import KLConfig, SamplingConfig
from heedful.config.section import LoraConfig
from heedful.data.chat import end_token_ids
from heedful.errors import EngineError, GuardError
from heedful.models.roles import Reference, build_roles
from heedful.rollout.experience import build_experience
from heedful.rollout.fake import FakeEngine
from heedful.rollout.hf import HFEngine
from heedful.rollout.score import LearnedReward
from heedful.runs.folder import StageFolder
from toy_parts import CPU, disturb, prompts, roles
from toy_ppo import RATE, largest_gap, train, weights

LORA = LoraConfig(rank=4)


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    return tmp_path_factory.mktemp("ppo-models")


def all_finite(row):
    return "warnings" not in row and all(math.isfinite(x) for x in row.values() if isinstance(x, (int, float)))


def scripted(parts, *answers):
    """An engine that answers prompt n with ``answers[n]``, "E" for the end token."""
    (end, *_) = ends = end_token_ids(parts.policy.tokenizer)
    return FakeEngine(
        lambda r: [end if i == "E" else i for i in answers[int(r.prompt_id[1:])]], ends, parts.policy.tokenizer
    )


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.0])
@pytest.mark.parametrize("lora", [None, LORA], ids=["full", "lora"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_ROL_01_PPO_08_the_first_ratio_is_1_for_every_sampling_setting(models, tmp_path, temperature, lora, dtype):
    """The guard would stop the run; the numbers are looked at all the same. Dropout is 0.1 in the configs."""
    parts = roles(models, lora=lora, dtype=dtype)
    row = train(parts, tmp_path, steps=1, sampling=SamplingConfig(max_new_tokens=8, temperature=temperature))[0]
    assert row["ppo/ratio_max"] == row["ppo/ratio_mean"] == 1 and row["ppo/clip_fraction"] == 0
    assert row["ppo/approx_kl_nats"] == 0 and row["ppo/kl_nats"] == row["ppo/kl_k3_nats"] == 0
    assert row["ppo/logprob_gap_nats"] < (1e-4 if dtype == torch.float32 else 0.5)
    assert parts.policy.base.config.attention_dropout == 0.1


def test_PPO_08_dropout_that_is_left_on_is_caught(models, tmp_path):
    parts = roles(models)
    trunk = parts.policy.base.model
    trunk.embed_tokens = torch.nn.Sequential(trunk.embed_tokens, torch.nn.Dropout(0.1))
    parts.policy.model.train()
    before = weights(parts)
    with pytest.raises(GuardError, match="KL to the reference is .* no dropout is active"):
        train(parts, tmp_path, engine=scripted(parts, *[[50, 51, 52]] * 6))
    assert largest_gap(before, weights(parts)) == 0


@pytest.mark.parametrize("only", [False, True], ids=["one-row", "every-row"])
def test_ROL_05_an_immediate_end_is_an_answer(models, tmp_path, only):
    parts = roles(models, value_shift=0.1, value_scale=2.0)
    answers = [["E"]] * 6 if only else [["E"], [40, 41, "E"], *[[60, "E"]] * 4]
    before = weights(parts)
    reward = LearnedReward(parts.reward, micro_batch_tokens=256)
    rows = train(parts, tmp_path, engine=scripted(parts, *answers), rewards=[reward], steps=2, epochs=2)
    assert all(all_finite(row) for row in rows)
    assert rows[0]["ppo/end_token_rate"] == 1 and rows[0]["ppo/answer_tokens_mean"] == (1 if only else 2)
    samples = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    assert all(s["answer"] == "" and s["finish_reason"] == "stop" for s in samples if only or s["prompt_id"] == "p0")
    after = weights(parts)
    assert all(torch.isfinite(x).all() for x in after.values()) and largest_gap(before, after) > 0


@pytest.mark.parametrize("lora", [None, LORA], ids=["full", "lora"])
@pytest.mark.parametrize("whiten", [True, False])
def test_PPO_10_the_cut_into_micro_batches_changes_nothing(models, tmp_path, lora, whiten):
    found, rows = [], []
    for micro_batch_tokens in (1, 70, 10**6):
        parts = roles(models, lora=lora)
        rows.append(train(parts, tmp_path / str(micro_batch_tokens), micro_batch_tokens=micro_batch_tokens, steps=2,
                          epochs=2, minibatches=2, whiten_advantages=whiten))  # fmt: skip
        found.append(weights(parts))
    start = weights(roles(models, lora=lora))
    assert largest_gap(found[0], found[2]) < 1e-5 and largest_gap(found[1], found[2]) < 1e-5
    assert largest_gap(start, found[0]) > 1e-3
    for name in ("ppo/policy_loss", "ppo/value_loss", "ppo/policy_gradient_norm", "ppo/value_gradient_norm",
                 "ppo/ratio_mean", "ppo/ratio_max", "ppo/clip_fraction", "ppo/value_mean", "ppo/approx_kl_nats",
                 ):  # fmt: skip
        for one, _, whole in zip(*rows, strict=True):
            assert one[name] == pytest.approx(whole[name], rel=1e-3, abs=1e-6), name


def test_a_prompt_met_twice_in_a_step_gets_streams_of_its_own(models, tmp_path):
    parts = roles(models)
    asked = []
    real = HFEngine(parts.policy, end_token_ids(parts.policy.tokenizer))

    class Spy:
        sync, rest = staticmethod(real.sync), staticmethod(real.rest)

        def generate(self, requests, sampling, **options):
            found = real.generate(requests, sampling, **options)
            asked.append([(r.prompt_id, r.sample_index, tuple(c.ids)) for r, c in zip(requests, found, strict=True)])
            return found

    texts = ["a", "I", "up"]
    train(parts, tmp_path, engine=Spy(), texts=texts, steps=2, prompts_per_step=5, samples_per_prompt=2, minibatches=2)
    for step in asked:
        assert len(step) == 10 and len({(p, n) for p, n, _ in step}) == 10 and len({ids for *_, ids in step}) == 10
        for prompt in {p for p, *_ in step}:
            assert sorted(n for p, n, _ in step if p == prompt) == list(range(sum(p == prompt for p, *_ in step)))
    assert {ids for *_, ids in asked[0]}.isdisjoint({ids for *_, ids in asked[1]})  # a step draws anew


def test_only_value_learns_during_the_warm_up(models, tmp_path):
    rows = train(roles(models), tmp_path, steps=3, value_warmup_steps=2)
    assert ["ppo/policy_loss" in row for row in rows] == [False, False, True]
    assert [row["ppo/kl_nats"] for row in rows] == [0, 0, 0], "the policy moved during the warm-up"
    assert len({row["ppo/value_mean"] for row in rows}) == 3, "the value did not learn during the warm-up"


def test_PPO_20_the_schedule_counts_optimizer_steps(models, tmp_path):
    linear = {"learning_rate": 1e-5, "schedule": "linear", "warmup_fraction": 0.0}
    rows = train(roles(models), tmp_path, steps=10, epochs=2, minibatches=2, prompts_per_step=2, optimizer=linear,
                 value_optimizer=linear, sampling=SamplingConfig(max_new_tokens=2))  # fmt: skip
    for name in ("ppo/policy_learning_rate", "ppo/value_learning_rate"):  # of the step's last update
        assert rows[4][name] == pytest.approx(1e-5 * (1 - 19 / 40)) and rows[9][name] == pytest.approx(1e-5 / 40)


def test_ROL_08_every_answer_stays_with_its_prompt(models, tmp_path):
    """Eight prompts a step out of six, three answers each: some prompts come twice. Only one of them pays."""
    seen = []

    class OnePays:
        name, weight = "one", 1.0

        def __call__(self, prompts, completions):
            seen.extend((p.id, c.prompt_id, c.sample_index, c.prompt_ids) for p, c in zip(prompts, completions))
            return [float(p.id == "p0") for p in prompts]

    parts = roles(models)
    rows = train(parts, tmp_path, steps=3, prompts_per_step=8, samples_per_prompt=3, minibatches=2, rewards=[OnePays()],
                 sample_rows=24)  # fmt: skip
    encoded = {p.id: ids for p, ids in prompts(parts.policy.tokenizer)}
    assert all(a == b and ids == encoded[a] for a, b, _, ids in seen)
    for i, row in enumerate(rows):
        step = seen[24 * i : 24 * (i + 1)]
        assert len({(a, n) for a, _, n, _ in step}) == 24  # no two answers share a random stream
        assert row["ppo/score_mean"] == pytest.approx(sum(a == "p0" for a, *_ in step) / 24)
    samples = StageFolder(tmp_path, "ppo", 3).samples.read_text().splitlines()
    said = [json.loads(line) for line in samples]
    assert len(said) == 72 and all(row["score"] == float(row["prompt_id"] == "p0") for row in said)


def test_PPO_11_the_logged_coefficient_is_the_one_that_was_used(models, tmp_path):
    rows = train(roles(models), tmp_path, steps=3, kl=KLConfig(coefficient=0.2, target=6.0, horizon=100))
    expected = 0.2
    for row in rows:
        assert row["ppo/kl_coefficient"] == pytest.approx(expected)
        error = min(max(row["ppo/kl_nats"] / 6 - 1, -0.2), 0.2)
        expected *= 1 + error * 6 / 100


def norm_of(part):
    return part.base.base_model.norm.weight


@pytest.mark.parametrize("side, error, message", [
    ("policy", GuardError, r"^log-probs is not finite at step 0 \(samples: p"),
    ("reference", GuardError, r"^reference log-probs is not finite at step 0 \(samples: p"),
    ("value", GuardError, r"^values is not finite at step 0 \(samples: p"),
    ("reward", EngineError, r"reward 'reward_model' gave nan for prompt 'p"),
])  # fmt: skip
def test_a_nan_is_caught_in_its_stream_and_nothing_moves(models, tmp_path, side, error, message):
    parts = roles(models)
    part = getattr(parts, side)
    with torch.no_grad():
        norm_of(part if side == "policy" else part.part)[3] = float("nan")
    before = weights(parts)
    reward = LearnedReward(parts.reward, micro_batch_tokens=256)
    with pytest.raises(error, match=message):
        train(parts, tmp_path, engine=scripted(parts, *[[50, 51, "E"]] * 6), rewards=[reward])
    assert all(torch.equal(x.nan_to_num(), before[n].nan_to_num()) for n, x in weights(parts).items())


def test_a_nan_in_the_policy_is_caught_by_the_sampler(models, tmp_path):
    parts = roles(models)
    with torch.no_grad():
        norm_of(parts.policy)[3] = float("inf")
    with pytest.raises(EngineError, match="logits are not finite during sampling"):
        train(parts, tmp_path)


def test_a_wrong_reference_is_caught(models, tmp_path):
    parts = roles(models)
    other = roles(models)
    disturb(other.policy, 0.01)
    wrong = type(parts)(parts.policy, Reference(other.policy), parts.value, parts.reward)
    before = weights(parts)
    with pytest.raises(GuardError, match=r"KL to the reference is .* of sample p\d/0 at step 0"):
        train(wrong, tmp_path)
    assert largest_gap(before, weights(parts)) == 0


def cooler(batch, options):
    return batch, {**options, "temperature": 0.9}


def blind(batch, options):
    """Attention to nothing but the last tokens: a mask that was lost."""
    import dataclasses

    mask = batch.attention_mask_BT.clone()
    mask[:, :2] = 0
    return dataclasses.replace(batch, attention_mask_BT=mask), options


def shifted(batch, options):
    import dataclasses

    return dataclasses.replace(batch, targets_BT=batch.targets_BT.roll(1, dims=1)), options


NO_GRAPH, GRAPH, BOTH = [False], [True], [False, True]
"""Forwards of one model in a step: the scoring's alone, one that the update starts from, one for each."""
SMALL = {"activation_checkpointing": True}


@pytest.mark.parametrize(("options", "of_policy", "of_value"), [
    ({}, GRAPH * 2, BOTH * 2),
    (SMALL, GRAPH * 2, GRAPH * 2),
    ({"value_warmup_steps": 1}, NO_GRAPH + GRAPH, GRAPH + BOTH),
    ({"value_from": "trunk"}, GRAPH * 2, []),
    ({"value_from": "frozen_trunk", "value_warmup_steps": 1}, NO_GRAPH + GRAPH, []),
    ({**SMALL, "epochs": 2}, (BOTH + GRAPH) * 2, (BOTH + GRAPH) * 2),
    ({**SMALL, "minibatches": 2}, BOTH * 4, BOTH * 4),
    ({**SMALL, "micro_batch_tokens": 150}, BOTH * 4, BOTH * 4),
])  # fmt: skip
@pytest.mark.parametrize(("lora", "sharing"), [(None, None), (LORA, None), (LORA, "shared")],
                         ids=["full", "lora", "shared"])  # fmt: skip
def test_the_forwards_of_a_single_update_are_made_once(
    models, tmp_path, monkeypatch, options, of_policy, of_value, lora, sharing
):
    """And the weights that come out are the same to the last bit, those of the value too."""
    options = {"value_from": "policy", **options}
    if sharing and options["value_from"] != "policy":
        pytest.skip("a head on the trunk is no part of its own")
    recompute, found = options.get("activation_checkpointing", False), []
    roles(models)  # makes the folders

    def build():
        torch.manual_seed(4)  # new adapters
        return build_roles(models / "Llama-policy", None, policy_lora=lora, value_lora=lora, device=CPU,
                           dtype=torch.float32, value_from=options["value_from"], sharing=sharing,
                           activation_checkpointing=recompute)  # fmt: skip

    for keeps in (True, False):
        parts = build()
        forwards = {"policy": [], "value": []}
        with monkeypatch.context() as patch:
            if not keeps:
                patch.setattr("heedful.train.ppo.build_experience",
                              lambda *args, keep_graphs, **options: build_experience(*args, **options))  # fmt: skip
            for name in forwards if options["value_from"] == "policy" else ["policy"]:
                part = parts.policy if name == "policy" else parts.value.part
                patch.setattr(part, "hidden", lambda batch, of=part.hidden, seen=forwards[name]: (
                    seen.append(torch.is_grad_enabled()) or of(batch)))  # fmt: skip
            train(parts, tmp_path / str(keeps), steps=2, entropy_coefficient=0.01, kl=KLConfig(in_loss="k2"),
                  **options)  # fmt: skip
        if keeps:
            num_micro_batches = 2 if {"minibatches", "micro_batch_tokens"} & options.keys() else 1
            of_reference = [False] * 2 * num_micro_batches if parts.reference.part is parts.policy else []
            assert sorted(forwards["policy"]) == sorted(of_policy + of_reference)
            assert sorted(forwards["value"]) == sorted(of_value)
        found.append(weights(parts))
    assert largest_gap(*found) == 0 and largest_gap(found[0], weights(build())) > 0


@pytest.mark.parametrize("mutation", [cooler, blind, shifted])
def test_a_training_forward_that_differs_is_caught(models, tmp_path, mutation, monkeypatch):
    parts = roles(models)
    hidden, logprobs_of = parts.policy.hidden, parts.policy.logprobs_of

    def mutated_hidden(batch):
        return hidden(mutation(batch, {})[0] if torch.is_grad_enabled() else batch)

    def mutated_logprobs(hidden_BTD, batch, **options):
        if torch.is_grad_enabled():
            batch, options = mutation(batch, options)
        return logprobs_of(hidden_BTD, batch, **options)

    monkeypatch.setattr(parts.policy, "hidden", mutated_hidden)
    monkeypatch.setattr(parts.policy, "logprobs_of", mutated_logprobs)
    before = weights(parts)
    with pytest.raises(GuardError, match="importance ratio differs from 1 .* on the first minibatch of step 0"):
        train(parts, tmp_path, epochs=2)  # with one epoch there is no second forward
    assert largest_gap(before, weights(parts)) == 0


def test_PPO_learns_what_is_rewarded(models, tmp_path):
    """Reward 1 for the token "x" in every place: its share rises from chance to most."""
    parts = roles(models)

    class Letter:
        name, weight = "x", 1.0

        def __call__(self, prompts, completions):
            return [4.0 * c.text.count("x") / len(c.ids) for c in completions]

    fast = {**RATE, "learning_rate": 3e-3, "epsilon": 1e-8}
    rows = train(parts, tmp_path, steps=40, prompts_per_step=48, epochs=2, rewards=[Letter()], optimizer=fast,
                 value_optimizer=fast, missing_end_penalty=0.0, score_clip=None,
                 sampling=SamplingConfig(max_new_tokens=4), kl=KLConfig(coefficient=0.0))  # fmt: skip
    assert rows[0]["ppo/score_mean"] < 0.2
    assert rows[-1]["ppo/score_mean"] > 2 and rows[-1]["ppo/kl_nats"] > 1
