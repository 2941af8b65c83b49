"""What a format is, and how fields are read: every refusal is a BadRow with a one-word reason and a plain sentence."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from heedful.data.files import BadRow, Row
from heedful.records import Answer, Demonstration, Judgement, Message, Prompt, Ranking

Fields = Mapping[str, Any]
Loadable = Ranking | Demonstration | Prompt

FILE_ANNOTATOR = "file"
"""The annotator of judgements that the file itself asserts, when it names no person."""

ROLES = {
    "system": "system", "user": "user", "human": "user", "prompter": "user", "assistant": "assistant",
    "gpt": "assistant", "chatgpt": "assistant", "bot": "assistant", "bard": "assistant", "model": "assistant",
}  # fmt: skip

ANSWER_KEYS = (
    "chosen", "rejected", "completion", "completions", "response", "responses", "output", "answer", "answers", "label",
    "score_chosen", "messages", "conversations", "response_0", "response_1", "response_2", "response_a", "summaries",
)  # fmt: skip
"""A row that holds one of these is more than a prompt."""


@dataclass(frozen=True)
class Format:
    """A shape of rows that can be recognised and imported."""

    name: str
    kind: str
    """"rankings", "demonstrations" or "prompts"."""
    about: str
    required: tuple[str, ...]
    """Keys every row has."""
    parse: Callable[[Fields], Loadable]
    """A row to a record; raises BadRow."""
    looks: Callable[[Fields], str | None] = lambda row: None
    """Why a row that has the keys is of another shape all the same; None when it fits."""
    join: Callable[[Iterable[Row]], Iterator[Row]] | None = None
    """Brings rows that belong together into one, for formats that spread a ranking over several rows."""

    def misfit(self, row: Fields) -> BadRow | None:
        """Why the row is not of this format; None when it is."""
        for key in self.required:
            if key not in row:
                return BadRow("missing_field", f"field {key!r} is missing")
        reason = self.looks(row)
        return BadRow("wrong_type", reason) if reason else None

    def matches(self, row: Fields) -> bool:
        """Whether the row is of this shape (its values may still be refused)."""
        return self.misfit(row) is None


class Candidate(NamedTuple):
    """An answer about to be ranked; ``field`` is its place in the row, for messages."""

    field: str
    text: Any
    policy: str = ""
    score: float | None = None
    id: str = ""
    ratings: Mapping[str, float] | None = None
    """By attribute, higher is better."""


# Fields of a row.


def present(row: Fields, *keys: str) -> bool:
    """Whether any of the keys holds a value."""
    return any(row.get(key) is not None for key in keys)


def value(row: Fields, key: str) -> Any:
    """A field that must be there and not null."""
    if key not in row:
        raise BadRow("missing_field", f"field {key!r} is missing")
    if row[key] is None:
        raise BadRow("null_field", f"field {key!r} is null")
    return row[key]


def listing(row: Fields, key: str, *, optional: bool = False) -> list[Any]:
    """A field that must be a list; an optional one that is absent or null counts as empty."""
    items = [] if optional and row.get(key) is None else value(row, key)
    if not isinstance(items, list):
        raise BadRow("wrong_type", f"field {key!r} must be a list, not {type(items).__name__}")
    return items


def objects(row: Fields, key: str, *, optional: bool = False) -> list[Fields]:
    """A field that must be a list of objects."""
    items = listing(row, key, optional=optional)
    for i, item in enumerate(items):
        if not isinstance(item, Mapping):
            raise BadRow("wrong_type", f"field '{key}[{i}]' must be an object, not {type(item).__name__}")
    return items


def mapping(row: Fields, key: str) -> Fields:
    """A field that must be an object; an absent or null one counts as empty."""
    item = {} if row.get(key) is None else row[key]
    if not isinstance(item, Mapping):
        raise BadRow("wrong_type", f"field {key!r} must be an object, not {type(item).__name__}")
    return item


def text(content: Any, field: str) -> str:
    """A string as it stands, without judging whether it is empty."""
    if content is None:
        raise BadRow("null_field", f"field {field!r} is null")
    if isinstance(content, list) and content and all(isinstance(part, dict) for part in content):
        if any(part.get("type") not in (None, "text") for part in content):
            raise BadRow("not_text", f"field {field!r} holds pictures or sound; only text is supported")
        content = "".join(text(part.get("text"), field) for part in content)
    if not isinstance(content, str):
        raise BadRow("wrong_type", f"field {field!r} must be text, not {type(content).__name__} {content!r:.40}")
    return content


def optional_text(row: Fields, *keys: str) -> str:
    """The first of the keys that holds text, else an empty string."""
    for key in keys:
        if isinstance(row.get(key), str) and row[key]:
            return str(row[key])
    return ""


def number(content: Any, field: str, *, low: float = -math.inf, high: float = math.inf) -> float:
    """A score or rank, given as a number or as text.

    Blanks around it, digits of any script and "x/y" with y equal to ``high`` are understood; anything that is not a
    finite number from ``low`` to ``high`` is refused, never clipped.
    """
    found = math.nan
    if isinstance(content, str):
        first, slash, second = content.partition("/")
        try:
            found = float(first) if not slash or float(second) == high else math.nan
        except ValueError:
            pass
    elif isinstance(content, (int, float)) and not isinstance(content, bool) and abs(content) < 1e300:
        found = float(content)
    if not math.isfinite(found) or not low <= found <= high:
        scale = f" from {low:g} to {high:g}" if math.isfinite(low) and math.isfinite(high) else ""
        raise BadRow("bad_score", f"field {field!r} must be a number{scale}, not {content!r:.40}")
    return found


def choice(content: Any, field: str, options: Sequence[int] = (0, 1)) -> int:
    """One of a few whole numbers, given as a number or as text."""
    found = number(content, field)
    if found not in options:
        raise BadRow("bad_label", f"field {field!r} must be one of {', '.join(map(str, options))}, not {content!r:.40}")
    return int(found)


def conversation(content: Any, field: str) -> tuple[Message, ...]:
    """Messages from a string (one user turn) or a list of {role, content} or {from, value}."""
    if isinstance(content, str):
        if not content.strip():
            raise BadRow("empty_prompt", f"field {field!r} is empty")
        return (Message("user", content),)
    if content is None:
        raise BadRow("null_field", f"field {field!r} is null")
    if not isinstance(content, list):
        raise BadRow("wrong_type", f"field {field!r} must be text or a list of messages, not {type(content).__name__}")
    if not content:
        raise BadRow("empty_prompt", f"field {field!r} is an empty list")
    return tuple(message(turn, f"{field}[{i}]") for i, turn in enumerate(content))


def message(turn: Any, field: str) -> Message:
    """One message from {role, content} or {from, value}."""
    if not isinstance(turn, Mapping):
        raise BadRow("wrong_type", f"field {field!r} must be a message with role and content")
    role_key, text_key = ("from", "value") if "from" in turn else ("role", "content")
    if turn.get("tool_calls"):
        raise BadRow("unsupported_role", f"field {field!r} calls a tool; only text is supported")
    role = str(value(turn, role_key)).lower()
    if role not in ROLES:
        raise BadRow("unsupported_role", f"field {field!r} has the role {role!r}; known are system, user and assistant")
    return Message(ROLES[role], text(value(turn, text_key), f"{field}.{text_key}"))


def answer_text(content: Any, field: str) -> str:
    """The text of an answer: a string, one message, or a list of one assistant message."""
    if isinstance(content, list) and len(content) == 1:
        content = content[0]
    if isinstance(content, Mapping):
        turn = message(content, field)
        if turn.role != "assistant":
            raise BadRow("wrong_role", f"field {field!r} must be the assistant's, not the {turn.role}'s")
        content = turn.content
    elif isinstance(content, list):
        raise BadRow("diverges_early", f"field {field!r} holds {len(content)} messages where one answer is needed")
    answer = text(content, field)
    if not answer.strip():
        raise BadRow("empty_answer", f"field {field!r} is empty")
    return answer


def check_prompt(prompt: tuple[Message, ...], field: str = "prompt") -> tuple[Message, ...]:
    """The prompt itself, when an assistant's answer can follow it."""
    if not prompt or not prompt[-1].content.strip():
        raise BadRow("empty_prompt", f"field {field!r} is empty")
    if prompt[-1].role != "user":
        raise BadRow("prompt_ends_wrong", f"field {field!r} ends with the {prompt[-1].role}, not with the user")
    return prompt


# Records of a row.


def row_id(row: Fields, *parts: Any) -> str:
    """The row's own ``id``, else a hash of its content, so that the id does not depend on the row's place or file."""
    own = row.get("id")
    if isinstance(own, (str, int)) and not isinstance(own, bool) and str(own):
        return str(own)
    return hashlib.sha256(json.dumps(parts, ensure_ascii=False).encode("utf-8")).hexdigest()[:16]


def dense(scores: Sequence[float], *, best: Callable[..., float] = max) -> list[int]:
    """Ranks from 1 without gaps; equal scores share a rank. ``best=min`` where low is good."""
    order = sorted(set(scores), reverse=best is max)
    place = {score: i for i, score in enumerate(order, 1)}
    return [place[score] for score in scores]


def ranking(
    row: Fields,
    prompt: tuple[Message, ...],
    candidates: Sequence[Candidate],
    ranks: Sequence[int] | Mapping[str, Sequence[int]],
    *,
    consensus: Sequence[int] | None = None,
    info: dict[str, Any] | None = None,
) -> Ranking:
    """A Ranking from answers and their ranks (1 is best), given once or by annotator."""
    check_prompt(prompt)
    if len(candidates) < 2:
        raise BadRow("single_answer", f"{len(candidates)} answer where a ranking needs two or more")
    texts = [answer_text(c.text, c.field) for c in candidates]
    if len(set(texts)) == 1:
        raise BadRow("identical_answers", f"{candidates[0].field!r} and {candidates[1].field!r} are the same text")
    ids = [c.id or f"a{i}" for i, c in enumerate(candidates, 1)]
    judged = ranks if isinstance(ranks, Mapping) else {FILE_ANNOTATOR: ranks}
    return Ranking(
        group_id=row_id(row, [m.to_json() for m in prompt], texts),
        prompt=prompt,
        answers=tuple(Answer(i, t, policy=c.policy, score=c.score) for i, t, c in zip(ids, texts, candidates)),
        rankings=tuple(Judgement(who, dict(zip(ids, places))) for who, places in judged.items()),
        consensus=dict(zip(ids, consensus)) if consensus is not None else None,
        category=optional_text(row, "category", "domain", "subset", "subreddit"),
        lang=optional_text(row, "lang", "language"),
        source=optional_text(row, "source", "dataset"),
        info=info or {},
        ratings=_by_attribute(ids, candidates),
    )


def _by_attribute(ids: Sequence[str], candidates: Sequence[Candidate]) -> dict[str, dict[str, float]]:
    names = dict.fromkeys(name for c in candidates for name in c.ratings or ())
    return {
        name: {i: c.ratings[name] for i, c in zip(ids, candidates) if c.ratings and name in c.ratings}
        for name in names
    }  # fmt: skip


def ratings(content: Any, field: str) -> dict[str, float]:
    """{name: number} as it stands in a row; null = not rated."""
    if content is not None and not isinstance(content, Mapping):
        raise BadRow("wrong_type", f"field {field!r} must be {{name: number}}, not {type(content).__name__}")
    return {
        str(name): number(value, f"{field}.{name}") for name, value in (content or {}).items() if value is not None
    }


def pair(
    row: Fields,
    prompt: tuple[Message, ...],
    first: Candidate,
    second: Candidate,
    preference: float = 1.0,
    *,
    info: dict[str, Any] | None = None,
    annotator: str = FILE_ANNOTATOR,
) -> Ranking:
    """Two answers: ``preference`` > 0 means the first is better, 0 a tie."""
    ranks = [1, 2] if preference > 0 else [2, 1] if preference < 0 else [1, 1]
    return ranking(row, prompt, (first, second), {annotator: ranks}, info=info)


def kept_info(row: Fields, *keys: str) -> dict[str, Any]:
    """The named fields that hold a value, for ``info``."""
    return {key: row[key] for key in keys if row.get(key) is not None}
