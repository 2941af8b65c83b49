"""Rows in: JSON, JSONL, Parquet, CSV, TSV, plain text and hub data sets, with errors that name the place.

Text must be UTF-8 (a byte-order mark is removed, CRLF is understood); anything else is an error that names file and
line, never a guess. Files may be gzipped.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import re
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, NamedTuple

from heedful.data.writing import write_jsonl as write_jsonl
from heedful.errors import DataError

MAX_LINE_BYTES = 16 * 1024 * 1024
"""A longer line is refused: such a line is nearly always a file written without line breaks."""

SUFFIXES = (".json", ".jsonl", ".ndjson", ".parquet", ".csv", ".tsv", ".txt")
_BOM = b"\xef\xbb\xbf"
_LIST_START = re.compile(r"\s*\[")
_BETWEEN = re.compile(r"[\s,]*")


class Row(NamedTuple):
    """One row of a file."""

    line: int
    """1-based line number; for Parquet and hub data sets the 1-based row number."""
    data: dict[str, Any]


class BadRow(DataError):
    """One row cannot be used. ``reason`` is its one-word name, by which skipped rows are counted."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


OnBad = Callable[[int, BadRow], None]


def place(path: str | Path, line: int) -> str:
    """"FILE line N", or "FILE row N" where the source has no lines."""
    has_lines = _suffix(Path(path)) in SUFFIXES and _suffix(Path(path)) != ".parquet"
    return f"{path} {'line' if has_lines else 'row'} {line}"


def read_rows(path: str | Path, *, split: str | None = None, on_bad: OnBad | None = None) -> Iterator[Row]:
    """Rows of a file, or of the hub data set ``owner/name`` or ``owner/name:config`` when no such file exists.

    Args:
        split: only for hub data sets; None takes "train", or the only split there is.
        on_bad: called with (line, BadRow) for a line that is no object; None raises instead.

    Raises:
        DataError: naming file, line and what to do.
    """
    source = Path(path)
    if not source.exists():
        if re.fullmatch(r"[\w.-]+/[\w.-]+(:[\w.-]+)?", str(path)) and _suffix(source) not in SUFFIXES:
            return _read_hub(str(path), split)
        raise DataError(f"{path}: no such file; give a file ({', '.join(SUFFIXES)}) or a hub data set as owner/name")
    if source.is_dir():
        raise DataError(f"{path}: this is a folder; name one file in it")
    suffix = _suffix(source)
    readers: dict[str, Callable[[Path, OnBad], Iterator[Row]]] = {
        ".json": _read_json,
        ".jsonl": _read_jsonl,
        ".ndjson": _read_jsonl,
        ".csv": _read_table,
        ".tsv": _read_table,
        ".txt": _read_text,
        ".parquet": _read_parquet,
    }
    if suffix not in readers:
        raise DataError(f"{path}: unknown kind of file {suffix!r}; rename it to end in one of {', '.join(SUFFIXES)}")
    if source.stat().st_size == 0:
        raise DataError(f"{path}: the file is empty (0 bytes); write it again")

    def refuse(line: int, bad: BadRow) -> None:
        raise DataError(f"{place(path, line)}: {bad}")

    return readers[suffix](source, on_bad or refuse)


def _suffix(path: Path) -> str:
    name = path.with_suffix("") if path.suffix.lower() == ".gz" else path
    return name.suffix.lower()


@contextmanager
def _open(path: Path) -> Iterator[IO[bytes]]:
    """The bytes of a file, unzipped, without the byte-order mark."""
    try:
        with path.open("rb") as raw:
            zipped = raw.read(2) == b"\x1f\x8b"
            raw.seek(0)
            head = io.BufferedReader(gzip.GzipFile(fileobj=raw)) if zipped else raw
            start = head.peek(4)[:4]
            if start[:2] in (b"\xff\xfe", b"\xfe\xff"):
                raise DataError(f"{path}: the text is UTF-16; save it as UTF-8")
            if start.startswith(_BOM):
                head.read(3)
            yield head
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise DataError(f"{path}: the gzip data is damaged or cut off ({error}); fetch it again") from error
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror or error})") from error


def _decode(data: bytes) -> str:
    if b"\x00" in data:
        raise BadRow("binary", "holds zero bytes, so it is no text; is this another kind of file with a wrong name?")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        byte = data[error.start]
        raise BadRow("not_utf8", f"byte 0x{byte:02x} at position {error.start} is not UTF-8; save as UTF-8") from None


def _lines(path: Path, on_bad: OnBad) -> Iterator[tuple[int, str]]:
    """Non-blank lines with their numbers. Only \\n and \\r\\n end a line: other separators may stand inside JSON."""
    with _open(path) as stream:
        number = 0
        while data := stream.readline(MAX_LINE_BYTES + 1):
            number += 1
            if len(data) > MAX_LINE_BYTES:
                size = MAX_LINE_BYTES / 2**20
                raise DataError(f"{place(path, number)}: the line is longer than {size:.0f} MiB; one row per line")
            try:
                text = _decode(data.rstrip(b"\r\n"))
            except BadRow as bad:
                if bad.reason == "binary":
                    raise DataError(f"{place(path, number)}: {bad}") from None
                on_bad(number, bad)
                continue
            if text.strip():
                yield number, text
    if number == 0:
        raise DataError(f"{path}: the file is empty; write it again")


def _object(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise BadRow("not_an_object", f"the row is {_named(value)}, not an object with named fields")
    return value


def _named(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a text", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")


def _whole_text(value: Any) -> bool:
    """False when some string holds half a surrogate pair (an escape like \\ud83d alone), which no file can hold."""
    try:
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _read_jsonl(path: Path, on_bad: OnBad) -> Iterator[Row]:
    for number, line in _lines(path, on_bad):
        try:
            data = _object(_parse(line))
            if "\\ud" in line.lower() and not _whole_text(data):
                raise BadRow("broken_character", "a text holds half a character (a lone \\ud… escape); write it again")
        except BadRow as bad:
            on_bad(number, bad)
            continue
        yield Row(number, data)


def _parse(line: str) -> Any:
    try:
        return json.loads(line)
    except json.JSONDecodeError as error:
        if error.pos >= len(line.rstrip()) or error.msg.startswith("Unterminated"):
            raise BadRow("invalid_json", "the JSON is cut off before its end; write the row again") from None
        hint = "; a .jsonl file holds one object per line" if line.strip() in "[]{}," else ""
        raise BadRow("invalid_json", f"not valid JSON at column {error.colno} ({error.msg}){hint}") from None
    except (ValueError, RecursionError) as error:
        kind = "nested too deep" if isinstance(error, RecursionError) else str(error).split(";")[0]
        raise BadRow("invalid_json", f"the JSON cannot be read ({kind})") from None


def _read_json(path: Path, on_bad: OnBad) -> Iterator[Row]:
    with _open(path) as stream:
        data = stream.read()
    try:
        text = _decode(data)
    except BadRow as bad:
        line = 1
        if bad.reason == "not_utf8":
            line = _first_bad_line(data)
        raise DataError(f"{place(path, line)}: {bad}") from None
    if not text.strip():
        raise DataError(f"{path}: the file holds only blank space; write it again")
    if match := _LIST_START.match(text):
        yield from _elements(path, text, match.end(), on_bad)
        return
    try:
        whole = _object(json.loads(text))
    except BadRow as bad:
        raise DataError(f"{path}: {bad}; a .json file holds a list of rows") from None
    except (ValueError, RecursionError) as error:
        if isinstance(error, json.JSONDecodeError):
            if error.msg == "Extra data" and "\n" in text.strip():
                yield from _read_jsonl(path, on_bad)
                return
            raise DataError(f"{place(path, error.lineno)}: {_json_fault(error, text)}") from None
        raise DataError(f"{path}: the JSON cannot be read ({error})") from None
    lists = [key for key, value in whole.items() if isinstance(value, list)]
    if len(lists) != 1:
        found = ", ".join(map(repr, list(whole)[:8]))
        raise DataError(f"{path}: one list of rows is needed, but the object has {len(lists)} lists (keys: {found})")
    start = re.search(re.escape(json.dumps(lists[0], ensure_ascii=False)) + r"\s*:\s*\[", text)
    if start is None:  # the key is written with escapes: positions unknown, count rows instead
        yield from (Row(i, _object(value)) for i, value in enumerate(whole[lists[0]], 1))
        return
    yield from _elements(path, text, start.end(), on_bad)


def _first_bad_line(data: bytes) -> int:
    try:
        data.decode("utf-8")
    except UnicodeDecodeError as error:
        return data.count(b"\n", 0, error.start) + 1
    return 1


def _json_fault(error: json.JSONDecodeError, text: str) -> str:
    if error.pos >= len(text.rstrip()) or error.msg.startswith("Unterminated"):
        return "the JSON is cut off before its end; copy or export the file again"
    return f"not valid JSON at column {error.colno} ({error.msg}); correct it or export the file again"


def _elements(path: Path, text: str, start: int, on_bad: OnBad) -> Iterator[Row]:
    """The elements of the JSON list that opens just before ``start``, each with the line it begins on."""
    decoder = json.JSONDecoder()
    position, line, counted = start, 1, 0
    check = "\\ud" in text.lower()
    while True:
        match = _BETWEEN.match(text, position)
        position = match.end() if match else position
        line += text.count("\n", counted, position)
        counted = position
        if text.startswith("]", position):
            return
        try:
            value, position = decoder.raw_decode(text, position)
        except json.JSONDecodeError as error:
            raise DataError(f"{place(path, error.lineno)}: {_json_fault(error, text)}") from None
        except (ValueError, RecursionError) as error:
            raise DataError(f"{place(path, line)}: the JSON cannot be read ({error})") from None
        try:
            if check and not _whole_text(value):
                raise BadRow("broken_character", "a text holds half a character (a lone \\ud… escape); write it again")
            row = Row(line, _object(value))
        except BadRow as bad:
            on_bad(line, bad)
            continue
        yield row


def _read_text(path: Path, on_bad: OnBad) -> Iterator[Row]:
    for number, line in _lines(path, on_bad):
        yield Row(number, {"prompt": line.strip()})


def _read_table(path: Path, on_bad: OnBad) -> Iterator[Row]:
    delimiter = "\t" if _suffix(path) == ".tsv" else ","
    csv.field_size_limit(MAX_LINE_BYTES)
    line = 1
    try:
        with _open(path) as stream:
            reader = csv.reader(_table_lines(path, stream), delimiter=delimiter, strict=True)
            header = next(reader, None) or []
            if not any(name.strip() for name in header):
                raise DataError(f"{path} line 1: the header line is blank; the first line names the columns")
            if len(set(header)) != len(header):
                raise DataError(f"{path} line 1: two columns have the same name; rename one")
            line = reader.line_num + 1
            for cells in reader:
                if len(cells) == len(header):
                    yield Row(line, dict(zip(header, cells)))
                elif cells:
                    counts = f"{len(cells)} cells where the header has {len(header)}"
                    on_bad(line, BadRow("wrong_cells", f"{counts}; quote cells that hold {delimiter!r}"))
                line = reader.line_num + 1
    except csv.Error as error:
        raise DataError(f"{place(path, line)}: the table cannot be read ({error}); is a quote not closed?") from None


def _table_lines(path: Path, stream: IO[bytes]) -> Iterator[str]:
    """Lines with their ends, because a quoted cell may run over several."""
    number = 0
    while data := stream.readline(MAX_LINE_BYTES + 1):
        number += 1
        if len(data) > MAX_LINE_BYTES:
            raise DataError(f"{place(path, number)}: the line is longer than {MAX_LINE_BYTES / 2**20:.0f} MiB")
        try:
            yield _decode(data)
        except BadRow as bad:
            raise DataError(f"{place(path, number)}: {bad}") from None


def _read_parquet(path: Path, on_bad: OnBad) -> Iterator[Row]:
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            number = 0
            for batch in file.iter_batches(batch_size=1024):
                for data in batch.to_pylist():
                    number += 1
                    yield Row(number, data)
    except (pyarrow.ArrowException, UnicodeDecodeError, OSError) as error:
        reason = str(error).splitlines()[0]
        raise DataError(f"{path}: the Parquet file cannot be read ({reason}); write it again") from None


def _read_hub(name: str, split: str | None) -> Iterator[Row]:
    try:
        import datasets
    except ImportError as error:
        raise DataError(f"{name}: hub data sets need the package datasets; pip install datasets") from error
    repository, _, config = name.partition(":")
    try:
        loaded = datasets.load_dataset(repository, config or None)
    except Exception as error:  # the library raises its own, the hub client's and requests' classes
        if isinstance(error, (KeyboardInterrupt, MemoryError)):
            raise
        reason = (str(error).splitlines() or [type(error).__name__])[0][:200]
        raise DataError(
            f"{name}: no such file, and the hub did not give a data set of this name ({reason}); "
            "check the spelling and the network, or give a local file"
        ) from None
    names = list(loaded)
    chosen = split or ("train" if "train" in names else names[0] if len(names) == 1 else None)
    if chosen not in names:
        raise DataError(f"{name}: no split {chosen or 'train'!r}; choose one of {', '.join(names)}")
    for number, data in enumerate(loaded[chosen], 1):
        yield Row(number, dict(data))
