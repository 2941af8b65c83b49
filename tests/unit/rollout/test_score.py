"""Answers become scores: as text, in order, each part apart."""

from __future__ import annotations

import re

import pytest

from heedful.data.chat import answer_ids, end_token_ids
from heedful.errors import EngineError
from heedful.rollout.engine import Request, Sampling
from heedful.rollout.fake import FakeEngine
from heedful.rollout.hf import HFEngine
from heedful.rollout.score import LearnedReward, score
from toy_parts import model_folder, policy, prompts, requests, scalar


class Fixed:
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


def test_scores_are_standardised_by_the_card(folder, said):
    asked, completions = said
    model = scalar(folder())
    raw = LearnedReward(model, micro_batch_tokens=512)(asked, completions)
    found = LearnedReward(model, micro_batch_tokens=512, mean=0.5, std=2.0)(asked, completions)
    assert found == pytest.approx([(r - 0.5) / 2 for r in raw])


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
        (rollout,) = score([asked], [c], [Fixed("full", lambda p, c: float(bool(re.match("^ok$", c.text))))])
        assert rollout.score == 1 and rollout.completion.ids == ids


def test_parts_are_kept_apart_and_weighted(said):
    asked, completions = said
    sources = [Fixed("length", lambda p, c: len(c.ids)), Fixed("prompt", lambda p, c: float(p.id[1:]), weight=-0.5)]
    for i, rollout in enumerate(score(asked, completions, sources)):
        assert rollout.reward_parts == {"length": 9, "prompt": i} and rollout.score == 9 - 0.5 * i
        assert rollout.completion is completions[i]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_reward_that_is_no_number_is_named(said, bad):
    asked, completions = said
    broken = Fixed("broken", lambda p, c: bad if p.id == "p3" else 0.0)
    with pytest.raises(EngineError, match=r"reward 'broken' gave (nan|inf) for prompt 'p3', sample 0"):
        score(asked, completions, [broken])


def test_a_reward_that_loses_an_answer_is_refused(said):
    asked, completions = said
    source = Fixed("short", lambda p, c: 0.0)
    source.__class__ = type("Short", (Fixed,), {"__call__": lambda self, p, c: [0.0]})
    with pytest.raises(EngineError, match="gave 1 scores for 6 answers"):
        score(asked, completions, [source])
