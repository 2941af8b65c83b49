"""Alpaca and ShareGPT rows: demonstrations and their ranking forms, and the LLaMA-Factory export."""

from __future__ import annotations

from typing import Any

from heedful.data.files import BadRow
from heedful.data.formats.base import (
    Candidate,
    Fields,
    Format,
    answer_text,
    conversation,
    listing,
    optional_text,
    pair,
    present,
    ranking,
    row_id,
    text,
    value,
)
from heedful.records import Demonstration, Message, PreferencePair, Ranking


def _alpaca_prompt(row: Fields) -> tuple[Message, ...]:
    turns: list[Message] = []
    if system := optional_text(row, "system"):
        turns.append(Message("system", system))
    for i, exchange in enumerate(listing(row, "history", optional=True)):
        if not isinstance(exchange, (list, tuple)) or len(exchange) != 2:
            raise BadRow("wrong_type", f"field 'history[{i}]' must be a question and its answer")
        turns += [
            Message("user", text(exchange[0], f"history[{i}][0]")),
            Message("assistant", text(exchange[1], f"history[{i}][1]")),
        ]
    instruction = text(value(row, "instruction"), "instruction")
    given = text(row["input"], "input") if row.get("input") is not None else ""
    question = "\n".join(part for part in (instruction, given) if part.strip())
    if not question:
        raise BadRow("empty_prompt", "field 'instruction' is empty")
    return (*turns, Message("user", question))


def _parse_alpaca(row: Fields) -> Demonstration:
    prompt = _alpaca_prompt(row)
    answer = answer_text(value(row, "output"), "output")
    return demonstration(row, (*prompt, Message("assistant", answer)), "output")


def _looks_alpaca(row: Fields) -> str | None:
    if isinstance(row["output"], list):
        return "'output' is a list of ranked answers"
    return "it has chosen and rejected" if present(row, "chosen", "rejected") else None


def _parse_alpaca_ranking(row: Fields) -> Ranking:
    prompt = _alpaca_prompt(row)
    if isinstance(row.get("output"), list):
        candidates = [Candidate(f"output[{i}]", answer) for i, answer in enumerate(row["output"])]
        return ranking(row, prompt, candidates, range(1, len(candidates) + 1))
    chosen, rejected = (Candidate(key, value(row, key)) for key in ("chosen", "rejected"))
    return pair(row, prompt, chosen, rejected)


def _looks_alpaca_ranking(row: Fields) -> str | None:
    if isinstance(row.get("output"), list) or ("chosen" in row and "rejected" in row):
        return None
    return "no 'chosen' and 'rejected', and 'output' is no list of answers"


def _turns(row: Fields) -> tuple[Message, ...]:
    turns = conversation(value(row, "conversations"), "conversations")
    system = optional_text(row, "system")
    return (Message("system", system), *turns) if system and turns[0].role != "system" else turns


def demonstration(row: Fields, messages: tuple[Message, ...], field: str) -> Demonstration:
    """A conversation to imitate, when no turn is empty and an answer stands at its end."""
    for i, turn in enumerate(messages):
        if not turn.content.strip():
            reason = "empty_answer" if turn.role == "assistant" else "empty_prompt"
            raise BadRow(reason, f"turn {i + 1} of field {field!r} is empty")
    if messages[-1].role != "assistant":
        raise BadRow("ends_without_answer", f"field {field!r} ends with the {messages[-1].role}, not with an answer")
    if all(turn.role != "user" for turn in messages):
        raise BadRow("empty_prompt", f"field {field!r} has no user turn")
    return Demonstration(
        row_id(row, [m.to_json() for m in messages]),
        messages,
        category=optional_text(row, "category", "domain"),
        source=optional_text(row, "source", "dataset"),
    )


def _parse_sharegpt(row: Fields) -> Demonstration:
    return demonstration(row, _turns(row), "conversations")


def _looks_sharegpt(row: Fields) -> str | None:
    return "it has chosen and rejected" if present(row, "chosen", "rejected") else None


def _parse_sharegpt_ranking(row: Fields) -> Ranking:
    chosen, rejected = (Candidate(key, value(row, key)) for key in ("chosen", "rejected"))
    return pair(row, _turns(row), chosen, rejected)


def write_llama_factory(item: PreferencePair) -> dict[str, Any]:
    """A pair as LLaMA-Factory's ShareGPT ranking row."""
    names = {"user": "human", "assistant": "gpt"}
    turns = [{"from": names.get(turn.role, turn.role), "value": turn.content} for turn in item.prompt]
    said = ({"from": "gpt", "value": answer} for answer in (item.chosen, item.rejected))
    return {"conversations": turns, "chosen": next(said), "rejected": next(said)}


def llama_factory_entry(file_name: str) -> dict[str, Any]:
    """What ``dataset_info.json`` says of such a file."""
    columns = {"messages": "conversations", "chosen": "chosen", "rejected": "rejected"}
    return {"file_name": file_name, "ranking": True, "formatting": "sharegpt", "columns": columns}


ALPACA = Format(
    "alpaca", "demonstrations", "Alpaca: instruction, input, output", ("instruction", "output"), _parse_alpaca,
    _looks_alpaca,
)  # fmt: skip
ALPACA_RANKING = Format(
    "alpaca_ranking", "rankings", "Alpaca with chosen and rejected, or with a list of outputs, best first",
    ("instruction",), _parse_alpaca_ranking, _looks_alpaca_ranking,
)  # fmt: skip
SHAREGPT = Format(
    "sharegpt", "demonstrations", "ShareGPT: conversations of {from, value}", ("conversations",), _parse_sharegpt,
    _looks_sharegpt,
)  # fmt: skip
SHAREGPT_RANKING = Format(
    "sharegpt_ranking", "rankings", "ShareGPT with chosen and rejected", ("conversations", "chosen", "rejected"),
    _parse_sharegpt_ranking,
)  # fmt: skip
