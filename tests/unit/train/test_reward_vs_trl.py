"""The comparison of benchmarks/reward_vs_trl.py; TRL itself is not installed here, so its side is written down."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from heedful.records import Answer, Message, Ranking
from toy_parts import model_folder

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "benchmarks"))

import reward_vs_trl  # noqa: E402


def ranking(n, texts, ranks):
    answers = tuple(Answer(f"a{k}", text) for k, text in enumerate(texts))
    consensus = {a.id: rank for a, rank in zip(answers, ranks)}
    return Ranking(f"g{n}", (Message("user", f"Question {n}"),), answers, consensus=consensus)


def line(text, name):
    return next(row for row in text.splitlines() if row.startswith(name))


def test_both_sides_get_the_answers_that_say_something():
    found = reward_vs_trl.rows([
        ranking(0, ["a", "b", "b", "c", "c"], [1, 2, 2, 3, 4]),  # a text counts once, or never
        ranking(1, ["a", "b"], [1, 1]),  # nothing to learn
    ])  # fmt: skip
    assert [row["id"] for row in found] == ["g0"]
    assert found[0]["answers"] == [{"text": "a", "rank": 1}, {"text": "b", "rank": 2}]
    assert reward_vs_trl.num_pairs(found) == 1


def test_the_table_holds_the_accuracies_of_either_side():
    dev = reward_vs_trl.rows([
        ranking(0, ["long answer", "short"], [1, 2]), ranking(1, ["brief", "a longer answer"], [1, 2]),
        ranking(2, ["one", "three", "fifteen"], [1, 2, 3]),
    ])  # fmt: skip
    made = {"version": "1", "seconds": 10.0, "core_seconds": 5.0, "num_pairs": 30, "peak_memory_bytes": 3 * 2**30}
    length = [[float(len(a["text"])) for a in row["answers"]] for row in dev]
    right = [[-float(a["rank"]) for a in row["answers"]] for row in dev]
    text = reward_vs_trl.table(dev, {"heedful": {**made, "scores": right}, "trl": {**made, "scores": length}})
    weighted, pairs = line(text, "accuracy, prompts"), line(text, "accuracy, pairs")
    assert "100.0%" in weighted and "33.3% [" in weighted  # one prompt of three
    assert "20.0% [" in pairs  # one pair of five
    assert "0.0% [" in line(text, "where the shorter") and line(text, "where the shorter").count("(4 pairs)") == 2
    assert line(text, "length alone").split() == ["length", "alone", "33.3%", "33.3%"]
    assert line(text, "pairs per second").split()[-2:] == ["3.00,", "6.00"]
    assert "3.00 GiB" in line(text, "peak memory")


@pytest.mark.skipif(sys.platform == "win32", reason="the stand-in for TRL's python is a shell script")
def test_sides_run_apart_and_only_those_of_one_task_are_compared(tmp_path, monkeypatch, capsys):
    data = tmp_path / "rankings.jsonl"
    rows = [
        {"id": f"g{n}", "prompt": f"Question {n}", "answers": [
            {"text": f"good {n}", "score": 0.9}, {"text": f"bad {n}", "score": 0.1}]}
        for n in range(4)
    ]  # fmt: skip
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    model, out, python = model_folder(tmp_path / "model"), tmp_path / "out", tmp_path / "python"
    side = {"version": "1.16.0", "seconds": 1.0, "core_seconds": 1.0, "num_pairs": 4, "scores": [[1.0, 0.0]] * 4}
    python.write_text(f"#!/bin/sh\ncat > \"$2/trl.json\" <<'END'\n{json.dumps(side)}\nEND\n")
    python.chmod(0o755)

    def run(*words):
        given = [str(data), str(data), "--model", str(model), "--out", str(out), "--threads", "1", *words]
        monkeypatch.setattr(sys, "argv", ["reward_vs_trl.py", *given])
        reward_vs_trl.main()
        return capsys.readouterr().out

    assert "100.0%" in run("--only", "trl", "--trl_python", str(python))
    both = run("--only", "heedful")
    head = both.splitlines()[0]
    assert "heedful" in head and "trl 1.16.0" in head
    assert json.loads((out / "heedful.json").read_text())["peak_memory_bytes"] > 50 * 2**20
    other = run("--only", "trl", "--trl_python", str(python), "--learning_rate", "1e-3")
    assert "heedful.json is of other data or settings" in other and "heedful 0" not in other
