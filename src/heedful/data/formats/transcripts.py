"""Transcripts: "\\n\\nHuman: …\\n\\nAssistant: …", and where two texts or conversations part."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence

from heedful.data.files import BadRow
from heedful.data.formats.base import Candidate, Fields, Format, conversation, kept_info, pair, text, value
from heedful.records import Message, PreferencePair, Ranking

MARKER = re.compile(r"\n\n(Human|Assistant):")
_ROLE = {"Human": "user", "Assistant": "assistant"}
_NAME = {"user": "Human", "assistant": "Assistant"}


def is_transcript(content: object) -> bool:
    """Whether a text holds a two-newline turn marker."""
    return isinstance(content, str) and MARKER.search(content) is not None


def read_transcript(content: str, field: str) -> tuple[Message, ...]:
    """Turns of a transcript. Only the marker with two newlines counts: one newline may stand in an answer.

    The text of a turn is stripped. The last turn may be an empty assistant's (a prompt that waits for the answer).
    """
    pieces = MARKER.split(content)
    if pieces[0].strip():
        raise BadRow("malformed_transcript", f"field {field!r} does not begin with a blank line and 'Human:'")
    turns = [Message(_ROLE[name], body.strip()) for name, body in zip(pieces[1::2], pieces[2::2])]
    for i, turn in enumerate(turns):
        expected = "user" if i % 2 == 0 else "assistant"
        if turn.role != expected:
            twice = f"two {_NAME[turn.role]} turns in a row" if i else "no Human turn at its start"
            raise BadRow("malformed_transcript", f"field {field!r} has {twice} (turn {i + 1})")
        if not turn.content and (i < len(turns) - 1 or turn.role == "user"):
            raise BadRow("malformed_transcript", f"field {field!r} has an empty turn (turn {i + 1})")
    return tuple(turns)


def read_prompt(content: object, field: str) -> tuple[Message, ...]:
    """A prompt given as text, as messages, or as a transcript that ends with an open assistant's turn."""
    if isinstance(content, str) and is_transcript(content):
        turns = read_transcript(content, field)
        return turns[:-1] if turns[-1].role == "assistant" and not turns[-1].content else turns
    return conversation(content, field)


def parting(chosen: Sequence[Message], rejected: Sequence[Message]) -> tuple[tuple[Message, ...], str, str]:
    """(common prompt, chosen answer, rejected answer) of two conversations that part at their last turn.

    Raises:
        BadRow: identical_answers, empty_answer (one conversation continues the other), or diverges_early: an answer
            of several turns is not one answer.
    """
    same = 0
    while same < min(len(chosen), len(rejected)) and chosen[same] == rejected[same]:
        same += 1
    if same == len(chosen) == len(rejected):
        raise BadRow("identical_answers", "'chosen' and 'rejected' are the same conversation")
    if same in (len(chosen), len(rejected)):
        shorter = "chosen" if same == len(chosen) else "rejected"
        raise BadRow("empty_answer", f"{shorter!r} ends where the other goes on, so its answer is empty")
    if same == 0:
        raise BadRow("no_common_prompt", "'chosen' and 'rejected' have no common first turn, so there is no prompt")
    if chosen[same].role != "assistant" or rejected[same].role != "assistant":
        raise BadRow("prompts_differ", f"'chosen' and 'rejected' have different prompts (turn {same + 1} differs)")
    if len(chosen) != same + 1 or len(rejected) != same + 1:
        raise BadRow("diverges_early", f"'chosen' and 'rejected' part at turn {same + 1}, before the last turn")
    return tuple(chosen[:same]), chosen[same].content, rejected[same].content


def common_text(first: str, second: str) -> int:
    """Length of the longest common beginning that ends at a border of words in both texts.

    Letters, digits, marks, apostrophes and hyphens make words; a run of Chinese or Japanese characters is one word,
    since its inner borders are unknown.
    """
    end = 0
    while end < min(len(first), len(second)) and first[end] == second[end]:
        end += 1
    while end and (_inside_word(first, end) or _inside_word(second, end)):
        end -= 1
    return end


def _inside_word(content: str, at: int) -> bool:
    return 0 < at < len(content) and _of_word(content[at - 1]) and _of_word(content[at])


def _of_word(character: str) -> bool:
    joins = character in "'’-_" or unicodedata.category(character) in ("Mn", "Mc", "Me", "Cf", "Sk")
    return joins or character.isalnum()


def _parse_hh(row: Fields) -> Ranking:
    chosen = read_transcript(text(value(row, "chosen"), "chosen"), "chosen")
    rejected = read_transcript(text(value(row, "rejected"), "rejected"), "rejected")
    prompt, better, worse = parting(chosen, rejected)
    return pair(row, prompt, Candidate("chosen", better), Candidate("rejected", worse), info=kept_info(row, "margin"))


def _looks_hh(row: Fields) -> str | None:
    if is_transcript(row["chosen"]) or is_transcript(row["rejected"]):
        return "a prompt stands apart" if row.get("prompt") is not None else None
    return "'chosen' and 'rejected' hold no turn marker (blank line, then 'Human:' or 'Assistant:')"


def write_transcript(prompt: Sequence[Message]) -> str:
    """The prompt as a transcript that ends with an open assistant's turn. Raises BadRow where it cannot be said so."""
    written = ""
    for turn in prompt:
        if turn.role not in _NAME:
            raise BadRow("unsupported_role", f"a transcript has no place for a {turn.role} message")
        if is_transcript("\n\n" + turn.content):
            raise BadRow("marker_in_text", "a message holds a turn marker itself")
        written += f"\n\n{_NAME[turn.role]}: {turn.content.strip()}"
    return written + "\n\nAssistant:"


def write_hh(item: PreferencePair) -> dict[str, str]:
    """A pair as two transcripts."""
    if is_transcript(f"\n\n{item.chosen}\n\n{item.rejected}"):
        raise BadRow("marker_in_text", "an answer holds a turn marker itself")
    prompt = write_transcript(item.prompt)
    return {"chosen": f"{prompt} {item.chosen.strip()}", "rejected": f"{prompt} {item.rejected.strip()}"}


HH = Format(
    "hh", "rankings", "HH-RLHF transcripts in chosen and rejected", ("chosen", "rejected"), _parse_hh, _looks_hh
)
