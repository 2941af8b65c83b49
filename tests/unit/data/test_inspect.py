"""The inspection's numbers, and the data verbs of the command line."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from heedful.cli import data as data_cli
from heedful.cli.main import main
from heedful.data.files import read_rows, write_jsonl
from heedful.data.inspect import count_words, inspect


def ranked(prompt: str, *texts: str, **more: Any) -> dict[str, Any]:
    return {"prompt": prompt, "answers": [{"text": text} for text in texts], **more}


@pytest.fixture()
def file(tmp_path: Path) -> Path:
    path = tmp_path / "a.jsonl"
    write_jsonl(
        path,
        [
            ranked("What is a hash table, and when is it slow?", "long answer", "short", category="chat"),
            ranked("what is a hash table, and when is it slow?", "x", "yyyy", "zz", category="chat"),
            ranked("写一首关于秋天的短诗，四行。", "同长", "一样", category="writing"),
            ranked("写一首关于秋天的短诗，四行。", "同长", "一样", category="writing"),
            ranked("Name three rivers.", "same", "same"),
            ranked("Name three lakes.", "some", ""),
        ],
    )
    return path


def test_numbers(file: Path) -> None:
    found = inspect(file)
    assert (found.format, found.kind, found.num_read, found.num_kept) == ("rankings", "rankings", 6, 4)
    assert found.dropped == {"empty_answer": 1, "identical_answers": 1}
    assert found.num_duplicate_rows == 1
    assert (found.num_distinct_prompts, found.num_prompt_groups) == (2, 2)
    assert found.categories == {"chat": 2, "writing": 2} and found.languages == {"other": 2, "cjk": 2}
    preferences = found.preferences
    assert preferences is not None
    assert preferences.num_answers == {"2": 3, "3": 1}
    assert (preferences.num_pairs, preferences.num_tied_pairs, preferences.num_judgements) == (6, 0, 4)
    # rows: 1; of x>yyyy, x>zz, yyyy>zz one in three; 1/2; 1/2
    assert preferences.longer_wins == pytest.approx((1 + 1 / 3 + 1 / 2 + 1 / 2) / 4)
    assert preferences.longer_wins_pairs == pytest.approx((1 + 1 + 0.5 + 0.5) / 6)
    assert preferences.agreement is None
    assert found.lengths["answer"].characters["p100"] == 11 and found.lengths["best answer"].characters["p0"] == 1
    assert found.lengths["answer"].words["mean"] == pytest.approx((2 + 1 + 1 + 1 + 1 + 2 * 4) / 9)


def test_near_duplicates_ties_and_agreement(tmp_path: Path) -> None:
    long = "Describe in detail how a hash table works and when its operations are slow"
    answers = [{"id": "a", "text": "x"}, {"id": "b", "text": "yy"}, {"id": "c", "text": "x"}]
    ranks = {"p": {"a": 1, "b": 1, "c": 2}, "q": {"a": 1, "b": 2, "c": 3}}
    votes = [{"annotator": name, "ranks": given} for name, given in ranks.items()]
    item = {"group_id": "g", "prompt": [{"role": "user", "content": long}], "answers": answers}
    path = tmp_path / "a.jsonl"
    write_jsonl(path, [item | {"rankings": votes}, item | {"group_id": "h", "rankings": votes[:1]} | {
        "prompt": [{"role": "user", "content": long + "!"}]}])  # fmt: skip
    found = inspect(path)
    assert (found.num_distinct_prompts, found.num_prompt_groups) == (2, 1)
    assert found.preferences is not None and found.preferences.agreement is not None
    assert (found.preferences.num_tied_pairs, found.preferences.num_identical_answers) == (1, 2)
    assert (found.preferences.agreement.num_pairs, found.preferences.agreement.observed) == (3, pytest.approx(2 / 3))


def test_leakage_between_two_files(file: Path, tmp_path: Path) -> None:
    other = tmp_path / "b.txt"
    prompts = ("What is a hash table, and when is it slow ?", "写一首关于秋天的短诗，四行。", "Something else.")
    other.write_text("\n".join(prompts), "utf-8")
    leak = inspect(file, other).leakage
    assert leak is not None
    assert (leak.num_same_prompts, leak.num_like_prompts) == (2, 4)


def test_words_in_mixed_text() -> None:
    assert count_words("Hello, 世界! it's 42") == 6
    assert count_words("") == 0


# The command line.


def run(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> tuple[int, str, str]:
    code = main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_inspect_prints_plain_lines_and_json(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "data", "inspect", file)
    assert code == 0
    assert "format: rankings (rankings)" in out and "rows dropped: 2" in out
    assert f"empty_answer: 1 (first: {file} line 6: field 'answers[1].text' is empty)" in out
    assert "longer answer wins: 58.3% by prompt, 50.0% by pair" in out and "\x1b" not in out
    code, out, _ = run(capsys, "data", "inspect", file, "--json", "--against", file)
    assert json.loads(out) == json.loads(json.dumps(inspect(file, file).to_json()))


def test_inspect_draws_a_table_on_a_terminal(
    file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    code, out, _ = run(capsys, "data", "inspect", file)
    assert code == 0 and "│ format" in out and "rankings (rankings)" in out


def test_convert_split_and_pairs(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, "data", "convert", file, "--to", "trl", "--out", tmp_path / "t.jsonl")
    assert code == 2 and "line 6: field 'answers[1].text' is empty" in err
    skip = ("--on_bad_row", "skip")
    code, out, _ = run(capsys, "data", "convert", file, "--to", "trl", "--out", tmp_path / "t.jsonl", *skip)
    assert code == 0 and "6 rows read as rankings, 4 kept, 2 dropped" in out and "6 rows written as trl" in out
    assert len(list(read_rows(tmp_path / "t.jsonl"))) == 6
    code, out, _ = run(capsys, "data", "pairs", file, "--out", tmp_path / "p.jsonl", *skip)
    first = next(iter(read_rows(tmp_path / "p.jsonl"))).data
    assert code == 0 and (first["chosen"], first["num_votes"], first["agree_fraction"]) == ("long answer", 1, 1.0)
    code, out, _ = run(capsys, "data", "split", file, "--out_dir", tmp_path / "s", "--fraction", "0.5", *skip)
    assert code == 0 and "2 to train.jsonl, 2 to held_out.jsonl" in out
    against = inspect(tmp_path / "s" / "train.jsonl", tmp_path / "s" / "held_out.jsonl").leakage
    assert against is not None and against.num_like_prompts == 0


ROW = '{"prompt": "p", "chosen": "c", "rejected": "r"}\n'
BROKEN: dict[str, tuple[bytes, str]] = {
    "truncated.json": (("[" + ROW.strip() + ",\n" + ROW[:20]).encode(), "line 2: the JSON is cut off before its end"),
    "encoding.json": (b'[{"prompt": "caf\xe9", "chosen": "c", "rejected": "r"}]', "line 1: byte 0xe9"),
    "missing_keys.jsonl": (b'{"prompt": "p", "chosen": "c"}\n', "the nearest is trl, but field 'rejected' is missing"),
    "none.jsonl": (ROW.replace('"r"', "null").encode(), "0 kept, all dropped (null_field 1)"),
    "empty.jsonl": (b"", "the file is empty (0 bytes)"),
    "blank.jsonl": (b"\n \r\n\n", "nothing but blank lines"),
    "mixed.jsonl": ((ROW + '{"instruction": "i", "output": "o"}\n').encode(), "row in line 2 looks like alpaca"),
    "binary.jsonl": (b"\x7fELF\x00\x01\x02", "line 1: holds zero bytes"),
    "utf16.jsonl": (ROW.encode("utf-16"), "UTF-16"),
    "list.jsonl": (b"[1, 2]\n", "1 rows read, 0 kept, all dropped (not_an_object 1)"),
    "cut.jsonl.gz": (b"\x1f\x8b\x08\x00\x00", "gzip"),
    "fake.parquet": (ROW.encode(), "Parquet"),
    "quote.csv": (b'prompt,chosen,rejected\n"p,c,r\n', "is a quote not closed?"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_files_give_one_sentence_and_exit_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    path = tmp_path / name
    path.write_bytes(BROKEN[name][0])
    code, out, err = run(capsys, "data", "inspect", path)
    assert code == 2 and out == ""
    assert BROKEN[name][1] in err and str(path) in err
    assert len(err.strip().splitlines()) == 1 and "Traceback" not in err


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("bom.jsonl", b"\xef\xbb\xbf" + ROW.encode() * 2, "records kept: 2"),
        ("crlf.jsonl", ROW.replace("\n", "\r\n").encode() * 2, "records kept: 2"),
        ("cut.jsonl", (ROW + ROW[:20]).encode(), "invalid_json: 1 (first: "),
        ("latin.jsonl", ROW.encode() + b'{"prompt": "\xe9"}\n', "not_utf8: 1 (first: "),
        ("ids.jsonl", b'{"id": 1, "prompt": "p"}\n{"id": 1, "prompt": "q"}\n', "duplicate_id: 1 (first: "),
        ("some_none.jsonl", (ROW + ROW.replace('"r"', "null")).encode(), "null_field: 1 (first: "),
        ("huge.jsonl", (ROW + ROW.replace('"r"', f'"{"r" * 2**20}"')).encode(), "worst answer, characters: 1 / "),
    ],
)
def test_files_with_some_good_rows_are_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, content: bytes, said: str
) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    code, out, err = run(capsys, "data", "inspect", path)
    assert code == 0 and said in out and err == ""


def test_help_says_what_a_user_needs(capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser(prog="heedful")
    data_cli.add_parser(parser.add_subparsers())
    for arguments, words in (
        (["data", "--help"], ("inspect", "convert", "split", "pairs")),
        (["data", "convert", "--help"], ("trl_messages", "llama_factory", "verl", "nemo_rl", "master", "--on_bad_row")),
        (["data", "split", "--help"], ("held_out.jsonl", "--fraction", "--seed")),
    ):
        with pytest.raises(SystemExit) as stopped:
            parser.parse_args(arguments)
        said = capsys.readouterr().out
        assert stopped.value.code == 0 and all(word in said for word in words)


def test_a_control_item_that_nobody_has_judged_is_counted_without_a_best_answer(tmp_path: Path) -> None:
    answers = [{"id": "a", "text": "right"}, {"id": "b", "text": "wrong!"}]
    rows = [
        {"group_id": "gold", "prompt": "q", "answers": answers, "gold": [["a", "b"]]},
        {"group_id": "open", "prompt": "r", "answers": answers},
    ]
    write_jsonl(tmp_path / "rows.jsonl", rows)
    found = inspect(tmp_path / "rows.jsonl")
    assert found.num_kept == 1 and set(found.lengths) == {"prompt", "answer"}
    assert found.dropped == {"missing_ranks": 1} and "see heedful annotate" in found.examples["missing_ranks"]
    assert found.preferences is not None and found.preferences.num_pairs == 0
