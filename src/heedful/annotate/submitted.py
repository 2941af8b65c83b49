"""One person's ranking of one item as quality control sees it: plain data, whatever database it came from."""

from __future__ import annotations

from dataclasses import dataclass, field

from heedful.records import Record


@dataclass(frozen=True, slots=True)
class Submitted(Record):
    """The last revision of a submission, with what was on the screen."""

    annotator: str
    """Pseudonym"""
    group_id: str
    category: str
    round: int
    lang: str
    ranks: dict[str, int]
    """Answer id → rank, 1 = best, equal = tie; an absent answer was left unranked: it stands behind all others, and
    nothing is said of two such"""
    slots: dict[str, int]
    """Answer id → where it stood, from 0"""
    num_characters: dict[str, int]
    """Answer id → characters of its text that are no white space"""
    policies: dict[str, str]
    at: float
    """Seconds since 1970"""
    seconds: float | None = None
    guideline_version: int = 1
    repetition: int = 0
    """1: the same person ranked the item before"""
    gold: tuple[tuple[str, ...], ...] | None = None
    """Of a control item: (better, worse) answer ids"""
    all_bad: bool = False
    strength: int | None = None
    reason: str = ""
    flags: dict[str, list[str]] = field(default_factory=dict)
    ratings: dict[str, dict[str, float]] = field(default_factory=dict)
    num_revisions: int = 1
    excluded: bool = False
    """This person's work is left out at present"""
