"""The web app of one project, from its parts."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any
from urllib.parse import quote

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from fastapi.staticfiles import StaticFiles
from starlette.exceptions import HTTPException

from heedful.annotate import passwords
from heedful.annotate.project import Project
from heedful.annotate.web import account, admin, api, dashboard, pages, rating
from heedful.annotate.web.door import Limits, SignIn, Throttle
from heedful.annotate.web.shield import Shield
from heedful.errors import HeedfulError

MESSAGES = {
    400: "This request cannot be read.", 404: "There is no such page.", 405: "There is no such page.",
    422: "This request cannot be read.",
}  # fmt: skip


def create_app(
    project: Project, *, clock: Callable[[], float] = time.time, secure_cookies: bool, limits: Limits | None = None
) -> FastAPI:
    """The app. Its parts find ``project``, ``clock``, ``throttle`` and ``secure_cookies`` in ``request.app.state``.

    Args:
        clock: seconds since 1970.
        secure_cookies: browsers reach the app by TLS: cookies are bound to it, and browsers are told to stay with it.
        limits: how often one may try to log in and send; None = the defaults.
    """
    app = FastAPI(
        title=project.settings.name, docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False,
        # no spans: the path of an invitation is a secret, and a database's message may hold what somebody typed
        telemetry={"tracing": False, "logs": False, "auto_configure": False},
    )  # fmt: skip
    app.state.project, app.state.clock, app.state.secure_cookies = project, clock, secure_cookies
    app.state.throttle = Throttle(limits or Limits())
    passwords.nobodys()  # made now, so that the first unknown name takes no longer than the second
    for router in (account.router, rating.router, admin.router, admin.exports, dashboard.router, api.router):
        app.include_router(router)
    app.mount("/static", StaticFiles(packages=[("heedful.annotate.web", "static")]), name="static")
    app.add_middleware(Shield, refuse=refusal, secure=secure_cookies)  # type: ignore[arg-type]
    app.add_exception_handler(SignIn, _to_login)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(RequestValidationError, _unreadable)
    app.add_exception_handler(passwords.Busy, _busy)
    app.add_exception_handler(HeedfulError, _refused)
    return app


def refusal(request: Request, status: int, message: str, headers: Any = None) -> Response:
    """The one page of everything that goes wrong; for programs, JSON."""
    if request.url.path.startswith("/api/"):
        response: Response = JSONResponse({"error": message}, status)
    else:
        request_id = getattr(request.state, "request_id", "")
        response = pages.render(
            request, "error.html.j2", status=status, code=status, message=pages.text_of(request, message),
            request_id=request_id if status >= 500 else "", path=request.url.path if request.method == "GET" else "/",
        )  # fmt: skip
    for name, value in (headers or {}).items():
        response.headers[name] = value
    return response


def _to_login(request: Request, error: Exception) -> Response:
    """A person gets the login page and comes back after it; a script gets 401."""
    if request.url.path.startswith("/api/") or request.headers.get("sec-fetch-dest", "document") != "document":
        return refusal(request, 401, "Log in first.")
    path = request.url.path
    return pages.see_other(f"/login?next={quote(path)}" if request.method == "GET" and path != "/" else "/login")


def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    detail = error.detail if isinstance(error.detail, str) else ""
    is_standard = detail in ("", "Not Found", "Method Not Allowed")
    message = MESSAGES.get(error.status_code, "Something went wrong here.") if is_standard else detail
    status = 404 if error.status_code == 405 else error.status_code
    return refusal(request, status, message, error.headers)


def _unreadable(request: Request, error: Exception) -> Response:
    """A field of the wrong kind; what was sent is not repeated."""
    return refusal(request, 422, MESSAGES[422])


def _busy(request: Request, error: Exception) -> Response:
    return refusal(request, 503, "Many people log in at this moment; try again.", {"Retry-After": "2"})


def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, HeedfulError)
    return refusal(request, 422, pages.words_of(error))
