"""Every format: recognised by its rows, imported with the right side preferred, refused with a named reason."""

from __future__ import annotations

import contextlib
import copy
import json
from pathlib import Path
from typing import Any

import pytest

from heedful.data.files import BadRow, Row, write_jsonl
from heedful.data.formats import registry
from heedful.data.formats.base import number
from heedful.data.formats.transcripts import common_text
from heedful.data.load import load, load_rankings
from heedful.data.pairs import consensus, to_pairs
from heedful.errors import DataError
from heedful.records import Message, Ranking

USER, ASSISTANT, SYSTEM = (lambda t, r=role: {"role": r, "content": t} for role in ("user", "assistant", "system"))
HUMAN, GPT = "\n\nHuman: ", "\n\nAssistant: "


def oasst(name: str, parent: str | None, role: str, text: str, rank: float | None = None) -> dict[str, Any]:
    return {"message_id": name, "parent_id": parent, "role": role, "text": text, "rank": rank, "lang": "de"}


def webgpt(first: float, second: float) -> dict[str, Any]:
    return {"question": {"full_text": "Q"}, "answer_0": "good", "answer_1": "bad", "score_0": first, "score_1": second}


OASST = [
    oasst("r", None, "prompter", "Q"),
    oasst("a", "r", "assistant", "bad", 1.0),
    oasst("b", "r", "assistant", "good", 0.0),
    oasst("c", "r", "assistant", "unranked"),
]
TREE = {
    "message_tree_id": "r",
    "prompt": {**OASST[0], "replies": [{**OASST[1], "replies": []}, {**OASST[2], "replies": []}]},
}
ARENA = {"prompt": '["Q"]', "response_a": '["bad"]', "response_b": '["good"]', "model_a": "m", "model_b": "n"}
PKU = {"prompt": "Q", "response_0": "good", "response_1": "bad", "better_response_id": 0, "safer_response_id": 1}
STEER = {"correctness": 1, "coherence": 2, "complexity": 1, "verbosity": 3}

LABEL_STUDIO = {
    "id": 5, "data": {"prompt": "Q", "items": [{"id": "m1", "body": "bad"}, {"id": "m2", "body": "good"}]},
    "annotations": [{"completed_by": 3, "lead_time": 4.5, "was_cancelled": False, "result": [
        {"type": "ranker", "from_name": "rank", "to_name": "list", "value": {"ranker": {"rank": ["m2", "m1"]}}}]}],
}  # fmt: skip
ARGILLA = {
    "id": "r", "fields": {"prompt": "Q", "response_1": "bad", "response_2": "good"}, "metadata": {}, "suggestions": {},
    "responses": {"preference": [{"user_id": "u", "value": [
        {"value": "response-2", "rank": 1}, {"value": "response-1", "rank": 2}]}]},
}  # fmt: skip

# format, its rows, and what the single ranking must prefer: "good" over "bad" to the prompt "Q".
CASES: list[tuple[str, list[dict[str, Any]]]] = [
    ("label_studio", [LABEL_STUDIO]),
    ("argilla", [ARGILLA]),
    ("argilla", [{**ARGILLA, "responses": [{"user_id": "u", "status": "submitted", "values": {
        "preference": {"value": ["response-2", "response-1"]}}}]}]),
    ("trl", [{"prompt": "Q", "chosen": "good", "rejected": "bad"}]),
    ("trl", [{"prompt": [USER("Q")], "chosen": [ASSISTANT("good")], "rejected": [ASSISTANT("bad")]}]),
    (
        "trl",
        [{"prompt": "Q", "chosen": [USER("Q"), ASSISTANT("good")], "rejected": [USER("Q"), ASSISTANT("bad")]}],
    ),
    ("trl", [{"prompt": f"{HUMAN}Q\n\nAssistant:", "chosen": " good", "rejected": " bad"}]),
    ("trl_implicit", [{"chosen": [USER("Q"), ASSISTANT("good")], "rejected": [USER("Q"), ASSISTANT("bad")]}]),
    ("trl_implicit", [{"chosen": "Q good", "rejected": "Q bad"}]),
    ("hh", [{"chosen": f"{HUMAN}Q{GPT}good", "rejected": f"{HUMAN}Q{GPT}bad"}]),
    ("rm_static", [{"prompt": f"{HUMAN}Q{GPT}", "response": " good", "chosen": " good", "rejected": " bad"}]),
    ("openrlhf", [{"input": "Q", "chosen": "good", "rejected": "bad"}]),
    ("openrlhf", [{"question": "Q", "chosen": [ASSISTANT("good")], "rejected": [ASSISTANT("bad")]}]),
    (
        "ultrafeedback_binarized",
        [
            {
                "prompt": "Q",
                "chosen": [USER("Q"), ASSISTANT("good")],
                "rejected": [USER("Q"), ASSISTANT("bad")],
                "messages": [USER("Q"), ASSISTANT("good")],
                "score_chosen": 8.5,
                "score_rejected": 3.0,
            }
        ],
    ),
    (
        "ultrafeedback",
        [
            {
                "instruction": "Q",
                "completions": [
                    {"model": "m", "response": "bad", "overall_score": 10.0, "fine-grained_score": 1.5},
                    {"model": "n", "response": "good", "overall_score": 7.0, "fine-grained_score": 4.5},
                ],
            }
        ],
    ),
    ("alpaca_ranking", [{"instruction": "Q", "input": "", "chosen": "good", "rejected": "bad"}]),
    ("alpaca_ranking", [{"instruction": "Q", "input": "", "output": ["good", "bad"]}]),
    (
        "sharegpt_ranking",
        [
            {
                "conversations": [{"from": "human", "value": "Q"}],
                "chosen": {"from": "gpt", "value": "good"},
                "rejected": {"from": "gpt", "value": "bad"},
            }
        ],
    ),
    (
        "nectar",
        [
            {
                "prompt": f"{HUMAN}Q{GPT}",
                "answers": [{"answer": "bad", "rank": 2.0}, {"answer": "good", "model": "n", "rank": 1.0}],
            }
        ],
    ),
    ("rankings", [{"id": "1", "prompt": "Q", "answers": [{"text": "good", "score": 9}, {"text": "bad", "score": 1}]}]),
    ("rankings", [{"prompt": "Q", "answers": ["good", "bad"]}]),
    (
        "nemo_rl",
        [
            {
                "context": [USER("Q")],
                "completions": [
                    {"rank": 1, "completion": [ASSISTANT("bad")]},
                    {"rank": 0, "completion": [ASSISTANT("good")]},
                ],
            }
        ],
    ),
    ("webgpt", [webgpt(0.5, -0.5)]),
    ("shp", [{"history": "Q", "human_ref_A": "good", "human_ref_B": "bad", "labels": 1, "score_A": 9, "score_B": 2}]),
    ("shp", [{"history": "Q", "human_ref_A": "bad", "human_ref_B": "good", "labels": 0, "score_A": 1, "score_B": 2}]),
    ("helpsteer3", [{"context": [USER("Q")], "response1": "good", "response2": "bad", "overall_preference": -2}]),
    ("helpsteer3", [{"context": [USER("Q")], "response1": "bad", "response2": "good", "overall_preference": 1}]),
    ("helpsteer2_preference", [{"prompt": "Q", "response_1": "good", "response_2": "bad", "preference_strength": -1}]),
    ("helpsteer2_preference", [{"prompt": "Q", "response_1": "bad", "response_2": "good", "preference_strength": 3}]),
    (
        "helpsteer",
        [
            {"prompt": "Q", "response": "bad", "helpfulness": 1, **STEER},
            {"prompt": "Q", "response": "good", "helpfulness": 4, **STEER},
        ],
    ),
    ("pku_better", [PKU]),
    ("arena_flags", [{**ARENA, "winner_model_a": 0, "winner_model_b": 1, "winner_tie": 0}]),
    (
        "arena",
        [
            {
                "conversation_a": [USER("Q"), ASSISTANT("good")],
                "conversation_b": [USER("Q"), ASSISTANT("bad")],
                "winner": "model_a",
            }
        ],
    ),
    ("oasst", OASST),
    ("oasst_tree", [TREE]),
    (
        "master",
        [
            {
                "group_id": "g",
                "prompt": [USER("Q")],
                "answers": [{"id": "x", "text": "bad"}, {"id": "y", "text": "good"}],
                "rankings": [{"annotator": "p", "ranks": {"x": 2, "y": 1}}],
            }
        ],
    ),
]  # fmt: skip


@pytest.mark.parametrize(("name", "data"), CASES, ids=[f"{name}-{i}" for i, (name, _) in enumerate(CASES)])
def test_recognised_and_imported(tmp_path: Path, name: str, data: list[dict[str, Any]]) -> None:
    path = tmp_path / "data.jsonl"
    write_jsonl(path, data)
    loaded = load(path, kind="rankings")
    assert loaded.format == name
    assert loaded.num_read == len(data) and loaded.num_kept == 1 and not loaded.dropped
    (pair,) = to_pairs(loaded.records[0])  # type: ignore[arg-type]
    assert (pair.chosen.strip(), pair.rejected.strip()) == ("good", "bad")
    assert [(turn.role, turn.content.strip()) for turn in pair.prompt] == [("user", "Q")]


def test_every_ranking_format_has_a_case() -> None:
    rankings = {name for name, f in registry.FORMATS.items() if f.kind == "rankings"}
    assert rankings - {name for name, _ in CASES} == {"tldr", "pku_safer"}


def test_tldr_choice_worker_and_confidence(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    summaries = [{"text": " bad", "policy": "sup1"}, {"text": " good", "policy": "sup4"}]
    row = {"info": {"post": "P", "title": "T", "subreddit": "r/x"}, "summaries": summaries, "choice": 1}
    write_jsonl(path, [{**row, "worker": "w7", "extra": {"confidence": 6}}])
    (ranking,) = load_rankings(path)
    (pair,) = to_pairs(ranking)
    assert (pair.chosen, pair.rejected, pair.category) == ("good", "bad", "")
    assert pair.prompt[0].content == "SUBREDDIT: r/x\n\nTITLE: T\n\nPOST: P\n\nTL;DR:"
    assert ranking.rankings[0].annotator == "w7" and ranking.info["confidence"] == 6
    write_jsonl(path, [{**row, "choice": 2}])
    with pytest.raises(DataError, match="line 1: field 'choice' must be one of 0, 1, not 2"):
        load(path)


def test_pku_two_preferences_are_never_merged(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    write_jsonl(path, [PKU])
    assert to_pairs(load_rankings(path)[0])[0].chosen == "good"
    assert to_pairs(load_rankings(path, format="pku_safer")[0])[0].chosen == "bad"


def test_ties_are_dropped_and_counted_never_a_win(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    write_jsonl(path, [webgpt(0.5, 0.5), webgpt(0.0, 0.5), webgpt(0.0, 0.0)])
    loaded = load(path)
    assert (loaded.num_read, loaded.num_kept, loaded.dropped) == (3, 1, {"all_tied": 2})
    for row in (
        {**ARENA, "winner_model_a": 0, "winner_model_b": 0, "winner_tie": 1},
        {"context": [USER("Q")], "response1": "a", "response2": "b", "overall_preference": 0},
    ):
        write_jsonl(path, [row])
        with pytest.raises(DataError, match=r"1 rows read, 0 kept, all dropped \(all_tied 1\)"):
            load(path)


def test_helpsteer3_keeps_each_judge(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    judges = [{"score": -1}, {"score": 2}, {"score": -3}]
    row = {"context": [USER("Q")], "response1": "good", "response2": "bad", "overall_preference": -1}
    write_jsonl(path, [{**row, "individual_preference": judges}])
    (ranking,) = load_rankings(path)
    assert [j.ranks for j in ranking.rankings] == [{"a1": 1, "a2": 2}, {"a1": 2, "a2": 1}, {"a1": 1, "a2": 2}]
    (pair,) = to_pairs(ranking)
    assert (pair.chosen, pair.num_votes, pair.agree_fraction) == ("good", 3, pytest.approx(2 / 3))


def test_oasst_missing_parent_is_named_and_the_thread_is_the_prompt(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    replies = [oasst("e", "d", "assistant", "x", 0), oasst("f", "d", "assistant", "y", 1)]
    deep = [*OASST, oasst("d", "b", "prompter", "more"), *replies]
    write_jsonl(path, deep)
    last = load_rankings(path)[-1]
    assert [turn.content for turn in last.prompt] == ["Q", "good", "more"] and last.lang == "de"
    write_jsonl(path, deep[4:])
    with pytest.raises(DataError, match="line 1: a message above the ranked replies is missing"):
        load(path)


def spots(value: Any) -> list[tuple[Any, Any]]:
    """Every (container, key) inside a row."""
    keys = value.keys() if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    return [spot for key in keys for spot in [(value, key), *spots(value[key])]]


ODD = [None, 7, -1, "", "x", "1/0", [], {}, [None], [7], {"x": 1}, [{}], [[]], True, float("nan"), 10**400]


SUMMARIES = [{"text": "bad", "policy": "p"}, {"text": "good", "policy": "q"}]
OTHER_CASES: list[tuple[str, list[dict[str, Any]]]] = [
    ("tldr", [{"info": {"post": "P", "title": "T"}, "summaries": SUMMARIES, "choice": 1, "extra": {"confidence": 6}}]),
    ("pku_safer", [PKU]),
    ("helpsteer3", [{"context": [USER("Q")], "response1": "a", "response2": "b", "overall_preference": 1,
                     "individual_preference": [{"score": 1}]}]),
    ("alpaca", [{"instruction": "Q", "input": "I", "output": "A", "system": "S", "history": [["q", "a"]]}]),
    ("sharegpt", [{"conversations": [{"from": "human", "value": "Q"}, {"from": "gpt", "value": "A"}]}]),
    ("messages", [{"messages": [USER("Q"), ASSISTANT("A")], "category": "c", "id": "1"}]),
    ("messages", [{"messages": [USER("Q"), {"role": "assistant", "content": [{"type": "text", "text": "A"}]}]}]),
    ("prompt_completion", [{"prompt": "Q", "completion": "A"}]),
    ("messages_prompt", [{"messages": [USER("Q")], "info": {"k": 1}}]),
    ("prompts", [{"prompt": "Q", "category": "c"}]),
    ("arena", [{"conversation_a": "Q", "conversation_b": "Q", "winner": "tie"}]),
    ("master", [{"group_id": "g", "prompt": [USER("Q")], "consensus": {"x": 1, "y": 2}, "gold": [["x", "y"]],
                 "answers": [{"id": "x", "text": "a", "flags": ["f"]}, {"id": "y", "text": "b", "score": 1.0}]}]),
]  # fmt: skip


@pytest.mark.parametrize(("name", "data"), CASES + OTHER_CASES)
def test_DAT_03_odd_values_anywhere_never_give_a_bare_error(
    tmp_path: Path, name: str, data: list[dict[str, Any]]
) -> None:
    """Every field of every format, replaced by every odd value or taken away: a record, a count or a DataError."""
    path = tmp_path / "a.jsonl"
    for row, original in enumerate(data):
        for spot in range(len(spots(original))):
            for odd in [*ODD, "remove"]:
                rows = copy.deepcopy(data)
                container, key = spots(rows[row])[spot]
                if odd == "remove":
                    del container[key]
                else:
                    container[key] = odd
                for form in ("auto", name):
                    with contextlib.suppress(DataError):
                        list(_records(path, form, rows))


def _records(path: Path, form: str, rows: list[dict[str, Any]]) -> Any:
    sample = [Row(i, row) for i, row in enumerate(rows, 1)]
    found = registry.sniff(sample) if form == "auto" else registry.find(form)
    fitting = [row for row in sample if found.matches(row.data)]
    for row in found.join(fitting) if found.join else fitting:
        record = found.parse(row.data)
        if isinstance(record, Ranking):
            to_pairs(record)
        yield Ranking.from_json(json.loads(json.dumps(record.to_json()))) if isinstance(record, Ranking) else record


# Prompts that have to be found: DAT-04, DAT-05, DAT-06.


def implicit(tmp_path: Path, chosen: Any, rejected: Any) -> tuple[str, str, str]:
    path = tmp_path / "a.jsonl"
    write_jsonl(path, [{"chosen": chosen, "rejected": rejected}])
    (ranking,) = load_rankings(path)
    (pair,) = to_pairs(ranking)
    return "".join(turn.content for turn in pair.prompt), pair.chosen, pair.rejected


def test_DAT_04_common_prefix(tmp_path: Path) -> None:
    assert common_text("The lake is deep", "The lake is deep and cold") == 16
    with pytest.raises(DataError, match="line 1: field 'chosen' is empty"):
        implicit(tmp_path, "The lake is deep", "The lake is deep and cold")
    assert implicit(tmp_path, "The lake is deep", "The lake is deeper") == ("The lake is ", "deep", "deeper")
    assert implicit(tmp_path, "A: don't", "A: don") == ("A: ", "don't", "don")
    talk = [USER("Q"), ASSISTANT("A")]
    with pytest.raises(DataError, match="line 1: 'chosen' ends where the other goes on, so its answer is empty"):
        implicit(tmp_path, talk, [*talk, USER("more")])


@pytest.mark.parametrize(
    ("first", "second", "prompt"),
    [
        ("你好吗？我很好", "你好吗？我很累", "你好吗？"),
        ("नमस्ते कि", "नमस्ते की", "नमस्ते "),
        ("cafe\u0301 x", "cafe\u0300 x", ""),
        ("Q: well-known", "Q: well-read", "Q: "),
        ("a\nb", "a\nc", "a\n"),
    ],
)
def test_DAT_04_never_inside_a_word(first: str, second: str, prompt: str) -> None:
    end = common_text(first, second)
    assert first[:end] == second[:end] == prompt


def test_DAT_05_no_common_prompt_is_named(tmp_path: Path) -> None:
    assert common_text("Rome ", "Oslo") == 0
    with pytest.raises(DataError, match="line 1: 'chosen' and 'rejected' have no common beginning"):
        implicit(tmp_path, "Rome ", "Oslo")
    with pytest.raises(DataError, match="line 1: field 'chosen' is empty"):
        implicit(tmp_path, "", "x")
    with pytest.raises(DataError, match="no common first turn"):
        implicit(tmp_path, [USER("a"), ASSISTANT("b")], [USER("c"), ASSISTANT("b")])


def test_DAT_06_divergence_before_the_last_turn_is_refused(tmp_path: Path) -> None:
    chosen = [USER("U1"), ASSISTANT("A1"), USER("U2"), ASSISTANT("A2")]
    with pytest.raises(DataError, match="part at turn 2, before the last turn"):
        implicit(tmp_path, chosen, [USER("U1"), ASSISTANT("other")])
    transcripts = [f"{HUMAN}U1{GPT}A1{HUMAN}U2{GPT}A2", f"{HUMAN}U1{GPT}other"]
    with pytest.raises(DataError, match="part at turn 2, before the last turn"):
        implicit(tmp_path, *transcripts)
    with pytest.raises(DataError, match="have different prompts"):
        implicit(tmp_path, chosen, [*chosen[:2], USER("other"), ASSISTANT("A2")])
    assert implicit(tmp_path, chosen, [*chosen[:3], ASSISTANT("z")]) == ("U1A1U2", "A2", "z")


@pytest.mark.parametrize(
    ("chosen", "said"),
    [
        (f"{HUMAN}Q{GPT}a{GPT}b", "two Assistant turns in a row"),
        (f"{HUMAN}Q{HUMAN}R{GPT}b", "two Human turns in a row"),
        (f"hello{HUMAN}Q{GPT}b", "does not begin with"),
        (f"{HUMAN}{GPT}b", "empty turn"),
        (f"{GPT}b", "no Human turn at its start"),
        (f"{HUMAN}Q{GPT}", "field 'chosen' is empty"),
        (None, "field 'chosen' is null"),
    ],
)
def test_hh_malformed_transcripts_are_refused(tmp_path: Path, chosen: str | None, said: str) -> None:
    path = tmp_path / "a.jsonl"
    good = {"chosen": f"{HUMAN}Q{GPT}good", "rejected": f"{HUMAN}Q{GPT}bad"}
    write_jsonl(path, [good, {**good, "chosen": chosen}])
    with pytest.raises(DataError, match=f"line 2: .*{said}"):
        load(path)


def test_hh_only_the_marker_with_two_newlines_counts(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    quoted = "I said\nHuman: yes\nAssistant: no"
    write_jsonl(path, [{"chosen": f"{HUMAN}Q{GPT}{quoted}", "rejected": f"{HUMAN}Q{GPT}bad"}])
    assert to_pairs(load_rankings(path)[0])[0].chosen == quoted


# Ranks and scores: ANN-04, ANN-07.


def master(**changes: Any) -> dict[str, Any]:
    answers = [{"id": name, "text": f"text {name}"} for name in "abc"]
    return {"group_id": "g", "prompt": [USER("Q")], "answers": answers, "rankings": [], **changes}


@pytest.mark.parametrize(
    "ranks", [["b", "a", "c"], {"b": 1, "a": 2, "c": 3}, {"b": 0, "a": 1, "c": 2}, {"b": 1.0, "a": "4", "c": 9}]
)
def test_ANN_04_all_documented_forms_give_the_same_pairs(tmp_path: Path, ranks: Any) -> None:
    path = tmp_path / "a.jsonl"
    write_jsonl(path, [master(rankings=[{"annotator": "x", "ranks": ranks}])])
    (ranking,) = load_rankings(path)
    assert consensus(ranking) == {"b": 1, "a": 2, "c": 3}
    assert [(p.chosen[-1], p.rejected[-1]) for p in to_pairs(ranking)] == [("b", "a"), ("b", "c"), ("a", "c")]
    write_jsonl(path, [master(consensus=ranks)])
    assert consensus(load_rankings(path)[0]) == {"b": 1, "a": 2, "c": 3}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, "missing_ranks"),
        ({"rankings": [{"annotator": "x", "ranks": {}}]}, "missing_ranks"),
        ({"rankings": [{"annotator": "x", "ranks": {"a": 1}}]}, "missing_ranks"),
        ({"rankings": [{"annotator": "x", "ranks": {"a": 1, "z": 2}}]}, "unknown_answer_id"),
        ({"rankings": [{"annotator": "x", "ranks": ["a", "a", "b"]}]}, "duplicate_rank"),
        ({"rankings": [{"annotator": "x", "ranks": {"a": 2, "b": 3}}]}, "bad_ranks"),
        ({"rankings": [{"annotator": "x", "ranks": {"a": 1, "b": 1.5}}]}, "bad_ranks"),
        ({"rankings": [{"annotator": "x", "ranks": "a>b>c"}]}, "bad_ranks"),
        ({"consensus": {"a": 1, "b": 1, "c": 1}}, "all_tied"),
        ({"answers": [{"id": "a", "text": "x"}, {"id": "a", "text": "y"}]}, "duplicate_answer_id"),
        ({"answers": [{"id": "a", "text": "x"}]}, "single_answer"),
        ({"answers": [{"id": "a", "text": "x"}, {"id": "b", "text": " "}]}, "empty_answer"),
        ({"answers": [{"id": "a", "text": "x"}, {"id": "b", "text": "x"}]}, "identical_answers"),
        ({"schema": "heedful.ranking/9"}, "unknown_schema"),
        ({"consensus": ["a", "b"], "colour": 1}, "bad_record"),
    ],
)
def test_ANN_04_other_forms_are_refused_by_name(tmp_path: Path, changes: dict[str, Any], reason: str) -> None:
    path = tmp_path / "a.jsonl"
    write_jsonl(path, [master(**changes)])
    with pytest.raises(DataError, match=rf"0 kept, all dropped \({reason} 1\)"):
        load(path, on_bad_row="skip")


def test_what_people_are_yet_to_rank_is_read_where_it_is_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    tied = master(group_id="t", consensus={"a": 1, "b": 1, "c": 1})
    write_jsonl(path, [master(), tied])
    loaded = load(path, keep_unranked=True)
    assert [r.group_id for r in loaded.records] == ["g"] and loaded.dropped == {"all_tied": 1}
    assert len(load(path, keep_unranked=True, keep_ties=True).records) == 2
    assert [p.id for p in load(path, kind="prompts").records] == ["g"]  # a prompt needs no preference


@pytest.mark.parametrize(
    ("written", "read"), [("1", 1), ("1.0", 1), ("10", 10), ("1 ", 1), ("10/10", 10), ("٣", 3), (7, 7), (2.5, 2.5)]
)
def test_ANN_07_scores_are_read(written: Any, read: float) -> None:
    assert number(written, "score", low=1, high=10) == read


@pytest.mark.parametrize("written", ["11", "NaN", float("nan"), "-1", "inf", "1/5", "", "ten", None, True, [1], "0"])
def test_ANN_07_other_scores_are_refused(written: Any) -> None:
    with pytest.raises(BadRow, match="field 'score' must be a number from 1 to 10"):
        number(written, "score", low=1, high=10)


def test_ANN_07_order_by_score_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    scores = ["10", "9 ", "2.0", "1"]
    answers = [{"text": f"t{i}", "score": score} for i, score in enumerate(scores)]
    write_jsonl(path, [{"prompt": "Q", "answers": answers}])
    (ranking,) = load_rankings(path)
    assert [a.score for a in ranking.answers] == [10, 9, 2, 1]
    assert list(consensus(ranking).values()) == [1, 2, 3, 4]
    write_jsonl(path, [{"prompt": "Q", "answers": answers[::-1]}])
    with pytest.raises(DataError, match="the scores do not fall"):
        load(path)


def test_equal_scores_tie_and_ranks_decide(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    three = [{"text": "x", "score": 0.5}, {"text": "y", "score": 0.5}, {"text": "z", "score": 0.1}]
    write_jsonl(path, [{"id": "1", "prompt": "Q", "answers": three}])
    assert consensus(load_rankings(path)[0]) == {"a1": 1, "a2": 1, "a3": 2}
    write_jsonl(path, [{"prompt": "Q", "answers": [{"text": "x", "rank": 2}, {"text": "y"}]}])
    with pytest.raises(DataError, match=r"field 'answers\[1\].rank' is missing"):
        load(path)


# Demonstrations and prompts.


@pytest.mark.parametrize(
    ("name", "row"),
    [
        ("alpaca", {"instruction": "Q", "input": "", "output": "A"}),
        ("sharegpt", {"conversations": [{"from": "human", "value": "Q"}, {"from": "gpt", "value": "A"}]}),
        ("messages", {"messages": [USER("Q"), ASSISTANT("A")]}),
        ("prompt_completion", {"prompt": "Q", "completion": "A"}),
        ("prompt_completion", {"prompt": [USER("Q")], "completion": [ASSISTANT("A")]}),
        ("prompt_completion", {"input": "Q", "output": "A"}),
        ("prompt_completion", {"question": "Q", "answer": "A"}),
    ],
)
def test_demonstrations(tmp_path: Path, name: str, row: dict[str, Any]) -> None:
    path = tmp_path / "a.jsonl"
    write_jsonl(path, [row])
    loaded = load(path, kind="demonstrations")
    assert loaded.format == name
    assert loaded.records[0].messages == (Message("user", "Q"), Message("assistant", "A"))  # type: ignore[union-attr]
    (prompt,) = load(path, kind="prompts").records
    assert prompt.messages == (Message("user", "Q"),)  # type: ignore[union-attr]
    assert prompt.info == {"reference_answer": "A"}  # type: ignore[union-attr]


def test_alpaca_with_input_system_and_history(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    write_jsonl(path, [{"instruction": "Q", "input": "I", "output": "A", "system": "S", "history": [["q", "a"]]}])
    (record,) = load(path).records
    assert [m.content for m in record.messages] == ["S", "q", "a", "Q\nI", "A"]  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"conversations": [{"from": "human", "value": "Q"}]}, "ends_without_answer"),
        ({"conversations": [{"from": "observation", "value": "Q"}]}, "unsupported_role"),
        ({"messages": [ASSISTANT("A")]}, "empty_prompt"),
        ({"messages": [USER("Q"), ASSISTANT(" ")]}, "empty_answer"),
        ({"messages": [USER("Q"), {"role": "assistant", "content": [{"type": "image_url"}]}]}, "not_text"),
        ({"messages": []}, "empty_prompt"),
    ],
)
def test_demonstrations_refused(tmp_path: Path, row: dict[str, Any], reason: str) -> None:
    path = tmp_path / "a.jsonl"
    write_jsonl(path, [row])
    with pytest.raises(DataError, match=rf"\({reason} 1\)"):
        load(path, on_bad_row="skip")


def test_prompts_keep_extra_columns_and_take_text_lines(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    write_jsonl(path, [{"id": "7", "prompt": "Q", "category": "chat", "keywords": ["x"]}])
    (prompt,) = load(path).records
    assert (prompt.id, prompt.category, prompt.info) == ("7", "chat", {"keywords": ["x"]})  # type: ignore[union-attr]
    text = tmp_path / "a.txt"
    text.write_text("one\ntwo\n")
    loaded = load(text)
    assert loaded.kind == "prompts" and loaded.num_kept == 2
    write_jsonl(path, [{"messages": [SYSTEM("S"), USER("Q")]}])
    assert load(path).format == "messages_prompt"


# Recognising.


def test_unknown_rows_name_what_was_seen_and_the_nearest_format() -> None:
    said = r"fields 'prompt', 'chosen', 'other'\); the nearest is trl, but field 'rejected' is missing"
    with pytest.raises(DataError, match=said):
        registry.sniff([Row(3, {"prompt": "p", "chosen": "c", "other": 1})])
    with pytest.raises(DataError, match=r"no known format has such rows \(line 1 has the fields 'x'\)"):
        registry.sniff([Row(1, {"x": 1})])
    with pytest.raises(DataError, match="format 'trll' is unknown; did you mean 'trl'"):
        registry.find("trll")


def test_mixed_formats_are_named_wherever_they_stand(tmp_path: Path) -> None:
    pair, alpaca = {"prompt": "p", "chosen": "c", "rejected": "r"}, {"instruction": "i", "input": "", "output": "o"}
    path = tmp_path / "a.jsonl"
    write_jsonl(path, [pair] * 300 + [alpaca])
    for mode in ("error", "skip"):
        with pytest.raises(DataError, match="a.jsonl: the row in line 301 looks like alpaca, but the file like trl"):
            load(path, on_bad_row=mode)
    assert load(path, format="trl", on_bad_row="skip").dropped == {"missing_field": 1}
    write_jsonl(path, [pair, alpaca, pair])
    with pytest.raises(DataError, match="a.jsonl: the row in line 2 looks like alpaca"):
        load(path)


def test_csv_rows_are_read_as_the_same_records(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("history,human_ref_A,human_ref_B,labels\nQ,good,bad,1\nQ,bad,good,0\n")
    assert [to_pairs(r)[0].chosen for r in load_rankings(path)] == ["good", "good"]
    path.write_text("history,human_ref_A,human_ref_B,labels\nQ,good,bad,yes\n")
    with pytest.raises(DataError, match="line 2: field 'labels' must be a number"):
        load(path)

