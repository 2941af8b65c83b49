"""All formats, the most particular first, and how a file's format is recognised."""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from heedful.data.files import Row
from heedful.data.formats import (
    annotated,
    comparisons,
    conversations,
    instructions,
    joined,
    lists,
    preferences,
    transcripts,
)
from heedful.data.formats.base import Format
from heedful.errors import DataError

FORMATS: dict[str, Format] = {
    f.name: f
    for f in (
        lists.MASTER,
        annotated.LABEL_STUDIO,
        annotated.ARGILLA,
        lists.NECTAR,
        lists.RANKINGS,
        lists.ULTRAFEEDBACK,
        lists.NEMO_RL,
        comparisons.TLDR,
        comparisons.WEBGPT,
        comparisons.HELPSTEER3,
        comparisons.HELPSTEER2_PREFERENCE,
        comparisons.SHP,
        comparisons.PKU_BETTER,
        comparisons.PKU_SAFER,
        comparisons.ARENA_FLAGS,
        comparisons.ARENA,
        joined.HELPSTEER,
        joined.OASST_TREE,
        joined.OASST,
        preferences.ULTRAFEEDBACK_BINARIZED,
        preferences.RM_STATIC,
        instructions.ALPACA_RANKING,
        instructions.SHAREGPT_RANKING,
        preferences.TRL,
        transcripts.HH,
        preferences.OPENRLHF,
        preferences.TRL_IMPLICIT,
        instructions.SHAREGPT,
        conversations.MESSAGES,
        instructions.ALPACA,
        conversations.PROMPT_COMPLETION,
        conversations.MESSAGES_PROMPT,
        conversations.PROMPTS,
    )
}

SAMPLE_ROWS = 200


def find(name: str) -> Format:
    """The format of that name. Raises DataError that suggests the nearest name."""
    if name not in FORMATS:
        near = difflib.get_close_matches(name, FORMATS, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise DataError(f"format {name!r} is unknown{hint}; known are auto, {', '.join(FORMATS)}")
    return FORMATS[name]


def recognise(row: Mapping[str, Any]) -> Format | None:
    """The most particular format that one row fits."""
    return next((f for f in FORMATS.values() if f.matches(row)), None)


def sniff(rows: Iterable[Row]) -> Format:
    """The format of a sample of rows: the one that most of them fit best.

    Raises:
        DataError: no format fits (says what was seen, and the nearest format with the reason it did not fit), or rows
            of two formats are mixed.
    """
    sample = list(rows)
    votes = Counter(f.name for row in sample if (f := recognise(row.data)) is not None)
    if not votes:
        raise DataError(_unknown(sample))
    best = max(votes.values())
    found = next(f for f in FORMATS.values() if votes[f.name] == best)
    keys = usual_keys(sample, found)
    for row in sample:
        refuse_mixed(row, found, keys)
    return found


def usual_keys(sample: Iterable[Row], found: Format) -> frozenset[str]:
    """The fields seen in rows of the file's format."""
    return frozenset(key for row in sample if found.matches(row.data) for key in row.data)


def refuse_mixed(row: Row, found: Format, keys: frozenset[str]) -> None:
    """Raises DataError when the row is not of the file's format but plainly of another one.

    A row with fields that the others have too, only fewer of them, is no other format: something is missing in it.
    """
    if found.matches(row.data) or keys.issuperset(row.data):
        return
    other = recognise(row.data)
    if other is not None:
        raise DataError(
            f"the row in line {row.line} looks like {other.name}, but the file like {found.name}; "
            "split the file into one file per format, or name the format to keep only its rows"
        )


def _unknown(sample: list[Row]) -> str:
    if not sample:
        return "no rows"
    row = sample[0]
    keys = ", ".join(map(repr, list(row.data)[:12])) or "none"

    def likeness(f: Format) -> tuple[int, int]:
        have = sum(key in row.data for key in f.required)
        return (have, have - len(f.required))

    nearest = max(FORMATS.values(), key=likeness)
    if likeness(nearest)[0] == 0:
        return f"no known format has such rows (line {row.line} has the fields {keys}); see docs/04-data.md"
    return (
        f"no known format fits the rows (line {row.line} has the fields {keys}); "
        f"the nearest is {nearest.name}, but {nearest.misfit(row.data)}"
    )
