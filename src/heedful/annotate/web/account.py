"""In and out: login, logout, invitations, one's own password, tokens and language."""

from __future__ import annotations

from fastapi import APIRouter, HTTPException, Request
from fastapi.responses import HTMLResponse, Response
from sqlalchemy import select

from heedful.annotate import invitations, passwords, people
from heedful.annotate.tables import ApiToken, Person
from heedful.annotate.web import pages
from heedful.annotate.web.door import Posted, SignedIn, address, field, not_found
from heedful.errors import DataError

router = APIRouter()
WRONG = "Name or password is wrong."


@router.get("/login")
def login_page(request: Request, next: str = "/") -> HTMLResponse:
    """The form; ``next`` is where to go afterwards."""
    return pages.render(request, "login.html.j2", next=local_path(next), name="", message="")


@router.post("/login")
def log_in(request: Request, form: Posted) -> Response:
    """A new login under a new token. Wrong name, wrong password and closed account look alike and take equally long."""
    state = request.app.state
    name, password = field(form, "name"), field(form, "password")
    back = local_path(field(form, "next", "/"))
    state.throttle.hit("login_per_address", address(request))
    state.throttle.hit("login_per_account", people.plain(name))
    with state.project.database.reading() as session:
        person = people.by_name(session, name)
    person = people.enter(person, password)
    if person is None:
        message = pages.text_of(request, WRONG)
        return pages.render(request, "login.html.j2", status=401, next=back, name=name[:64], message=message)
    state.throttle.clear("login_per_account", people.plain(name))
    return _enter(request, person, back)


@router.post("/logout")
def log_out(request: Request, form: Posted) -> Response:
    """The row goes, so the old cookie is worth nothing; the browser forgets it as well."""
    cookie = pages.cookie_of(request)
    with request.app.state.project.database.writing() as session:
        people.close_login(session, cookie or "", request.app.state.clock(), request_id=request.state.request_id)
    response = pages.see_other("/login")
    response.delete_cookie(pages.cookie_name(request), path="/", httponly=True, samesite="lax",
                           secure=request.app.state.secure_cookies)  # fmt: skip
    return response


@router.get("/join/{token}")
def join_page(request: Request, token: str) -> HTMLResponse:
    """The form of an invitation."""
    request.app.state.throttle.hit("login_per_address", address(request))
    if not _is_open(request, token):
        raise HTTPException(404, invitations.NO_INVITATION)
    return pages.render(request, "join.html.j2", token=token, name="", message="")


@router.post("/join/{token}")
def join(request: Request, token: str, form: Posted) -> Response:
    """Make the account and log in."""
    state, now = request.app.state, request.app.state.clock()
    state.throttle.hit("login_per_address", address(request))
    name, password = field(form, "name"), field(form, "password")
    try:
        if password != field(form, "password_again"):
            raise DataError("The two passwords differ.")
        if not _is_open(request, token):
            raise DataError(invitations.NO_INVITATION)
        known = passwords.hashed(name, password)
        with state.project.database.writing() as session:
            person = invitations.join(session, token, name, known, now, request_id=request.state.request_id)
    except DataError as error:
        message = pages.text_of(request, error)
        return pages.render(request, "join.html.j2", status=422, token=token, name=name[:64], message=message)
    return _enter(request, person, "/")


@router.post("/language")
def set_language(request: Request, form: Posted) -> Response:
    """With an account the choice is kept there, without one in a cookie."""
    state, chosen = request.app.state, field(form, "language")
    if chosen not in state.project.settings.languages:
        raise not_found()
    response = pages.see_other(local_path(field(form, "back", "/")))
    cookie = pages.cookie_of(request)
    with state.project.database.writing() as session:
        found = people.person_of_login(session, cookie or "", state.project.settings, state.clock())
        if found is not None:
            found[1].language = chosen
    response.set_cookie("language", chosen, path="/", httponly=True, samesite="lax", secure=state.secure_cookies)
    return response


@router.get("/account")
def account_page(request: Request, visitor: SignedIn) -> HTMLResponse:
    """One's own account."""
    return _account(request, visitor.person)


@router.post("/account/password")
def change_password(request: Request, visitor: SignedIn, form: Posted) -> Response:
    """Needs the present password; every login ends, this browser gets a new one."""
    state, now = request.app.state, request.app.state.clock()
    state.throttle.hit("login_per_account", people.plain(visitor.person.name or ""))
    try:
        if people.enter(visitor.person, field(form, "present_password")) is None:
            raise DataError("The present password is wrong.")
        if field(form, "password") != field(form, "password_again"):
            raise DataError("The two passwords differ.")
        known = passwords.hashed(visitor.person.name or "", field(form, "password"))
        with state.project.database.writing() as session:
            person = session.get_one(Person, visitor.person.id)
            people.set_password(session, person, known, now, by=person, request_id=request.state.request_id)
    except DataError as error:
        return _account(request, visitor.person, status=422, message=pages.text_of(request, error))
    return _enter(request, visitor.person, "/account")


@router.post("/account/logout_everywhere")
def log_out_everywhere(request: Request, visitor: SignedIn, form: Posted) -> Response:
    """End all logins of one's own account, this one too."""
    with request.app.state.project.database.writing() as session:
        person = session.get_one(Person, visitor.person.id)
        people.close_logins(session, person, request.app.state.clock(), by=person, request_id=request.state.request_id)
    return pages.see_other("/login")


@router.post("/account/token")
def make_token(request: Request, visitor: SignedIn, form: Posted) -> Response:
    """A token for a program; this answer alone shows it."""
    days = field(form, "days", "30")
    try:
        if not days.isdecimal():
            raise DataError("Days are a whole number.")
        with request.app.state.project.database.writing() as session:
            person = session.get_one(Person, visitor.person.id)
            token = people.create_token(
                session, person, field(form, "scope"), request.app.state.clock(), days=int(days), by=person,
                request_id=request.state.request_id,
            )  # fmt: skip
    except DataError as error:
        return _account(request, visitor.person, status=422, message=pages.text_of(request, error))
    return _account(request, visitor.person, token=token)


@router.post("/account/token/{prefix}/revoke")
def revoke_token(request: Request, visitor: SignedIn, form: Posted, prefix: str) -> Response:
    """End one of one's own tokens."""
    with request.app.state.project.database.writing() as session:
        person = session.get_one(Person, visitor.person.id)
        now = request.app.state.clock()
        if not people.revoke_token(session, person, prefix, now, by=person, request_id=request.state.request_id):
            raise not_found()
    return pages.see_other("/account")


def _is_open(request: Request, token: str) -> bool:
    with request.app.state.project.database.reading() as session:
        return invitations.open_invitation(session, token, request.app.state.clock()) is not None


def local_path(path: str) -> str:
    """The path, if it stays on this site; else the start page. Browsers read a backslash as a slash."""
    is_local = path.startswith("/") and path.isprintable() and not path.startswith(("//", "/\\"))
    return path if is_local and len(path) <= 500 else "/"


def _enter(request: Request, person: Person, back: str) -> Response:
    state = request.app.state
    with state.project.database.writing() as session:
        token = people.open_login(
            session, session.get_one(Person, person.id), state.clock(), old_token=pages.cookie_of(request),
            request_id=request.state.request_id,
        )  # fmt: skip
    response = pages.see_other(back)
    pages.set_cookie(request, response, token)
    return response


def _account(
    request: Request, person: Person, *, status: int = 200, message: str = "", token: str = ""
) -> HTMLResponse:
    now = request.app.state.clock()
    alive = (ApiToken.person_id == person.id, ApiToken.revoked_at.is_(None), ApiToken.expires_at >= now)
    with request.app.state.project.database.reading() as session:
        tokens = list(session.scalars(select(ApiToken).where(*alive).order_by(ApiToken.created_at)))
    return pages.render(
        request, "account.html.j2", status=status, tokens=tokens, message=message, token=token, path="/account"
    )
