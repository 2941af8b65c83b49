"""Demonstrations as messages or as prompt and completion, and plain prompts."""

from __future__ import annotations

from typing import Any

from heedful.data.formats.base import (
    ANSWER_KEYS,
    Fields,
    Format,
    answer_text,
    check_prompt,
    conversation,
    optional_text,
    present,
    row_id,
    value,
)
from heedful.data.formats.instructions import demonstration
from heedful.data.formats.transcripts import read_prompt
from heedful.records import Demonstration, Message, Prompt

_ASKED = ("prompt", "instruction", "input", "question", "query")
_ANSWERED = ("completion", "response", "output", "answer")


def _parse_messages(row: Fields) -> Demonstration:
    return demonstration(row, conversation(value(row, "messages"), "messages"), "messages")


def _last_role(row: Fields) -> str:
    turns = row["messages"]
    last = turns[-1] if isinstance(turns, list) and turns else None
    return str(last.get("role") or last.get("from")) if isinstance(last, dict) else ""


def _looks_messages(row: Fields) -> str | None:
    if present(row, "chosen", "rejected"):
        return "it has chosen and rejected"
    return "the last message is the user's" if _last_role(row) == "user" else None


def _key(row: Fields, keys: tuple[str, ...]) -> str | None:
    return next((key for key in keys if key in row), None)


def _parse_completion(row: Fields) -> Demonstration:
    asked, answered = _key(row, _ASKED) or "prompt", _key(row, _ANSWERED) or "completion"
    prompt = read_prompt(value(row, asked), asked)
    check_prompt(prompt, asked)
    answer = answer_text(value(row, answered), answered)
    return demonstration(row, (*prompt, Message("assistant", answer)), answered)


def _looks_completion(row: Fields) -> str | None:
    if present(row, "label", "labels", "chosen", "rejected"):
        return "it has a label or ranked answers; unpaired preferences are not imported"
    for name, keys in (("prompt", _ASKED), ("answer", _ANSWERED)):
        if _key(row, keys) is None:
            return f"no {name} (one of the fields {', '.join(keys)})"
    return None


def _parse_prompt_messages(row: Fields) -> Prompt:
    return _prompt(row, conversation(value(row, "messages"), "messages"), "messages")


def _prompt(row: Fields, messages: tuple[Message, ...], field: str) -> Prompt:
    check_prompt(messages, field)
    known = ("id", "messages", "category", "source", "info", field)
    info: dict[str, Any] = dict(row.get("info") or {}) if isinstance(row.get("info"), dict) else {}
    info |= {key: item for key, item in row.items() if key not in known and item is not None}
    return Prompt(
        row_id(row, [m.to_json() for m in messages]),
        messages,
        category=optional_text(row, "category"),
        source=optional_text(row, "source"),
        info=info,
    )


def _looks_prompt_messages(row: Fields) -> str | None:
    if present(row, "chosen", "rejected"):
        return "it has chosen and rejected"
    return None if _last_role(row) == "user" else "the last message is not the user's"


def _parse_prompt(row: Fields) -> Prompt:
    key = _key(row, _ASKED) or "prompt"
    return _prompt(row, read_prompt(value(row, key), key), key)


def _looks_prompt(row: Fields) -> str | None:
    # What a reward may look up; but a label beside an answer, or one that is true or false, judges an answer.
    ours = "answer" if "answer" in row or isinstance(row.get("label"), bool) else "label"
    if answer := next((key for key in ANSWER_KEYS if key in row and key != ours), None):
        return f"it has {answer!r}, so it is more than a prompt"
    return None if _key(row, _ASKED) else f"no prompt (one of the fields {', '.join(_ASKED)})"


MESSAGES = Format(
    "messages", "demonstrations", "a conversation in messages: [{role, content}]", ("messages",), _parse_messages,
    _looks_messages,
)  # fmt: skip
PROMPT_COMPLETION = Format(
    "prompt_completion", "demonstrations", "prompt and completion (or input and output, question and answer, …)", (),
    _parse_completion, _looks_completion,
)  # fmt: skip
MESSAGES_PROMPT = Format(
    "messages_prompt", "prompts", "a conversation that waits for an answer", ("messages",), _parse_prompt_messages,
    _looks_prompt_messages,
)  # fmt: skip
PROMPTS = Format(
    "prompts", "prompts", "plain prompts: prompt (or instruction, input, question, query), or lines of text", (),
    _parse_prompt, _looks_prompt,
)  # fmt: skip
