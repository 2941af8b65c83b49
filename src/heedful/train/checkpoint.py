"""Checkpoints that survive a kill at any moment: written aside, fsynced, checksummed, renamed; then the old one goes.

    checkpoints/step-00000010/
        manifest.json     step, and for every file its size and SHA-256; written last
        policy.pt, policy_optimizer.pt, loop.pt, …

A folder whose name ends in ``.partial`` is never a checkpoint. A damaged folder is skipped aloud and the next older
one is used.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from heedful.errors import CheckpointError

_NAME = re.compile(r"^step-(\d{8})$")
State = dict[str, Any]


def save(folder: Path, step: int, state: State, *, keep: int = 1) -> Path:
    """Write ``state`` (file stem → anything torch.save takes) as the checkpoint of ``step``; remove surplus old ones.

    Raises:
        CheckpointError: disk full or not writable; older checkpoints are untouched then.
    """
    folder.mkdir(parents=True, exist_ok=True)
    final = folder / f"step-{step:08d}"
    partial = folder / f"{final.name}.partial"
    try:
        remove_partial(folder)
        partial.mkdir()
        files = {}
        for stem, value in state.items():
            path = partial / f"{stem}.pt"
            with path.open("wb") as handle:
                torch.save(value, handle)
                handle.flush()
                os.fsync(handle.fileno())
            files[path.name] = {"bytes": path.stat().st_size, "sha256": _sha256(path)}
        _write(partial / "manifest.json", json.dumps({"step": step, "files": files}, indent=1))
        _fsync_folder(partial)
        if final.exists():  # the same step saved twice: the new one replaces the old
            shutil.rmtree(final)
        partial.rename(final)
        _fsync_folder(folder)
    except (OSError, RuntimeError) as error:  # torch reports a full disk as RuntimeError
        shutil.rmtree(partial, ignore_errors=True)
        raise CheckpointError(
            f"{final}: could not be saved ({error}); older checkpoints are untouched: free disk space and resume"
        ) from None
    for old in _numbered(folder)[:-keep] if keep else []:
        shutil.rmtree(old)
    return final


def load_newest(folder: Path, *, say: Callable[[str], None] = print) -> tuple[int, State] | None:
    """The newest complete checkpoint as (step, state), or None; says which damaged ones it skips."""
    if not folder.exists():
        return None
    for path in reversed(_numbered(folder)):
        problem = _damage(path)
        if problem:
            say(f"checkpoint {path.name} is skipped: {problem}")
            continue
        manifest = json.loads((path / "manifest.json").read_text())
        state = {
            Path(name).stem: torch.load(path / name, map_location="cpu", weights_only=True)
            for name in manifest["files"]
        }
        return int(manifest["step"]), state
    return None


def take(state: State, name: str) -> Any:
    """One part of a loaded state; a missing part is an error, never a fresh start (RES-05)."""
    if name not in state:
        raise CheckpointError(
            f"the checkpoint has no {name!r} (it has {', '.join(sorted(state))}); it was written by another version or "
            f"another recipe: start a new run"
        )
    return state[name]


def remove_partial(folder: Path) -> None:
    """Delete what a killed save left behind."""
    for leftover in folder.glob("step-*.partial"):
        shutil.rmtree(leftover, ignore_errors=True)


def _numbered(folder: Path) -> list[Path]:
    return sorted(p for p in folder.iterdir() if p.is_dir() and _NAME.match(p.name))


def _damage(path: Path) -> str | None:
    try:
        manifest = json.loads((path / "manifest.json").read_text())
        files = manifest["files"]
    except (OSError, ValueError, KeyError):
        return "its manifest.json is missing or unreadable"
    for name, facts in files.items():
        file = path / name
        if not file.exists():
            return f"{name} is missing"
        if file.stat().st_size != facts["bytes"]:
            return f"{name} has {file.stat().st_size} bytes instead of {facts['bytes']}"
        if _sha256(file) != facts["sha256"]:
            return f"{name} does not match its checksum"
    return None


def _sha256(path: Path) -> str:
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def _write(path: Path, text: str) -> None:
    with path.open("w") as handle:
        handle.write(text)
        handle.flush()
        os.fsync(handle.fileno())


def _fsync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
