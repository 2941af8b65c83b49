"""Formats that spread one ranking over several rows: oasst message trees and HelpSteer's scored answers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from heedful.data.files import BadRow, Row
from heedful.data.formats.base import Candidate, Fields, Format, dense, number, optional_text, ranking, value
from heedful.data.formats.lists import whole_ranks
from heedful.data.formats.transcripts import read_prompt
from heedful.records import Message, Ranking

_HELPSTEER_ASPECTS = ("helpfulness", "correctness", "coherence", "complexity", "verbosity")


def join_by_prompt(rows: Iterable[Row]) -> Iterator[Row]:
    """Neighbouring rows with the same prompt, as one row."""
    line, group = 0, list[dict[str, Any]]()
    for row in rows:
        if group and row.data.get("prompt") != group[0].get("prompt"):
            yield Row(line, {"rows": group})
            group = []
        if not group:
            line = row.line
        group.append(row.data)
    if group:
        yield Row(line, {"rows": group})


def _parse_helpsteer(row: Fields) -> Ranking:
    """Ranked by ``helpfulness`` (0 to 4, higher is better); all aspects are ratings, complexity and verbosity too."""
    rows = row["rows"]
    scores = [number(value(r, "helpfulness"), "helpfulness", low=0, high=4) for r in rows]
    candidates = [
        Candidate("response", value(r, "response"), score=score,
                  ratings={key: number(r[key], key) for key in _HELPSTEER_ASPECTS if r.get(key) is not None})
        for r, score in zip(rows, scores)
    ]  # fmt: skip
    prompt = read_prompt(value(rows[0], "prompt"), "prompt")
    return ranking(rows[0], prompt, candidates, dense(scores))


def join_messages(rows: Iterable[Row]) -> Iterator[Row]:
    """Every user message with two or more ranked replies, as one row, in the order of the file."""
    nodes: dict[str, Row] = {}
    replies: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        if row.data.get("deleted"):
            continue
        nodes[row.data["message_id"]] = row
        parent = row.data.get("parent_id")
        if parent and row.data.get("rank") is not None and str(row.data.get("role")).lower() == "assistant":
            replies.setdefault(parent, []).append(row.data)
    for parent, ranked in replies.items():
        if len(ranked) < 2:
            continue
        line = nodes[parent].line if parent in nodes else nodes[ranked[0]["message_id"]].line
        yield Row(line, {"thread": _thread(nodes, parent), "replies": ranked})


def _thread(nodes: dict[str, Row], last: str) -> list[dict[str, Any]] | None:
    """Messages from the root to ``last``; None when a parent is missing or the parents run in a circle."""
    thread: list[dict[str, Any]] = []
    step: str | None = last
    while step:
        if step not in nodes or len(thread) > len(nodes):
            return None
        thread.append(nodes[step].data)
        step = nodes[step].data.get("parent_id")
    return thread[::-1]


def join_trees(rows: Iterable[Row]) -> Iterator[Row]:
    """Whole trees: the replies are unfolded, then handled as single messages."""

    def unfold(line: int, node: dict[str, Any], parent: str | None) -> Iterator[Row]:
        yield Row(line, {**node, "parent_id": parent})
        for reply in node.get("replies") or []:
            yield from unfold(line, reply, node.get("message_id"))

    for row in rows:
        yield from join_messages(unfold(row.line, row.data["prompt"], None))


def _parse_oasst(row: Fields) -> Ranking:
    """``rank`` 0 is best among the replies to one message."""
    thread, replies = row["thread"], row["replies"]
    if thread is None:
        raise BadRow("missing_parent", "a message above the ranked replies is missing, so the prompt is unknown")
    names = {"prompter": "user", "assistant": "assistant"}
    prompt = tuple(Message(names.get(str(m.get("role")), "user"), str(m.get("text") or "")) for m in thread)
    candidates = [Candidate("text", r.get("text"), policy="" if r.get("synthetic") else "human") for r in replies]
    ranks = whole_ranks([r["rank"] for r in replies], "rank")
    fields = {"lang": optional_text(replies[0], "lang"), "source": "oasst", "id": thread[-1].get("message_id")}
    return ranking(fields, prompt, candidates, ranks)


def _looks_message(row: Fields) -> str | None:
    fits = isinstance(row["message_id"], str) and isinstance(row["parent_id"], (str, type(None)))
    return None if fits else "'message_id' and 'parent_id' must be text"


def _looks_tree(row: Fields) -> str | None:
    def fits(node: Any) -> bool:
        if not isinstance(node, dict) or not isinstance(node.get("message_id"), str):
            return False
        replies = node.get("replies") or []
        return isinstance(replies, list) and all(map(fits, replies))

    return None if fits(row["prompt"]) else "'prompt' is no message with replies"


HELPSTEER = Format(
    "helpsteer", "rankings", "HelpSteer and HelpSteer2: one scored answer a row, neighbours share the prompt",
    ("prompt", "response", "helpfulness"), _parse_helpsteer, join=join_by_prompt,
)  # fmt: skip
OASST = Format(
    "oasst", "rankings", "oasst messages: parent_id, role, text, rank (0 = best)",
    ("message_id", "parent_id", "role", "text"), _parse_oasst, _looks_message, join_messages,
)  # fmt: skip
OASST_TREE = Format(
    "oasst_tree", "rankings", "oasst trees: a message with nested replies", ("message_tree_id", "prompt"),
    _parse_oasst, _looks_tree, join_trees,
)  # fmt: skip
