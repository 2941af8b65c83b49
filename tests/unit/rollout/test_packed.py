"""Weights laid out for decoding and attention by groups of heads say what the plain layers say."""

from __future__ import annotations

import pytest
import torch
import transformers
from torch import nn
from transformers.models.llama.modeling_llama import eager_attention_forward
from transformers.pytorch_utils import Conv1D

from heedful.config.section import LoraConfig
from heedful.errors import EngineError
from heedful.rollout import hf
from heedful.rollout.engine import Request, Sampling
from heedful.rollout.hf import HFEngine
from heedful.rollout.packed import (
    JoinedPart,
    PackedLinear,
    can_pack,
    group_queries,
    grouped_attention,
    pack_layers,
    takers,
)
from toy_parts import disturb, model_folder, policy, prompts, requests

needs_packing = pytest.mark.skipif(not can_pack(), reason="this CPU or this build of PyTorch packs no weights")


@needs_packing
@pytest.mark.parametrize("kind", [nn.Linear, Conv1D])
@pytest.mark.parametrize("rows", [1, 5, 70])
def test_a_packed_layer_is_the_layer(kind, rows):
    torch.manual_seed(0)
    layer = (nn.Linear(50, 37) if kind is nn.Linear else Conv1D(37, 50)).to(torch.bfloat16)
    layer.bias.data.normal_()
    packed = PackedLinear(layer)
    with torch.no_grad():
        for _ in range(2):  # the second weight takes the place of the first
            layer.weight.normal_()
            packed.pack(layer.weight)
            x_BTI = torch.randn(rows, 2, 50).bfloat16()
            torch.testing.assert_close(packed(x_BTI), layer(x_BTI), rtol=2**-7, atol=2**-6)
            assert torch.equal(packed.weight, layer.weight)
            assert not torch.allclose(packed(x_BTI), layer(x_BTI.flip(-1)), rtol=2**-7, atol=2**-6)


def plain(part, monkeypatch):
    """The engine as it is where nothing can be packed and no attention be grouped."""
    with monkeypatch.context() as patch:
        patch.setattr(hf, "can_pack", lambda: False)
        patch.setattr(hf, "group_queries", lambda model: False)
        engine = HFEngine(part, [10**6])
    assert engine.num_packed == 0 and not any(isinstance(m, PackedLinear) for m in engine._model.modules())
    return engine


def step_logprobs(engine, prompts_of_one_length):
    """Log-probs [B, V] of the first token after each prompt."""
    ids_BT, mask_BT, cache = engine._prefill(prompts_of_one_length)
    positions_BT = mask_BT.sum(dim=1, keepdim=True) - 1
    with torch.no_grad():
        out = engine._model(input_ids=ids_BT[:, -1:], attention_mask=mask_BT, position_ids=positions_BT, cache=cache)
    return out.logits[:, -1].float().log_softmax(-1)


def folder_with(path, **options):
    """A small Llama with other options than the usual one."""
    model_folder(path)
    config = transformers.AutoConfig.from_pretrained(path)
    for name, value in options.items():
        setattr(config, name, value)
    model = transformers.LlamaForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_()  # they begin as 0
    model.save_pretrained(path)
    return path


@needs_packing
@pytest.mark.parametrize("model", ["Llama", "GPT2", "adapters", "tied", "biases"])
def test_the_packed_engine_says_what_the_plain_one_says(folder, tmp_path, monkeypatch, model):
    options = {"tied": {"tie_word_embeddings": True}, "biases": {"attention_bias": True, "mlp_bias": True}}
    path = (
        folder_with(tmp_path, **options[model]) if model in options else folder("GPT2" if model == "GPT2" else "Llama")
    )
    lora = LoraConfig(rank=4) if model == "adapters" else None
    part = policy(path, dtype=torch.bfloat16, lora=lora)
    asked = [ids for _, ids in prompts(part.tokenizer)]
    engine, expected = HFEngine(part, [10**6]), plain(part, monkeypatch)
    assert engine.num_packed == (9 if model == "GPT2" else 15)
    assert engine.groups_queries == (model != "GPT2")
    before_BV = step_logprobs(expected, asked)
    for version in (1, 2):
        disturb(part, 0.3, seed=version)
        engine.sync(part, version=version)
        expected.sync(part, version=version)
        found_BV, expected_BV = step_logprobs(engine, asked), step_logprobs(expected, asked)
        gap = (found_BV - expected_BV).abs()
        moved = (expected_BV - before_BV).abs()
        assert gap.mean() < 0.03 and gap.mean() < moved.mean() / 20  # bfloat16's rounding; the new weights, not the old
    completion = engine.generate(requests(part.tokenizer)[:1], Sampling(3), seed=0)[0]
    assert completion.policy_version == 2


def num_held(engine):
    """Numbers in all matrices of the engine's copy, packed ones too."""
    packed = [m._packed for m in engine._model.modules() if isinstance(m, PackedLinear)]
    packed += [m.joined.whole._packed for m in engine._model.modules() if isinstance(m, JoinedPart)]
    matrices = [x for x in engine._model.state_dict().values() if x.dim() > 1]
    return sum(x.numel() for x in [*packed, *matrices] if x is not None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("model", ["Llama", "GPT2", "adapters", "tied", "biases"])
def test_an_engine_at_rest_holds_no_matrix_and_speaks_as_ever_after_the_next_sync(folder, tmp_path, model, dtype):
    options = {"tied": {"tie_word_embeddings": True}, "biases": {"attention_bias": True, "mlp_bias": True}}
    path = (
        folder_with(tmp_path, **options[model]) if model in options else folder("GPT2" if model == "GPT2" else "Llama")
    )
    part = policy(path, dtype=dtype, lora=LoraConfig(rank=4) if model == "adapters" else None)
    rested, awake = HFEngine(part, [10**6]), HFEngine(part, [10**6])
    asked = requests(part.tokenizer)
    for version in (1, 2):
        whole = num_held(rested)
        rested.rest()
        rested.rest()  # a second time changes nothing
        assert num_held(rested) == 0 < whole
        with pytest.raises(EngineError, match="call sync"):
            rested.generate(asked, Sampling(3), seed=0)
        disturb(part, 0.3, seed=version)
        for engine in (rested, awake):
            engine.sync(part, version=version)
        found, expected = (engine.generate(asked, Sampling(5), seed=0) for engine in (rested, awake))
        assert found == expected and num_held(rested) == whole


@needs_packing
def test_a_packed_output_layer_is_read_from_the_embedding_where_the_policy_does_not_name_it(tmp_path, monkeypatch):
    part = policy(folder_with(tmp_path, tie_word_embeddings=True), dtype=torch.bfloat16)
    engine = HFEngine(part, [10**6])
    disturb(part, 0.3)
    state = {name: tensor for name, tensor in part.model.state_dict().items() if name != hf.HEAD}
    monkeypatch.setattr(hf, "merged_state", lambda model: iter(state.items()))
    engine.sync(part, version=1)
    assert torch.equal(engine._model.lm_head.weight, part.model.state_dict()[hf.HEAD].bfloat16())
    assert torch.equal(engine._model.get_input_embeddings().weight, engine._model.lm_head.weight)


def test_float32_is_not_packed(folder):
    engine = HFEngine(policy(folder()), [10**6])
    assert engine.num_packed == 0 and engine.groups_queries


@needs_packing
def test_packed_weights_are_held_once(folder):
    engine = HFEngine(policy(folder(), dtype=torch.bfloat16), [10**6])
    held = dict(engine._model.named_parameters())
    assert not any(".mlp." in name or "_proj" in name for name in held) and "lm_head.weight" not in held
    assert set(takers(engine._model)) == set(policy(folder()).model.state_dict())


@needs_packing
def test_layers_that_a_model_keeps_in_float32_stay_as_they_are():
    model = nn.Sequential(nn.Linear(4, 4, dtype=torch.bfloat16), nn.Linear(4, 4))
    assert pack_layers(model) == 1
    assert [type(layer) for layer in model] == [PackedLinear, nn.Linear]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "groups"), [(4, 2), (6, 1), (3, 3)])
@pytest.mark.parametrize("queries", [1, 5])
def test_grouped_attention_is_eager_attention(dtype, heads, groups, queries):
    torch.manual_seed(0)
    query, keys, values = (torch.randn(3, n, t, 8).to(dtype) for n, t in ((heads, queries), (groups, 9), (groups, 9)))
    mask = torch.zeros(3, 1, queries, 9, dtype=dtype).masked_fill(torch.rand(3, 1, queries, 9) < 0.4, -1e9)
    module = nn.Module().eval()
    module.num_key_value_groups = heads // groups
    for given in (mask, None):
        expected, _ = eager_attention_forward(module, query, keys, values, given, scaling=0.4)
        found, _ = grouped_attention(module, query.clone(), keys, values, given, scaling=0.4)
        assert found.shape == expected.shape and found.is_contiguous()
        torch.testing.assert_close(found, expected, rtol=2**-6 if dtype == torch.bfloat16 else 1e-5, atol=1e-2 if
                                   dtype == torch.bfloat16 else 1e-6)  # fmt: skip


def test_only_models_with_plain_attention_are_grouped():
    def model(kind, attention="eager", **options):
        sizes = {"vocab_size": 20, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "head_dim": 8}
        config = getattr(transformers, f"{kind}Config")(**sizes, num_attention_heads=2, **options)
        return getattr(transformers, f"{kind}ForCausalLM")._from_config(config, attn_implementation=attention)

    for kind in ("Llama", "Qwen2", "Qwen3", "Mistral"):
        assert group_queries(model(kind, num_key_value_heads=1)), kind
    assert not group_queries(model("Llama", num_key_value_heads=2))  # nothing to gain
    assert not group_queries(model("Llama", "sdpa", num_key_value_heads=1))  # another kernel was asked for
    assert not group_queries(model("Gemma2", num_key_value_heads=1))  # its scores are capped


def test_a_prompt_is_read_once_for_all_its_answers(folder, monkeypatch):
    part = policy(folder())
    engine = HFEngine(part, [10**6])
    asked = [Request(p.id, n, ids) for n in range(3) for p, ids in prompts(part.tokenizer)]
    read = []
    model = engine._model.base_model
    forward = model.forward
    monkeypatch.setattr(model, "forward", lambda **given: (read.append(len(given["input_ids"])), forward(**given))[1])
    together = {(c.prompt_id, c.sample_index): c for c in engine.generate(asked, Sampling(6), seed=0)}
    assert read == [6, *[18] * 6]
    for request in asked:
        (alone,) = engine.generate([request], Sampling(6), seed=0)
        found = together[request.prompt_id, request.sample_index]
        assert found.ids == alone.ids and found.logprobs == pytest.approx(alone.logprobs, abs=1e-4)
    assert len({tuple(c.ids) for c in together.values()}) == 18  # each with its own stream
