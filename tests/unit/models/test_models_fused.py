"""Norms and gated layers that keep less: the same numbers forward, the same gradients but for rounding."""

from __future__ import annotations

import contextlib
import copy
import gc
import inspect
import weakref

import pytest
import torch
import transformers
from torch import nn
from transformers.models.llama import modeling_llama
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm
from transformers.models.qwen2 import modeling_qwen2

from heedful.batches import LossOut
from heedful.config.section import OptimizerConfig
from heedful.models import fused
from heedful.models.fused import add_rows_of_tied_embedding, fuse
from heedful.models.lora import add_lora
from heedful.train.step import Optimisation, optimise

CPU, F32, BF16 = torch.device("cpu"), torch.float32, torch.bfloat16
ALL = {"Llama": 7, "Qwen2": 7, "Qwen3": 11, "Mistral": 7, "Granite": 7, "Phi3": 5, "Cohere": 2}
"""How many layers of two are changed: two norms and a gated layer each, the last norm, Qwen3's norms of heads"""
NONE = ("Gemma", "Gemma2", "GPT2", "OPT")


def built(kind, **more):
    options = {
        "vocab_size": 90, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 4,
        "max_position_embeddings": 128, "bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0,
    }  # fmt: skip
    options |= {} if kind in ("GPT2", "OPT") else {"num_key_value_heads": 2}
    options |= {"n_embd": 48, "n_layer": 2, "n_head": 4} if kind == "GPT2" else {}
    options |= {"ffn_dim": 80, "word_embed_proj_dim": 48} if kind == "OPT" else {}
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**options, **more, initializer_range=0.2)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "norm" in name:
                p.uniform_(0.5, 1.5)
    return model


def is_changed(module):
    return type(module).__module__ == fused.__name__


def states(model, dtype):
    ids = torch.randint(90, (3, 20), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[0, 12:] = 0
    with torch.autocast("cpu", dtype=dtype) if dtype != F32 else contextlib.nullcontext():
        found = model.base_model(input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state
    return found.float() * mask[..., None]


def gradients(model, dtype):
    model.zero_grad()
    found = states(model, dtype)
    weights = torch.randn(found.shape, generator=torch.Generator().manual_seed(2))
    (found * weights).sum().backward()
    return {name: p.grad.float().clone() for name, p in model.named_parameters() if p.grad is not None}


def error(found, expected):
    """Of all gradients, as a share of their norm."""
    assert found.keys() == expected.keys()
    gap = sum(float((found[name] - x).square().sum()) for name, x in expected.items())
    return (gap / sum(float(x.square().sum()) for x in expected.values())) ** 0.5


@pytest.mark.parametrize("kind", ALL)
def test_values_to_the_bit_and_gradients_but_for_rounding(kind):
    exact = gradients(built(kind), F32)
    for dtype in (F32, BF16):
        plain, model = built(kind), built(kind)
        assert fuse(model, CPU, dtype) == ALL[kind]
        assert torch.equal(states(model, dtype), states(plain, dtype))
        found, expected = gradients(model, dtype), gradients(plain, dtype)
        if dtype == F32:
            assert error(found, expected) < 1e-6
        else:
            assert 0 < error(found, exact) < 1.15 * error(expected, exact)


def adapted(dtype):
    """A base in a precision under float32 adapters that do something."""
    model = add_lora(built("Llama").to(dtype), rank=4, alpha=8, task="causal")
    torch.manual_seed(3)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if ".lora_" in name:
                p.normal_(std=0.1)
    return model.get_base_model()


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_under_adapters_on_a_frozen_base(dtype):
    plain, model = adapted(dtype), adapted(dtype)
    assert fuse(model, CPU, dtype) == 7
    assert torch.equal(states(model, dtype), states(plain, dtype))
    found, expected = gradients(model, dtype), gradients(plain, dtype)
    assert found and all(".lora_" in name for name in found)
    if dtype == F32:
        assert error(found, expected) < 1e-6
    else:
        exact = gradients(plain.float(), F32)
        assert 0 < error(found, exact) < 1.15 * error(expected, exact)


@pytest.mark.parametrize("shape", [(7, 48), (2, 5, 3, 48)])
def test_the_gradient_of_a_norm_by_finite_differences(shape):
    norm = LlamaRMSNorm(48, eps=1e-3)
    norm.weight.data.uniform_(0.5, 1.5)
    x = torch.randn(shape, requires_grad=True)
    outward = torch.randn(shape)
    y = fused._Norm.apply(x, norm.weight, norm.variance_epsilon, None)
    assert torch.equal(y, norm(x))
    of_x, of_weight = torch.autograd.grad((y * outward).sum(), (x, norm.weight))

    def loss(x, weight):
        x, weight = x.double(), weight.double()
        return float((weight * x * (x.square().mean(-1, keepdim=True) + 1e-3).rsqrt() * outward.double()).sum())

    with torch.no_grad():
        for _ in range(3):
            along, step = torch.randn(shape), 1e-4
            slope = (loss(x + step * along, norm.weight) - loss(x - step * along, norm.weight)) / (2 * step)
            assert float((of_x * along).sum()) == pytest.approx(slope, rel=1e-2, abs=1e-2)
            along = torch.randn(48)
            slope = (loss(x, norm.weight + step * along) - loss(x, norm.weight - step * along)) / (2 * step)
            assert float((of_weight * along).sum()) == pytest.approx(slope, rel=1e-2, abs=1e-2)


def test_the_gradient_of_a_gated_layer_is_autograds():
    gate, up, outward = (torch.randn(6, 80, dtype=torch.float64) for _ in range(3))
    gate.requires_grad_(), up.requires_grad_()
    assert torch.autograd.gradcheck(fused._Gated.apply, (gate, up))
    found = torch.autograd.grad((fused._Gated.apply(gate, up) * outward).sum(), (gate, up))
    expected = torch.autograd.grad((nn.functional.silu(gate) * up * outward).sum(), (gate, up))
    torch.testing.assert_close(found, expected)


def kept_bytes(model, dtype):
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept = {}

    def keep(x):
        if x.untyped_storage().data_ptr() not in weights:
            kept[x.untyped_storage().data_ptr()] = x.untyped_storage()
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        states(model, dtype)
    return sum(storage.nbytes() for storage in kept.values())


def test_it_keeps_less():
    plain, model = built("Llama"), built("Llama")
    fuse(model, CPU, BF16)
    casts = 2 * sum(p.numel() for p in model.parameters() if p.dim() > 1) - 2 * 90 * 48 * 2
    assert kept_bytes(model, BF16) - casts < 0.75 * (kept_bytes(plain, BF16) - casts)


@pytest.mark.parametrize("kind", NONE)
def test_other_layers_are_left_alone(kind):
    model = built(kind)
    expected = states(model, BF16)
    assert fuse(model, CPU, BF16) == 0
    assert not any(is_changed(module) for module in model.modules())
    assert torch.equal(states(model, BF16), expected)


def test_a_norm_that_more_than_products_read_keeps_its_precision():
    class Louder(nn.Module):
        def __init__(self, attention):
            super().__init__()
            self.attention = attention

        def forward(self, hidden_states, **options):
            return self.attention(hidden_states=hidden_states * 1.1, **options)  # in float32

    plain, model = built("Llama"), built("Llama")
    for x in (plain, model):
        for layer in x.model.layers:
            layer.self_attn = Louder(layer.self_attn)
    assert fuse(model, CPU, BF16) == 7
    assert torch.equal(states(model, BF16), states(plain, BF16))
    assert type(model.model.layers[0].input_layernorm).forward is fused._norm


def test_a_model_whose_states_would_change_is_left_alone(monkeypatch):
    monkeypatch.setattr(fused, "_gated", lambda self, x: self.down_proj(self.gate_proj(x)))
    model = built("Llama")
    expected = states(model, F32)
    assert fuse(model, CPU, F32) == 0 and torch.equal(states(model, F32), expected)
    assert not any(is_changed(module) for module in model.modules())


def test_another_activation_is_left_alone():
    config = transformers.LlamaConfig(hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
                                      vocab_size=90, hidden_act="gelu", pad_token_id=0)  # fmt: skip
    model = transformers.LlamaForCausalLM(config).eval()
    assert fuse(model, CPU, F32) == 3 and type(model.model.layers[0].mlp) is LlamaMLP


def test_a_second_part_on_the_model_and_a_copy_of_it():
    model = built("Llama")
    assert fuse(model, CPU, BF16) == 7 and fuse(model, CPU, BF16) == 0
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.model.norm.weight.mul_(2)
        other.model.layers[0].mlp.down_proj.weight.zero_()
    assert not torch.allclose(states(other, F32), states(model, F32))
    assert is_changed(other.model.norm)


def test_a_model_is_freed_when_nothing_names_it():
    """No circle of references, which would hold its weights until the garbage collector comes."""
    model = built("Llama")
    assert fuse(model, CPU, F32) == 7
    weights = [weakref.ref(x.weight) for x in (model.model.norm, model.model.layers[0].mlp.down_proj)]
    gc.collect()
    gc.disable()
    try:
        del model
        assert [ref() for ref in weights] == [None, None]
    finally:
        gc.enable()


@pytest.mark.parametrize("kind", ["Llama", "GPT2"])
def test_the_gradient_of_a_tied_embedding_is_added_by_rows(kind, tmp_path):
    """And no second matrix of its size is made in the backward."""
    found = []
    for by_rows in (False, True):
        model = built(kind, tie_word_embeddings=True)
        if by_rows:
            add_rows_of_tied_embedding(model)
        embedding = model.get_input_embeddings()
        assert embedding.sparse == by_rows and embedding.weight is model.get_output_embeddings().weight
        made = []
        with Noting(embedding.weight.shape, made):
            model(input_ids=torch.tensor([[5, 6, 5, 7]]), labels=torch.tensor([[6, 5, 7, 8]])).loss.backward()
        found.append(embedding.weight.grad)
        assert sum("embedding" in name for name in made) == (not by_rows)
    assert found[1].layout == torch.strided
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-8)


class Noting(torch.utils._python_dispatch.TorchDispatchMode):
    """Names of the operations that make a tensor of a shape."""

    def __init__(self, shape, names):
        super().__init__()
        self.shape, self.names = shape, names

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and out.layout == torch.strided and out.shape == self.shape:
            self.names.append(str(func))
        return out


def test_an_embedding_of_its_own_stays_as_it_is():
    model = built("Llama", tie_word_embeddings=False)
    add_rows_of_tied_embedding(model)
    assert not model.get_input_embeddings().sparse


def test_a_step_without_the_output_layer_has_a_dense_gradient():
    """Values on a trunk, and no policy loss."""
    model = built("Llama", tie_word_embeddings=True)
    add_rows_of_tied_embedding(model)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    moved = Optimisation("policy", dict(model.named_parameters()), OptimizerConfig(learning_rate=1e-2), 1)

    def loss(ids):
        return LossOut(model.base_model(input_ids=ids).last_hidden_state.square().mean())

    out = optimise([moved], [torch.tensor([[5, 6]]), torch.tensor([[5, 9]])], loss, step=0)
    assert out.moved and out.gradient_norms["policy"] > 0
    rows = (model.get_input_embeddings().weight - before["model.embed_tokens.weight"]).abs().sum(dim=1) > 0
    assert rows.nonzero().flatten().tolist() == [5, 6, 9]


def rotated(rotate, dtypes):
    """Queries, keys and their gradients."""
    torch.manual_seed(0)
    of_states, of_angles = dtypes
    q, k = (torch.randn(2, 7, n, 16, dtype=of_states).transpose(1, 2).requires_grad_() for n in (6, 2))
    cos, sin = (torch.randn(2, 7, 16, dtype=of_angles) for _ in range(2))  # of two halves that differ
    found = rotate(q, k, cos, sin)
    loss = sum((x.float() * torch.randn(x.shape)).sum() for x in found)
    return [x.detach() for x in found], torch.autograd.grad(loss, (q, k))


@pytest.mark.parametrize("dtypes", [(F32, F32), (BF16, F32), (BF16, BF16)])
def test_the_rotation_of_queries_and_keys_is_llamas_to_the_bit(dtypes):
    fuse(built("Llama"), CPU, F32)
    ours = modeling_llama.apply_rotary_pos_emb
    assert hasattr(ours, fused._OURS) and not hasattr(ours.__wrapped__, fused._OURS)
    (found, gradients), (expected, theirs) = (rotated(f, dtypes) for f in (ours, ours.__wrapped__))
    for x, y in zip(found, expected, strict=True):
        assert x.dtype == y.dtype and torch.equal(x, y)
    bound = 1e-6 if dtypes[0] == F32 else 0.02
    for x, y in zip(gradients, theirs, strict=True):
        torch.testing.assert_close(x, y, rtol=bound, atol=bound)


class _Kernel(nn.Module):
    """As a hub of kernels gives one in place of a function."""

    def forward(self, q, k, cos, sin):
        return q, k


def _other_half(x):
    return x


@pytest.mark.parametrize(("name", "other"), [("apply_rotary_pos_emb", _Kernel()), ("rotate_half", _other_half)])
def test_a_rotation_that_is_not_llamas_is_left_alone(monkeypatch, name, other):
    plain = inspect.unwrap(modeling_llama.apply_rotary_pos_emb)
    monkeypatch.setattr(modeling_qwen2, "apply_rotary_pos_emb", plain)
    monkeypatch.setattr(modeling_qwen2, name, other)
    assert fuse(built("Qwen2"), CPU, F32) == ALL["Qwen2"]
    assert modeling_qwen2.apply_rotary_pos_emb is (other if isinstance(other, nn.Module) else plain)
