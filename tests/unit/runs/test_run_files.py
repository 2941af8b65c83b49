import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from heedful.errors import CheckpointError, DataError
from heedful.runs import files


def test_plain_values_round_trip(tmp_path) -> None:
    value = {"a": (1, 2.5, None, True), "p": tmp_path, "nan": float("nan"), "np": np.float32(0.5), "n": np.int64(3)}
    path = tmp_path / "x.json"
    files.write_json(path, value)
    assert files.read_json(path) == {"a": [1, 2.5, None, True], "p": str(tmp_path), "nan": None, "np": 0.5, "n": 3}


def test_an_object_that_is_not_plain_is_refused_and_named(tmp_path) -> None:
    with pytest.raises(DataError, match="cannot save a set"):
        files.write_json(tmp_path / "x.json", {"a": {1, 2}})
    assert list(tmp_path.iterdir()) == []


def test_half_characters_and_strange_newlines_survive(tmp_path) -> None:
    row = {"step": 1, "text": "a\ud800b\u2028c\u0000中"}
    path = tmp_path / "x.jsonl"
    path.write_bytes(files.json_line(row))
    assert files.read_lines(path) == [row]


def test_a_failed_write_keeps_the_old_file_and_leaves_no_rubbish(tmp_path, monkeypatch) -> None:
    path = tmp_path / "x.json"
    files.write_json(path, {"a": 1})

    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(CheckpointError, match="No space left"):
        files.write_json(path, {"a": 2})
    assert [p.name for p in tmp_path.iterdir()] == ["x.json"]
    assert files.read_json(path) == {"a": 1}


def test_RES_07_killed_while_writing_leaves_old_or_new(tmp_path) -> None:
    path = tmp_path / "x.json"
    code = f"""
from pathlib import Path
from heedful.runs.files import write_json
n = 0
while True:
    write_json(Path({str(path)!r}), {{"n": n, "same": n, "filling": "x" * 200_000}})
    n += 1
"""
    for _ in range(5):
        process = subprocess.Popen([sys.executable, "-c", code])
        deadline = time.monotonic() + 20
        while not path.exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.05)
        process.send_signal(signal.SIGKILL)
        process.wait()
        content = json.loads(path.read_text())
        assert content["n"] == content["same"]
        path.unlink()


def test_a_torn_last_line_is_left_out_but_a_broken_one_inside_is_named(tmp_path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n{"st')
    assert [row["step"] for row in files.read_lines(path)] == [1, 2]
    path.write_text('{"step": 1}\n{"st\n{"step": 3}\n')
    with pytest.raises(CheckpointError, match="line 2: not JSON"):
        files.read_lines(path)
    path.write_text('{"step": 1}\n[1]\n')
    with pytest.raises(CheckpointError, match="line 2: expected an object"):
        files.read_lines(path)
    assert files.read_lines(tmp_path / "none.jsonl") == []
