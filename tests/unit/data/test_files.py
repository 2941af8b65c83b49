"""Rows of every kind of file, and one clear sentence for every broken one."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from heedful.data import files
from heedful.data.files import BadRow, Row, read_rows, write_jsonl
from heedful.data.writing import write_parquet
from heedful.errors import DataError

PAIR = {"prompt": "p", "chosen": "c", "rejected": "r"}
LINE = json.dumps(PAIR)


def put(folder: Path, name: str, content: str | bytes) -> Path:
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode("utf-8"))
    return path


def rows(path: Path) -> list[Row]:
    return list(read_rows(path))


def fault(path: Path) -> str:
    with pytest.raises(DataError) as caught:
        rows(path)
    message = str(caught.value)
    assert str(path) in message and "\n" not in message
    return message


def test_DAT_01_byte_order_mark(tmp_path: Path) -> None:
    text = f"{LINE}\n{LINE}\n".encode()
    plain, marked = put(tmp_path, "a.jsonl", text), put(tmp_path, "b.jsonl", b"\xef\xbb\xbf" + text)
    assert rows(marked) == rows(plain) == [Row(1, PAIR), Row(2, PAIR)]
    for name, body in (("c.json", f"[{LINE}]"), ("d.csv", "prompt,chosen,rejected\np,c,r\n"), ("e.txt", "p\n")):
        first = rows(put(tmp_path, name, b"\xef\xbb\xbf" + body.encode()))[0]
        assert next(iter(first.data)) == "prompt"


def test_windows_line_ends_blank_lines_and_missing_last_newline(tmp_path: Path) -> None:
    path = put(tmp_path, "a.jsonl", f"{LINE}\r\n\r\n   \r\n{LINE}")
    assert rows(path) == [Row(1, PAIR), Row(4, PAIR)]


def test_other_unicode_separators_do_not_end_a_line(tmp_path: Path) -> None:
    data = {"prompt": "a\u2028b\u2029c\x85d\x0be"}
    path = put(tmp_path, "a.jsonl", json.dumps(data, ensure_ascii=False).replace("\\u000b", "\\u000b") + "\n")
    assert rows(path) == [Row(1, data)]


def test_json_lists_name_the_line_of_each_row(tmp_path: Path) -> None:
    pretty = json.dumps([PAIR, PAIR], indent=1)
    assert [row.line for row in rows(put(tmp_path, "a.json", pretty))] == [2, 7]
    wrapped = '{"version": 1,\n "data": [' + LINE + ",\n" + LINE + "]}"
    assert [row.line for row in rows(put(tmp_path, "b.json", wrapped))] == [2, 3]
    assert rows(put(tmp_path, "c.json", f"{LINE}\n{LINE}\n")) == [Row(1, PAIR), Row(2, PAIR)]


def test_tables_and_parquet_and_text(tmp_path: Path) -> None:
    table = put(tmp_path, "a.csv", 'prompt,chosen,rejected\n"p\nq",c,r\nx,"y, z",w\n')
    assert rows(table) == [
        Row(2, {"prompt": "p\nq", "chosen": "c", "rejected": "r"}),
        Row(4, {"prompt": "x", "chosen": "y, z", "rejected": "w"}),
    ]
    assert rows(put(tmp_path, "a.tsv", "prompt\tchosen\na\tb\n")) == [Row(2, {"prompt": "a", "chosen": "b"})]
    write_parquet(tmp_path / "a.parquet", [PAIR, PAIR])
    assert rows(tmp_path / "a.parquet") == [Row(1, PAIR), Row(2, PAIR)]
    assert rows(put(tmp_path, "a.txt", "one\n\n two \n")) == [Row(1, {"prompt": "one"}), Row(3, {"prompt": "two"})]


def test_gzip_by_content(tmp_path: Path) -> None:
    packed = gzip.compress(f"{LINE}\n".encode())
    assert rows(put(tmp_path, "a.jsonl.gz", packed)) == rows(put(tmp_path, "b.jsonl", packed)) == [Row(1, PAIR)]
    assert "gzip" in fault(put(tmp_path, "c.jsonl.gz", packed[:-12]))


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.jsonl", b"", "empty (0 bytes)"),
        ("a.jsonl", f"{LINE}\n{LINE[:20]}", "line 2: the JSON is cut off"),
        ("a.jsonl", f"{LINE}\n{{'prompt': 1}}\n", "line 2: not valid JSON at column 2"),
        ("a.jsonl", f"{LINE}\n[1, 2]\n", "line 2: the row is a list"),
        ("a.jsonl", f"{LINE}\n" + '{"prompt": "é"}\n'.encode("latin-1").decode("latin-1"), None),
        ("a.jsonl", LINE.encode("utf-16"), "UTF-16"),
        ("a.jsonl", LINE.encode() + b"\n\x00\x01\x02\n", "line 2: holds zero bytes"),
        ("a.jsonl", LINE + '\n{"prompt": "\\ud83d"}\n', "line 2: a text holds half a character"),
        ("a.jsonl", "[" * 100_000, "line 1: "),
        ("a.json", "[" + LINE + ",\n" + LINE[:20], "line 2: the JSON is cut off"),
        ("a.json", json.dumps({"a": [PAIR], "b": [PAIR]}), "2 lists"),
        ("a.json", '"text"', "the row is a text"),
        ("a.json", "  \n ", "blank"),
        ("a.json", b"[\n\xe9]", "line 2: byte 0xe9"),
        ("a.csv", "prompt,prompt\na,b\n", "the same name"),
        ("a.csv", "prompt,chosen\na\n", "line 2: 1 cells where the header has 2"),
        ("a.csv", 'prompt,chosen\n"a,b\nc,d\n', "is a quote not closed?"),
        ("a.parquet", b"PAR1 nothing", "Parquet"),
        ("a.xlsx", b"x", "unknown kind of file '.xlsx'"),
    ],
)
def test_broken_files_give_one_sentence(tmp_path: Path, name: str, content: str | bytes, said: str | None) -> None:
    path = put(tmp_path, name, content)
    if said is None:
        assert len(rows(path)) == 2
    else:
        assert said in fault(path)


def test_wrong_encoding_names_line_and_byte(tmp_path: Path) -> None:
    path = put(tmp_path, "a.jsonl", LINE.encode() + b'\n{"prompt": "caf\xe9"}\n')
    assert "line 2: byte 0xe9 at position 15 is not UTF-8; save as UTF-8" in fault(path)


def test_huge_line_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "MAX_LINE_BYTES", 2**20)
    path = put(tmp_path, "a.jsonl", LINE + "\n" + json.dumps({"prompt": "x" * 2**20}) + "\n")
    assert "line 2: the line is longer than 1 MiB" in fault(path)


def test_missing_file_folder_and_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "no such file" in fault(tmp_path / "none.jsonl")
    assert "folder" in fault(tmp_path)
    import datasets

    def offline(*_: object, **__: object) -> None:
        raise ConnectionError("Couldn't reach the hub")

    monkeypatch.setattr(datasets, "load_dataset", offline)
    with pytest.raises(DataError, match="no-such/data-2.0: no such file, and the hub did not give"):
        list(read_rows("no-such/data-2.0"))


def test_hub_rows_and_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    sets = {"train": [PAIR], "test": [PAIR, PAIR]}
    monkeypatch.setattr(datasets, "load_dataset", lambda name, config: sets if config == "small" else {"only": [PAIR]})
    assert len(list(read_rows("a/b:small"))) == 1
    assert len(list(read_rows("a/b:small", split="test"))) == 2
    assert len(list(read_rows("a/b"))) == 1
    with pytest.raises(DataError, match="choose one of train, test"):
        list(read_rows("a/b:small", split="dev"))


def test_bad_lines_can_be_collected(tmp_path: Path) -> None:
    path = put(tmp_path, "a.jsonl", LINE.encode() + b"\n{\n7\n\xff\n" + LINE.encode())
    bad: list[tuple[int, str]] = []

    def collect(line: int, row: BadRow) -> None:
        bad.append((line, row.reason))

    assert [row.line for row in read_rows(path, on_bad=collect)] == [1, 5]
    assert bad == [(2, "invalid_json"), (3, "not_an_object"), (4, "not_utf8")]


def test_writing_is_all_or_nothing(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "a.jsonl"
    assert write_jsonl(path, [{"a": "né\u2028"}, {"a": None}]) == 2
    before = path.read_bytes()
    assert [row.data for row in read_rows(path)] == [{"a": "né\u2028"}, {"a": None}]
    with pytest.raises(TypeError):
        write_jsonl(path, [{"a": 1}, {"a": object()}])
    assert path.read_bytes() == before and [p.name for p in path.parent.iterdir()] == ["a.jsonl"]
    write_jsonl(tmp_path / "a.jsonl.gz", [PAIR])
    assert rows(tmp_path / "a.jsonl.gz") == [Row(1, PAIR)]
