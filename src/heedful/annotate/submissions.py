"""What a person says of an item: checked, stored once, corrected by a further revision, skipped or drafted."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import ColumnElement, func, select
from sqlalchemy.orm import Session

from heedful.annotate import trail
from heedful.annotate.project import storable
from heedful.annotate.queue import HELD, change, is_needed, new_id, whole
from heedful.annotate.settings import FLAGS, SKIP_REASONS, STRENGTHS, Settings
from heedful.annotate.tables import Assignment, Guideline, Person, Submission
from heedful.annotate.wording import Wording
from heedful.errors import DataError

MAX_RANK = 9
MAX_RATING = 5
MAX_REASON = 5_000
"""Characters of a reason or of a skip's note."""
MAX_DRAFT = 20_000
"""Characters of a draft's JSON."""


OUT_OF_HAND = ("submitted", "skipped", "taken", "stale")
"""Codes of refusals of what is right in itself: the item is no longer the person's to rank."""


class Refused(DataError):
    """What a person sent cannot be taken.

    ``code`` is one word for programs, ``field`` the part that is wrong ("ranks.CARD", "reason", …; "" = the whole).
    The message is a Wording.
    """

    def __init__(self, code: str, template: str, *, field: str = "", **values: Any) -> None:
        super().__init__(Wording(template, **values))
        self.code, self.field = code, field


@dataclass(frozen=True, slots=True)
class Said:
    """A judgement by the cards' public ids, as it comes from a page or a program."""

    ranks: Mapping[str, int]
    """Card → 1 (best) to 9, equal = tie; an absent card was not ranked"""
    flags: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Card → some of settings.FLAGS"""
    ratings: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """Attribute → card → 1 to 5"""
    all_bad: bool = False
    strength: int | None = None
    """1 to 3, with two answers that are not tied"""
    reason: str = ""

    @classmethod
    def from_json(cls, data: Any) -> Said:
        """From plain JSON. Raises Refused for unknown keys and for parts of another kind than they should be."""
        kinds: dict[str, Any] = {"ranks": dict, "flags": dict, "ratings": dict, "all_bad": bool, "strength": int,
                                 "reason": str}  # fmt: skip
        if not isinstance(data, Mapping):
            raise Refused("bad_form", "A judgement must be an object.")
        for key, value in data.items():
            if key not in kinds:
                raise Refused("bad_form", "The field {name} is unknown.", field=str(key)[:80], name=str(key)[:80])
            empty = value is None and key == "strength"
            if not empty and (not isinstance(value, kinds[key]) or (kinds[key] is int and isinstance(value, bool))):
                raise Refused("bad_form", "The field {name} has the wrong form.", field=key, name=key)
        return cls(**{"ranks": {}, **data})


@dataclass(frozen=True, slots=True)
class Stored:
    """What became of a submission."""

    submission: Submission
    is_repeat: bool
    """It had been stored before, nothing was changed"""


def find(session: Session, person: Person, public_id: str) -> Assignment | None:
    """The person's own assignment of that id, with item and cards; None for another person's as for an unknown one, and
    for somebody whose account was closed or forgotten since the request began."""
    mine = whole(select(Assignment)).where(Assignment.public_id == public_id, Assignment.person_id == person.id)
    is_in = select(Person.id).where(Person.disabled_at.is_(None))
    found: Assignment | None = session.scalars(mine.where(Assignment.person_id.in_(is_in))).one_or_none()
    return found


def last_submitted(session: Session, person: Person, limit: int = 20) -> list[Assignment]:
    """What the person submitted last, newest first, to look at or correct."""
    mine = whole(select(Assignment)).where(Assignment.person_id == person.id, Assignment.state == "submitted")
    return list(session.scalars(mine.order_by(Assignment.ended_at.desc(), Assignment.id.desc()).limit(limit)))


def submit(
    session: Session,
    assignment: Assignment,
    said: Said,
    *,
    nonce: str,
    settings: Settings,
    now: float,
    correct: bool = False,
    guideline_version: int | None = None,
    request_id: str = "",
) -> Stored:
    """Store a judgement; inside ``writing()``. The assignment gets a fresh nonce for a later correction.

    Args:
        nonce: the assignment's as the page showed it. The same one again gives back what was stored with it, whatever
            is said now.
        correct: replace an earlier submission by a further revision.
        guideline_version: what the person was shown; None = the newest.

    Raises:
        Refused: with ``field`` and ``code``: something is wrong with what was said; the page is out of date
            ("stale"); it was submitted before and this is no correction ("submitted"); or the lease ran out and others
            have ranked the item meanwhile ("taken").
    """
    if nonce != assignment.nonce and (stored := _stored(session, assignment, nonce)):
        return Stored(stored, is_repeat=True)
    content = checked(assignment, said, settings)
    is_first = assignment.state != "submitted"
    if not _take(session, assignment, nonce, now, correct):
        if stored := _stored(session, assignment, nonce):  # the other click of a double click, a moment ago
            return Stored(stored, is_repeat=True)
        raise _why_not(session, assignment, now, correct)
    before = None if is_first else _last(session, assignment)
    submission = Submission(
        assignment_id=assignment.id, revision=before.revision + 1 if before else 1, nonce=nonce, created_at=now,
        seconds=now - assignment.opened_at if before is None and assignment.opened_at is not None else None,
        guideline_version=_shown_version(session, guideline_version), all_bad=said.all_bad, strength=said.strength,
        reason=said.reason.strip(), said=content,
    )  # fmt: skip
    session.add(submission)
    if before is not None:
        trail.record(
            session, who=session.get_one(Person, assignment.person_id).pseudonym, action="correct ranking",
            object=assignment.item.group_id, before=before.said, after=content, request_id=request_id, now=now,
        )  # fmt: skip
    session.flush()
    session.expire(assignment, ["submissions"])
    return Stored(submission, is_repeat=False)


def _last(session: Session, assignment: Assignment) -> Submission | None:
    mine = select(Submission).where(Submission.assignment_id == assignment.id).order_by(Submission.revision.desc())
    return session.scalars(mine.limit(1)).first()


def _stored(session: Session, assignment: Assignment, nonce: str) -> Submission | None:
    mine = select(Submission).where(Submission.assignment_id == assignment.id, Submission.nonce == nonce)
    return session.scalars(mine).one_or_none()


def _take(session: Session, assignment: Assignment, nonce: str, now: float, correct: bool) -> bool:
    """Change the state, provided that it is still the one it must be; of two at once only one succeeds."""
    new: dict[str, Any] = {"state": "submitted", "nonce": new_id(), "draft": None}
    mine = Assignment.nonce == nonce
    if assignment.state == "submitted":
        return correct and change(session, assignment, new, mine, Assignment.state == "submitted")
    return _while_needed(session, assignment, new | {"ended_at": now}, now, mine)


def _while_needed(
    session: Session, assignment: Assignment, new: dict[str, Any], now: float, *where: ColumnElement[bool]
) -> bool:
    """Change a row that the person holds, or held and that is still needed: nobody else has the item's last place."""
    if change(session, assignment, new, Assignment.state == "leased", Assignment.lease_until >= now, *where):
        return True
    return is_needed(session, assignment, now) and change(session, assignment, new, Assignment.state.in_(HELD), *where)


def _why_not(session: Session, assignment: Assignment, now: float, correct: bool = False) -> Refused:
    session.refresh(assignment, ["state", "nonce", "lease_until"])
    if assignment.state == "submitted" and not correct:
        return Refused("submitted", "You have submitted this item already; open it under “My rankings” to correct it.")
    if assignment.state == "skipped":
        return Refused("skipped", "You have skipped this item.")
    if assignment.state == "expired" or assignment.lease_until < now:
        return Refused("taken", "Your time for this item ran out and others have ranked it meanwhile; take the next.")
    return Refused("stale", "This page is out of date; load it again.")


def _shown_version(session: Session, version: int | None) -> int:
    if version is None:
        return session.scalar(select(func.max(Guideline.version))) or 1
    if session.scalar(select(Guideline.id).where(Guideline.version == version)) is None:
        raise Refused("bad_form", "There is no such version of the guideline.", field="guideline_version")
    return version


def checked(assignment: Assignment, said: Said, settings: Settings) -> dict[str, Any]:
    """What was said by the answers' ids in the master file, ranks without gaps. Raises Refused."""
    names = {card.public_id: card.answer.answer_id for card in assignment.shown}
    for part in ("ranks", "flags", *(f"ratings.{name}" for name in said.ratings)):
        cards = said.ratings[part.removeprefix("ratings.")] if "." in part else getattr(said, part)
        _check_cards(cards, names, part)
    ranks = _ranks(said.ranks, names, settings)
    for card, flags in said.flags.items():
        if isinstance(flags, str) or not isinstance(flags, Sequence) or any(flag not in FLAGS for flag in flags):
            raise Refused("bad_flag", "A flag is unknown.", field=f"flags.{card}")
    ratings = _ratings(said.ratings, names, settings)
    if said.strength is not None:
        _check_strength(said.strength, ranks, settings)
    _check_reason(said.reason, settings)
    flagged = {names[card]: [flag for flag in FLAGS if flag in given] for card, given in said.flags.items() if given}
    return {"ranks": ranks, "flags": flagged, "ratings": ratings}


def _check_cards(cards: Any, names: Mapping[str, str], part: str) -> None:
    if not isinstance(cards, Mapping):
        raise Refused("bad_form", "The field {name} has the wrong form.", field=part, name=part[:80])
    unknown = next((card for card in cards if card not in names), None)
    if unknown is not None:
        raise Refused("unknown_card", "An answer was named that is not on this page; load it again.", field=part)


def _ranks(ranks: Mapping[str, Any], names: Mapping[str, str], settings: Settings) -> dict[str, int]:
    for card, rank in ranks.items():
        if not _is_whole(rank, 1, MAX_RANK):
            raise Refused("bad_rank", "A rank must be a number from 1 to {max}.", field=f"ranks.{card}", max=MAX_RANK)
    missing = next((card for card in names if card not in ranks), None)
    if missing is not None and not (settings.allow_unranked and ranks):
        raise Refused("unranked", "Give every answer a rank; equal ranks are ties.", field=f"ranks.{missing}")
    order = sorted(set(ranks.values()))
    return {names[card]: order.index(ranks[card]) + 1 for card in names if card in ranks}


def _ratings(given: Mapping[str, Any], names: Mapping[str, str], settings: Settings) -> dict[str, dict[str, int]]:
    unknown = next((name for name in given if name not in settings.attributes), None)
    if unknown is not None:
        raise Refused("unknown_attribute", "A rating was given that is not asked for.", field="ratings")
    rated = {}
    for attribute in settings.attributes:
        ratings = given.get(attribute, {})
        for card in names:
            if not _is_whole(ratings.get(card), 1, MAX_RATING):
                raise Refused(
                    "unrated", "Rate “{attribute}” of every answer from 1 to {max}.",
                    field=f"ratings.{attribute}.{card}", attribute=attribute, max=MAX_RATING,
                )  # fmt: skip
        rated[attribute] = {name: ratings[card] for card, name in names.items()}
    return rated


def _check_strength(strength: Any, ranks: Mapping[str, int], settings: Settings) -> None:
    if not settings.strength or len(ranks) != 2 or len(set(ranks.values())) != 2:
        raise Refused("no_strength", "How much better can be said of two answers of different rank.", field="strength")
    if not _is_whole(strength, 1, len(STRENGTHS)):
        raise Refused("bad_strength", "How much better is a number from 1 to {max}.", field="strength", max=3)


def _check_reason(reason: Any, settings: Settings) -> None:
    _check_text(reason, "reason")
    if settings.reason == "off" and reason.strip():
        raise Refused("no_reason", "This project asks for no reason.", field="reason")
    if settings.reason == "required" and not reason.strip():
        raise Refused("reason_missing", "Say in a few words why.", field="reason")


def _check_text(text: Any, part: str) -> None:
    if not isinstance(text, str):
        raise Refused("bad_form", "The field {name} has the wrong form.", field=part, name=part)
    if len(text) > MAX_REASON:
        raise Refused("too_long", "The text is longer than {max} characters.", field=part, max=MAX_REASON)
    try:
        storable(text, "the text")
    except DataError:
        raise Refused("bad_text", "The text holds characters that cannot be stored.", field=part) from None


def _is_whole(value: Any, low: int, high: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


def save_draft(session: Session, assignment: Assignment, draft: Any, *, settings: Settings, now: float) -> None:
    """Keep what the person has so far, unchecked, and prolong the lease; inside ``writing()``.

    Raises:
        Refused: it is no object or too large, or the item is no longer the person's ("submitted", "skipped", "taken").
    """
    if not isinstance(draft, dict):
        raise Refused("bad_form", "A draft must be an object.")
    if len(json.dumps(draft)) > MAX_DRAFT:
        raise Refused("too_long", "The text is longer than {max} characters.", max=MAX_DRAFT)
    kept = {"state": "leased", "draft": draft, "lease_until": now + 60 * settings.lease_minutes}
    if not _while_needed(session, assignment, kept, now):
        raise _why_not(session, assignment, now)


def skip(session: Session, assignment: Assignment, reason: str, note: str = "", *, now: float) -> None:
    """Give an item back for good, with one of settings.SKIP_REASONS; inside ``writing()``. Twice is once.

    Raises:
        Refused: an unknown reason, a note that is too long, or it was submitted before ("submitted").
    """
    if reason not in SKIP_REASONS:
        raise Refused("bad_reason", "Choose why you skip this item.", field="skip_reason")
    _check_text(note, "skip_note")
    skipped = {"state": "skipped", "skip_reason": reason, "skip_note": note.strip(), "ended_at": now, "draft": None}
    if not change(session, assignment, skipped, Assignment.state.in_(HELD)):
        refused = _why_not(session, assignment, now)
        if refused.code != "skipped":
            raise refused
