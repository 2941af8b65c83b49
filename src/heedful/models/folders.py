"""Model folders: written whole or not at all, and recognised before anything is loaded from them."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from heedful.errors import ModelError
from heedful.runs.files import file_sha256

WEIGHT_FILES = tuple(n + end for n in ("model.safetensors", "pytorch_model.bin") for end in ("", ".index.json"))
MODEL_SUFFIXES = (".safetensors", ".bin", ".json", ".jinja", ".model", ".txt")
NOTES = ("reward_", "origin.json", "README")
"""Files in a model folder that say something about it (card, norm, self-test) and do not change its scores."""


@contextlib.contextmanager
def atomic_folder(path: Path, *, replace: bool) -> Iterator[Path]:
    """A new folder to fill; it appears at ``path`` complete and synced, or not at all.

    Files get the umask's default mode (``save_pretrained`` writes weights with 0600, which a server under another user
    cannot read). When ``replace`` is False and another process was first, its folder stays and ours is dropped.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.parent / f".{path.name}.{uuid.uuid4().hex[:8]}.partial"
    partial.mkdir()
    try:
        yield partial
        probe = partial / ".mode"
        probe.touch()
        mode = probe.stat().st_mode & 0o777
        probe.unlink()
        for file in partial.rglob("*"):
            if file.is_file():
                file.chmod(mode)
            _sync(file)
        _sync(partial)
        _move_into_place(partial, path, replace=replace)
        _sync(path.parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _move_into_place(partial: Path, path: Path, *, replace: bool) -> None:
    old = partial.with_suffix(".old")
    if path.exists():
        if not replace:
            return
        path.rename(old)
    try:
        partial.rename(path)
    except OSError:
        if old.exists():
            old.rename(path)
            raise
        if replace or not path.exists():
            raise
    shutil.rmtree(old, ignore_errors=True)


def remove_leftovers(path: Path) -> None:
    """Delete what killed writers of ``path`` left beside it. Only under a lock that excludes living writers."""
    for leftover in path.parent.glob(f".{path.name}.*"):
        if leftover.suffix in (".partial", ".old"):
            shutil.rmtree(leftover, ignore_errors=True)


def _sync(path: Path) -> None:
    if os.name == "nt":  # folders cannot be opened there
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def is_model_folder(path: Path) -> bool:
    """A config and weights are there."""
    return (path / "config.json").is_file() and any((path / name).is_file() for name in WEIGHT_FILES)


def check_model_folder(path: Path) -> Path:
    """``path`` itself, once it is known to hold a whole model.

    Raises:
        ModelError: no folder, an adapter without its base, no config.json, or no weights.
    """
    if not path.is_dir():
        raise ModelError(f"{path}: there is no such model folder")
    if (path / "adapter_config.json").is_file() and not (path / "config.json").is_file():
        raise ModelError(f"{path}: this is a LoRA adapter without its base; give the merged model's folder instead")
    if not (path / "config.json").is_file():
        raise ModelError(f"{path}: no config.json in this folder, so it is not a transformers model")
    if not is_model_folder(path):
        raise ModelError(f"{path}: the folder has a config.json but no weights ({WEIGHT_FILES[0]})")
    return path


def folder_digest(path: Path) -> str:
    """SHA-256 of what a model computes from: weights, config, tokenizer and template, wherever the folder lies."""
    total = hashlib.sha256()
    for file in sorted(check_model_folder(path).iterdir()):
        if file.is_file() and file.suffix in MODEL_SUFFIXES and not file.name.startswith(NOTES):
            total.update(f"{file.name}\n{file_sha256(file)}\n".encode())
    return total.hexdigest()


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silence transformers' progress bars and its notices of new or unused weights: what matters is checked by us."""
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


def read_config(path: Path) -> dict[str, Any]:
    """The config.json of a model folder.

    Raises:
        ModelError: missing, or not a JSON object.
    """
    file = check_model_folder(path) / "config.json"
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelError(f"{file}: not readable as JSON ({error})") from None
    if not isinstance(config, dict):
        raise ModelError(f"{file}: expected a JSON object")
    return config
