"""Tiny tokenizers and random models, made on the spot."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<repo_name>", "<empty_output>"]


def make_tokenizer(
    special: list[str] = SPECIAL,
    *,
    template: str | None = CHATML,
    eos: str = "<|im_end|>",
    pad: str | None = "<|im_end|>",
    shift: int = 0,
) -> Any:
    """Byte-level, one token per byte; ``shift`` moves every byte's id, so that two tokenizers disagree."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [*special, *alphabet[shift:], *alphabet[:shift]]
    core = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token=eos, pad_token=pad, additional_special_tokens=special
    )
    tokenizer.chat_template = template
    return tokenizer


SHAPES: dict[str, dict[str, Any]] = {
    "Llama": {"num_key_value_heads": 1, "tie_word_embeddings": True},
    "GPT2": {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 128},
    "Qwen2": {"num_key_value_heads": 2, "tie_word_embeddings": False, "use_sliding_window": False},
    "Gemma2": {"num_key_value_heads": 2, "head_dim": 16, "query_pre_attn_scalar": 16, "final_logit_softcapping": 2.0},
    "Cohere": {"num_key_value_heads": 2, "logit_scale": 0.25},
    "OPT": {"ffn_dim": 64, "word_embed_proj_dim": 32, "init_std": 0.3},
    "Phi": {"num_key_value_heads": 2},
    "Granite": {"num_key_value_heads": 2, "logits_scaling": 4.0},
}


def make_model(kind: str, tokenizer: Any, *, head: str = "ForCausalLM", seed: int = 0, **options: Any) -> Any:
    """A random model of two layers; weights are large, so that nothing is hidden by being near zero."""
    common = {
        "vocab_size": len(tokenizer), "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 2, "max_position_embeddings": 128, "initializer_range": 0.3,
        "bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id,
    }  # fmt: skip
    torch.manual_seed(seed)
    config = getattr(transformers, kind + "Config")(**{**common, **SHAPES[kind], **options})
    prefix = {"GPT2ForCausalLM": "GPT2LMHeadModel"}.get(kind + head, kind + head)
    return getattr(transformers, prefix)(config).eval()
