"""Frozen parts beside fully trained models: the plan's bytes are those of the parts that roles builds."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers

from heedful.config.recipe import Recipe
from heedful.models.quantise import Rounding
from heedful.models.roles import build_policy, build_roles, build_scalar
from heedful.plan.machine import gpu
from heedful.plan.memory import plan_memory, ppo_models
from heedful.plan.parts import Model, Setup
from heedful.plan.shape import NAMED, ModelShape, read_shape
from heedful.plan.workload import of_limits
from toy_parts import toy_tokenizer

CPU, BF16 = torch.device("cpu"), torch.bfloat16
DATA = {"rankings": "r.jsonl", "prompts": "p.jsonl", "heldout_prompts": "h.jsonl", "max_prompt_tokens": 64}
KINDS = {
    "tied": ("Llama", {"num_key_value_heads": 1, "tie_word_embeddings": True}),
    "untied, biases": ("Qwen2", {"num_key_value_heads": 2, "tie_word_embeddings": False}),
    "transposed": ("GPT2", {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 128}),
    "projected": ("OPT", {"ffn_dim": 64, "word_embed_proj_dim": 16, "do_layer_norm_before": False}),
    "bias of the output": ("Phi", {"num_key_value_heads": 2, "tie_word_embeddings": False}),
}


def folders(path: Path, kind: str) -> tuple[Path, Path]:
    """A language model and a reward model."""
    name, options = KINDS[kind]
    tokenizer = toy_tokenizer()
    tokenizer.pad_token = "<|endoftext|>"  # else loading adds one
    config = getattr(transformers, f"{name}Config")(**{
        "vocab_size": len(tokenizer), "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 2, "max_position_embeddings": 128, "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id, "num_labels": 1,
        "problem_type": "regression", **options,
    })  # fmt: skip
    for part, head in (("policy", "LMHeadModel" if name == "GPT2" else "ForCausalLM"),
                       ("reward", "ForSequenceClassification")):  # fmt: skip
        getattr(transformers, name + head)(config).save_pretrained(path / part)
        tokenizer.save_pretrained(path / part)
    return path / "policy", path / "reward"


def setup(shape: ModelShape, dtype: str = "bfloat16", **ppo: object) -> Setup:
    recipe = Recipe.model_validate(
        {"model": {"name": "toy", "dtype": dtype, "reward": "some/reward"}, "data": DATA, "ppo": ppo, "evaluate": {}}
    )
    return Setup(recipe, shape, shape, gpu("h200"), of_limits(recipe, shape.max_positions))


def held(model: torch.nn.Module) -> int:
    """Parameters once each, and what int8 keeps beside them."""
    tensors = [*model.parameters(), *(b for name, b in model.named_buffers() if name.endswith((".weight", ".scale")))]
    return sum(x.nbytes for x in {x.data_ptr(): x for x in tensors}.values())


@pytest.mark.parametrize("frozen", ["float", "int8"])
@pytest.mark.parametrize("kind", KINDS)
def test_bytes_of_frozen_twins_are_those_that_are_held(kind: str, frozen: str, tmp_path: Path) -> None:
    paths = folders(tmp_path, kind)
    found = {model.part: model.held_bytes for model in ppo_models(setup(read_shape(paths[0]), frozen_weights=frozen))}
    roles = build_roles(
        *paths, policy_lora=None, value_lora=None, device=CPU, dtype=BF16, rounding=Rounding(frozen=frozen)
    )
    assert roles.reward is not None
    assert found["reference"] == held(roles.reference.part.model)
    assert found["reward"] == held(roles.reward.part.model)
    assert found["policy"] == held(roles.policy.model)


@pytest.mark.parametrize("kind", ["tied", "untied, biases"])
def test_the_evaluation_holds_its_models_so_too(kind: str, tmp_path: Path) -> None:
    policy, reward = folders(tmp_path, kind)
    load, copy, rollout, score = plan_memory(setup(read_shape(policy)))[-1].phases
    options = {"lora": None, "trained": False, "device": CPU, "dtype": BF16}
    whole = build_policy(policy, lora=None, trained=False, device=CPU, dtype=torch.float32).model
    assert load.parts["policy: float weights"] == held(whole)
    assert copy.parts["policy: parameters"] == held(build_policy(policy, **options).model)
    assert "policy: parameters" not in rollout.parts and copy.parts["engine: parameters"] > 0
    assert score.parts["reward: parameters"] == held(build_scalar(reward, **options).model)


def test_in_float32_nothing_is_smaller() -> None:
    shape = NAMED["smollm2-135m"]
    models = {model.part: model for model in ppo_models(setup(shape, dtype="float32"))}
    assert models["reference"].held_bytes == 4 * shape.num_causal == models["policy"].held_bytes
    assert models["reward"].held_bytes == 4 * shape.num_scalar


@pytest.mark.parametrize("name", ["smollm2-135m", "7b"])
def test_a_twin_is_nearly_half_where_products_are_most(name: str) -> None:
    shape = NAMED[name]
    twin = {model.part: model for model in ppo_models(setup(shape))}["reference"]
    assert isinstance(twin, Model) and shape.tied == (name == "smollm2-135m")
    cast = shape.num_linear_weights + (0 if shape.tied else shape.num_embedding)
    assert twin.held_bytes == 4 * shape.num_causal - 2 * cast
    assert 2 * shape.num_causal < twin.held_bytes < (2.5 if shape.tied else 2.1) * shape.num_causal
