"""``heedful data`` and ``heedful score`` never write over what they read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from heedful.cli.main import main

ROW = {"prompt": "Why?", "chosen": "Because it is.", "rejected": "No."}


def size(prompts, answers):
    return [len(a) for a in answers]


@pytest.mark.parametrize("link", [None, "in", "out", "hard"])
@pytest.mark.parametrize("words", [
    ["score", f"{__name__}:size", "IN", "--out", "OUT"], ["data", "convert", "IN", "--to", "trl", "--out", "OUT"],
    ["data", "pairs", "IN", "--out", "OUT"], ["data", "split", "IN", "--out_dir", "FOLDER"],
], ids=["score", "convert", "pairs", "split"])  # fmt: skip
def test_the_input_is_not_replaced(tmp_path: Path, capsys, words, link) -> None:
    file, other = tmp_path / "train.jsonl", tmp_path / "other.jsonl"
    file.write_text("".join(json.dumps({**ROW, "prompt": f"Why {n}?"}) + "\n" for n in range(4)))
    if link == "hard":
        other.hardlink_to(file)
    elif link == "out":  # the name that is written is a link
        file = file.rename(other)
        (tmp_path / "train.jsonl").symlink_to(other)
    elif link == "in":
        other.symlink_to(file)
    names = {"IN": other if link else file, "OUT": tmp_path / "train.jsonl", "FOLDER": tmp_path}
    before, listed = file.read_bytes(), sorted(tmp_path.iterdir())
    assert main([str(names.get(word, word)) for word in words]) == 2
    said = capsys.readouterr().err.strip().splitlines()
    assert len(said) == 1 and "train.jsonl: this is the input " in said[0]
    assert file.read_bytes() == before and sorted(tmp_path.iterdir()) == listed


def test_an_old_output_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text(json.dumps(ROW) + "\n")
    (tmp_path / "out.jsonl").write_text("old")
    assert main(["data", "pairs", str(tmp_path / "in.jsonl"), "--out", str(tmp_path / "out.jsonl")]) == 0
    assert "old" not in (tmp_path / "out.jsonl").read_text()
