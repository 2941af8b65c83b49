"""The prompt of any record: what the answer follows."""

from __future__ import annotations

from heedful.records import Demonstration, Message, PreferencePair, Prompt, Ranking

Prompted = Ranking | PreferencePair | Demonstration | Prompt


def prompt_of(record: Prompted) -> tuple[Message, ...]:
    """The messages before the answer (of a demonstration: before its last answer)."""
    if isinstance(record, Demonstration):
        return record.messages[:-1]
    return record.messages if isinstance(record, Prompt) else record.prompt


def prompt_text(record: Prompted) -> str:
    """The prompt as one text, without the system message: what is compared to find like prompts."""
    return "\n".join(turn.content for turn in prompt_of(record) if turn.role != "system")
