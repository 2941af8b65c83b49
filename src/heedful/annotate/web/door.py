"""Who may come in: the visitor of a request, roles, form tokens, bearer tokens, and how often one may try."""

from __future__ import annotations

import hashlib
import hmac
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

from fastapi import Depends, HTTPException, Request
from limits import RateLimitItem, parse
from limits.storage import MemoryStorage
from limits.strategies import MovingWindowRateLimiter
from starlette.datastructures import FormData

from heedful.annotate import people
from heedful.annotate.tables import Person
from heedful.annotate.web import pages

SEEN_EVERY_SECONDS = 60.0
"""A login's last use is written down this often at most: to read a page should not be a write."""


@dataclass(frozen=True, slots=True)
class Visitor:
    """Who is logged in, for one request. ``person`` is detached: in a session of your own use ``person.id``."""

    person: Person
    login_id: int


class SignIn(Exception):
    """Nobody is logged in; the app answers with the way to the login page."""


@dataclass(frozen=True, slots=True)
class Limits:
    """How often, in the notation of the library ``limits``."""

    login_per_account: str = "10 per 15 minutes"
    """Wrong or right; a right one clears the count"""
    login_per_address: str = "60 per 15 minutes"
    bad_token_per_address: str = "30 per minute"
    token: str = "1200 per minute"
    submit: str = "120 per minute"
    """By a person on the pages"""


class Throttle:
    """Counts in this process; one process serves a project."""

    def __init__(self, limits: Limits) -> None:
        self.limiter = MovingWindowRateLimiter(MemoryStorage())
        self.items: dict[str, RateLimitItem] = {name: parse(getattr(limits, name)) for name in limits.__slots__}

    def hit(self, name: str, key: str) -> None:
        """Count one; raises 429 with Retry-After when it is one too many."""
        item, key = self.items[name], hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()
        if not self.limiter.hit(item, name, key):
            reset_at, _ = self.limiter.get_window_stats(item, name, key)
            wait = max(1, math.ceil(reset_at - time.time()))
            raise HTTPException(429, "Too many attempts; wait a little.", {"Retry-After": str(wait)})

    def clear(self, name: str, key: str) -> None:
        """Forget the count."""
        self.limiter.clear(self.items[name], name, hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest())


def address(request: Request) -> str:
    """Of the browser; behind a proxy that is trusted, as the proxy says."""
    return request.client.host if request.client is not None else "unknown"


def not_found() -> HTTPException:
    """The same for what is not there and for what is somebody else's."""
    return HTTPException(404, "There is no such page.")


def signed_in(request: Request) -> Visitor:
    """Dependency: the visitor; raises SignIn when nobody is logged in."""
    state = request.app.state
    token, now = pages.cookie_of(request), state.clock()
    if token is None:
        raise SignIn
    with state.project.database.reading() as session:
        found = people.person_of_login(session, token, state.project.settings, now)
        if found is None:
            raise SignIn
        login, person = found
        session.expunge_all()
    visitor = request.state.visitor = Visitor(person, login.id)
    if now - login.seen_at > SEEN_EVERY_SECONDS:
        with state.project.database.writing() as session:
            people.touch_login(session, login.id, state.project.settings, now)
    return visitor


SignedIn = Annotated[Visitor, Depends(signed_in)]


def needs(role: str) -> Callable[[Visitor], Visitor]:
    """Dependency: a visitor of that role or above; for others there is no such page."""

    def check(visitor: SignedIn) -> Visitor:
        if not people.role_allows(visitor.person.role, role):
            raise not_found()
        return visitor

    return check


async def posted(request: Request) -> FormData:
    """Dependency of every form: its fields, once the form token (a field, or header X-Form-Token) fits the cookie."""
    form = await request.form(max_files=0, max_fields=1000)
    given = request.headers.get("x-form-token") or form.get("form_token")
    cookie = pages.cookie_of(request)
    if cookie is None or not isinstance(given, str) or not _same(given, pages.form_token(cookie)):
        raise HTTPException(403, "This form is from another login; load the page again.")
    if any("\x00" in name or (isinstance(value, str) and "\x00" in value) for name, value in form.multi_items()):
        raise HTTPException(400, "This request cannot be read.")  # PostgreSQL cannot hold it, no keyboard makes it
    return form


Posted = Annotated[FormData, Depends(posted)]


def field(form: FormData, name: str, default: str = "") -> str:
    """A text field of a form."""
    value = form.get(name, default)
    return value if isinstance(value, str) else default


def token_bearer(scope: str) -> Callable[[Request], Person]:
    """Dependency of the JSON interface: whose token the Authorization header holds; 401 when it is not good."""

    def check(request: Request) -> Person:
        state = request.app.state
        kind, _, token = request.headers.get("authorization", "").partition(" ")
        if kind.lower() == "bearer" and 20 <= len(token) <= 200:
            with state.project.database.reading() as session:
                person = people.person_of_token(session, token.strip(), scope, state.clock())
                session.expunge_all()
            if person is not None:
                state.throttle.hit("token", person.pseudonym)
                return person
        state.throttle.hit("bad_token_per_address", address(request))
        raise HTTPException(401, "Send a valid token as 'Authorization: Bearer TOKEN'.", {"WWW-Authenticate": "Bearer"})

    return check


def _same(given: str, expected: str) -> bool:
    return hmac.compare_digest(given.encode("utf-8", "surrogatepass"), expected.encode())
