"""Answers become scores: as text, in order, each part apart."""

from __future__ import annotations

import math
import re
from fractions import Fraction

import numpy as np
import pytest
import torch
import transformers

from heedful.data.chat import answer_ids, end_token_ids, prompt_ids
from heedful.errors import CheckpointError, EngineError, ModelError
from heedful.models.roles import build_reward, build_scalar
from heedful.rollout.engine import Request, Sampling
from heedful.rollout.fake import FakeEngine
from heedful.rollout.hf import HFEngine
from heedful.rollout.scaling import Batch, Fixed, Running
from heedful.rollout.score import LastRead, LearnedReward, Scoring, as_numbers
from toy_parts import CPU, model_folder, policy, prompts, requests, scalar


class Part:
    """A reward part made of a function of (prompt, completion)."""

    def __init__(self, name, of, weight=1.0):
        self.name, self.weight, self._of = name, weight, of

    def __call__(self, prompts, completions):
        return [self._of(p, c) for p, c in zip(prompts, completions, strict=True)]


@pytest.fixture
def said(folder):
    part = policy(folder())
    asked = prompts(part.tokenizer)
    return [p for p, _ in asked], HFEngine(part, [10**6]).generate(requests(part.tokenizer), Sampling(9), seed=0)


def test_REW_09_the_text_is_encoded_again_by_the_reward_models_own_tokenizer(folder, said, tmp_path):
    asked, completions = said
    own = scalar(model_folder(tmp_path / "other", seed=3, shift=1))
    assert own.tokenizer.convert_tokens_to_ids("a") != policy(folder()).tokenizer.convert_tokens_to_ids("a")
    found = LearnedReward(own, micro_batch_tokens=64)(asked, completions)
    expected = own.score_texts([p.messages for p in asked], [c.text for c in completions], micro_batch_tokens=4096)
    assert found == pytest.approx(expected, abs=1e-5) and len(set(found)) == len(found)


@pytest.mark.parametrize("micro_batch_tokens", [1, 100, 10**6])
def test_REW_03_no_score_depends_on_its_company(folder, said, micro_batch_tokens):
    asked, completions = said
    reward = LearnedReward(scalar(folder()), micro_batch_tokens=micro_batch_tokens)
    alone = [reward([p], [c])[0] for p, c in zip(asked, completions, strict=True)]
    assert reward(asked, completions) == pytest.approx(alone, abs=1e-4)
    assert reward(asked[::-1], completions[::-1]) == pytest.approx(alone[::-1], abs=1e-4)


def test_a_learned_part_is_raw_and_its_scaler_standardises_it(folder, said):
    asked, completions = said
    source = LearnedReward(scalar(folder()), micro_batch_tokens=512, weight=3.0)
    raw = source(asked, completions)
    rollouts = Scoring([source], {"reward_model": Fixed(0.5, 2.0)})(asked, completions)
    assert [r.raw_parts["reward_model"] for r in rollouts] == raw
    assert [r.reward_parts["reward_model"] for r in rollouts] == [(x - 0.5) / 2 for x in raw]
    assert [r.score for r in rollouts] == pytest.approx([3 * (x - 0.5) / 2 for x in raw])


class Counting:
    """A reward model with two outputs: the answer's length and the last prompt message's."""

    def __init__(self):
        self.num_forwards = 0

    def output_texts(self, prompts, answers, *, micro_batch_tokens):
        self.num_forwards += 1
        return [[float(len(a)), float(len(p[-1].content))] for p, a in zip(prompts, answers, strict=True)]


def test_parts_of_one_model_share_a_forward(said):
    asked, completions = said
    model = Counting()
    shared = LastRead(model)
    heads = [LearnedReward(shared, micro_batch_tokens=1, head=h, name=f"head{h}") for h in (0, 1)]
    heads.append(LearnedReward(shared, micro_batch_tokens=1, name="against", weight=-1.0))
    rollouts = Scoring(heads)(asked, completions)
    assert model.num_forwards == 1
    assert [r.raw_parts["head1"] for r in rollouts] == [len(p.messages[-1].content) for p in asked]
    assert [r.score for r in rollouts] == [r.raw_parts["head1"] for r in rollouts]
    Scoring(heads)(asked[::-1], completions)  # other prompts, same answers: not remembered
    assert model.num_forwards == 2


def test_several_outputs_are_those_of_transformers(tmp_path, said):
    asked, completions = said
    folder = model_folder(tmp_path / "heads", scalar=3)
    with pytest.raises(ModelError, match="3 outputs"):
        build_scalar(folder, lora=None, device=CPU, dtype=torch.float32)
    reward = build_reward(folder, device=CPU, dtype=torch.float32)
    texts = [c.text for c in completions]
    found = reward.output_texts([p.messages for p in asked], texts, micro_batch_tokens=100)
    stock = transformers.AutoModelForSequenceClassification.from_pretrained(folder).eval()
    tokenizer = reward.part.tokenizer
    for prompt, text, row in zip(asked, texts, found, strict=True):
        ids = torch.tensor([prompt_ids(tokenizer, prompt.messages) + answer_ids(tokenizer, text)])
        expected = stock.score(stock.model(ids).last_hidden_state)[0, -1].tolist()
        assert row == pytest.approx(expected, abs=1e-4) and len(row) == 3
    one = LearnedReward(reward, micro_batch_tokens=100, head=2)(asked, completions)
    assert one == pytest.approx([row[2] for row in found])
    assert reward.score_texts([p.messages for p in asked], texts, micro_batch_tokens=100) == [row[0] for row in found]


def test_REW_10_the_reward_sees_the_answer_and_nothing_else(folder):
    part = policy(folder())
    (end, *_) = end_token_ids(part.tokenizer)
    ok = answer_ids(part.tokenizer, "ok")
    assert ok[-1] == end
    asked, pad = prompts(part.tokenizer)[0][0], part.pad_id
    for ids in (ok, [*ok, pad, pad, pad], [pad, *ok], ok[:-1]):
        (c,) = FakeEngine(lambda _, ids=ids: ids, [end], part.tokenizer).generate(
            [Request(asked.id, 0, [1])], Sampling(10), seed=0
        )
        (rollout,) = Scoring([Part("full", lambda p, c: float(bool(re.match("^ok$", c.text))))])([asked], [c])
        assert rollout.score == 1 and rollout.completion.ids == ids


def test_parts_are_kept_apart_and_weighted(said):
    asked, completions = said
    sources = [Part("length", lambda p, c: len(c.ids)), Part("prompt", lambda p, c: float(p.id[1:]), weight=-0.5)]
    for i, rollout in enumerate(Scoring(sources)(asked, completions)):
        assert rollout.reward_parts == {"length": 9, "prompt": i} and rollout.score == 9 - 0.5 * i
        assert rollout.completion is completions[i]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_reward_that_is_no_number_is_named(said, bad):
    asked, completions = said
    broken = Part("broken", lambda p, c: bad if p.id == "p3" else 0.0)
    with pytest.raises(EngineError, match=r"reward 'broken' gave (nan|inf) for prompt 'p3', sample 0"):
        Scoring([broken])(asked, completions)


def test_a_reward_that_loses_an_answer_is_refused(said):
    asked, completions = said
    source = Part("short", lambda p, c: 0.0)
    source.__class__ = type("Short", (Part,), {"__call__": lambda self, p, c: [0.0]})
    with pytest.raises(EngineError, match="gave 1 scores for 6 answers"):
        Scoring([source])(asked, completions)


@pytest.mark.parametrize("given", [
    None, 1.0, "123456", ["a"] * 6, ["1.0"] * 6, [None] * 6, [True] * 6, [[1.0]] * 6, torch.ones(6, 1),
    torch.ones(6) > 0,
], ids=["none", "number", "text", "words", "digits", "nones", "truths", "lists", "column", "mask"])  # fmt: skip
def test_what_is_no_list_of_numbers_is_refused(said, given):
    source = Part("odd", None)
    source.__class__ = type("Odd", (Part,), {"__call__": lambda self, p, c: given})
    with pytest.raises(EngineError, match="reward 'odd' must give a list with one number per answer"):
        Scoring([source])(*said)


@pytest.mark.parametrize("given", [
    [1, 2.5, Fraction(1, 2)], np.array([1, 2.5, 0.5]), [np.int64(1), np.float32(2.5), np.float16(0.5)],
    torch.tensor([1, 2.5, 0.5], requires_grad=True), [torch.tensor(1), torch.tensor(2.5), torch.tensor(0.5)],
])  # fmt: skip
def test_plain_numbers_are_taken_in_every_form(given):
    found = as_numbers("judge", given, 3)
    assert found == [1.0, 2.5, 0.5] and {type(x) for x in found} == {float}


@pytest.mark.parametrize(
    "number", [10**400, -(10**400), 10**5000, 1e308, -1e308, 3.5e38],
    ids=["integer", "negative", "too-long-to-write", "double", "negative-double", "next"],
)  # fmt: skip
def test_what_float32_cannot_hold_is_refused(number):
    with pytest.raises(EngineError, match=r"^judge gave a score beyond ±3\.4e\+38, which float32") as caught:
        as_numbers("judge", [0.0, number], 2)
    assert len(str(caught.value)) < 100
    largest = float(torch.finfo(torch.float32).max)
    assert as_numbers("judge", [largest, -largest, math.inf], 3) == [largest, -largest, math.inf]


def test_a_bad_number_moves_no_statistics(said):
    asked, completions = said
    values = {"value": 1.0}
    parts = [Part("good", lambda p, c: len(c.text)), Part("bad", lambda p, c: values["value"])]
    scoring = Scoring(parts, {"good": Running(), "bad": Batch()})
    scoring(asked, completions)
    before = scoring.state_dict()
    values["value"] = float("nan")
    with pytest.raises(EngineError, match="'bad' gave nan"):
        scoring(asked, completions)
    assert scoring.state_dict() == before


@pytest.mark.parametrize("scaler", [Batch, Running, lambda: Fixed(10.0, 4.0)])
def test_comparable_scores_stay_in_the_units_of_the_first_step(said, scaler):
    asked, completions = said
    level = {"value": 10.0}
    spread = [float(i % 2) * 8 for i, _ in enumerate(completions)]
    parts = [Part("climbs", lambda p, c: level["value"] - 4 + spread[completions.index(c)], weight=2.0)]
    scoring = Scoring(parts, {"climbs": scaler()})
    first = scoring.comparable(scoring(asked, completions))
    assert first == pytest.approx([2 * (x - 4) / 4 for x in spread])
    level["value"] = 18.0
    before = scoring.state_dict()
    later = scoring.comparable(scoring(asked, completions))
    assert later == pytest.approx([x + 2 * 8 / 4 for x in first])
    moved = scoring.state_dict()
    scoring.comparable(scoring(asked, completions, update=False))
    assert scoring.state_dict() == moved and (moved != before) is (scaler is Running)


def test_RES_04_statistics_go_on_where_they_were(said):
    asked, completions = said
    noise = iter([float(x) for x in torch.randn(100, generator=torch.Generator().manual_seed(0))])
    numbers = [next(noise) for _ in range(24)]

    def scoring(values):
        rest = iter(values)
        return Scoring([Part("noise", lambda p, c: next(rest))], {"noise": Running()})

    straight, first, second = scoring(numbers), scoring(numbers[:12]), scoring(numbers[12:])
    expected = [straight(asked, completions) for _ in range(4)][2:]
    [first(asked, completions) for _ in range(2)]
    second.load_state_dict(first.state_dict())
    assert [second(asked, completions) for _ in range(2)] == expected
    assert second.state_dict() == straight.state_dict()
    with pytest.raises(CheckpointError, match="has the reward parts noise, this run has other"):
        Scoring([Part("other", None)]).load_state_dict(first.state_dict())
