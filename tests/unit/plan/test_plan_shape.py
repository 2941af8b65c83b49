"""Parameter counts are those of transformers' own models."""

from __future__ import annotations

import pytest
import torch
import transformers

from heedful.errors import ModelError
from heedful.plan.shape import NAMED, read_shape, shape_of

SMALL = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "max_position_embeddings": 64, "bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0,
}  # fmt: skip
CONFIGS = {
    "llama": ("Llama", {"num_key_value_heads": 2, "tie_word_embeddings": True}),
    "llama-biases": ("Llama", {"num_key_value_heads": 1, "attention_bias": True, "mlp_bias": True, "head_dim": 16}),
    "qwen2": ("Qwen2", {"num_key_value_heads": 2}),
    "qwen3": ("Qwen3", {"num_key_value_heads": 2, "head_dim": 16, "attention_bias": True}),
    "mistral": ("Mistral", {"num_key_value_heads": 2}),
    "granite": ("Granite", {"num_key_value_heads": 2}),
    "gemma": ("Gemma", {"num_key_value_heads": 1, "head_dim": 16}),
    "gemma2": ("Gemma2", {"num_key_value_heads": 2, "head_dim": 16}),
    "gemma3": ("Gemma3Text", {"num_key_value_heads": 2, "head_dim": 16}),
    "phi3": ("Phi3", {"num_key_value_heads": 2}),
    "cohere": ("Cohere", {"num_key_value_heads": 2}),
    "gpt2": ("GPT2", {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 64}),
    "gpt_neox": ("GPTNeoX", {}),
    "gpt_neox-no-bias": ("GPTNeoX", {"attention_bias": False, "tie_word_embeddings": True}),
    "phi": ("Phi", {"num_key_value_heads": 2}),
    "opt": ("OPT", {"ffn_dim": 48}),
    "opt-350m": ("OPT", {"ffn_dim": 48, "word_embed_proj_dim": 16, "do_layer_norm_before": False}),
}
MODELS = {"GPT2": "GPT2LMHeadModel", "Gemma3Text": "Gemma3ForCausalLM"}


def built(kind, options, head="ForCausalLM", **more):
    config = getattr(transformers, f"{kind}Config")(**{**SMALL, **options, **more})
    name = MODELS.get(kind, kind + head) if head == "ForCausalLM" else kind.replace("Gemma3Text", "Gemma3Text") + head
    with torch.device("meta"):
        return getattr(transformers, name)(config)


def count(model):
    return sum(p.numel() for p in model.parameters())  # tied weights once


@pytest.mark.parametrize("name", CONFIGS)
def test_the_count_is_that_of_the_model(name):
    kind, options = CONFIGS[name]
    model = built(kind, options)
    shape = shape_of(model.config.to_dict())
    assert shape.num_causal == count(model)
    assert shape.num_trunk == count(model.base_model)


@pytest.mark.parametrize("name", ["llama", "qwen2", "gpt2", "gpt_neox", "phi", "opt-350m"])
def test_the_count_is_that_of_the_scalar_model(name):
    kind, options = CONFIGS[name]
    model = built(kind, options, head="ForSequenceClassification", num_labels=1)
    assert shape_of(model.config.to_dict()).num_scalar == count(model)


@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt2", "gpt_neox", "phi", "phi3", "opt-350m"])
def test_the_adapters_are_those_of_peft(name):
    import peft

    kind, options = CONFIGS[name]
    model = built(kind, options)
    shape = shape_of(model.config.to_dict())
    config = peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM", fan_in_fan_out=kind == "GPT2")
    adapted = peft.get_peft_model(model, config)
    assert shape.num_lora(4, "all-linear") == sum(p.numel() for p in adapted.parameters() if p.requires_grad)


def test_the_adapters_of_named_modules_and_a_wrong_name():
    shape = NAMED["smollm2-135m"]
    assert shape.num_lora(8, "q_proj, v_proj") == 30 * 8 * (576 + 576 + 576 + 192)
    with pytest.raises(ModelError, match="'c_attn'.*q_proj, k_proj"):
        shape.num_lora(8, "c_attn")


def test_published_sizes():
    """In millions, as their authors or the hub give them (safetensors' own count)."""
    published = {
        "smollm2-135m": 134.515, "qwen2.5-0.5b": 494.033, "qwen2.5-1.5b": 1543.714, "qwen2.5-7b": 7615.617,
        "llama-2-7b": 6738.416, "llama-2-13b": 13015.864, "llama-2-70b": 68976.648, "llama-3.1-8b": 8030.261,
        "mistral-7b": 7241.732, "opt-350m": 331.196, "opt-1.3b": 1315.758, "pythia-1.4b": 1414.648,
    }  # fmt: skip
    for name, millions in published.items():
        assert NAMED[name].num_causal / 1e6 == pytest.approx(millions, abs=0.001), name


def test_read_shape_and_its_refusals(tmp_path):
    built("Llama", CONFIGS["llama"][1]).config.save_pretrained(tmp_path)
    assert read_shape(tmp_path).layers == 3
    with pytest.raises(ModelError, match=r"no config\.json"):
        read_shape(tmp_path / "nothing")
    with pytest.raises(ModelError, match="does not know models of type 'mamba'"):
        shape_of({"model_type": "mamba"})
    with pytest.raises(ModelError, match="lacks 'hidden_size'"):
        shape_of({"model_type": "llama", "num_attention_heads": 4})
