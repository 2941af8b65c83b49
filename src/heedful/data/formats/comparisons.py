"""Data sets that compare two answers with a label: TL;DR, WebGPT, HelpSteer2/3, SHP, PKU-SafeRLHF, Chatbot Arena.

The meaning of each label is written at its parser; a flipped sign here trains the opposite of what people said.
"""

from __future__ import annotations

import json
from typing import Any

from heedful.data.files import BadRow
from heedful.data.formats.base import (
    Candidate,
    Fields,
    Format,
    choice,
    conversation,
    kept_info,
    mapping,
    number,
    objects,
    optional_text,
    pair,
    present,
    ranking,
    text,
    value,
)
from heedful.data.formats.transcripts import parting, read_prompt
from heedful.records import Message, Ranking


def _parse_tldr(row: Fields) -> Ranking:
    """``choice`` is the index of the better summary."""
    info, summaries = mapping(row, "info"), objects(row, "summaries")
    first, second = (
        Candidate(f"summaries[{i}].text", text(value(s, "text"), "text").strip(), optional_text(s, "policy"))
        for i, s in enumerate(summaries)
    )
    post = optional_text(info, "post", "article")
    if not post:
        raise BadRow("empty_prompt", "field 'info.post' is empty")
    head = [f"{name}: {info[key]}" for name, key in (("SUBREDDIT", "subreddit"), ("TITLE", "title")) if info.get(key)]
    prompt = "\n\n".join([*head, f"POST: {post}", "TL;DR:"])
    chosen = choice(value(row, "choice"), "choice")
    confidence = mapping(row, "extra").get("confidence")
    return pair(
        row, (Message("user", prompt),), first, second, 1 if chosen == 0 else -1,
        info={"confidence": confidence} if confidence is not None else None,
        annotator=optional_text(row, "worker") or "file",
    )  # fmt: skip


def _looks_tldr(row: Fields) -> str | None:
    two = isinstance(row["summaries"], list) and len(row["summaries"]) == 2
    return None if two and all(isinstance(s, dict) for s in row["summaries"]) else "'summaries' is not a list of two"


def _parse_webgpt(row: Fields) -> Ranking:
    """Scores from -1 to 1, equal scores are a tie."""
    question = value(row, "question")
    if isinstance(question, dict):
        question = value(question, "full_text")
    scores = [number(value(row, key), key, low=-1, high=1) for key in ("score_0", "score_1")]
    first, second = (Candidate(f"answer_{i}", value(row, f"answer_{i}"), score=scores[i]) for i in (0, 1))
    margin = scores[0] - scores[1]
    return pair(row, conversation(question, "question"), first, second, margin, info={"margin": abs(margin)})


def _parse_helpsteer3(row: Fields) -> Ranking:
    """``overall_preference`` from -3 to 3: below 0 the first answer is better, 0 is a tie.

    Single judgements, where given, become one judgement each; the overall value stays the consensus.
    """
    strength = number(value(row, "overall_preference"), "overall_preference", low=-3, high=3)
    candidates = [Candidate(f"response{i}", value(row, f"response{i}")) for i in (1, 2)]
    judged: dict[str, list[int]] = {}
    for i, judgement in enumerate(objects(row, "individual_preference", optional=True), 1):
        score = number(judgement.get("score"), f"individual_preference[{i - 1}].score", low=-3, high=3)
        judged[f"rater-{i}"] = _two_ranks(score)
    overall = _two_ranks(strength)
    prompt = conversation(value(row, "context"), "context")
    return ranking(
        row, prompt, candidates, judged or {"file": overall}, consensus=overall, info={"margin": abs(strength)}
    )


def _two_ranks(strength: float) -> list[int]:
    return [1, 2] if strength < 0 else [2, 1] if strength > 0 else [1, 1]


def _parse_helpsteer2(row: Fields) -> Ranking:
    """``preference_strength`` from -3 to 3: below 0 the first answer is better, 0 is a tie."""
    strength = number(value(row, "preference_strength"), "preference_strength", low=-3, high=3)
    first, second = (Candidate(f"response_{i}", value(row, f"response_{i}")) for i in (1, 2))
    prompt = read_prompt(value(row, "prompt"), "prompt")
    return pair(row, prompt, first, second, -strength, info={"margin": abs(strength)})


def _parse_shp(row: Fields) -> Ranking:
    """``labels`` 1: answer A is better; 0: answer B."""
    better_a = choice(value(row, "labels"), "labels") == 1
    first, second = (
        Candidate(key, value(row, key), score=_maybe(row, score))
        for key, score in (("human_ref_A", "score_A"), ("human_ref_B", "score_B"))
    )
    info = kept_info(row, "score_ratio", "post_id")
    prompt = conversation(value(row, "history"), "history")
    return pair(row, prompt, first, second, 1 if better_a else -1, info=info)


def _maybe(row: Fields, key: str) -> float | None:
    return number(row[key], key) if row.get(key) is not None else None


_PKU_ATTRIBUTES = {"helpful": "better_response_id", "safe": "safer_response_id"}


def _parse_pku(which: str, row: Fields) -> Ranking:
    """``better_response_id`` (helpful) and ``safer_response_id`` (safe) are two preferences, never merged.

    One is the ranking; each is a rating of its own too, 1 for the response that it names and 0 for the other.
    """
    chosen = choice(value(row, which), which)
    wins = {name: choice(row[key], key) for name, key in _PKU_ATTRIBUTES.items() if row.get(key) is not None}
    first, second = (
        Candidate(f"response_{i}", value(row, f"response_{i}"), ratings={n: float(w == i) for n, w in wins.items()})
        for i in (0, 1)
    )
    info = kept_info(row, "is_response_0_safe", "is_response_1_safe")
    prompt = conversation(value(row, "prompt"), "prompt")
    return pair(row, prompt, first, second, 1 if chosen == 0 else -1, info=info)


def _flag(content: Any, field: str) -> bool:
    if isinstance(content, bool):
        return content
    if isinstance(content, str) and content.strip().lower() in ("true", "false"):
        return content.strip().lower() == "true"
    return choice(content, field) == 1


def _parse_arena_flags(row: Fields) -> Ranking:
    """Exactly one of winner_model_a, winner_model_b, winner_tie is set; prompt and responses may be JSON lists."""
    flags = [_flag(value(row, key), key) for key in ("winner_model_a", "winner_model_b", "winner_tie")]
    if sum(flags) != 1:
        raise BadRow("bad_label", "exactly one of winner_model_a, winner_model_b and winner_tie must be set")
    prompts, a, b = (_turn_list(value(row, key), key) for key in ("prompt", "response_a", "response_b"))
    if not len(prompts) == len(a) == len(b):
        raise BadRow("diverges_early", "prompt and responses have different numbers of turns")
    return _battle(row, _dialogue(prompts, a), _dialogue(prompts, b), 1 if flags[0] else -1 if flags[1] else 0)


def _dialogue(questions: list[str], answers: list[str]) -> list[Message]:
    turns = zip(questions, answers)
    return [turn for asked, said in turns for turn in (Message("user", asked), Message("assistant", said))]


def _turn_list(content: Any, field: str) -> list[str]:
    if isinstance(content, str) and content.lstrip().startswith("["):
        try:
            content = json.loads(content)
        except ValueError:
            raise BadRow("invalid_json", f"field {field!r} is no valid JSON list") from None
    turns = content if isinstance(content, list) else [content]
    return [text("" if turn is None else turn, f"{field}[{i}]") for i, turn in enumerate(turns)]


def _parse_arena(row: Fields) -> Ranking:
    """``winner`` is model_a, model_b, or begins with "tie" ("tie (bothbad)", "both_bad" are ties too)."""
    winner = text(value(row, "winner"), "winner")
    if winner not in ("model_a", "model_b") and not winner.startswith(("tie", "both")):
        raise BadRow("bad_label", f"field 'winner' must be model_a, model_b or tie, not {winner!r:.40}")
    a, b = (conversation(value(row, key), key) for key in ("conversation_a", "conversation_b"))
    return _battle(row, list(a), list(b), {"model_a": 1, "model_b": -1}.get(winner, 0))


def _battle(row: Fields, a: list[Message], b: list[Message], preference: int) -> Ranking:
    try:
        prompt, answer_a, answer_b = parting(a, b)
    except BadRow as bad:
        renamed = str(bad).replace("chosen", "conversation a").replace("rejected", "conversation b")
        raise BadRow(bad.reason, renamed) from None
    first = Candidate("answer a", answer_a, optional_text(row, "model_a"))
    second = Candidate("answer b", answer_b, optional_text(row, "model_b"))
    return pair(row, prompt, first, second, preference, annotator=optional_text(row, "judge") or "file")


def _looks_pku(row: Fields) -> str | None:
    return None if present(row, "response_0", "response_1") else "no answers"


TLDR = Format(
    "tldr", "rankings", "TL;DR comparisons: info.post, two summaries, choice", ("info", "summaries", "choice"),
    _parse_tldr, _looks_tldr,
)  # fmt: skip
WEBGPT = Format(
    "webgpt", "rankings", "WebGPT comparisons: question, answer_0/1, score_0/1 (equal = tie)",
    ("question", "answer_0", "answer_1", "score_0", "score_1"), _parse_webgpt,
)  # fmt: skip
HELPSTEER3 = Format(
    "helpsteer3", "rankings", "HelpSteer3: context, response1/2, overall_preference (below 0 = first)",
    ("context", "response1", "response2", "overall_preference"), _parse_helpsteer3,
)  # fmt: skip
HELPSTEER2_PREFERENCE = Format(
    "helpsteer2_preference", "rankings", "HelpSteer2: prompt, response_1/2, preference_strength (below 0 = first)",
    ("prompt", "response_1", "response_2", "preference_strength"), _parse_helpsteer2,
)  # fmt: skip
SHP = Format(
    "shp", "rankings", "SHP: history, human_ref_A/B, labels (1 = A)",
    ("history", "human_ref_A", "human_ref_B", "labels"), _parse_shp,
)  # fmt: skip
PKU_BETTER = Format(
    "pku_better", "rankings", "PKU-SafeRLHF by helpfulness (better_response_id)",
    ("prompt", "response_0", "response_1", "better_response_id"), lambda row: _parse_pku("better_response_id", row),
    _looks_pku,
)  # fmt: skip
PKU_SAFER = Format(
    "pku_safer", "rankings", "PKU-SafeRLHF by harmlessness (safer_response_id)",
    ("prompt", "response_0", "response_1", "safer_response_id"), lambda row: _parse_pku("safer_response_id", row),
    _looks_pku,
)  # fmt: skip
ARENA_FLAGS = Format(
    "arena_flags", "rankings", "Chatbot Arena: prompt, response_a/b, winner_model_a/b/tie",
    ("prompt", "response_a", "response_b", "winner_model_a", "winner_model_b", "winner_tie"), _parse_arena_flags,
)  # fmt: skip
ARENA = Format(
    "arena", "rankings", "Chatbot Arena: conversation_a/b and winner", ("conversation_a", "conversation_b", "winner"),
    _parse_arena,
)  # fmt: skip
