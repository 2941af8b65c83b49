"""The in-process engine says what the policy would say, and its log-probs are the trainer's."""

from __future__ import annotations

import pytest
import torch

from heedful.config.section import LoraConfig
from heedful.data.chat import end_token_ids
from heedful.data.collate import completion_batch
from heedful.errors import EngineError
from heedful.rollout.engine import Request, Sampling, sample_seed
from heedful.rollout.hf import HFEngine
from toy_parts import disturb, policy, prompts, requests

LORA = LoraConfig(rank=4)
OFTEN = set(range(20))
"""Taken for end tokens where answers are to end at many lengths: a random model seldom says a given token."""


def engine_of(part, **options):
    return HFEngine(part, end_token_ids(part.tokenizer), **options)


def trainer_logprobs(part, completions, temperature=1.0):
    """Log-probs of the answers' tokens by the training forward, one list per answer."""
    batch = completion_batch([c.prompt_ids for c in completions], [c.ids for c in completions], part.pad_id)
    with torch.no_grad():
        logprobs_BT, _ = part.logprobs(batch, temperature=temperature)
    return [row[mask].tolist() for row, mask in zip(logprobs_BT, batch.loss_mask_BT, strict=True)]


def largest_gap(part, completions, temperature=1.0):
    pairs = zip(trainer_logprobs(part, completions, temperature), completions, strict=True)
    return max(abs(a - b) for own, c in pairs for a, b in zip(own, c.logprobs, strict=True))


def answers(completions):
    return [c.ids for c in completions]


@pytest.mark.parametrize("kind", ["Llama", "GPT2"])
@pytest.mark.parametrize("lora", [None, LORA], ids=["full", "lora"])
@pytest.mark.parametrize("temperature", [1.0, 0.5, 2.0])
def test_ROL_01_ROL_02_the_engine_and_the_trainer_mean_one_distribution(folder, kind, lora, temperature):
    part = policy(folder(kind), lora=lora)
    completions = engine_of(part).generate(requests(part.tokenizer), Sampling(12, temperature), seed=1)
    assert largest_gap(part, completions, temperature) < 1e-4
    assert largest_gap(part, completions, 1.3 * temperature) > 1e-2  # the comparison can fail


def test_ROL_02_the_values_of_the_fault(monkeypatch):
    from heedful.rollout.hf import _sample

    logits_BV = torch.tensor([[2.0, 1.0, 0.0]] * 2)
    tokens_B, logprobs_B = _sample(logits_BV, torch.tensor([0.0, 1 - 1e-12], dtype=torch.float64), 0.5)
    assert tokens_B.tolist() == [0, 2]
    assert logprobs_B.tolist() == pytest.approx([-0.142932, -4.142932], abs=1e-5)


def test_ROL_03_a_cut_answer_keeps_its_tokens(folder):
    part = policy(folder())
    engine = HFEngine(part, end_ids=[len(part.tokenizer) + 7])  # an end that never comes
    for c in engine.generate(requests(part.tokenizer), Sampling(4), seed=0):
        assert c.finish_reason == "length" and len(c.ids) == len(c.logprobs) == 4
        batch = completion_batch([c.prompt_ids], [c.ids], part.pad_id)
        assert batch.targets_BT[batch.loss_mask_BT].tolist() == c.ids  # all four are trained, and nothing else


def test_an_end_at_the_limit_is_an_end(folder):
    part = policy(folder())
    request = requests(part.tokenizer)[0]
    ids = HFEngine(part, [10**6]).generate([request], Sampling(5), seed=3)[0].ids
    first = ids.index(ids[-1]) + 1
    for limit in (first, first + 1):
        (c,) = HFEngine(part, [ids[-1]]).generate([request], Sampling(limit), seed=3)
        assert c.ids == ids[:first] and c.finish_reason == "stop"


def test_ROL_06_nothing_after_the_end(folder):
    part = policy(folder())
    asked = [Request("one", n, prompts(part.tokenizer)[0][1]) for n in range(60)]
    end = OFTEN
    completions = HFEngine(part, end).generate(asked, Sampling(40), seed=0)
    stopped = [c for c in completions if c.finish_reason == "stop"]
    assert len({len(c.ids) for c in stopped}) > 5 and any(c.finish_reason == "length" for c in completions)
    for c in completions:
        assert not end & set(c.ids[:-1]) and (c.ids[-1] in end) == (c.finish_reason == "stop")
        assert len(c.ids) == len(c.logprobs) and (c.finish_reason == "stop" or len(c.ids) == 40)
        assert "<|" not in c.text  # REW-10: no special token reaches the reward


def test_ROL_07_every_sample_has_its_own_stream(folder):
    part = policy(folder())
    ids = prompts(part.tokenizer)[0][1]
    asked = [Request("one", n, ids) for n in range(64)]
    engine = HFEngine(part, [10**6], batch_size=64)
    whole = answers(engine.generate(asked, Sampling(8), seed=0))
    assert len(set(map(tuple, whole))) == 64
    for batch_size in (1, 7, 16):  # as many workers would do it, each with its share
        cut = HFEngine(part, [10**6], batch_size=batch_size)
        assert answers(cut.generate(asked, Sampling(8), seed=0)) == whole
    other = answers(engine.generate(asked, Sampling(8), seed=1))
    assert set(map(tuple, other)) != set(map(tuple, whole))
    assert len({sample_seed(s, p, n) for s in range(3) for p in ("a", "b") for n in range(3)}) == 18


@pytest.mark.parametrize("kind", ["Llama", "GPT2"])
def test_ROL_09_company_changes_nothing(folder, kind):
    """Left padding, the order of rows and dropping finished rows leave every answer and its log-probs alone."""
    part = policy(folder(kind))
    asked = requests(part.tokenizer)
    alone = [engine_of(part).generate([r], Sampling(30), seed=2)[0] for r in asked]
    for batch in (asked, asked[::-1], asked[2:4] + asked[:2] + asked[4:]):
        found = {c.prompt_id: c for c in engine_of(part).generate(batch, Sampling(30), seed=2)}
        assert [found[r.prompt_id].prompt_ids for r in batch] == [r.prompt_ids for r in batch]
        for one in alone:
            assert found[one.prompt_id].ids == one.ids
            assert found[one.prompt_id].logprobs == pytest.approx(one.logprobs, abs=1e-4)


@pytest.mark.parametrize("share", [0.0, 1.1])
def test_dropping_finished_rows_changes_nothing(folder, share, monkeypatch):
    from heedful.rollout import hf

    part = policy(folder())
    asked = [Request("one", n, prompts(part.tokenizer)[n % 6][1]) for n in range(40)]
    usual = HFEngine(part, OFTEN).generate(asked, Sampling(40), seed=5)
    assert 5 < sum(c.finish_reason == "stop" for c in usual) < 40
    monkeypatch.setattr(hf, "COMPACT_BELOW", share)  # never; at every chance
    other = HFEngine(part, OFTEN).generate(asked, Sampling(40), seed=5)
    assert answers(other) == answers(usual)
    for a, b in zip(usual, other, strict=True):
        assert a.logprobs == pytest.approx(b.logprobs, abs=1e-4)


@pytest.mark.parametrize("kind", ["Llama", "GPT2"])
@pytest.mark.parametrize("lora", [None, LORA], ids=["full", "lora"])
def test_greedy_is_what_transformers_generates(folder, kind, lora):
    part = policy(folder(kind), lora=lora)
    asked = requests(part.tokenizer)
    ends = list(end_token_ids(part.tokenizer))
    for request, c in zip(asked, engine_of(part).generate(asked, Sampling(15, 0.0), seed=0), strict=True):
        inputs = torch.tensor([request.prompt_ids])
        ids = part.model.generate(
            input_ids=inputs, attention_mask=torch.ones_like(inputs), max_new_tokens=15, do_sample=False,
            eos_token_id=ends, pad_token_id=part.pad_id,
        )  # fmt: skip
        assert ids[0, inputs.shape[1] :].tolist() == c.ids
    assert largest_gap(part, [c], 1.0) < 1e-4


def test_the_order_and_the_count_are_kept_and_progress_is_told(folder):
    part = policy(folder())
    asked = requests(part.tokenizer)
    told = []
    found = engine_of(part, batch_size=4).generate(asked, Sampling(3), seed=0, on_done=told.append)
    assert [c.prompt_id for c in found] == [r.prompt_id for r in asked] and told == [4, 2]
    assert engine_of(part).generate([], Sampling(3), seed=0) == []


def test_sync_moves_the_weights_and_the_version(folder):
    part = policy(folder())
    engine = engine_of(part)
    before = engine.generate(requests(part.tokenizer), Sampling(8), seed=0)
    disturb(part, 0.3)
    stale = engine.generate(requests(part.tokenizer), Sampling(8), seed=0)
    assert answers(stale) == answers(before)  # a copy of its own
    engine.sync(part, version=4)
    after = engine.generate(requests(part.tokenizer), Sampling(8), seed=0)
    assert answers(after) != answers(before) and largest_gap(part, after) < 1e-4
    assert {c.policy_version for c in before} == {0} and {c.policy_version for c in after} == {4}


def test_sync_of_adapters_reaches_the_engine(folder):
    part = policy(folder(), lora=LORA)
    engine = engine_of(part)
    disturb(part, 0.3, seed=8)
    assert largest_gap(part, engine.generate(requests(part.tokenizer), Sampling(8), seed=0)) > 1e-2
    engine.sync(part, version=1)
    assert largest_gap(part, engine.generate(requests(part.tokenizer), Sampling(8), seed=0)) < 1e-4


@pytest.mark.parametrize("change", ["missing", "unknown"])
def test_sync_refuses_weights_that_do_not_match(folder, change, monkeypatch):
    from heedful.rollout import hf

    part = policy(folder())
    engine = engine_of(part)
    state = dict(part.model.state_dict())
    name = "model.layers.1.mlp.up_proj.weight"
    if change == "missing":
        del state[name]
    else:
        state["model.layers.9.mlp.up_proj.weight"] = state[name]
    monkeypatch.setattr(hf, "merged_state", lambda model: iter(state.items()))
    with pytest.raises(EngineError, match=r"layers\.[19]\.mlp\.up_proj"):
        engine.sync(part, version=1)


def test_bfloat16_decodes_a_rounded_copy_and_leaves_the_policy_alone(folder):
    part = policy(folder(), dtype=torch.bfloat16)
    before = {name: p.clone() for name, p in part.trainable_parameters().items()}
    engine = engine_of(part)
    completions = engine.generate(requests(part.tokenizer), Sampling(8), seed=0)
    assert {p.dtype for p in engine._model.parameters()} == {torch.bfloat16}
    assert all(p.dtype == torch.float32 and torch.equal(p, before[n]) for n, p in part.trainable_parameters().items())
    assert 0 < largest_gap(part, completions) < 0.5
    for c in completions:
        assert all(logprob <= 0 for logprob in c.logprobs)


def test_making_an_engine_draws_nothing_from_the_random_stream(folder):
    part = policy(folder())
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    engine_of(part).generate(requests(part.tokenizer), Sampling(4), seed=0)
    assert torch.equal(torch.rand(4), expected)


@pytest.mark.parametrize("kind", ["Llama", "GPT2"])
def test_an_answer_that_does_not_fit_the_model_is_refused_before_it_begins(folder, kind):
    part = policy(folder(kind))
    (request,) = requests(part.tokenizer, ["a"])
    room = 256 - len(request.prompt_ids) + 1
    (c,) = HFEngine(part, [10**6]).generate([request], Sampling(room), seed=0)
    assert len(c.ids) == room
    with pytest.raises(EngineError, match="do not fit the 256 positions of this model"):
        HFEngine(part, [10**6]).generate([request], Sampling(room + 1), seed=0)


def test_damaged_weights_are_an_error_not_an_answer(folder):
    part = policy(folder())
    engine = engine_of(part)
    part.trainable_parameters()["model.norm.weight"].data[3] = float("nan")
    engine.sync(part, version=1)
    with pytest.raises(EngineError, match="logits are not finite"):
        engine.generate(requests(part.tokenizer), Sampling(4), seed=0)
