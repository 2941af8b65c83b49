"""A journal gives back whole entries and nothing else."""

from __future__ import annotations

import json

import pytest

from heedful.errors import CheckpointError
from heedful.runs.journal import append_entry, read_entries

ENTRIES = [{"key": "a", "scores": [0.1, 1e-300, -3]}, {"key": "é 汉 \ud83d"}, [], None, "line\nbreak"]


def test_entries_come_back_as_they_were(tmp_path):
    path = tmp_path / "folder" / "x.jsonl"
    assert read_entries(path) == []
    for number, entry in enumerate(ENTRIES):
        append_entry(path, entry)
        assert read_entries(path) == ENTRIES[: number + 1]


def test_RES_07_a_line_cut_anywhere_is_left_out_and_what_follows_it_is_read(tmp_path):
    path = tmp_path / "x.jsonl"
    append_entry(path, ENTRIES[0])
    whole = path.read_bytes()
    for cut in range(len(whole)):
        path.write_bytes(whole[:cut])
        append_entry(path, "next")
        kept = ENTRIES[:1] if whole[:cut].strip() == whole.strip() else []
        assert read_entries(path) == [*kept, "next"], cut


def test_RES_07_what_was_changed_is_left_out(tmp_path):
    path = tmp_path / "x.jsonl"
    for entry in ENTRIES:
        append_entry(path, entry)
    path.write_bytes(path.read_bytes().replace(b"0.1,", b"0.2,") + b'\n{"entry": 1}\n[]\n\xff{\n')
    assert read_entries(path) == ENTRIES[1:]


def test_what_cannot_be_written_or_read_is_one_sentence(tmp_path):
    (tmp_path / "file").write_text(json.dumps(1))
    with pytest.raises(CheckpointError, match="cannot write: .*; finished pieces are kept"):
        append_entry(tmp_path / "file" / "x.jsonl", 1)
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_entries(tmp_path)
