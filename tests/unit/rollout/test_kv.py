"""The growing cache holds what transformers' own holds, then zeros."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, MistralConfig
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from heedful.rollout.engine import Request, Sampling
from heedful.rollout.hf import HFEngine
from heedful.rollout.kv import ROOM, GrowingCache, GrowingLayer
from toy_parts import policy, prompts, requests


@pytest.mark.parametrize("first", [1, ROOM - 1, ROOM, ROOM + 1])
def test_a_growing_layer_holds_what_a_dynamic_one_holds(first):
    torch.manual_seed(0)
    growing, expected = GrowingLayer(), DynamicLayer()
    assert growing.get_seq_length() == 0
    rows = 4
    for step, tokens in enumerate([first, *[1] * (2 * ROOM)]):
        keys, values = torch.randn(rows, 2, tokens, 8), torch.randn(rows, 2, tokens, 6)
        announced, offset = growing.get_mask_sizes(tokens)
        for found, plain in zip(growing.update(keys, values), expected.update(keys, values), strict=True):
            length = plain.shape[2]
            assert found.is_contiguous() and found.shape[2] == announced and length <= announced < length + ROOM
            assert torch.equal(found[:, :, :length], plain) and not found[:, :, length:].any()
        assert offset == 0 and growing.get_seq_length() == length
        if step == 5:  # rows that have ended go
            rows = 2
            for layer in (growing, expected):
                layer.batch_select_indices(torch.tensor([2, 0]))


def test_windows_keep_their_own_layers():
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    assert {type(layer) for layer in GrowingCache(LlamaConfig(**sizes)).layers} == {GrowingLayer}
    windowed = GrowingCache(MistralConfig(**sizes, sliding_window=8))
    assert {type(layer) for layer in windowed.layers} == {DynamicSlidingWindowLayer} and not windowed.can_join


@pytest.mark.parametrize("words", [["a", "one of a rather different length, so that rows are padded a good deal"]])
def test_answers_do_not_depend_on_how_the_cache_grows(folder, monkeypatch, words):
    part = policy(folder())
    asked = [*requests(part.tokenizer, words), Request("one", 0, prompts(part.tokenizer)[0][1][:1])]
    engine = HFEngine(part, [10**6])
    usual = engine.generate(asked, Sampling(2 * ROOM), seed=0)
    monkeypatch.setattr(engine, "_new_cache", lambda: None)
    for one, other in zip(usual, engine.generate(asked, Sampling(2 * ROOM), seed=0), strict=True):
        assert one.ids == other.ids and one.logprobs == pytest.approx(other.logprobs, abs=1e-4)


@pytest.mark.parametrize("together", [1, 2, 4])
def test_prompts_read_in_parts_are_prompts_read_together(folder, monkeypatch, together):
    from heedful.rollout import hf

    part = policy(folder())
    asked = [Request(p.id, n, ids) for n in range(2) for p, ids in prompts(part.tokenizer)]
    engine = HFEngine(part, [10**6])
    monkeypatch.setattr(hf, "PROMPTS_TOGETHER", 100)
    expected = engine.generate(asked, Sampling(ROOM), seed=0)
    monkeypatch.setattr(hf, "PROMPTS_TOGETHER", together)
    widths = []
    forward = engine._model.base_model.forward
    monkeypatch.setattr(
        engine._model.base_model, "forward",
        lambda **given: (widths.append(given["input_ids"].shape[1]), forward(**given))[1],
    )  # fmt: skip
    for one, other in zip(engine.generate(asked, Sampling(ROOM), seed=0), expected, strict=True):
        assert one.ids == other.ids and one.logprobs == pytest.approx(other.logprobs, abs=1e-4)
    lengths = sorted({len(request.prompt_ids) - 1 for request in asked})
    assert len(widths) == ROOM + -(-6 // together) and widths[-ROOM - 1] == lengths[-1] and widths[0] < lengths[-1]
