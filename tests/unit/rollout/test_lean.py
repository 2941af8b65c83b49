"""The lean step says what the model says, and is not taken where a model computes anything else."""

from __future__ import annotations

import pytest
import torch
import transformers

from heedful.rollout import lean
from heedful.rollout.engine import Sampling
from heedful.rollout.hf import HFEngine
from heedful.rollout.packed import JoinedLinear, can_pack
from toy_parts import disturb, model_folder, policy, prompts, requests

pytestmark = pytest.mark.skipif(not can_pack(), reason="this CPU or this build of PyTorch packs no weights")


def engine_of(path, kind, **options):
    """An engine of a small model of that kind with random weights, and its policy."""
    model_folder(path)
    old = transformers.AutoConfig.from_pretrained(path)
    sizes = {name: getattr(old, name) for name in ("vocab_size", "bos_token_id", "eos_token_id", "pad_token_id")}
    sizes |= {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = getattr(transformers, f"{kind}Config")(**sizes, **{"num_key_value_heads": 2, "head_dim": 8, **options})
    torch.manual_seed(0)
    model = getattr(transformers, f"{kind}ForCausalLM")(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))  # norms and biases too
    model.save_pretrained(path)
    part = policy(path, dtype=torch.bfloat16)
    return HFEngine(part, [10**6]), part


SAME = [("Llama", {}), ("Llama", {"tie_word_embeddings": True}), ("Llama", {"attention_bias": True, "mlp_bias": True}),
        ("Qwen2", {}), ("Mistral", {"sliding_window": None}), ("Llama", {"rope_theta": 500.0})]  # fmt: skip


@pytest.mark.parametrize(("kind", "options"), SAME)
def test_every_step_is_the_models_to_the_bit(tmp_path, kind, options):
    engine, part = engine_of(tmp_path, kind, **options)
    assert engine.is_lean
    for version in (0, 1):
        if version:  # it speaks with the weights of the last sync
            disturb(part, 0.3, seed=1)
            engine.sync(part, version=1)
        asked = [ids for _, ids in prompts(part.tokenizer)]
        asked = [ids[: 2 + n % 4] for n, ids in enumerate(asked)]  # padding of several widths
        found = []
        for step in (engine._lean, None):
            engine._lean, kept = step, engine._lean
            with torch.no_grad():
                ids_BT, mask_BT, cache = engine._prefill(asked)
                positions_B1, ids_B1, logits = mask_BT.sum(dim=1, keepdim=True) - 1, ids_BT[:, -1:], []
                for n in range(40):  # more than the room of the cache
                    logits_BV, cache = engine._step(ids_B1, mask_BT, positions_B1, cache)
                    logits.append(logits_BV)
                    ids_B1, positions_B1 = (ids_B1 + n + 1) % logits_BV.shape[1], positions_B1 + 1
                    mask_BT = torch.cat([mask_BT, mask_BT.new_ones(len(asked), 1)], dim=1)
            found.append(torch.stack(logits))
            engine._lean = kept
        assert found[0].std() > 0.1 and torch.equal(*found)


@pytest.mark.parametrize(("kind", "options"), [
    ("Qwen3", {}),  # norms of queries and keys
    ("Granite", {"residual_multiplier": 0.5}), ("Granite", {"logits_scaling": 3.0}),  # factors that no layer shows
    ("Mistral", {"sliding_window": 8}), ("Gemma", {}),
    ("Llama", {"num_key_value_heads": 4}),  # attention is the model's own
])  # fmt: skip
def test_a_model_that_computes_anything_else_is_left_as_it_is(tmp_path, kind, options):
    engine, part = engine_of(tmp_path, kind, **options)
    assert not engine.is_lean
    assert len(engine.generate(requests(part.tokenizer)[:1], Sampling(3), seed=0)[0].ids) == 3


def test_what_differs_when_it_is_tried_is_not_taken(tmp_path, monkeypatch):
    engine, _ = engine_of(tmp_path, "Llama")
    assert lean.lean_step(engine._model, engine._new_cache()) is not None
    normed = lean._normed
    monkeypatch.setattr(lean, "_normed", lambda norm, x: 1.03 * normed(norm, x))
    assert lean.lean_step(engine._model, engine._new_cache()) is None
    assert lean.lean_step(engine._model, None) is None


def test_joined_layers_are_the_layers():
    torch.manual_seed(0)
    layers = [torch.nn.Linear(20, n, bias=n != 6, dtype=torch.bfloat16) for n in (8, 6, 4)]
    joined = JoinedLinear(layers)
    x_BI, other_BI = torch.randn(2, 3, 20).bfloat16().unbind()
    for part, layer in zip(joined.parts, layers, strict=True):
        part.pack(layer.weight)
        if part.bias is not None:
            part.bias.copy_(layer.bias)
    with torch.no_grad():
        # in any order, and with another tensor between
        for n, given in [(0, x_BI), (1, x_BI), (2, x_BI), (1, other_BI), (0, x_BI), (0, x_BI), (2, other_BI)]:
            assert torch.equal(joined.parts[n].weight, layers[n].weight)
            torch.testing.assert_close(joined.parts[n](given), layers[n](given), rtol=2**-7, atol=2**-6)
        for part in joined.parts:
            part(x_BI)
    assert joined._read is None  # nothing is held once all have read
