"""Work on disk piece by piece: whatever a kill, a full disk or a flipped bit does to one line, the others are read.

    {"sha256": "a0…", "entry": {"key": "5f…", "scores": [0.5, 1.25]}}

One line per piece, on disk before the next is begun.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from heedful.errors import CheckpointError
from heedful.runs.files import content_of, sync_folder


def append_entry(path: Path, entry: Any) -> None:
    """Add what JSON can hold to a journal, which is made where it is missing; it is on disk when this returns.

    Raises:
        CheckpointError: it cannot be written (disk full, no permission).
    """
    line = json.dumps({"sha256": _sha256(entry), "entry": entry})
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        is_new = not path.exists()
        with path.open("ab") as file:
            file.write(f"\n{line}\n".encode())  # on a line of its own, whatever a kill has left before it
            file.flush()
            os.fsync(file.fileno())
        if is_new:
            sync_folder(path.parent)
    except OSError as error:
        raise CheckpointError(
            f"{path}: cannot write: {error.strerror or error}; finished pieces are kept: free disk space and go on"
        ) from error


def read_entries(path: Path) -> list[Any]:
    """The entries of a journal in order, [] when there is none; lines that are torn or damaged are left out.

    Raises:
        CheckpointError: the file cannot be read.
    """
    entries = []
    for line in content_of(path).split(b"\n"):
        try:
            row = json.loads(line)
            if row["sha256"] == _sha256(row["entry"]):
                entries.append(row["entry"])
        except (ValueError, KeyError, TypeError):
            continue
    return entries


@contextmanager
def alone(path: Path) -> Iterator[None]:
    """Nobody else uses the journal meanwhile; it goes when the block ends without an error.

    Raises:
        CheckpointError: another process has it, or it cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        stream = path.open("ab")
    except OSError as error:
        raise CheckpointError(f"{path}: cannot write: {error.strerror or error}") from error
    with stream:
        _lock(stream, path)
        yield
        path.unlink(missing_ok=True)  # under the lock, so that nobody goes on with what is gone


def _lock(stream: IO[bytes], path: Path) -> None:
    try:
        import fcntl
    except ImportError:  # Windows
        return
    try:
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        raise CheckpointError(f"{path}: another process is writing this file; wait, or name another") from None


def _sha256(entry: Any) -> str:
    return hashlib.sha256(json.dumps(entry).encode()).hexdigest()
