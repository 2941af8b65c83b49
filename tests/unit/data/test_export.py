"""Export → import gives the same pairs, for every format we write."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from heedful.data.export import EXPORTS, convert, record_row
from heedful.data.files import read_rows, write_jsonl
from heedful.data.load import load, load_rankings
from heedful.data.pairs import to_pairs
from heedful.errors import DataError
from heedful.records import Answer, Demonstration, Judgement, Message, Prompt, Ranking

ASK = (Message("user", "Why is the sky blue?"),)
TALK = (Message("user", "Hi\nthere"), Message("assistant", "Hello!"), Message("user", "为什么天是蓝的？"))
SYSTEM = (Message("system", "Be brief."), *ASK)


def rankings(*prompts: tuple[Message, ...]) -> list[Ranking]:
    answers = (Answer("a", "Scattering."), Answer("b", "Scattering"), Answer("c", "  Because…\n\n- blue  ".strip()))
    ranks = {"a": 1, "b": 3, "c": 2}
    return [Ranking(f"g{i}", p, answers, (Judgement("x", ranks),), info={"margin": 2.0}) for i, p in enumerate(prompts)]


def master(folder: Path, *prompts: tuple[Message, ...]) -> Path:
    path = folder / "master.jsonl"
    write_jsonl(path, (record_row(item) for item in rankings(*prompts)))
    return path


def pairs(path: Path) -> list[tuple[tuple[Message, ...], str, str]]:
    return [(p.prompt, p.chosen, p.rejected) for r in load_rankings(path) for p in to_pairs(r)]


PAIR_FORMATS = ["trl", "trl_messages", "openrlhf", "llama_factory", "hh", "verl", "nemo_rl", "pairs", "master"]


@pytest.mark.parametrize("to", PAIR_FORMATS)
def test_round_trip_gives_the_same_pairs(tmp_path: Path, to: str) -> None:
    source = master(tmp_path, ASK, TALK, ASK)
    out = tmp_path / ("out.parquet" if to == "verl" else "out.jsonl")
    done = convert(source, out, to)
    assert done.num_rows == (3 if to == "master" else 9)
    assert pairs(out) == pairs(source)


@pytest.mark.parametrize("to", ["trl_messages", "openrlhf", "llama_factory", "nemo_rl", "pairs", "master"])
def test_round_trip_keeps_the_system_message(tmp_path: Path, to: str) -> None:
    source = master(tmp_path, SYSTEM, ASK)
    convert(source, tmp_path / "out.json", to)
    assert pairs(tmp_path / "out.json") == pairs(source)


@pytest.mark.parametrize("to", ["trl_messages", "master", "nemo_rl", "llama_factory"])
def test_round_trip_through_parquet(tmp_path: Path, to: str) -> None:
    source = master(tmp_path, TALK, ASK)
    convert(source, tmp_path / "out.parquet", to)
    assert pairs(tmp_path / "out.parquet") == pairs(source)


def test_master_through_parquet_with_empty_and_uneven_fields(tmp_path: Path) -> None:
    answers = (Answer("a", "x"), Answer("b", "y"), Answer("c", "z"))
    first = Ranking("g", ASK, answers[:2], (Judgement("p", {"a": 1, "b": 2}),))
    second = Ranking("h", ASK, answers, (Judgement("q", {"a": 1, "c": 2}, 2.0),), lang="en", info={"k": "v"})
    for i, records in enumerate(([first], [first, second])):
        write_jsonl(tmp_path / "a.jsonl", [record_row(item) for item in records])
        convert(tmp_path / "a.jsonl", tmp_path / f"{i}.parquet", "master")
        assert load_rankings(tmp_path / f"{i}.parquet") == records


def test_every_export_is_tested() -> None:
    assert set(EXPORTS) == {*PAIR_FORMATS, "messages", "prompts"}


def test_master_loses_nothing(tmp_path: Path) -> None:
    item = Ranking(
        "g", TALK,
        (Answer("a", "x", "m", "gold", ("long",), 0.5), Answer("b", "y", kind="bait")),
        (Judgement("p", {"a": 1, "b": 2}, 3.5, "v1"), Judgement("q", {"a": 1, "b": 1})),
        {"a": 1, "b": 2}, "chat", "en", 2, "app", (("a", "b"),), {"k": [1]},
    )  # fmt: skip
    path = tmp_path / "a.jsonl"
    write_jsonl(path, [record_row(item)])
    assert next(iter(read_rows(path))).data["schema"] == "heedful.ranking/1"
    assert load_rankings(path) == [item]


def test_shapes_of_the_rows(tmp_path: Path) -> None:
    source = master(tmp_path, ASK)

    def first(to: str, name: str = "out.jsonl") -> dict[str, object]:
        convert(source, tmp_path / name, to)
        return next(iter(read_rows(tmp_path / name))).data

    assert first("trl") == {
        "prompt": "Why is the sky blue?", "chosen": "Scattering.", "rejected": "Because…\n\n- blue", "margin": 2.0,
    }  # fmt: skip
    assert first("hh")["chosen"] == "\n\nHuman: Why is the sky blue?\n\nAssistant: Scattering."
    assert first("nemo_rl")["completions"][0] == {  # type: ignore[index]
        "rank": 0, "completion": [{"role": "assistant", "content": "Scattering."}],
    }  # fmt: skip
    assert set(first("verl", "out.parquet")) >= {"prompt", "chosen", "rejected"}
    first("llama_factory")
    assert json.loads((tmp_path / "dataset_info.json").read_text())["out"] == {
        "file_name": "out.jsonl", "ranking": True, "formatting": "sharegpt",
        "columns": {"messages": "conversations", "chosen": "chosen", "rejected": "rejected"},
    }  # fmt: skip
    first("llama_factory", "other.jsonl")
    assert set(json.loads((tmp_path / "dataset_info.json").read_text())) == {"out", "other"}


def test_scores_do_not_become_a_margin_column(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    write_jsonl(path, [{"prompt": "Q", "answers": [{"text": "x", "score": 0.9}, {"text": "y", "score": 0.1}]}])
    convert(path, tmp_path / "b.jsonl", "trl")
    assert "margin" not in next(iter(read_rows(tmp_path / "b.jsonl"))).data


@pytest.mark.parametrize(
    ("to", "prompt", "answer", "said"),
    [
        ("hh", SYSTEM, "x", "a transcript has no place for a system message"),
        ("trl", SYSTEM, "x", "a transcript has no place for a system message"),
        ("hh", (Message("user", "a\n\nHuman: b"),), "x", "holds a turn marker itself"),
        ("hh", ASK, "a\n\nAssistant: b", "holds a turn marker itself"),
    ],
)
def test_what_a_format_cannot_say_is_refused(
    tmp_path: Path, to: str, prompt: tuple[Message, ...], answer: str, said: str
) -> None:
    path, out = tmp_path / "a.jsonl", tmp_path / "out.jsonl"
    bad = Ranking("bad", prompt, (Answer("a", answer), Answer("b", "z")), (Judgement("x", {"a": 1, "b": 2}),))
    write_jsonl(path, [record_row(item) for item in (*rankings(ASK), bad)])
    with pytest.raises(DataError, match=f"the ranking bad cannot be written as {to} .*{said}"):
        convert(path, out, to)
    assert not out.exists()
    done = convert(path, out, to, on_bad_row="skip")
    assert done.num_rows == 3 and done.loaded.num_dropped == 1


def test_wrong_targets_are_refused(tmp_path: Path) -> None:
    source = master(tmp_path, ASK)
    for out, to, said in (
        ("o.jsonl", "trl_message", "did you mean 'trl_messages'"),
        ("o.jsonl", "verl", "verl reads Parquet; name the output …o.parquet"),
        ("o.xlsx", "trl", "name the output .jsonl, .json or .parquet"),
        ("o.jsonl", "messages", "holds rankings"),
    ):
        with pytest.raises(DataError, match=said):
            convert(source, tmp_path / out, to)


def test_demonstrations_and_prompts_are_read_back(tmp_path: Path) -> None:
    demonstration = Demonstration("d", (*TALK, Message("assistant", "A")), "chat", "s")
    records = [demonstration, Prompt("p", TALK, "chat", "s", {"k": 1})]
    for record in records:
        path = tmp_path / f"{record.id}.jsonl"
        write_jsonl(path, [record_row(record)])
        assert load(path).records == [record]
    convert(tmp_path / "d.jsonl", tmp_path / "m.jsonl", "messages")
    assert load(tmp_path / "m.jsonl").records == records[:1]
    convert(master(tmp_path, ASK, ASK, TALK), tmp_path / "q.jsonl", "prompts")
    assert [r.messages for r in load(tmp_path / "q.jsonl").records] == [ASK, TALK]  # type: ignore[union-attr]
