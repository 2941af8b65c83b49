"""Writing files so that a kill at any moment leaves the old content or the new one, never half of either."""

from __future__ import annotations

import hashlib
import json
import math
import numbers
import os
import tempfile
from pathlib import Path
from typing import Any

from heedful.errors import CheckpointError, DataError


def plain(value: Any) -> Any:
    """A copy that JSON can hold: tuples become lists, paths text, a number that is not finite becomes None.

    Raises:
        DataError: an object of another kind (a tensor, say); the message names its type.
    """
    if value is None or isinstance(value, (str, bool)):
        return value
    if isinstance(value, dict):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(v) for v in value]
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    raise DataError(f"cannot save a {type(value).__name__} as JSON; turn it into numbers, text or lists first")


def json_line(value: Any) -> bytes:
    """One JSON object on one line, newline included. Half characters (lone surrogates) are escaped, so they survive."""
    text = json.dumps(plain(value), ensure_ascii=False, allow_nan=False)
    return text.encode("utf-8", "backslashreplace") + b"\n"


def write_bytes(path: Path, content: bytes) -> None:
    """Write atomically: temporary name in the same folder, fsync, rename, fsync of the folder.

    Raises:
        CheckpointError: the file cannot be written (disk full, no permission).
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            os.chmod(temporary, 0o644)
            os.replace(temporary, path)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise
        sync_folder(path.parent)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot write: {error.strerror or error}") from error


def write_json(path: Path, value: Any) -> None:
    """Write one JSON document atomically, indented for people."""
    text = json.dumps(plain(value), ensure_ascii=False, allow_nan=False, indent=2)
    write_bytes(path, text.encode("utf-8", "backslashreplace") + b"\n")


def read_json(path: Path) -> Any:
    """Read one JSON document.

    Raises:
        CheckpointError: the file is missing or is not JSON.
    """
    try:
        return json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise CheckpointError(f"{path}: no such file") from error
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot be read as JSON ({error})") from error


def content_of(path: Path) -> bytes:
    """All of a file, nothing when it does not exist.

    Raises:
        CheckpointError: it cannot be read.
    """
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return b""
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from error


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a JSONL file, [] when it does not exist; a torn last line (a kill while writing) is left out.

    Raises:
        CheckpointError: another line is not a JSON object; the message names file and line.
    """
    rows: list[dict[str, Any]] = []
    lines = content_of(path).split(b"\n")
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            if number == len(lines):  # no newline after it: the write was cut short
                break
            raise CheckpointError(f"{path}, line {number}: not JSON ({error}); repair or delete the line") from error
        if not isinstance(row, dict):
            raise CheckpointError(f"{path}, line {number}: expected an object, found {type(row).__name__}")
        rows.append(row)
    return rows


def sync_folder(folder: Path) -> None:
    if os.name == "nt":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def file_sha256(path: Path) -> str:
    """The SHA-256 of a file's content, in hex."""
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()
