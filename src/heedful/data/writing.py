"""Rows out: JSONL, JSON and Parquet, each written beside its place and renamed, so that no reader sees half a file."""

from __future__ import annotations

import gzip
import json
import os
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, cast

from heedful.errors import DataError


def refuse_to_replace(source: str | Path, out: str | Path) -> None:
    """Raises DataError when writing ``out`` would replace ``source``, under whatever name or link."""
    if os.path.exists(source) and os.path.exists(out) and os.path.samefile(source, out):
        raise DataError(f"{out}: this is the input {source} itself, which would be replaced; name another output")


@contextmanager
def _replacing(path: str | Path) -> Iterator[IO[bytes]]:
    """A temporary file beside ``path`` that takes its name when everything was written, and vanishes otherwise."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
    try:
        with os.fdopen(handle, "wb") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(temporary, 0o666 & ~umask)  # mkstemp makes files that only their owner reads
        os.replace(temporary, target)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def write_jsonl(path: str | Path, rows: Iterable[dict[str, Any]]) -> int:
    """Write one JSON object per line, atomically; gzipped when the name ends in .gz. Returns the number of rows."""
    count = 0
    with _replacing(path) as raw:
        zipped = str(path).endswith(".gz")
        stream = cast(IO[bytes], gzip.GzipFile(fileobj=raw, mode="wb", filename="", mtime=0)) if zipped else raw
        for row in rows:
            stream.write(json.dumps(row, ensure_ascii=False).encode("utf-8") + b"\n")
            count += 1
        if zipped:
            stream.close()
    return count


def write_json(path: str | Path, value: Any) -> None:
    """Write one JSON value, indented, atomically."""
    with _replacing(path) as stream:
        stream.write(json.dumps(value, ensure_ascii=False, indent=1).encode("utf-8") + b"\n")


def write_text(path: str | Path, text: str) -> None:
    """Write text as UTF-8, atomically."""
    with _replacing(path) as stream:
        stream.write(text.encode("utf-8"))


def write_parquet(path: str | Path, rows: Iterable[dict[str, Any]]) -> int:
    """Write rows with equal keys as Parquet, atomically. Returns the number of rows."""
    import pyarrow
    import pyarrow.parquet

    table = pyarrow.Table.from_pylist([_without_empty(row) for row in rows])
    with _replacing(path) as stream:
        pyarrow.parquet.write_table(table, stream)
    return int(table.num_rows)


def _without_empty(value: Any) -> Any:
    """Empty objects as null: Parquet has no type for an object without fields."""
    if isinstance(value, dict):
        return {key: _without_empty(item) for key, item in value.items()} or None
    return [_without_empty(item) for item in value] if isinstance(value, list) else value
