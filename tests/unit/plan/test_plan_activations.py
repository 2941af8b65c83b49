"""What the formulas say is kept for the backward is what PyTorch keeps."""

from __future__ import annotations

import contextlib
import dataclasses

import pytest
import torch
import transformers

from heedful.models import attention
from heedful.models.attention import keeps_no_probabilities
from heedful.models.fused import fuse
from heedful.models.load import silence_dropout
from heedful.models.lora import add_lora
from heedful.models.ragged import ROW_STEP, last_hidden_states
from heedful.objectives import logprobs
from heedful.objectives.logprobs import token_logprobs
from heedful.plan.activations import (
    BLOCK,
    FUSED_GATES,
    FUSED_NORMS,
    GROUP_PAIRS,
    IN_GROUPS,
    TILES,
    Batch,
    Training,
    layer,
    output_layer,
    trunk,
)  # fmt: skip
from heedful.plan.shape import NAMED, shape_of

ROWS, TOKENS, VOCABULARY = 3, 40, 96
GROUPED = ("Llama", "Qwen2", "Qwen3", "Mistral", "Granite", "Cohere", "Gemma", "Phi3", "Phi")
OPTIONS = {
    "Llama": {"num_key_value_heads": 2, "tie_word_embeddings": True},
    "Qwen2": {"num_key_value_heads": 2}, "Qwen3": {"num_key_value_heads": 2, "head_dim": 16},
    "Mistral": {"num_key_value_heads": 2}, "Granite": {"num_key_value_heads": 2}, "Cohere": {"num_key_value_heads": 2},
    "Gemma": {"num_key_value_heads": 2, "head_dim": 16}, "Gemma2": {"num_key_value_heads": 2, "head_dim": 16},
    "Gemma3Text": {"num_key_value_heads": 2, "head_dim": 16}, "Phi3": {"num_key_value_heads": 2},
    "GPT2": {"n_embd": 64, "n_head": 4, "n_positions": 256, "n_inner": 160}, "GPTNeoX": {},
    "Phi": {"num_key_value_heads": 2}, "OPT": {"ffn_dim": 160, "word_embed_proj_dim": 64},
}  # fmt: skip


def built(kind, layers, attention):
    common = {
        "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": layers,
        "num_attention_heads": 4, "max_position_embeddings": 256, "bos_token_id": None, "eos_token_id": 1,
        "pad_token_id": 0,
    }  # fmt: skip
    if kind == "GPT2":
        common["n_layer"] = layers
    config = getattr(transformers, f"{kind}Config")(**{**common, **OPTIONS[kind]})
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()
    silence_dropout(model)
    return model


def kept_bytes(model, dtype, kernel):
    """Storages that autograd saves in one forward of the trunk, weights left out."""
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept = {}

    def keep(x):
        storage = x.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage  # held, so that no address is used twice
        return x

    ids = torch.randint(VOCABULARY, (ROWS, TOKENS))
    mask = torch.ones_like(ids)
    mask[0, -5:] = 0
    positions = torch.arange(TOKENS)[None].expand(ROWS, TOKENS)
    cast = torch.autocast("cpu", dtype=dtype) if dtype != torch.float32 else contextlib.nullcontext()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x), cast:
        if kernel == "pieces":
            last_hidden_states(model.base_model, ids, mask, positions, dtype)
        else:
            model.base_model(input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=False)
    return sum(storage.nbytes() for storage in kept.values())


@pytest.mark.parametrize("adapters", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("kernel", ["eager", "pieces", "sdpa"])
@pytest.mark.parametrize("kind", OPTIONS)
def test_a_layer_keeps_what_the_formula_says(kind, kernel, dtype, adapters):
    if kernel == "pieces" and kind not in GROUPED:
        pytest.skip("as eager attention, piece by piece")
    if kind == "Gemma2" and kernel == "sdpa":
        pytest.skip("transformers has no sdpa for capped attention")
    kept = []
    for layers in (1, 2):
        model = built(kind, layers, "sdpa" if kernel == "sdpa" else "eager")
        if adapters:
            add_lora(model.to(dtype), rank=4, alpha=8, task="causal")
        fuse(model, torch.device("cpu"), dtype)
        kept.append(kept_bytes(model, dtype, kernel))
    training = Training(rank=4 if adapters else None)
    s = dtype.itemsize
    batch = Batch(2, ROW_STEP, 100) if kernel == "pieces" else Batch(ROWS, TOKENS, 100)  # 115 tokens, rounded up
    shape = shape_of(model.config.to_dict())
    planned = layer(shape, batch, training, s=s, kernel=kernel)
    assert planned == pytest.approx(kept[1] - kept[0], rel=0.05 if kind == "Phi" else 0.015)
    # the rest is that of a model of one layer, whose beginning needs no gradient under adapters
    whole = trunk(shape, batch, training, s=s, kernel=kernel)
    assert whole == pytest.approx(kept[1], rel=0.07 if not adapters else 0.15)


@pytest.mark.parametrize("kind", OPTIONS)
def test_the_plan_knows_whose_attention_is_taken_in_groups(kind):
    model = built(kind, 1, "eager")
    known = shape_of(model.config.to_dict()).family in IN_GROUPS
    assert keeps_no_probabilities(model.base_model) == known == (kind in GROUPED)
    assert (BLOCK, GROUP_PAIRS) == (attention._BLOCK, attention._GROUP_PAIRS)


@pytest.mark.parametrize("kind", OPTIONS)
def test_the_plan_knows_whose_norms_and_gated_layers_are_heedfuls(kind):
    model = built(kind, 1, "eager")
    family = shape_of(model.config.to_dict()).family
    num = 2 * (family in FUSED_NORMS) + (family in FUSED_GATES)
    num += (family in FUSED_NORMS) + 2 * (family == "qwen3")  # the last norm, and those of heads
    assert fuse(model, torch.device("cpu"), torch.bfloat16) == num


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_the_output_layer_keeps_rows_and_not_logits(dtype):
    shape = NAMED["smollm2-135m"]
    hidden = torch.randn(2, 10, shape.width, requires_grad=True)
    weight = torch.randn(500, shape.width, requires_grad=True)
    kept = {}

    def keep(x):
        kept[x.data_ptr()] = x
        return x

    cast = torch.autocast("cpu", dtype=dtype) if dtype != torch.float32 else contextlib.nullcontext()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x), cast:
        token_logprobs(hidden.to(dtype), weight, torch.zeros(2, 10, dtype=torch.int64), torch.ones(2, 10).bool())
    found = sum(x.nbytes for x in kept.values() if x.data_ptr() != weight.data_ptr())
    assert found < 2 * 20 * shape.width * dtype.itemsize


def test_the_output_layer_grows_no_further_than_a_tile():
    shape = NAMED["qwen2.5-1.5b"]

    def bytes_of(tokens, **changes):
        return output_layer(dataclasses.replace(shape, **changes), tokens, "cpu", s=2, trained=False, backward=True)

    assert bytes_of(512) > bytes_of(128)
    assert bytes_of(4096) - bytes_of(512) == (2 + 2 + 4) * (4096 - 512) * shape.width  # rows and their gradient
    assert bytes_of(512, vocabulary=2 * shape.vocabulary) == bytes_of(512)


def test_the_plan_counts_the_tiles_that_are_used():
    assert TILES == logprobs.TILES
