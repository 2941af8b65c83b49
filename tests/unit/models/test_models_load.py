from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from models_tiny import make_model, make_tokenizer

from heedful.errors import ModelError
from heedful.models.load import load_causal, load_scalar, load_tokenizer, resolve, saved_tensors, scalar_head

CPU = torch.device("cpu")
F32 = torch.float32


@pytest.fixture(autouse=True)
def empty_caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEEDFUL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def test_resolve_takes_a_local_folder(folder: Callable[..., Path]) -> None:
    path = folder()
    assert resolve(str(path)) == path


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("smollm2", r"did you mean smollm2-135m\?.*a local folder.*\.gguf"),
        ("SmolLM2-35M", "did you mean smollm2-135m"),
        ("./no-such-folder", "unknown"),
        ("a/b/c", "unknown"),
        ("nobody/nothing-of-this-name", "HF_HUB_OFFLINE is set|hub does not answer"),
    ],
)
def test_unknown_names_are_one_sentence(name: str, message: str) -> None:
    with pytest.raises(ModelError, match=message) as caught:
        resolve(name)
    assert "\n" not in str(caught.value)


def test_near_folders_are_named(folder: Callable[..., Path]) -> None:
    path = folder(name="policy-final")
    with pytest.raises(ModelError, match="did you mean .*policy-final"):
        resolve(str(path.parent / "policy-finall"))


def test_folders_that_are_no_model(tmp_path: Path, folder: Callable[..., Path]) -> None:
    with pytest.raises(ModelError, match=r"no config\.json"):
        resolve(str(tmp_path))
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ModelError, match="LoRA adapter"):
        resolve(str(tmp_path))
    path = folder()
    (path / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="no weights"):
        resolve(str(path))
    (tmp_path / "weights.bin").touch()
    with pytest.raises(ModelError, match=r"not \.gguf"):
        resolve(str(tmp_path / "weights.bin"))


def test_a_damaged_gguf_leaves_nothing_behind(tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    file.write_bytes(b"GGUF" + b"\0" * 64)
    for content in (b"GGUF" + b"\0" * 64, b"PK\3\4"):
        file.write_bytes(content)
        with pytest.raises(ModelError, match="GGUF"):
            resolve(str(file), say=lambda line: None)
    assert [p for p in (tmp_path / "cache").iterdir() if p.is_dir()] == []


def test_tokenizer_missing(folder: Callable[..., Path]) -> None:
    path = folder()
    for file in path.glob("token*"):
        file.unlink()
    with pytest.raises(ModelError, match="no tokenizer"):
        load_tokenizer(path)


def test_load_causal_agrees_with_its_tokenizer(folder: Callable[..., Path]) -> None:
    path = folder("Qwen2")
    model = load_causal(path, dtype=F32, device=CPU)
    tokenizer = load_tokenizer(path)
    assert tokenizer.pad_token == "<empty_output>"
    assert model.config.pad_token_id == model.generation_config.pad_token_id == tokenizer.pad_token_id
    assert model.config._attn_implementation == "eager" and not model.training


def test_tokenizer_and_model_choose_the_same_pad(folder: Callable[..., Path]) -> None:
    """As in Qwen 2.5: the pad is no end token of the tokenizer's, but one of the generation config's."""
    path = folder("Qwen2", tokenizer=make_tokenizer(pad="<|endoftext|>"))
    generation = json.loads((path / "generation_config.json").read_text())
    (path / "generation_config.json").write_text(json.dumps({**generation, "eos_token_id": [2, 0]}))
    model, tokenizer = load_causal(path, dtype=F32, device=CPU), load_tokenizer(path)
    assert tokenizer.pad_token_id == model.config.pad_token_id == 4
    assert model.generation_config.eos_token_id == [2, 0]


def test_a_causal_folder_with_missing_weights_is_refused(folder: Callable[..., Path]) -> None:
    from safetensors.torch import load_file, save_file

    path = folder("Qwen2")
    state = load_file(path / "model.safetensors")
    del state["model.layers.1.mlp.up_proj.weight"]
    save_file(state, path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match="lack model.layers.1.mlp.up_proj.weight"):
        load_causal(path, dtype=F32, device=CPU)


@pytest.mark.parametrize("keep", [0, 7, 100, -1], ids=["empty", "no-header", "half-a-header", "cut"])
def test_a_cut_file_of_weights_is_one_sentence(keep: int, folder: Callable[..., Path]) -> None:
    path = folder("Qwen2")
    weights = (path / "model.safetensors").read_bytes()
    (path / "model.safetensors").write_bytes(weights[:keep])
    for read in (
        lambda: load_causal(path, dtype=F32, device=CPU), lambda: saved_tensors(path),
        lambda: load_scalar(path, dtype=F32, device=CPU, head="new"),
    ):  # fmt: skip
        with pytest.raises(ModelError, match=r": cannot be loaded \(") as caught:
            read()
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", ["Llama", "GPT2"])
def test_PPO_08_dropout_is_recorded_but_silent(kind: str, folder: Callable[..., Path], tmp_path: Path) -> None:
    names = ["attn_pdrop", "resid_pdrop", "embd_pdrop"] if kind == "GPT2" else ["attention_dropout"]
    path = folder(kind, **dict.fromkeys(names, 0.1))
    model = load_causal(path, dtype=F32, device=CPU)
    ids = torch.arange(20)[None]
    quiet = model(ids).logits
    assert torch.equal(model.train()(ids).logits, quiet)
    model.save_pretrained(tmp_path / "again")
    config = json.loads((tmp_path / "again" / "config.json").read_text())
    assert [config[name] for name in names] == [0.1] * len(names)


def test_PPO_08_the_models_would_drop_otherwise(tokenizer: Any) -> None:
    model = make_model("Llama", tokenizer, attention_dropout=0.5, attn_implementation="eager").train()
    ids = torch.arange(20)[None]
    assert not torch.equal(model(ids).logits, model(ids).logits)


@pytest.mark.parametrize("kind", ["Llama", "GPT2", "Qwen2", "Gemma2"])
def test_new_head_is_small_seeded_and_moves_no_random_stream(kind: str, folder: Callable[..., Path]) -> None:
    path = folder(kind, hidden_size=64, **({"n_embd": 64} if kind == "GPT2" else {}))
    state = torch.get_rng_state()
    first = scalar_head(load_scalar(path, dtype=F32, device=CPU, head="new", seed=1)).weight
    assert torch.equal(torch.get_rng_state(), state)
    again = scalar_head(load_scalar(path, dtype=F32, device=CPU, head="new", seed=1)).weight
    other = scalar_head(load_scalar(path, dtype=F32, device=CPU, head="new", seed=2)).weight
    assert torch.equal(first, again) and not torch.equal(first, other)
    assert first.shape == (1, 64)
    assert first.detach().std().item() == pytest.approx(1 / math.sqrt(65), rel=0.35)


def test_new_head_keeps_the_trunk(folder: Callable[..., Path]) -> None:
    path = folder("Llama")
    trunk = load_causal(path, dtype=F32, device=CPU).model.state_dict()
    scalar = load_scalar(path, dtype=F32, device=CPU, head="new").model.state_dict()
    assert trunk.keys() == scalar.keys() and all(torch.equal(trunk[n], scalar[n]) for n in trunk)


def test_EXP_01_a_language_model_is_no_reward_model(folder: Callable[..., Path]) -> None:
    with pytest.raises(ModelError, match="no score head; train a reward model"):
        load_scalar(folder(), dtype=F32, device=CPU)


def test_EXP_01_a_missing_head_is_an_error(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    tokenizer = make_tokenizer()
    make_model("Llama", tokenizer, head="ForSequenceClassification", num_labels=1).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    load_scalar(tmp_path, dtype=F32, device=CPU)
    state = load_file(tmp_path / "model.safetensors")
    del state["score.weight"]
    save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"lack score\.weight.*random"):
        load_scalar(tmp_path, dtype=F32, device=CPU)


def test_EXP_03_two_outputs_are_refused(tmp_path: Path) -> None:
    tokenizer = make_tokenizer()
    make_model("Llama", tokenizer, head="ForSequenceClassification").save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="2 outputs; a reward model has exactly one"):
        load_scalar(tmp_path, dtype=F32, device=CPU)


def test_an_architecture_without_classifier_is_named(folder: Callable[..., Path]) -> None:
    with pytest.raises(ModelError, match="no sequence classifier .* for type cohere"):
        load_scalar(folder("Cohere"), dtype=F32, device=CPU, head="new")
