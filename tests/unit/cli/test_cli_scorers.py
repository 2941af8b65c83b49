"""Verbs that ask a scorer: what it gives, what it prints, and the options they share."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from heedful.cli.main import main
from heedful.data.export import record_row
from heedful.data.writing import write_jsonl
from toy_scorers import rankings

HERE = f"{__name__}:"
LARGEST = 3.4e38


def huge(prompts, answers):
    return [1e308 * (-1) ** len(a) for a in answers]


def integer(prompts, answers):
    return [10**400 for _ in answers]


def truth(prompts, answers):
    return [len(a) > 40 for a in answers]


def digits(prompts, answers):
    return [f"{len(a)}.0" for a in answers]


def large(prompts, answers):
    return [LARGEST * (-1) ** len(a) for a in answers]


def speaks(prompts, answers):
    print("scoring", len(answers))
    return [len(a) % 7 for a in answers]


@pytest.fixture
def verbs(tmp_path: Path) -> dict[str, list[str]]:
    """By verb, what stands behind the scorer."""
    file = str(tmp_path / "rankings.jsonl")
    write_jsonl(file, [record_row(r) for r in rankings(12)])
    return {
        "score": [file, "--out", str(tmp_path / "out.jsonl")], "card": [file],
        "audit": ["--data", file, "--language", "en", "--max_prompts", "8"], "serve-reward": [],
    }  # fmt: skip


@pytest.mark.parametrize("verb", ["score", "card", "audit"])
@pytest.mark.parametrize("name, said", [
    ("huge", "beyond"), ("integer", "beyond"), ("truth", "per answer, not "), ("digits", "per answer, not '"),
])  # fmt: skip
def test_what_is_no_plain_number_is_one_sentence(verbs, capsys, verb, name, said):
    assert main([verb, HERE + name, *verbs[verb], "--json"]) == 2
    shown = capsys.readouterr()
    last = shown.err.strip().splitlines()[-1]
    assert last.startswith("heedful: ") and said in last and shown.out == ""


def strict(text: str) -> object:
    def refuse(name: str) -> None:
        raise AssertionError(name)

    return json.loads(text, parse_constant=refuse)


@pytest.mark.parametrize("verb", ["score", "card", "audit"])
@pytest.mark.parametrize("name", ["large", "speaks"])
def test_the_largest_scores_and_printing_functions_leave_strict_json(verbs, capsys, verb, name):
    assert main([verb, HERE + name, *verbs[verb], "--json"]) in (0, 2)
    shown = capsys.readouterr()
    assert isinstance(strict(shown.out), dict)
    assert ("scoring" in shown.err) == (name == "speaks")


@pytest.mark.parametrize("verb", ["score", "card", "audit", "serve-reward"])
@pytest.mark.parametrize("option, value", [
    ("--timeout_seconds", "-1"), ("--timeout_seconds", "0"), ("--timeout_seconds", "nan"), ("--timeout_seconds", "inf"),
    ("--timeout_seconds", "1e20"), ("--timeout_seconds", "soon"), ("--seed", "-1"), ("--seed", "2147483648"),
    ("--seed", "1.5"), ("--micro_batch_tokens", "-5"), ("--micro_batch_tokens", "0"), ("--micro_batch_tokens", "many"),
])  # fmt: skip
@pytest.mark.parametrize("more", [[], ["--no_cache"]], ids=["cache", "no-cache"])
def test_options_out_of_range_are_refused(verbs, capsys, verb, option, value, more):
    lacks = {"serve-reward": ("--timeout_seconds", "--seed", "--no_cache"), "score": ("--seed",)}.get(verb, ())
    if {option, *more} & set(lacks):
        pytest.skip(f"{verb} has no such option")
    with pytest.raises(SystemExit) as stopped:
        main([verb, HERE + "speaks", *verbs[verb], option, value, *more])
    shown = capsys.readouterr()
    last = shown.err.strip().splitlines()[-1]
    assert stopped.value.code == 2 and last.startswith(f"heedful {verb}: error: argument {option}: ") and value in last
    assert shown.out == "" and "must be" in last
