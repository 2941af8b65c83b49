"""The JSON interface for programs: the next item, a ranking, a skip, the results. A bearer token says who asks.

A program sees what a page shows and no more, and what it says goes through the same checks.
"""

from __future__ import annotations

import json
import re
from typing import Annotated, Any

from fastapi import APIRouter, Body, Depends, Query, Request
from fastapi.openapi.utils import get_openapi
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel, ConfigDict
from sqlalchemy.orm import Session

from heedful.annotate import master, queue, submissions, trail
from heedful.annotate import project as projects
from heedful.annotate.settings import FLAGS, SKIP_REASONS, Settings
from heedful.annotate.submissions import OUT_OF_HAND, Refused, Said
from heedful.annotate.tables import Assignment, Person
from heedful.annotate.web.door import Visitor, needs, not_found, token_bearer

router = APIRouter(prefix="/api/v1")

Rater = Annotated[Person, Depends(token_bearer("annotate"))]
Reader = Annotated[Person, Depends(token_bearer("export"))]

_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")


class Answered(BaseModel):
    """An answer on the screen."""

    id: str
    text: str


class Asks(BaseModel):
    """What is asked of an item besides the ranks."""

    attributes: list[str]
    """Each rated 1 to 5 for every answer"""
    strength: bool
    """May be given where two answers are not tied: 1 slightly, 2 better, 3 much"""
    reason: str
    """off, optional or required"""
    allow_unranked: bool
    flags: list[str]
    skip_reasons: list[str]


class Task(BaseModel):
    """An item in the hands of the person whose token was sent."""

    assignment: str
    nonce: str
    """To be sent with the ranking"""
    lease_until: float
    """Seconds since 1970"""
    prompt: list[dict[str, str]]
    cards: list[Answered]
    guideline_version: int
    asks: Asks


class Ranked(BaseModel):
    """A ranking by the cards' ids: 1 = best, equal = tie."""

    model_config = ConfigDict(extra="forbid")
    nonce: str
    ranks: dict[str, int]
    flags: dict[str, list[str]] = {}
    ratings: dict[str, dict[str, int]] = {}
    all_bad: bool = False
    strength: int | None = None
    reason: str = ""
    correct: bool = False
    """Replace an earlier submission by a further revision"""
    guideline_version: int | None = None


class StoredAs(BaseModel):
    """What became of a ranking; sent twice, it is stored once."""

    stored: bool = True
    revision: int
    repeated: bool
    nonce: str
    """For a correction"""


class Skipped(BaseModel):
    """Why an item is given back."""

    model_config = ConfigDict(extra="forbid")
    reason: str
    note: str = ""


class GuidelineText(BaseModel):
    """The written criteria in force."""

    version: int
    text: str


def _takes(model: type[BaseModel]) -> dict[str, Any]:
    """The body as the documentation says it. What comes is checked by hand, as on the pages, with better sentences."""
    schema = model.model_json_schema()
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


@router.get("/next", response_model=Task, responses={204: {"description": "Nothing is left"}})
def next_item(request: Request, rater: Rater) -> Any:
    """The item to rank now: the one in hand, else a new one."""
    state = request.app.state
    now = state.clock()
    with state.project.database.writing() as session:
        assignment = queue.claim_next(session, rater, state.project.settings, now)
        if assignment is None:
            return Response(status_code=204)
        if assignment.opened_at is None:
            assignment.opened_at = now
        return _task(session, assignment, state.project.settings)


@router.get("/guideline", response_model=GuidelineText)
def guideline(request: Request, rater: Rater) -> Any:
    """The written criteria in force."""
    with request.app.state.project.database.reading() as session:
        row = projects.guideline(session)
        return GuidelineText(version=row.version, text=row.text)


@router.post("/assignments/{public_id}", response_model=StoredAs, openapi_extra=_takes(Ranked))
def submit(request: Request, rater: Rater, public_id: str, body: Annotated[Any, Body()]) -> Any:
    """Store a ranking."""
    state = request.app.state
    try:
        said = _object(body)
        nonce, correct = said.pop("nonce", None), said.pop("correct", False)
        version = said.pop("guideline_version", None)
        if not isinstance(nonce, str) or not _ID.fullmatch(nonce):
            raise Refused("bad_form", "The field {name} has the wrong form.", field="nonce", name="nonce")
        if not isinstance(correct, bool):
            raise Refused("bad_form", "The field {name} has the wrong form.", field="correct", name="correct")
        if version is not None and (not isinstance(version, int) or not 0 < version < 2**31):
            raise Refused("bad_form", "There is no such version of the guideline.", field="guideline_version")
        with state.project.database.writing() as session:
            assignment = _mine(session, rater, public_id)
            stored = submissions.submit(
                session, assignment, Said.from_json(said), nonce=nonce, settings=state.project.settings,
                now=state.clock(), correct=correct, guideline_version=version, request_id=request.state.request_id,
            )  # fmt: skip
            revision, fresh = stored.submission.revision, assignment.nonce
    except Refused as refusal:
        return _refusal(refusal)
    return StoredAs(revision=revision, repeated=stored.is_repeat, nonce=fresh)


@router.post("/assignments/{public_id}/skip", status_code=204, openapi_extra=_takes(Skipped))
def skip(request: Request, rater: Rater, public_id: str, body: Annotated[Any, Body()]) -> Response:
    """Give an item back."""
    state = request.app.state
    try:
        said = _object(body)
        reason, note = said.pop("reason", ""), said.pop("note", "")
        if said or not isinstance(reason, str):
            raise Refused("bad_form", "The field {name} is unknown.", field="", name=next(iter(said), "reason")[:80])
        with state.project.database.writing() as session:
            submissions.skip(session, _mine(session, rater, public_id), reason, note, now=state.clock())
    except Refused as refusal:
        return _refusal(refusal)
    return Response(status_code=204)


@router.get("/export/{view}", response_class=Response, responses={200: {"content": {"application/x-ndjson": {}}}})
def export(
    request: Request, reader: Reader, view: str, min_agree: Annotated[float, Query(ge=0, le=1)] = 0.0,
    with_gold: bool = False, round: Annotated[list[int] | None, Query()] = None,
) -> Response:  # fmt: skip
    """The rows of a view, one JSON object a line; the work of excluded people is left out.

    Which views there are: master, submissions, and the preference pairs of every format.
    """
    if view not in master.VIEWS:
        raise not_found()
    taken = master.View(with_gold=with_gold, min_agree_fraction=min_agree, rounds=tuple(round) if round else None)
    state = request.app.state
    rows = master.rows(state.project, view, taken)
    with state.project.database.writing() as session:
        trail.record(
            session, who=reader.pseudonym, action="export", object=view, after={"num_rows": len(rows)},
            request_id=request.state.request_id, now=state.clock(),
        )  # fmt: skip
    content = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    return Response(content, media_type="application/x-ndjson")


@router.get("/openapi.json", include_in_schema=False)
def openapi(request: Request, visitor: Annotated[Visitor, Depends(needs("admin"))]) -> JSONResponse:
    """The description of this interface, for admins who are logged in."""
    described = get_openapi(title="heedful annotate", version="1", routes=router.routes)
    schemes = described.setdefault("components", {}).setdefault("securitySchemes", {})
    schemes["token"] = {"type": "http", "scheme": "bearer"}
    described["security"] = [{"token": []}]
    return JSONResponse(described)


def _mine(session: Session, rater: Person, public_id: str) -> Assignment:
    """The person's own assignment; somebody else's is as unknown as one that never was."""
    assignment = submissions.find(session, rater, public_id) if _ID.fullmatch(public_id) else None
    if assignment is None:
        raise not_found()
    return assignment


def _task(session: Session, assignment: Assignment, settings: Settings) -> Task:
    return Task(
        assignment=assignment.public_id, nonce=assignment.nonce, lease_until=assignment.lease_until,
        prompt=[{"role": turn["role"], "content": turn["content"]} for turn in assignment.item.prompt],
        cards=[Answered(id=card.public_id, text=card.answer.text) for card in assignment.shown],
        guideline_version=projects.guideline(session).version,
        asks=Asks(
            attributes=list(settings.attributes), strength=settings.strength and len(assignment.shown) == 2,
            reason=settings.reason, allow_unranked=settings.allow_unranked, flags=list(FLAGS),
            skip_reasons=list(SKIP_REASONS),
        ),
    )  # fmt: skip


def _object(body: Any) -> dict[str, Any]:
    if not isinstance(body, dict):
        raise Refused("bad_form", "A judgement must be an object.")
    return dict(body)


def _refusal(refusal: Refused) -> JSONResponse:
    status = 409 if refusal.code in OUT_OF_HAND else 422
    return JSONResponse({"error": str(refusal), "code": refusal.code, "field": refusal.field}, status)
