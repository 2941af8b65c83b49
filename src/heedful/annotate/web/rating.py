"""The rater's pages: start, the ranking screen, own rankings, the guideline. What is said is checked by submissions.

A page names answers by the public ids of one assignment and by letters in the order drawn for it; nothing else of an
item's origin reaches a template.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request
from fastapi.responses import Response
from sqlalchemy import func, select
from sqlalchemy.orm import Session
from starlette.datastructures import FormData

from heedful.annotate import progress, queue, submissions
from heedful.annotate import project as projects
from heedful.annotate.settings import FLAGS, SKIP_REASONS, STRENGTHS
from heedful.annotate.submissions import OUT_OF_HAND, Refused, Said
from heedful.annotate.tables import Assignment, Guideline, Item, Submission
from heedful.annotate.web import pages
from heedful.annotate.web.door import Posted, SignedIn, Visitor, not_found
from heedful.annotate.web.door import field as field_of

router = APIRouter(include_in_schema=False)

DAY_SECONDS = 86_400.0
EXCERPT_CHARACTERS = 160


def now_of(request: Request) -> float:
    """Dependency: the time of the request."""
    return float(request.app.state.clock())


Now = Annotated[float, Depends(now_of)]


@dataclass(frozen=True, slots=True)
class Card:
    """An answer as a rater sees it, with what they have said of it so far."""

    letter: str
    public_id: str
    text: str
    rank: int | None = None
    flags: list[str] = field(default_factory=list)
    ratings: dict[str, Any] = field(default_factory=dict)


# --- pages ----------------------------------------------------------------------------------------------------------


@router.get("/")
def home(request: Request, visitor: SignedIn, now: Now, nothing: str = "") -> Response:
    """How far the person and the project are, and the way on."""
    with request.app.state.project.database.reading() as session:
        mine = select(func.count(Assignment.id)).where(
            Assignment.person_id == visitor.person.id, Assignment.state == "submitted"
        )
        held = select(func.count(Assignment.id)).where(
            Assignment.person_id == visitor.person.id, Assignment.state == "leased", Assignment.lease_until >= now
        )
        return pages.render(
            request, "home.html.j2",
            held=bool(session.scalar(held)), nothing_left=bool(nothing), mine=session.scalar(mine),
            today=session.scalar(mine.where(Assignment.ended_at > now - DAY_SECONDS)), percent=_percent(session),
        )  # fmt: skip


@router.post("/next")
def take_next(request: Request, visitor: SignedIn, form: Posted, now: Now) -> Response:
    """Hand out an item and go there."""
    with request.app.state.project.database.writing() as session:
        return pages.see_other(_next(request, session, visitor, now))


@router.get("/rank/{public_id}")
def rank(request: Request, visitor: SignedIn, public_id: str, correct: str = "") -> Response:
    """The ranking screen; of an item that is done, what became of it."""
    with request.app.state.project.database.reading() as session:
        assignment = _mine(session, visitor, public_id)
        if assignment.state == "skipped" or (assignment.state == "submitted" and not correct):
            return _done(request, assignment)
        if assignment.state == "submitted":
            return _screen(request, session, visitor, assignment, _said_before(assignment), correct=True)
        return _screen(request, session, visitor, assignment, assignment.draft or {})


@router.post("/rank/{public_id}")
def submit(request: Request, visitor: SignedIn, form: Posted, public_id: str, now: Now) -> Response:
    """Store the ranking and go on to the next item; of what cannot be taken, say why and keep what was filled in."""
    request.app.state.throttle.hit("submit", visitor.person.pseudonym)
    project = request.app.state.project
    said, correct = _said(form), field_of(form, "correct") == "1"
    try:
        with project.database.writing() as session:
            assignment = _mine(session, visitor, public_id)
            submissions.submit(
                session, assignment, Said.from_json(said), nonce=field_of(form, "nonce"), settings=project.settings,
                now=now, correct=correct, guideline_version=_whole(field_of(form, "guideline_version")),
                request_id=request.state.request_id,
            )  # fmt: skip
            return pages.see_other("/mine" if correct else _next(request, session, visitor, now))
    except Refused as refusal:
        with project.database.reading() as session:
            assignment = _mine(session, visitor, public_id)
            if refusal.code in OUT_OF_HAND:
                return _done(request, assignment, refusal)
            return _screen(request, session, visitor, assignment, said, correct=correct, refusal=refusal)


@router.post("/rank/{public_id}/draft")
def save_draft(request: Request, visitor: SignedIn, form: Posted, public_id: str, now: Now) -> Response:
    """Keep what is filled in so far; sent by the page's script."""
    project = request.app.state.project
    try:
        with project.database.writing() as session:
            assignment = _mine(session, visitor, public_id)
            submissions.save_draft(session, assignment, _said(form), settings=project.settings, now=now)
    except Refused as refusal:
        return Response(_words(request, refusal), 409, media_type="text/plain")
    return Response(status_code=204)


@router.post("/rank/{public_id}/skip")
def skip(request: Request, visitor: SignedIn, form: Posted, public_id: str, now: Now) -> Response:
    """Give the item back with a reason and go on."""
    request.app.state.throttle.hit("submit", visitor.person.pseudonym)
    database = request.app.state.project.database
    try:
        with database.writing() as session:
            assignment = _mine(session, visitor, public_id)
            submissions.skip(session, assignment, field_of(form, "reason"), field_of(form, "note"), now=now)
            return pages.see_other(_next(request, session, visitor, now))
    except Refused as refusal:
        with database.reading() as session:
            assignment = _mine(session, visitor, public_id)
            if refusal.code in OUT_OF_HAND:
                return _done(request, assignment, refusal)
            return _screen(request, session, visitor, assignment, assignment.draft or {}, refusal=refusal)


@router.get("/mine")
def mine(request: Request, visitor: SignedIn) -> Response:
    """What the person ranked last, to look at and to correct."""
    with request.app.state.project.database.reading() as session:
        rows = [
            {
                "public_id": assignment.public_id, "at": assignment.ended_at, "order": _order(assignment),
                "excerpt": _excerpt(assignment.item), "lang": _lang(assignment.item),
                "num_corrections": len(assignment.submissions) - 1,
            }
            for assignment in submissions.last_submitted(session, visitor.person)
        ]  # fmt: skip
        return pages.render(request, "mine.html.j2", rows=rows)


@router.get("/guideline")
def guideline(request: Request, visitor: SignedIn) -> Response:
    """The written criteria, and what they were before."""
    with request.app.state.project.database.reading() as session:
        newest, *earlier = session.scalars(select(Guideline).order_by(Guideline.version.desc()).limit(20)).all()
        return pages.render(request, "guideline.html.j2", guideline=newest, earlier=earlier)


# --- what the pages show --------------------------------------------------------------------------------------------


def _mine(session: Session, visitor: Visitor, public_id: str) -> Assignment:
    """The visitor's own assignment; of anybody else's there is no such page."""
    assignment = submissions.find(session, visitor.person, public_id)
    if assignment is None:
        raise not_found()
    return assignment


def _next(request: Request, session: Session, visitor: Visitor, now: float) -> str:
    """The address of the item to rank now; the browser goes there at once, so its clock starts here."""
    assignment = queue.claim_next(session, visitor.person, request.app.state.project.settings, now)
    if assignment is None:
        return "/?nothing=1"
    if assignment.opened_at is None:
        assignment.opened_at = now
    return f"/rank/{assignment.public_id}"


def _screen(
    request: Request,
    session: Session,
    visitor: Visitor,
    assignment: Assignment,
    said: dict[str, Any],
    *,
    correct: bool = False,
    refusal: Refused | None = None,
) -> Response:
    """The ranking screen filled with ``said``."""
    cards = _cards(assignment, said)
    notes = []
    if refusal is not None:
        notes.append({"kind": "bad", "text": _words(request, refusal, cards)})
    if assignment.state == "expired":
        notes.append({"kind": "", "text": pages.text_of(request, EXPIRED)})
    guideline = projects.guideline(session)
    seen_version = select(func.max(Submission.guideline_version)).join(Assignment)
    seen_version = seen_version.where(Assignment.person_id == visitor.person.id)
    return pages.render(
        request, "rank.html.j2", status=422 if refusal is not None else 200,
        public_id=assignment.public_id, nonce=assignment.nonce, correct=correct, notes=notes, cards=cards,
        prompt=assignment.item.prompt, item_lang=_lang(assignment.item), guideline=guideline,
        guideline_is_new=(session.scalar(seen_version) or 0) < guideline.version,
        all_bad=bool(said.get("all_bad")), strength=said.get("strength"), reason=said.get("reason") or "",
        settings=request.app.state.project.settings, flags=FLAGS, strengths=STRENGTHS, skip_reasons=SKIP_REASONS,
        max_reason=submissions.MAX_REASON,
    )  # fmt: skip


EXPIRED = (
    "You have had this item for long, so it may have gone to somebody else. What you submit counts as long as it is "
    "still needed."
)


def _cards(assignment: Assignment, said: dict[str, Any]) -> list[Card]:
    """The answers with what was said of them, as far as it can be filled in again."""
    ranks, flags, ratings = (said.get(part) or {} for part in ("ranks", "flags", "ratings"))
    possible = range(1, 1 + len(assignment.shown))
    return [
        Card(
            letter, shown.public_id, shown.answer.text,
            ranks[shown.public_id] if ranks.get(shown.public_id) in possible else None,
            flags.get(shown.public_id) or [],
            {name: of.get(shown.public_id) for name, of in ratings.items()},
        )
        for letter, shown in _lettered(assignment)
    ]  # fmt: skip


def _done(request: Request, assignment: Assignment, refusal: Refused | None = None) -> Response:
    """An item that is no longer in the person's hands."""
    return pages.render(
        request, "done.html.j2", status=409 if refusal is not None else 200,
        why=_words(request, refusal) if refusal is not None else "", state=assignment.state,
        order=_order(assignment), public_id=assignment.public_id, excerpt=_excerpt(assignment.item),
        item_lang=_lang(assignment.item),
    )  # fmt: skip


def _words(request: Request, refusal: Refused, cards: list[Card] | None = None) -> str:
    """A refusal in the visitor's language, with the letter of the card it is about."""
    text = pages.text_of(request, refusal)
    letter = next((card.letter for card in cards or () if refusal.field.endswith(f".{card.public_id}")), None)
    return text if letter is None else f"{letter}: {text}"


def _percent(session: Session) -> int:
    """How much of the rankings that the project needs is there, in tens: a number that counts every ranking stands
    still at control items and repetitions, and so tells a rater which they are."""
    rows = progress.by_category(session)
    need = sum(row.num_wanted for row in rows)
    return 10 * min(10, 10 * sum(row.num_submitted for row in rows) // need) if need else 100


def _lettered(assignment: Assignment) -> list[tuple[str, Any]]:
    return [(chr(ord("A") + shown.slot), shown) for shown in assignment.shown]


def _order(assignment: Assignment) -> str:
    """The last revision as "B > A = C"; what was left without a rank last, "B > (A C)"; "" when there is none."""
    if not assignment.submissions:
        return ""
    ranks = assignment.submissions[-1].said["ranks"]
    by_rank: dict[int, list[str]] = {}
    unranked: list[str] = []
    for letter, shown in _lettered(assignment):
        rank = ranks.get(shown.answer.answer_id)
        (unranked if rank is None else by_rank.setdefault(rank, [])).append(letter)
    parts = [" = ".join(by_rank[rank]) for rank in sorted(by_rank)]
    return " > ".join(parts + ([f"({' '.join(unranked)})"] if unranked else []))


def _excerpt(item: Item) -> str:
    text = " ".join(str(item.prompt[-1]["content"]).split()) if item.prompt else ""
    return text if len(text) <= EXCERPT_CHARACTERS else text[:EXCERPT_CHARACTERS].rstrip() + "…"


def _lang(item: Item) -> str:
    """For the ``lang`` attribute: a screen reader speaks, and a browser breaks lines, by it."""
    return item.lang.replace("_", "-") if re.fullmatch(r"[A-Za-z]{2,3}([-_][A-Za-z0-9]{2,8})*", item.lang) else ""


# --- what a form says -----------------------------------------------------------------------------------------------


def _said(form: FormData) -> dict[str, Any]:
    """The fields of a form as the JSON of a judgement. What is no number stays as it is; the check refuses it."""
    ranks: dict[str, Any] = {}
    flags: dict[str, list[str]] = {}
    ratings: dict[str, dict[str, Any]] = {}
    for name, value in form.multi_items():
        kind, _, rest = name.partition(".")
        if not rest or not isinstance(value, str) or not value:
            continue
        if kind == "rank":
            ranks[rest] = _number(value)
        elif kind == "flag":
            flags.setdefault(rest, []).append(value)
        elif kind == "rating":
            attribute, _, card = rest.rpartition(".")
            ratings.setdefault(attribute, {})[card] = _number(value)
    return {
        "ranks": ranks, "flags": flags, "ratings": ratings, "all_bad": field_of(form, "all_bad") == "1",
        "strength": _whole(field_of(form, "strength")), "reason": field_of(form, "reason").replace("\r\n", "\n"),
    }  # fmt: skip


def _said_before(assignment: Assignment) -> dict[str, Any]:
    """The last revision by the cards' public ids."""
    last = assignment.submissions[-1]
    names = {shown.answer.answer_id: shown.public_id for shown in assignment.shown}
    return {
        **{part: {names[id]: value for id, value in last.said[part].items()} for part in ("ranks", "flags")},
        "ratings": {name: {names[id]: value for id, value in of.items()} for name, of in last.said["ratings"].items()},
        "all_bad": last.all_bad, "strength": last.strength, "reason": last.reason,
    }  # fmt: skip


def _whole(text: str) -> int | None:
    return int(text) if re.fullmatch(r"[0-9]{1,9}", text) else None


def _number(text: str) -> int | str:
    number = _whole(text)
    return text[:20] if number is None else number
