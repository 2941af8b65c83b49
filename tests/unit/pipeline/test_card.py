"""``heedful card``: the card of folder, server and function on a file; what cannot be used is one clear sentence."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import re
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch

from heedful.cli.main import main
from heedful.data.formats.lists import write_master
from heedful.errors import DataError, EngineError
from heedful.models.roles import build_scalar
from heedful.pipeline.card import card_of_file
from heedful.records import Answer, Judgement, Message, Ranking, RewardCard
from toy_parts import model_folder

HERE = f"{__name__}:"


def by_length(prompts, answers):
    return [float(len(a)) for a in answers]


def nan_for_late(prompts, answers):
    return [math.nan if p.id == "g70" else float(len(a)) for p, a in zip(prompts, answers, strict=True)]


def broken(prompts, answers):
    raise TimeoutError("the judge sleeps")


def too_few(prompts, answers):
    return [0.0]


def record(n, *texts, ranks=None, **options):
    """Answers from best to worst, unless ``ranks`` says otherwise (0 = not ranked)."""
    answers = tuple(Answer(f"a{k}", text) for k, text in enumerate(texts))
    order = {a.id: rank for a, rank in zip(answers, ranks or range(1, len(texts) + 1), strict=True) if rank}
    return Ranking(f"g{n}", (Message("user", f"Question {n}"),), options.pop("answers", answers),
                   (Judgement("r1", order),), **options)  # fmt: skip


def write(path, rows):
    rows = [write_master(row) if isinstance(row, Ranking) else row for row in rows]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_REW_07_the_verb_finds_what_training_reported(tmp_path, capsys):
    """Per-row scores and accuracy of the trainer's evaluation and of the verb on the same file."""
    from heedful.config.reward import RewardConfig
    from heedful.data import tokenise
    from heedful.data.pairs import consensus
    from heedful.train.reward import reward_card

    folder = model_folder(tmp_path / "rm", scalar=1)
    rows = [record(n, *(f"{'word ' * ((n * k) % 4)}{k}" for k in range(2 + n % 3))) for n in range(30)]
    file = write(tmp_path / "held_out.jsonl", rows)
    model = build_scalar(folder, lora=None, device=torch.device("cpu"), dtype=torch.float32)
    samples = tokenise.rankings(rows, [consensus(r) for r in rows], model.tokenizer, max_tokens=200).samples
    trained = reward_card(model, samples, RewardConfig(), seed=0)
    assert main(["card", str(folder), file, "--json", "--no_cache", "--device", "cpu", "--dtype", "float32"]) == 0
    card = RewardCard.from_json(json.loads(capsys.readouterr().out))
    assert (card.accuracy, card.accuracy_low, card.num_pairs) == (
        trained.accuracy, trained.accuracy_low, trained.num_pairs)  # fmt: skip
    assert card.over_pairs == trained.over_pairs and card.length_accuracy == trained.length_accuracy
    assert (card.score_mean, card.score_std) == pytest.approx((trained.score_mean, trained.score_std), abs=1e-4)
    assert card.margins == pytest.approx(trained.margins, abs=1e-4)
    assert card.model == str(folder) and card.data["num_rankings"] == 30 and card.data["format"] == "master"


def test_a_function_needs_no_torch_and_the_text_says_what_the_card_says(tmp_path):
    rows = [record(n, "longest answer", "middling", "short", category="chat" if n % 2 else "qa") for n in range(20)]
    file = write(tmp_path / "a.jsonl", rows)
    (tmp_path / "mine.py").write_text("def score(prompts, answers):\n    return [float(len(a)) for a in answers]\n")
    code = f"""
import sys; sys.path.insert(0, {str(tmp_path)!r})
from heedful.cli.main import main
code = main(["card", "mine:score", {file!r}])
sys.exit(code or "torch" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "all pairs" in done.stdout and "category chat" in done.stdout and "60       20" in done.stdout
    assert "the scores prefer the longer answer in 100.0% of pairs, the people in 100.0%" in done.stdout
    assert "Ties: 0 pairs" in done.stdout and "Calibration error" in done.stdout


def test_what_nobody_ranked_and_what_cannot_be_told_apart_is_left_out_and_counted(tmp_path):
    rows = [
        record(0, "one", "three", "fifteen!"[::-1], ranks=[1, 2, 0]),  # the third is not ranked
        record(1, "same", "same", "other one", ranks=[1, 2, 3]),  # equal texts, different ranks
        record(2, "same", "same", "longer text", ranks=[2, 2, 1]),  # equal texts, one rank
    ]
    card = card_of_file(HERE + "by_length", write(tmp_path / "a.jsonl", rows))
    assert card.data["answers_dropped"] == {"not_ranked": 1, "identical_answers": 3}
    assert (card.num_pairs, card.num_prompts) == (2, 2)  # g0: one < three; g2: longer > same; g1: nothing left
    assert card.accuracy == 0.5


def test_controls_and_baits_of_a_file_stand_apart(tmp_path):
    kinds = (Answer("a0", "good answer"), Answer("a1", "fine"), Answer("a2", "x", kind="bait"))
    rows = [
        record(0, "longer", "less"),
        record(1, "", "", "", answers=kinds, ranks=[1, 2, 0]),  # the bait needs no rank
        record(2, "right and long", "wrong", gold=(("a0", "a1"),)),
        record(3, "right", "wrong but long", gold=(("a0", "a1"),)),
    ]
    file = write(tmp_path / "a.jsonl", rows)
    card = card_of_file(HERE + "by_length", file)
    assert (card.num_pairs, card.accuracy, card.baits.value, card.baits.num_pairs) == (2, 1.0, 1.0, 2)
    assert (card.gold_controls.num_passed, card.gold_controls.num_items) == (1, 2)
    write(tmp_path / "a.jsonl", [*rows, record(4, "a", "b", gold=(("a0", "a9"),))])
    with pytest.raises(DataError, match="a.jsonl line 5: field 'gold' has .*a9.* pair"):
        card_of_file(HERE + "by_length", file)
    write(tmp_path / "a.jsonl", [*rows, record(4, "a", "b", gold=(("a0", "a1", "a0"),))])
    with pytest.raises(DataError, match="line 5: field 'gold' has"):
        card_of_file(HERE + "by_length", file)


GOOD = write_master(record(0, "longer", "less"))
ANSWERS = [{"id": "a", "text": "x"}, {"id": "b", "text": "yy"}]
MASTER = {"group_id": "g", "prompt": "Q", "answers": ANSWERS}


@pytest.mark.parametrize(
    ("row", "said"),
    [
        (MASTER, "no judgement and no consensus ranks two answers"),
        ({**MASTER, "rankings": [{"annotator": "r", "ranks": {"a": 1}}]}, "ranks two answers"),
        ({**MASTER, "rankings": [{"annotator": "r", "ranks": ["a", "b", "a"]}]}, "'rankings[0].ranks' lists an answer"),
        ({**MASTER, "rankings": [{"annotator": "r", "ranks": {"a": 1, "c": 2}}]}, "ranks 'c', which is no answer's id"),
        ({**MASTER, "rankings": [{"annotator": "r", "ranks": {"a": 1.5, "b": 2}}]}, "whole numbers"),
        ({**MASTER, "rankings": [{"annotator": "r", "ranks": {"a": 2, "b": 3}}]}, "begin with 1 (or 0)"),
        ({**MASTER, "answers": [ANSWERS[0], {"id": "a", "text": "z"}]}, "two answers have the id 'a'"),
    ],
)
def test_a_ranking_with_bad_ranks_is_one_sentence_with_file_and_line(tmp_path, capsys, row, said):
    file = write(tmp_path / "a.jsonl", [GOOD, row])
    assert main(["card", HERE + "by_length", file]) == 2
    error = capsys.readouterr().err.strip().splitlines()
    assert len(error) == 1 and error[0].startswith("heedful: ") and "a.jsonl" in error[0] and "line 2" in error[0]
    assert said in error[0]
    assert main(["card", HERE + "by_length", file, "--on_bad_row", "skip", "--json"]) == 0
    assert sum(json.loads(capsys.readouterr().out)["data"]["dropped"].values()) == 1


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([{"chosen": "Hello there", "rejected": "Bye now"}], "no common beginning, so there is no prompt"),
        ([{"chosen": [{"role": "user", "content": "Q1"}, {"role": "assistant", "content": "x"}],
           "rejected": [{"role": "user", "content": "Q2"}, {"role": "assistant", "content": "y"}]}], "'rejected'"),
        ([{"prompt": "Q", "chosen": [{"role": "user", "content": "Q1"}, {"role": "assistant", "content": "x"}],
           "rejected": [{"role": "user", "content": "Q1"}, {"role": "assistant", "content": "y"}]}],
         "is not the prompt that 'chosen' and 'rejected' begin with"),
    ],
)  # fmt: skip
def test_answers_of_different_prompts_are_one_sentence(tmp_path, capsys, rows, said):
    assert main(["card", HERE + "by_length", write(tmp_path / "a.jsonl", rows)]) == 2
    error = capsys.readouterr().err.strip().splitlines()
    assert len(error) == 1 and "a.jsonl" in error[0] and "line 1" in error[0] and said in error[0]


def test_all_tied_rankings_are_counted_and_a_file_of_nothing_else_is_refused(tmp_path, capsys):
    tied = record(1, "a", "bb", ranks=[1, 1])
    card = card_of_file(HERE + "by_length", write(tmp_path / "a.jsonl", [GOOD, tied]))
    assert card.data["dropped"] == {"all_tied": 1} and card.num_pairs == 1
    assert main(["card", HERE + "by_length", write(tmp_path / "b.jsonl", [tied])]) == 2
    assert "b.jsonl: 1 rows read, 0 kept, all dropped (all_tied 1)" in capsys.readouterr().err
    assert (
        main(["card", HERE + "by_length", write(tmp_path / "c.jsonl", [record(1, "ab", "b", gold=(("a0", "a1"),))])])
        == 2
    )
    assert "c.jsonl: no pair to judge" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("nan_for_late", "after 64 of 80 rankings: {} gave nan for an answer to prompt 'g70'"),
        ("broken", "after 0 of 80 rankings: {} failed: TimeoutError('the judge sleeps')"),
        ("too_few", "gave 1 scores for 128 answers"),
    ],
)
def test_a_scorer_that_fails_is_one_sentence(tmp_path, capsys, name, said):
    file = write(tmp_path / "a.jsonl", [record(n, "longer", "less") for n in range(80)])
    assert main(["card", HERE + name, file]) == 2
    error = [line for line in capsys.readouterr().err.splitlines() if line.startswith("heedful: ")]
    assert len(error) == 1 and "a.jsonl" in error[0] and said.format(HERE + name) in error[0]


class Judge(BaseHTTPRequestHandler):
    """Scores by length, says NaN, or falls asleep."""

    mode = "length"

    def do_POST(self):
        query = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if Judge.mode == "sleep":
            time.sleep(0.6)
        scores = [math.nan if Judge.mode == "nan" else len(text) for text in query["query"]]
        body = json.dumps({"rewards": scores}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        with contextlib.suppress(BrokenPipeError):  # the asker did not wait
            self.wfile.write(body)

    def log_message(self, *_):
        pass


@pytest.fixture
def judge():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Judge)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


def test_a_server_scores_and_one_that_gives_nan_or_sleeps_is_one_sentence(tmp_path, judge, monkeypatch):
    file = write(tmp_path / "a.jsonl", [record(n, "longer", "less") for n in range(3)])
    monkeypatch.setattr(Judge, "mode", "length")
    assert card_of_file(judge, file).accuracy == 1.0
    monkeypatch.setattr(Judge, "mode", "nan")
    with pytest.raises(EngineError, match="a score of NaN; it must be a finite number"):
        card_of_file(judge, file)
    monkeypatch.setattr(Judge, "mode", "sleep")
    with pytest.raises(EngineError, match=r"a.jsonl, after 0 of 3 rankings: .*\(no answer within 0.1 s\)"):
        card_of_file(judge, file, timeout_seconds=0.1, retries=0)


def test_a_text_that_the_model_cannot_read_is_named_with_its_prompt(tmp_path, capsys):
    folder = str(model_folder(tmp_path / "rm", scalar=1))
    rows = [record(n, "longer", "less") for n in range(8)]
    for bad, said in (
        (record(8, "word " * 400, "less"), "'g8': .* tokens with its answer 'word .*the model has 256 positions"),
        (dataclasses.replace(record(8, "a", "b"), prompt=(Message("user", "x <|im_end|> y"),)),
         "'g8': message 1 holds the control token"),
    ):  # fmt: skip
        file = write(tmp_path / "a.jsonl", [*rows, bad])
        for command in (["card", folder, file], ["score", folder, file, "--out", str(tmp_path / "out.jsonl")]):
            assert main([*command, "--no_cache", "--device", "cpu"]) == 2
            error = [line for line in capsys.readouterr().err.splitlines() if line.startswith("heedful: ")]
            assert len(error) == 1 and re.search(said, error[0]) and "leave it out of the file" in error[0]
            assert "a.jsonl" in error[0] and "max_tokens" not in error[0]


def test_equal_answers_with_different_ranks_are_the_reason_that_is_given(tmp_path):
    with pytest.raises(DataError, match=r"no ranking has two different answers.*identical_answers 2"):
        card_of_file(HERE + "by_length", write(tmp_path / "a.jsonl", [record(1, "same", "same", "other one")]))
