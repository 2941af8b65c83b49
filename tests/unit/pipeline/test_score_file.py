"""``heedful score``: every answer once, in order, whatever happens on the way."""

from __future__ import annotations

import errno
import gzip
import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from heedful.cli.main import main
from heedful.errors import CheckpointError, DataError, EngineError
from heedful.models.export import save_reward
from heedful.models.heads import new_heads
from heedful.models.roles import build_reward, build_scalar
from heedful.pipeline import score as score_module
from heedful.pipeline.score import score_file
from heedful.records import Message
from heedful.rollout.cache import ScoreCache
from heedful.runs.journal import alone
from toy_parts import CPU, model_folder

HERE = f"{__name__}:"
SAID: list[str] = []


def by_length(prompts, answers):
    return [len(p.messages[-1].content) + len(a) / 100 for p, a in zip(prompts, answers, strict=True)]


def nan_at_b7(prompts, answers):
    return [math.nan if a == "b7" else 1.0 for a in answers]


def counting(prompts, answers):
    with open(os.environ["SCORE_CALLS"], "a") as file:
        file.write("".join(f"{p.id} {a}\n" for p, a in zip(prompts, answers, strict=True)))
    time.sleep(float(os.environ.get("SCORE_SECONDS", "0")))
    return by_length(prompts, answers)


def rankings(path: Path, num: int = 10) -> Path:
    with path.open("w") as file:
        for i in range(num):
            texts = {f"a{i}": 0.9, f"b{i}": 0.5, "long " * (i % 5 + 1): 0.1}
            row = {"id": f"r{i}", "prompt": "Say " + "x" * (i % 7), "category": ["chat", "writing"][i % 2],
                   "answers": [{"text": text, "score": score} for text, score in texts.items()]}  # fmt: skip
            file.write(json.dumps(row) + "\n")
    return path


def score(source, out, model=HERE + "by_length", **options):
    SAID.clear()
    return score_file(model, str(source), out, say=SAID.append, **options)


def read(out):
    return [json.loads(line) for line in Path(out).read_text().splitlines()]


@pytest.fixture
def small_parts(monkeypatch):
    monkeypatch.setattr(score_module, "ANSWERS_PER_PART", 4)


def test_one_row_per_answer_in_the_order_of_the_file(tmp_path, small_parts):
    done = score(rankings(tmp_path / "in.jsonl"), tmp_path / "out.jsonl")
    rows = read(tmp_path / "out.jsonl")
    assert [(r["id"], r["answer_id"]) for r in rows] == [(f"r{i}", f"a{k}") for i in range(10) for k in (1, 2, 3)]
    for i, row in enumerate(rows):
        assert row["score"] == len("Say ") + (i // 3) % 7 + len(row["answer"]) / 100
        assert row["rank"] == i % 3 + 1 and row["prompt"][0]["role"] == "user"
    assert done.num_answers == 30 and done.num_resumed == 0 and set(done.categories) == {"chat", "writing"}
    assert done.all.mean == pytest.approx(sum(r["score"] for r in rows) / 30)
    assert done.categories["chat"].num + done.categories["writing"].num == done.all.num == 30
    assert done.all.min == min(r["score"] for r in rows) <= done.all.p50 <= done.all.max
    assert {p.name for p in tmp_path.iterdir()} == {"in.jsonl", "out.jsonl"}


def test_answers_of_a_ranking_of_ties_are_rows_too(tmp_path):
    answers = [{"id": "a", "text": "x"}, {"id": "b", "text": "yy"}]
    row = {"group_id": "g", "prompt": "Q", "answers": answers, "rankings": [{"annotator": "r", "ranks": [["a", "b"]]}]}
    (tmp_path / "in.jsonl").write_text(json.dumps(row) + "\n")
    assert score(tmp_path / "in.jsonl", tmp_path / "out.jsonl").num_answers == 2
    assert [(r["answer_id"], r["rank"]) for r in read(tmp_path / "out.jsonl")] == [("a", 1), ("b", 1)]


def by_margin(prompts, answers):
    return [p.info["margin"] + len(a) for p, a in zip(prompts, answers, strict=True)]


def test_functions_see_the_columns_of_the_file(tmp_path):
    (tmp_path / "in.jsonl").write_text('{"prompt": "Q", "chosen": "good", "rejected": "bad", "margin": 0.5}\n')
    score(tmp_path / "in.jsonl", tmp_path / "out.jsonl", HERE + "by_margin")
    assert [r["score"] for r in read(tmp_path / "out.jsonl")] == [4.5, 3.5]


@pytest.mark.parametrize("name, content, expected", [
    ("pairs.jsonl", '{"prompt": "Q", "chosen": "good", "rejected": "bad"}\n', [("good", 1), ("bad", 2)]),
    ("hh.jsonl", json.dumps({
        name: f"\n\nHuman: Q\n\nAssistant: {text}" for name, text in (("chosen", "good"), ("rejected", "bad"))
    }), [("good", 1), ("bad", 2)]),
    ("pairs.csv", "prompt,chosen,rejected\nQ,good,bad\n", [("good", 1), ("bad", 2)]),
    ("alpaca.json", '[{"instruction": "Q", "output": "good"}]', [("good", None)]),
    ("chat.jsonl", '{"messages": [{"role": "user", "content": "P"}, {"role": "assistant", "content": "x"}, '
     '{"role": "user", "content": "Q"}, {"role": "assistant", "content": "good"}]}\n', [("good", None)]),
])  # fmt: skip
def test_any_format(tmp_path, name, content, expected):
    (tmp_path / name).write_text(content)
    score(tmp_path / name, tmp_path / "out.jsonl")
    rows = read(tmp_path / "out.jsonl")
    assert [(r["answer"], r["rank"]) for r in rows] == expected
    assert all(r["score"] == 1 + len(r["answer"]) / 100 for r in rows)  # the prompt ends with Q


@pytest.mark.parametrize("name", ["out.json", "out.jsonl.gz", "out.parquet"])
def test_kinds_of_output(tmp_path, name):
    score(rankings(tmp_path / "in.jsonl", 3), tmp_path / name)
    score(tmp_path / "in.jsonl", tmp_path / "out.jsonl")
    if name.endswith(".gz"):
        found = [json.loads(line) for line in gzip.decompress((tmp_path / name).read_bytes()).splitlines()]
    elif name.endswith(".json"):
        found = json.loads((tmp_path / name).read_text())
    else:
        import pyarrow.parquet

        found = pyarrow.parquet.read_table(tmp_path / name).to_pylist()
    assert found == read(tmp_path / "out.jsonl")


@pytest.mark.parametrize("out", ["out", "out.csv", "out.gz"])
def test_other_outputs_are_refused_before_anything_is_scored(tmp_path, out):
    with pytest.raises(DataError, match=r"name the output \.jsonl"):
        score(tmp_path / "missing.jsonl", tmp_path / out)


def test_prompts_without_answers_are_refused(tmp_path):
    (tmp_path / "p.jsonl").write_text('{"prompt": "Q"}\n')
    with pytest.raises(DataError, match="holds prompts without answers"):
        score(tmp_path / "p.jsonl", tmp_path / "out.jsonl")


def test_REW_07_scores_are_those_of_the_live_model_and_of_the_cache(tmp_path):
    path = model_folder(tmp_path / "reward", scalar=1)
    live = build_reward(path, device=CPU, dtype=torch.float32)
    source, options = rankings(tmp_path / "in.jsonl"), {"device": "cpu", "dtype": "float32"}
    for micro_batch_tokens in (30, 4096):
        score(source, tmp_path / "out.jsonl", str(path), micro_batch_tokens=micro_batch_tokens, **options)
        rows = read(tmp_path / "out.jsonl")
        prompts = [tuple(Message(**m) for m in r["prompt"]) for r in rows]
        expected = live.score_texts(prompts, [r["answer"] for r in rows], micro_batch_tokens=100)
        assert [r["score"] for r in rows] == pytest.approx(expected, abs=1e-4)
    cache = ScoreCache(tmp_path / "scores.sqlite")
    for name in ("first.jsonl", "second.jsonl"):
        score(source, tmp_path / name, str(path), cache=cache, **options)
    assert (tmp_path / "first.jsonl").read_bytes() == (tmp_path / "second.jsonl").read_bytes()


def test_a_score_that_is_nan_is_one_sentence_and_nothing_is_lost(tmp_path, small_parts, monkeypatch):
    source = rankings(tmp_path / "in.jsonl")
    with pytest.raises(EngineError) as found:
        score(source, tmp_path / "out.jsonl", HERE + "nan_at_b7")
    said = str(found.value)
    assert "answers 21 to 24" in said and "'r7'" in said and "the 20 scores before them are kept" in said
    assert not (tmp_path / "out.jsonl").exists()
    monkeypatch.setattr(sys.modules[__name__], "nan_at_b7", counting)
    monkeypatch.setenv("SCORE_CALLS", str(tmp_path / "calls"))
    done = score(source, tmp_path / "out.jsonl", HERE + "nan_at_b7")
    assert done.num_resumed == 20 and len((tmp_path / "calls").read_text().splitlines()) == 10
    assert [r["score"] for r in read(tmp_path / "out.jsonl")][:20] == [1.0] * 20


COMMAND = [sys.executable, "-m", "heedful.cli.main", "score", HERE + "counting"]


def test_a_killed_command_goes_on_where_it_stopped(tmp_path):
    """SIGKILL after some parts; the same command then asks for the rest alone and writes what a straight one does."""
    source, out = rankings(tmp_path / "in.jsonl", 300), tmp_path / "out.jsonl"
    calls, partial = tmp_path / "calls", tmp_path / "out.jsonl.partial"
    here = Path(__file__).parent
    paths = os.pathsep.join([str(here), str(here.parents[1]), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "SCORE_CALLS": str(calls), "SCORE_SECONDS": "0.2", "PYTHONPATH": paths}
    for at_least in (2, 4):
        process = subprocess.Popen([*COMMAND, str(source), "--out", str(out)], env=environment, stderr=subprocess.PIPE)
        deadline = time.monotonic() + 60
        while not (partial.exists() and partial.read_bytes().count(b"}\n") > at_least):
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        assert not out.exists()
    last = subprocess.run([*COMMAND, str(source), "--out", str(out)], env={**environment, "SCORE_SECONDS": "0"},
                          capture_output=True, text=True, timeout=60)  # fmt: skip
    assert last.returncode == 0 and "answers were scored before; going on" in last.stderr and not partial.exists()
    assert "all answers" in last.stdout and "writing" in last.stdout
    asked = calls.read_text().splitlines()
    assert len(set(asked)) == 900 and len(asked) <= 900 + 2 * 128  # at most the part of each kill is asked again
    score(source, tmp_path / "straight.jsonl")
    assert out.read_bytes() == (tmp_path / "straight.jsonl").read_bytes()


@pytest.mark.parametrize(("damage", "num_resumed"), [
    ("torn", 16), ("newline", 20), ("other file", 0), ("other model", 0), ("nonsense", 20), ("a digit", 16),
])  # fmt: skip
def test_what_is_torn_or_of_something_else_is_not_used(tmp_path, small_parts, monkeypatch, damage, num_resumed):
    source, partial = rankings(tmp_path / "in.jsonl"), tmp_path / "out.jsonl.partial"
    with pytest.raises(EngineError):
        score(source, tmp_path / "out.jsonl", HERE + "nan_at_b7")
    model = HERE + "by_length" if damage == "other model" else HERE + "nan_at_b7"
    monkeypatch.setattr(sys.modules[__name__], "nan_at_b7", by_length)
    if damage in ("torn", "newline"):
        partial.write_bytes(partial.read_bytes()[: -9 if damage == "torn" else -1])
    if damage == "other file":
        rankings(source, 11)
    if damage == "nonsense":
        partial.write_bytes(b"\x00" + partial.read_bytes())
    if damage == "a digit":  # of the last score: a file cut nowhere, and yet not what was written
        partial.write_bytes(partial.read_bytes().removesuffix(b"]]}}\n") + b"1]]}}\n")
    done = score(source, tmp_path / "out.jsonl", model)
    assert done.num_resumed == num_resumed
    assert done.num_answers == len(read(tmp_path / "out.jsonl")) == (33 if damage == "other file" else 30)


def test_a_torn_end_does_no_harm_to_what_is_written_behind_it(tmp_path, small_parts, monkeypatch):
    source, partial = rankings(tmp_path / "in.jsonl"), tmp_path / "out.jsonl.partial"
    for _ in range(2):  # fails, is torn, goes on and fails again
        with pytest.raises(EngineError):
            score(source, tmp_path / "out.jsonl", HERE + "nan_at_b7")
        whole = partial.read_bytes()
        partial.write_bytes(whole[:-9])
    partial.write_bytes(whole)
    monkeypatch.setattr(sys.modules[__name__], "nan_at_b7", by_length)
    assert score(source, tmp_path / "out.jsonl", HERE + "nan_at_b7").num_resumed == 20


def test_a_full_disk_is_one_sentence_and_loses_no_finished_part(tmp_path, small_parts, monkeypatch):
    source, calls, real = rankings(tmp_path / "in.jsonl"), [], os.fsync

    def full(handle):
        calls.append(handle)
        if len(calls) == 3:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(handle)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(CheckpointError, match=r"out\.jsonl\.partial: cannot write: No space left .* are kept"):
            score(source, tmp_path / "out.jsonl")
    assert score(source, tmp_path / "out.jsonl").num_resumed >= 8


def test_two_at_once_are_refused(tmp_path):
    source = rankings(tmp_path / "in.jsonl")
    said = "another process is writing this file"
    with alone(tmp_path / "out.jsonl.partial"), pytest.raises(CheckpointError, match=said):
        score(source, tmp_path / "out.jsonl")
    score(source, tmp_path / "out.jsonl")


def test_the_command_prints_the_distribution(tmp_path, capsys):
    source = rankings(tmp_path / "in.jsonl")
    command = ["score", HERE + "by_length", str(source), "--out", str(tmp_path / "out.jsonl"), "--no_cache"]
    assert main(command) == 0
    shown = capsys.readouterr()
    assert "30 answers scored" in shown.out and "chat" in shown.out and "p50" in shown.out
    assert "kept" in shown.err and "kept" not in shown.out
    assert main([*command, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["num_answers"] == 30 and found["categories"]["chat"]["num"] == 15
    assert main(["score", HERE + "missing", str(source), "--out", str(tmp_path / "out.jsonl")]) == 2
    said = capsys.readouterr().err.strip().splitlines()[-1]
    assert said.startswith("heedful: ") and "no function 'missing'" in said


def test_functions_need_no_torch(tmp_path):
    rankings(tmp_path / "in.jsonl")
    code = (
        "import sys; from heedful.cli.main import main\n"
        f"main(['score', 'operator:add', {str(tmp_path / 'in.jsonl')!r}, '--out', {str(tmp_path / 'o.jsonl')!r}])\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60).returncode == 0


@pytest.mark.parametrize("kind", ["attributes", "ensemble"])
def test_what_the_heads_of_a_model_say_stands_beside_the_score(tmp_path, small_parts, kind):
    part = build_scalar(model_folder(tmp_path / "base"), lora=None, device=CPU, dtype=torch.float32, new_head=True)
    heads = new_heads(kind, {"kind": 0.5, "safe": 0.5}, 32, seed=1, device=CPU)
    heads.means, heads.deviations = (0.5, -0.5), (2.0, 1.0)
    part.set_head(heads.row())
    save_reward(part.model, part.tokenizer, tmp_path / "out", score_mean=0, score_std=1, heads=heads)
    source, model = rankings(tmp_path / "in.jsonl", 3), str(tmp_path / "out")
    score(source, tmp_path / "a.jsonl", model, device="cpu", dtype="float32")
    for row in read(tmp_path / "a.jsonl"):
        kind_score, safe_score = row["heads"]["kind"], row["heads"]["safe"]
        factors = (0.25, 0.5) if kind == "attributes" else (0.5, 0.5)
        assert row["score"] == pytest.approx(factors[0] * kind_score + factors[1] * safe_score, abs=1e-5)
        assert ("disagreement" in row) == (kind == "ensemble")
        if kind == "ensemble":
            apart = abs((kind_score - 0.5) / 2 - (safe_score + 0.5)) / math.sqrt(2)
            assert row["disagreement"] == pytest.approx(1.5 * apart, rel=1e-5)
    score(source, tmp_path / "b.parquet", model, device="cpu", dtype="float32")
    assert Path(tmp_path / "b.parquet").exists()
