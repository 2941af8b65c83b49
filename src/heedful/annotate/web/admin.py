"""The pages of those who run the project: progress, people, guideline, audit log, exports."""

from __future__ import annotations

import io
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query, Request
from fastapi.responses import HTMLResponse, Response
from sqlalchemy import select

from heedful.annotate import invitations, people, project, trail
from heedful.annotate.master import VIEWS
from heedful.annotate.progress import by_category, by_person
from heedful.annotate.publish import publish
from heedful.annotate.tables import Guideline, Person
from heedful.annotate.web import pages
from heedful.annotate.web.door import Posted, Visitor, field, needs, not_found
from heedful.errors import DataError

router = APIRouter(prefix="/admin")
exports = APIRouter()
Admin = Annotated[Visitor, Depends(needs("admin"))]
Reviewer = Annotated[Visitor, Depends(needs("reviewer"))]
Before = Annotated[int | None, Query(ge=0, le=2**31 - 1)]
LOG_PAGE = 100


@router.get("")
def overview(request: Request, visitor: Admin) -> HTMLResponse:
    """How far the project is, by category."""
    with request.app.state.project.database.reading() as session:
        rows = by_category(session)
    return pages.render(request, "admin.html.j2", rows=rows, num_items=sum(row.num_items for row in rows))


# --- people ---------------------------------------------------------------------------------------------------------


@router.get("/people")
def people_page(request: Request, visitor: Admin) -> HTMLResponse:
    """Everybody, with what they did."""
    return _people(request)


@router.post("/invite")
def invite(request: Request, visitor: Admin, form: Posted) -> Response:
    """A link that makes one account; this answer alone shows it."""

    def make(session: Any, by: Person, now: float, request_id: str) -> str:
        return invitations.invite(session, field(form, "role"), now, by=by, request_id=request_id)

    try:
        token = _do(request, visitor, make)
    except DataError as error:
        return _people(request, status=422, message=pages.text_of(request, error))
    return _people(request, invitation=f"{str(request.base_url).rstrip('/')}/join/{token}")


@router.post("/people/{pseudonym}/{verb}")
def change_person(request: Request, visitor: Admin, form: Posted, pseudonym: str, verb: str) -> Response:
    """disable, enable, exclude, reinstate, role, forget."""
    if verb not in VERBS:
        raise not_found()

    def change(session: Any, by: Person, now: float, request_id: str) -> None:
        person = people.by_pseudonym(session, pseudonym)
        if person is None:
            raise not_found()
        VERBS[verb](session, person, now, form, by, request_id)

    try:
        _do(request, visitor, change)
    except DataError as error:
        return _people(request, status=422, message=pages.text_of(request, error))
    if verb == "forget":
        people.erase_remains(request.app.state.project.database)
    return pages.see_other(f"/admin/people#{pseudonym}")


def _exclude(session: Any, person: Person, now: float, form: Posted, by: Person, request_id: str) -> None:
    people.exclude(session, person, field(form, "reason"), now, by=by, request_id=request_id)


def _role(session: Any, person: Person, now: float, form: Posted, by: Person, request_id: str) -> None:
    people.set_role(session, person, field(form, "role"), now, by=by, request_id=request_id)


def _forget(session: Any, person: Person, now: float, form: Posted, by: Person, request_id: str) -> None:
    if field(form, "pseudonym").strip() != person.pseudonym:
        raise DataError("To delete a person, type the name they have in results.")
    with_reasons = field(form, "with_reasons") == "1"
    people.forget(session, person, now, with_reasons=with_reasons, by=by, request_id=request_id)


def _plain(change: Callable[..., None]) -> Callable[..., None]:
    return lambda session, person, now, form, by, request_id: change(session, person, now, by=by, request_id=request_id)


VERBS: dict[str, Callable[..., None]] = {
    "disable": _plain(people.disable), "enable": _plain(people.enable), "reinstate": _plain(people.reinstate),
    "exclude": _exclude, "role": _role, "forget": _forget,
}  # fmt: skip


def _people(request: Request, *, status: int = 200, message: str = "", invitation: str = "") -> HTMLResponse:
    with request.app.state.project.database.reading() as session:
        rows = by_person(session)
    return pages.render(
        request, "people.html.j2", status=status, rows=rows, roles=people.ROLES, message=message,
        invitation=invitation, path="/admin/people",
    )  # fmt: skip


# --- guideline ------------------------------------------------------------------------------------------------------


@router.get("/guideline")
def guideline_page(request: Request, visitor: Admin) -> HTMLResponse:
    """The present version, to write the next one from."""
    return _guideline(request, None)


@router.post("/guideline")
def write_guideline(request: Request, visitor: Admin, form: Posted) -> Response:
    """Show the new version; with ``save`` it is in force from now on."""
    text = field(form, "text").replace("\r\n", "\n")
    if field(form, "save") != "1":
        return _guideline(request, text)

    def add(session: Any, by: Person, now: float, request_id: str) -> None:
        project.add_guideline(session, text, who=by.pseudonym, now=now, request_id=request_id)

    try:
        _do(request, visitor, add)
    except DataError as error:
        return _guideline(request, text, status=422, message=pages.text_of(request, error))
    return pages.see_other("/admin/guideline")


def _guideline(request: Request, text: str | None, *, status: int = 200, message: str = "") -> HTMLResponse:
    with request.app.state.project.database.reading() as session:
        now = session.scalars(select(Guideline).order_by(Guideline.version.desc()).limit(1)).one()
    shown = now.text if text is None else text
    return pages.render(
        request, "admin_guideline.html.j2", status=status, guideline=now, text=shown, is_preview=text is not None,
        max_characters=project.MAX_TEXT, message=message,
    )  # fmt: skip


# --- audit log, exports ---------------------------------------------------------------------------------------------


@router.get("/log")
def log_page(request: Request, visitor: Admin, before: Before = None) -> HTMLResponse:
    """The audit log, newest first; ``before`` is the number of the last row of the page before."""
    with request.app.state.project.database.reading() as session:
        rows = trail.newest(session, before_id=before, limit=LOG_PAGE + 1)
    older = rows[LOG_PAGE - 1].id if len(rows) > LOG_PAGE else None
    return pages.render(request, "log.html.j2", rows=rows[:LOG_PAGE], older=older)


@exports.get("/exports")
def exports_page(request: Request, visitor: Reviewer) -> HTMLResponse:
    """What can be downloaded."""
    return pages.render(request, "exports.html.j2", views=VIEWS)


@exports.get("/exports/{name}")
def download(request: Request, visitor: Reviewer, name: str) -> Response:
    """A view by name with its data card, which says whose work is left out and why, as a zip file."""
    if name not in VIEWS:
        raise not_found()
    with tempfile.TemporaryDirectory(prefix="heedful-export-") as folder:
        written = publish(request.app.state.project, folder, to=(name,))
        packed = io.BytesIO()
        with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
            for path in sorted(Path(folder).iterdir()):
                archive.write(path, path.name)

    def note(session: Any, by: Person, now: float, request_id: str) -> None:
        trail.record(
            session, who=by.pseudonym, action="export", object=name, after={"recipe": written.card.recipe_hash},
            request_id=request_id, now=now,
        )  # fmt: skip

    _do(request, visitor, note)
    headers = {"Content-Disposition": f'attachment; filename="heedful-{name}.zip"'}
    return Response(packed.getvalue(), media_type="application/zip", headers=headers)


def _do(request: Request, visitor: Visitor, change: Callable[..., Any]) -> Any:
    """``change`` in one transaction, as this visitor."""
    with request.app.state.project.database.writing() as session:
        by = session.get_one(Person, visitor.person.id)
        return change(session, by, request.app.state.clock(), request.state.request_id)
