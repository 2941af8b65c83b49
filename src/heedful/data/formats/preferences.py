"""Rows with chosen and rejected: TRL (explicit, implicit prompt), OpenRLHF keys, UltraFeedback-binarized, rm-static."""

from __future__ import annotations

from typing import Any

from heedful.data.files import BadRow
from heedful.data.formats.base import (
    Candidate,
    Fields,
    Format,
    answer_text,
    conversation,
    kept_info,
    number,
    pair,
    present,
    text,
    value,
)
from heedful.data.formats.transcripts import common_text, is_transcript, parting, read_prompt, write_transcript
from heedful.records import Message, PreferencePair, Ranking

PROMPT_KEYS = ("prompt", "input", "question", "query", "instruction", "context")


def _explicit(row: Fields, key: str) -> tuple[tuple[Message, ...], str, str]:
    """Prompt and answers; lists that repeat the prompt before the answer are cut."""
    prompt = read_prompt(value(row, key), key)
    chosen, rejected = value(row, "chosen"), value(row, "rejected")
    if not (_repeats_prompt(chosen) and _repeats_prompt(rejected)):
        better, worse = answer_text(chosen, "chosen"), answer_text(rejected, "rejected")
        if is_transcript(row[key]):
            better, worse = better.strip(), worse.strip()
        return prompt, better, worse
    common, better, worse = parting(conversation(chosen, "chosen"), conversation(rejected, "rejected"))
    asked = [turn for turn in common if turn.role != "system"]
    named = [turn for turn in prompt if turn.role != "system"]
    if asked != named and not (isinstance(row[key], str) and row[key] in [turn.content for turn in asked]):
        raise BadRow("prompts_differ", f"field {key!r} is not the prompt that 'chosen' and 'rejected' begin with")
    return common if len(common) >= len(prompt) else prompt, better, worse


def _repeats_prompt(content: Any) -> bool:
    return isinstance(content, list) and len(content) > 1


def _parse_explicit(key: str, row: Fields) -> Ranking:
    prompt, better, worse = _explicit(row, key)
    info = kept_info(row, "margin")
    if "margin" in info:
        info["margin"] = number(info["margin"], "margin")
    return pair(row, prompt, Candidate("chosen", better), Candidate("rejected", worse), info=info)


def _parse_trl(row: Fields) -> Ranking:
    return _parse_explicit("prompt", row)


def _looks_plain(row: Fields) -> str | None:
    if isinstance(row["prompt"], dict):
        return "'prompt' is an object where text or a list of messages is needed"
    return None


def _openrlhf_key(row: Fields) -> str | None:
    return next((key for key in PROMPT_KEYS[1:] if present(row, key)), None)


def _parse_openrlhf(row: Fields) -> Ranking:
    return _parse_explicit(_openrlhf_key(row) or "input", row)


def _looks_openrlhf(row: Fields) -> str | None:
    if present(row, "prompt"):
        return "the prompt stands in 'prompt'"
    return None if _openrlhf_key(row) else f"no prompt (one of the fields {', '.join(PROMPT_KEYS[1:])})"


def _parse_implicit(row: Fields) -> Ranking:
    chosen, rejected = value(row, "chosen"), value(row, "rejected")
    if isinstance(chosen, str) and isinstance(rejected, str):
        for key in ("chosen", "rejected"):
            answer_text(row[key], key)
        if chosen == rejected:
            raise BadRow("identical_answers", "'chosen' and 'rejected' are the same text")
        end = common_text(chosen, rejected)
        if not chosen[:end].strip():
            raise BadRow("no_common_prompt", "'chosen' and 'rejected' have no common beginning, so there is no prompt")
        prompt: tuple[Message, ...] = (Message("user", chosen[:end]),)
        better, worse = chosen[end:], rejected[end:]
    elif isinstance(chosen, list) and isinstance(rejected, list):
        prompt, better, worse = parting(conversation(chosen, "chosen"), conversation(rejected, "rejected"))
    else:
        odd = "rejected" if isinstance(chosen, (str, list)) else "chosen"
        text(row[odd], odd)  # names what it is when it is no text at all
        raise BadRow("wrong_type", "'chosen' and 'rejected' must both be text or both be lists of messages")
    info = kept_info(row, "margin")
    return pair(row, prompt, Candidate("chosen", better), Candidate("rejected", worse), info=info)


def _looks_implicit(row: Fields) -> str | None:
    key = next((key for key in (*PROMPT_KEYS, "conversations") if present(row, key)), None)
    return f"the prompt stands in {key!r}" if key else None


def _parse_ultrafeedback(row: Fields) -> Ranking:
    prompt, better, worse = _explicit(row, "prompt")
    scores = {key: number(value(row, f"score_{key}"), f"score_{key}") for key in ("chosen", "rejected")}
    margin = scores["chosen"] - scores["rejected"]
    if margin < 0:
        raise BadRow("score_contradicts", "'score_rejected' is above 'score_chosen'")
    first = Candidate("chosen", better, score=scores["chosen"])
    return pair(
        row, prompt, first, Candidate("rejected", worse, score=scores["rejected"]), margin, info={"margin": margin}
    )


def _looks_rm_static(row: Fields) -> str | None:
    ends = isinstance(row["prompt"], str) and row["prompt"].rstrip().endswith("Assistant:")
    return None if ends else "'prompt' does not end with 'Assistant:'"


def _write_prompt(item: PreferencePair) -> tuple[str, str]:
    """The prompt as one string, and what stands between it and the answer."""
    if len(item.prompt) == 1 and item.prompt[0].role == "user" and not is_transcript(item.prompt[0].content):
        return item.prompt[0].content, ""
    return write_transcript(item.prompt), " "


def write_strings(item: PreferencePair) -> dict[str, Any]:
    """Prompt, chosen and rejected as text; a conversation of several turns becomes a transcript."""
    prompt, gap = _write_prompt(item)
    return {"prompt": prompt, "chosen": gap + item.chosen, "rejected": gap + item.rejected, **_margin(item)}


def write_messages(item: PreferencePair) -> dict[str, Any]:
    """Prompt, chosen and rejected as lists of messages."""
    answers = {"chosen": [_said(item.chosen)], "rejected": [_said(item.rejected)]}
    return {"prompt": _plain(item.prompt), **answers, **_margin(item)}


def write_implicit(item: PreferencePair) -> dict[str, Any]:
    """Whole conversations in chosen and rejected: what OpenRLHF reads with its default keys and a chat template."""
    prompt = _plain(item.prompt)
    return {"chosen": [*prompt, _said(item.chosen)], "rejected": [*prompt, _said(item.rejected)]} | _margin(item)


def _plain(messages: tuple[Message, ...]) -> list[dict[str, Any]]:
    return [turn.to_json() for turn in messages]


def _said(answer: str) -> dict[str, str]:
    return {"role": "assistant", "content": answer}


def _margin(item: PreferencePair) -> dict[str, float]:
    return {} if item.margin is None else {"margin": item.margin}


_PAIR = ("chosen", "rejected")
ULTRAFEEDBACK_BINARIZED = Format(
    "ultrafeedback_binarized", "rankings", "UltraFeedback-binarized: messages with score_chosen and score_rejected",
    ("prompt", *_PAIR, "score_chosen", "score_rejected"), _parse_ultrafeedback,
)  # fmt: skip
RM_STATIC = Format(
    "rm_static", "rankings", "rm-static: prompt ends with 'Assistant:', answers begin with a space",
    ("prompt", "response", *_PAIR), _parse_trl, _looks_rm_static,
)  # fmt: skip
TRL = Format(
    "trl", "rankings", "TRL preference: prompt, chosen, rejected as text or messages", ("prompt", *_PAIR), _parse_trl,
    _looks_plain,
)  # fmt: skip
OPENRLHF = Format(
    "openrlhf", "rankings", "OpenRLHF keys: input (or question, query, …), chosen, rejected", _PAIR, _parse_openrlhf,
    _looks_openrlhf,
)  # fmt: skip
TRL_IMPLICIT = Format(
    "trl_implicit", "rankings", "TRL preference without a prompt: the common beginning of chosen and rejected", _PAIR,
    _parse_implicit, _looks_implicit,
)  # fmt: skip
