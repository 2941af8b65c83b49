"""Checkpoints that survive a kill at any moment: written aside, fsynced, checksummed, renamed; then the old one goes.

    checkpoints/step-00000010/
        manifest.json     step, and for every file its size and SHA-256; written last
        policy.pt, policy_optimizer.pt, loop.pt, …

A folder whose name ends in ``.partial`` is never a checkpoint. A damaged folder is skipped aloud and the next older
one is used.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from functools import partial as bound
from pathlib import Path
from typing import IO, Any

import torch

from heedful.errors import CheckpointError
from heedful.runs.files import file_sha256, sync_folder

_NAME = re.compile(r"^step-(\d{8})(\.old)?$")
State = dict[str, Any]


def save(folder: Path, step: int, state: State, *, keep: int = 1, say: Callable[[str], None] = print) -> Path:
    """Write ``state`` (file stem → anything torch.save takes) as the checkpoint of ``step``, which is then the newest.

    Of the older ones, ``keep`` − 1 complete ones stay. Those of later steps go too: they were damaged, or the run would
    have gone on from them. One that cannot be deleted is told, and no harm.

    Raises:
        CheckpointError: disk full or not writable; older checkpoints are untouched then.
    """
    final = folder / f"step-{step:08d}"
    partial, old = folder / f"{final.name}.partial", folder / f"{final.name}.old"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        remove_partial(folder)
        partial.mkdir()
        files = {}
        for stem, value in state.items():
            path = partial / f"{stem}.pt"
            _write(path, bound(torch.save, value))
            files[path.name] = {"bytes": path.stat().st_size, "sha256": file_sha256(path)}
        manifest = json.dumps({"step": step, "files": files}, indent=1).encode()
        _write(partial / "manifest.json", lambda handle: handle.write(manifest))
        sync_folder(partial)
        if final.exists():  # the same step saved twice: the first one counts until the new one has its name
            shutil.rmtree(old, ignore_errors=True)
            final.rename(old)
        partial.rename(final)
        sync_folder(folder)
    except (OSError, RuntimeError) as error:
        shutil.rmtree(partial, ignore_errors=True)
        cause = error if isinstance(error, OSError) else error.__context__ or error  # torch hides a full disk so
        raise CheckpointError(
            f"{final}: could not be saved ({getattr(cause, 'strerror', None) or cause}); older checkpoints are "
            f"untouched: free disk space or mend the permissions, then resume"
        ) from None
    _rotate(folder, final, keep, say)
    return final


def _rotate(folder: Path, newest: Path, keep: int, say: Callable[[str], None]) -> None:
    """Leave ``newest`` and the ``keep`` − 1 newest complete ones before it."""
    num_kept = 1
    try:
        for path in reversed(_numbered(folder)):
            if path == newest:
                continue
            if path.name < newest.name and num_kept < keep and _damage(path) is None:
                num_kept += 1
            else:
                shutil.rmtree(path)
    except OSError as error:
        say(f"{error.filename or folder}: an old checkpoint could not be deleted ({error.strerror or error})")


def load_newest(folder: Path, *, say: Callable[[str], None] = print) -> tuple[int, State] | None:
    """The newest complete checkpoint as (step, state), or None; says which damaged ones it skips.

    Raises:
        CheckpointError: the folder cannot be read.
    """
    if not folder.exists():
        return None
    try:
        candidates = _numbered(folder)
    except OSError as error:
        raise CheckpointError(f"{folder}: cannot be read: {error.strerror or error}; mend its permissions") from error
    for path in reversed(candidates):
        problem = _damage(path)
        if problem:
            say(f"checkpoint {path.name} is skipped: {problem}")
            continue
        state = {file.stem: torch.load(file, map_location="cpu", weights_only=True) for file in path.glob("*.pt")}
        return _step(path), state
    return None


def exist(folder: Path) -> bool:
    """Whether a checkpoint is there, be it damaged."""
    return folder.exists() and bool(_numbered(folder))


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
    """Checkpoints, oldest first; of two of one step the replaced one first."""
    found = (p for p in folder.iterdir() if _NAME.match(p.name) and p.is_dir())
    return sorted(found, key=lambda p: (_step(p), p.suffix != ".old"))


def _step(path: Path) -> int:
    return int(path.name[len("step-") :].removesuffix(".old"))


def _damage(path: Path) -> str | None:
    """What is wrong with a checkpoint; None when every file is as it was written."""
    try:
        manifest = json.loads((path / "manifest.json").read_bytes())
        files, step = manifest["files"], manifest["step"]
        if step != _step(path):
            return f"its manifest.json is of step {step}"
        missing = {p.name for p in path.glob("*.pt")} ^ files.keys()
        if missing:
            return f"{min(missing)} is missing, or missing from its manifest.json"
        for name, facts in files.items():
            size = (path / name).stat().st_size
            if size != facts["bytes"]:
                return f"{name} has {size} bytes instead of {facts['bytes']}"
            if file_sha256(path / name) != facts["sha256"]:
                return f"{name} does not match its checksum"
    except OSError as error:
        return f"{Path(error.filename or path).name} cannot be read ({error.strerror or error})"
    except (ValueError, KeyError, TypeError, AttributeError):
        return "its manifest.json is damaged"
    return None


def _write(path: Path, fill: Callable[[IO[bytes]], object]) -> None:
    with path.open("wb") as handle:
        fill(handle)
        handle.flush()
        os.fsync(handle.fileno())
