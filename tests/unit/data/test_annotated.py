"""Rankings out of Label Studio and Argilla: who said what, what was not said, and what the file cannot tell."""

import json

import pytest

from heedful.data.load import load, load_rankings
from heedful.errors import DataError
from heedful.records import Judgement


def task(*orders, items=3, **annotation):
    """A Label Studio task of three items, ranked by people 0, 1, …; an order is a list of ids or the whole value."""
    return {
        "id": 17,
        "data": {
            "category": "chat",
            "prompt": "Why?",
            "items": [{"id": f"llm_{i}", "title": f"Model {i}", "body": f"Because {i}."} for i in range(items)],
        },
        "annotations": [
            {"id": 100 + who, "completed_by": who, "was_cancelled": False, **annotation, "result": [
                {"type": "choices", "value": {"choices": ["ok"]}},
                {"type": "ranker", "from_name": "rank", "to_name": "answers",
                 "value": {"ranker": order if isinstance(order, dict) else {"rank": order}}},
            ]}
            for who, order in enumerate(orders)
        ],
        "predictions": [{"result": [{"type": "ranker", "value": {"ranker": {"rank": ["llm_2", "llm_1", "llm_0"]}}}]}],
    }  # fmt: skip


def record(responses, **fields):
    """An Argilla record."""
    fields = fields or {"instruction": "Why?", **{f"response-{i}": f"Because {i}." for i in range(3)}}
    return {"id": "r1", "fields": fields, "metadata": {"category": "chat"}, "suggestions": {}, "responses": responses,
            "vectors": {}}  # fmt: skip


def read(tmp_path, row, suffix=".json"):
    path = tmp_path / f"x{suffix}"
    path.write_text(json.dumps([row] if suffix == ".json" else row), encoding="utf-8")
    return load_rankings(path)[0]


def test_label_studio_keeps_every_person_and_no_prediction(tmp_path):
    row = task(["llm_2", "llm_0", "llm_1"], ["llm_2", "llm_1", "llm_0"], lead_time=12.5)
    found = read(tmp_path, row)
    assert found.group_id == "17" and found.category == "chat" and found.prompt[0].content == "Why?"
    assert [(a.id, a.text, a.policy) for a in found.answers][1] == ("llm_1", "Because 1.", "Model 1")
    assert found.rankings == (
        Judgement("label-studio-0", {"llm_2": 1, "llm_0": 2, "llm_1": 3}, 12.5),
        Judgement("label-studio-1", {"llm_2": 1, "llm_1": 2, "llm_0": 3}, 12.5),
    )


def test_label_studio_addresses_are_not_kept_where_an_account_number_is_there(tmp_path):
    row = task(["llm_0", "llm_1", "llm_2"])
    row["annotations"][0]["completed_by"] = {"id": 9, "email": "x@example.org"}
    assert read(tmp_path, row, ".jsonl").rankings[0].annotator == "label-studio-9"


def test_label_studio_items_that_were_not_moved_are_not_ranked(tmp_path):
    found = read(tmp_path, task({"best": ["llm_1", "llm_2"], "_": ["llm_0"]}))
    assert found.rankings[0].ranks == {"llm_1": 1, "llm_2": 2}


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (task({"good": ["llm_1"], "bad": ["llm_0", "llm_2"]}), "sorted into 2 buckets"),
        (task(["llm_1", "llm_1", "llm_0"]), "lists an answer twice"),
        (task(["llm_1", "llm_7"]), "ranks 'llm_7', which is no answer's id"),
        (task(["llm_0", "llm_1", "llm_2"], was_cancelled=True), "no judgement and no consensus ranks two answers"),
        (task(), "no judgement and no consensus"),
        (task(["llm_0"], items=1), "1 answer where a ranking needs two"),
    ],
)
def test_label_studio_what_cannot_be_read_is_named(tmp_path, row, reason):
    with pytest.raises(DataError, match=reason):
        read(tmp_path, row)


def test_label_studio_tasks_that_nobody_ranked_can_be_brought_into_a_project(tmp_path):
    path = tmp_path / "x.json"
    path.write_text(json.dumps([task()]))
    loaded = load(path, keep_unranked=True)
    assert loaded.format == "label_studio" and loaded.records[0].rankings == ()


def ranks(*pairs):
    return [{"value": f"response-{i}", "rank": rank} for i, rank in pairs]


def test_argilla_ties_and_unranked_options_are_kept_and_drafts_are_not(tmp_path):
    people = [
        {"user_id": "u1", "status": "submitted", "values": {"order": {"value": ranks((0, 1), (1, 1), (2, 3))}}},
        {"user_id": "u2", "status": "submitted", "values": {"order": {"value": ranks((2, 1), (0, 2), (1, None))}}},
        {"user_id": "u3", "status": "draft", "values": {"order": {"value": ranks((0, 1), (1, 2), (2, 3))}}},
        {"user_id": "u4", "status": "discarded", "values": {}},
    ]
    found = read(tmp_path, record(people))
    assert found.group_id == "r1" and found.category == "chat" and found.prompt[0].content == "Why?"
    assert found.rankings == (
        Judgement("argilla-u1", {"response-0": 1, "response-1": 1, "response-2": 2}),
        Judgement("argilla-u2", {"response-2": 1, "response-0": 2}),
    )


def test_argilla_lists_of_the_sdk_are_best_first_beside_other_questions(tmp_path):
    responses = {
        "order": [{"value": ["response-2", "response-0", "response-1"], "user_id": "u1"}],
        "topics": [{"value": ["sports", "science"], "user_id": "u1"}],
        "comment": [{"value": "good", "user_id": "u1"}],
    }
    found = read(tmp_path, record(responses))
    assert found.rankings == (Judgement("argilla-u1", {"response-2": 1, "response-0": 2, "response-1": 3}),)


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (record({"order": [{"value": ["first", "second"]}]}), "ranks 'first', and 'fields' has no field"),
        (record({}), "0 ranking questions are answered"),
        (record({name: [{"value": ["response-0", "response-1"]}] for name in ("a", "b")}), r"2 ranking .*\(a, b\)"),
        (record({"order": [{"value": ["response-0", "response-0"]}]}), "lists an option twice"),
        (record({"order": [{"value": ["a", "b"]}]}, title="x", note="y", a="1", b="2"),
         "field 'fields' has no prompt; it should be called prompt"),
        (record({"order": [{"value": ranks((0, 2), (1, 5))}]}), "begin with 1"),
    ],
)  # fmt: skip
def test_argilla_what_cannot_be_read_is_named(tmp_path, row, reason):
    with pytest.raises(DataError, match=reason):
        read(tmp_path, row)


def test_argilla_chat_fields_are_conversations(tmp_path):
    chat = [{"role": role, "content": "x"} for role in ("user", "assistant", "user")]
    row = record({"order": [{"value": ["a-1", "a-2"]}]}, dialogue=chat, a_1="x", a_2="y")
    found = read(tmp_path, row)
    assert [message.role for message in found.prompt] == ["user", "assistant", "user"]
    assert found.rankings == (Judgement("argilla", {"a-1": 1, "a-2": 2}),)
