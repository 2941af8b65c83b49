from __future__ import annotations

from typing import Any

import pytest
import torch
from models_tiny import SPECIAL, make_model, make_tokenizer

from heedful.errors import ModelError
from heedful.models.tokens import agree, end_ids, ensure_pad


def test_a_distinct_pad_stays(tokenizer: Any) -> None:
    tokenizer.pad_token = "<|endoftext|>"
    assert ensure_pad(tokenizer) == 0
    assert tokenizer.pad_token == "<|endoftext|>"


def test_pad_equal_to_end_becomes_a_token_no_chat_uses(tokenizer: Any) -> None:
    before = len(tokenizer)
    assert tokenizer.pad_token_id == tokenizer.eos_token_id
    assert ensure_pad(tokenizer) == SPECIAL.index("<empty_output>")
    assert len(tokenizer) == before


@pytest.mark.parametrize(
    ("special", "expected"),
    [
        (["<e>", "<|fim_pad|>", "<|reserved_0|>", "<|finetune_right_pad_id|>"], "<|finetune_right_pad_id|>"),
        (["<e>", "<|fim_pad|>", "<|reserved_0|>"], "<|reserved_0|>"),
        (["<e>", "<|image_pad|>", "<|fim_pad|>"], "<|fim_pad|>"),
        (["<e>", "<repo>", "<|image_pad|>"], "<|pad|>"),
    ],
)
def test_preference_among_free_tokens(special: list[str], expected: str) -> None:
    tokenizer = make_tokenizer(special, template=None, eos="<e>", pad=None)
    ensure_pad(tokenizer)
    assert tokenizer.pad_token == expected


def test_a_pad_that_generation_ends_on_is_replaced(tokenizer: Any) -> None:
    tokenizer.pad_token = "<|endoftext|>"
    model = make_model("Llama", tokenizer)
    model.generation_config.eos_token_id = [2, 0]
    assert ensure_pad(tokenizer, model) == 4
    assert model.generation_config.eos_token_id == [2, 0]
    assert model.config.pad_token_id == model.generation_config.pad_token_id == 4


@pytest.mark.parametrize("kind", ["Llama", "Qwen2", "GPT2"])
def test_EXP_05_new_pad_grows_the_embedding_only_when_needed(kind: str) -> None:
    tokenizer = make_tokenizer(["<e>"], template=None, eos="<e>", pad=None)
    model = make_model(kind, tokenizer)
    tied = model.config.tie_word_embeddings
    old = model.get_input_embeddings().weight.detach().clone()
    rows = len(old)
    pad = ensure_pad(tokenizer, model)
    new = model.get_input_embeddings().weight
    assert pad == rows and len(tokenizer) == len(new) == model.config.vocab_size == rows + 1
    assert torch.equal(new[:rows], old)
    assert torch.allclose(new[rows], old.mean(0), atol=1e-6)
    assert (model.get_output_embeddings().weight is new) == tied
    assert len(model.get_output_embeddings().weight) == rows + 1
    assert ensure_pad(tokenizer, model) == pad and len(model.get_input_embeddings().weight) == rows + 1


def test_a_spare_row_is_used() -> None:
    tokenizer = make_tokenizer(["<e>"], template=None, eos="<e>", pad=None)
    model = make_model("Llama", tokenizer, vocab_size=len(tokenizer) + 3)
    assert ensure_pad(tokenizer, model) == len(tokenizer) - 1
    assert model.config.vocab_size == len(tokenizer) + 2


def test_EXP_06_the_templates_end_of_turn_ends_generation() -> None:
    tokenizer = make_tokenizer(eos="<|endoftext|>", pad=None)
    model = make_model("Llama", tokenizer)
    assert end_ids(tokenizer, model) == (2, 0)
    ensure_pad(tokenizer, model)
    assert model.generation_config.eos_token_id == model.config.eos_token_id == [2, 0]
    assert tokenizer.eos_token_id == 2


def test_a_template_that_prints_eos_keeps_it() -> None:
    template = "{% for m in messages %}{{ m['content'] + '<|im_end|>' }}{% endfor %}{{ eos_token }}"
    tokenizer = make_tokenizer(template=template, eos="<|endoftext|>", pad=None)
    ensure_pad(tokenizer)
    assert tokenizer.eos_token == "<|endoftext|>"


def test_padding_row_does_not_freeze_the_end_token(tokenizer: Any) -> None:
    model = make_model("Qwen2", tokenizer)
    assert model.get_input_embeddings().padding_idx == tokenizer.eos_token_id
    ensure_pad(tokenizer, model)
    model(torch.tensor([[7, tokenizer.eos_token_id, 8]])).logits.sum().backward()
    assert model.get_input_embeddings().weight.grad[tokenizer.eos_token_id].abs().sum() > 0


def test_EXP_05_a_tokenizer_too_large_for_the_model_is_refused(tokenizer: Any) -> None:
    model = make_model("Llama", tokenizer)
    tokenizer.add_tokens(["<new>"])
    with pytest.raises(ModelError, match="embedding only"):
        agree(tokenizer, model)
