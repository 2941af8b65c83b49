"""Around every request: an id, the security headers, the size of bodies, forms of other sites, faults, one log line."""

from __future__ import annotations

import logging
import re
import secrets
import time
import traceback
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

from fastapi import HTTPException, Request
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

log = logging.getLogger("heedful.annotate")

CONTENT_SECURITY_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; form-action 'self'; "
    "frame-ancestors 'none'; base-uri 'none'"
)
HEADERS = {
    "content-security-policy": CONTENT_SECURITY_POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}
MAX_BODY_BYTES = 1 << 20
SAFE_METHODS = ("GET", "HEAD", "OPTIONS")


class Shield:
    """ASGI middleware; ``refuse(request, status, message)`` makes the page of a refusal."""

    def __init__(self, app: ASGIApp, *, refuse: Callable[[Request, int, str], Any], secure: bool) -> None:
        self.app, self.refuse = app, refuse
        self.headers = dict(HEADERS)
        if secure:
            self.headers["strict-transport-security"] = "max-age=31536000"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        request_id = secrets.token_hex(8)
        scope.setdefault("state", {})["request_id"] = request_id
        began = time.perf_counter()
        status = 0

        async def answer(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                self._add_headers(scope, MutableHeaders(raw=message["headers"]), request_id)
            await send(message)

        try:
            await self._pass_on(scope, receive, answer)
        except Exception as error:
            # where and what kind, but not the message: a database's own may hold what somebody typed
            place = "".join(traceback.format_tb(error.__traceback__))
            log.error("%s a fault: %s\n%s", request_id, type(error).__qualname__, place)
            if status:
                raise  # the answer had begun: the connection is cut, so that no half page looks whole
            await self.refuse(Request(scope), 500, "Something went wrong here.")(scope, receive, answer)
        finally:
            route = getattr(scope.get("route"), "path", "-")  # never the path itself: it may hold an invitation
            milliseconds = 1000 * (time.perf_counter() - began)
            log.info("%s %s %s %s %.0f ms", request_id, scope["method"], route, status, milliseconds)

    async def _pass_on(self, scope: Scope, receive: Receive, answer: Send) -> None:
        headers = Headers(scope=scope)
        if scope["method"] not in SAFE_METHODS and comes_from_elsewhere(headers):
            await self.refuse(Request(scope), 403, "This form was sent from another site.")(scope, receive, answer)
            return
        if "\x00" in scope["path"]:  # no database knows it, and PostgreSQL refuses even the question
            await self.refuse(Request(scope), 404, "There is no such page.")(scope, receive, answer)
            return
        length = headers.get("content-length", "0")
        if not length.isdecimal() or int(length) > MAX_BODY_BYTES:
            await self.refuse(Request(scope), 413, "This is too large.")(scope, receive, answer)
            return
        await self.app(scope, _counted(receive), answer)

    def _add_headers(self, scope: Scope, headers: MutableHeaders, request_id: str) -> None:
        for name, value in self.headers.items():
            headers[name] = value
        headers["x-request-id"] = request_id
        is_static = scope["path"].startswith("/static/")
        kept = "public, max-age=31536000, immutable" if scope["query_string"].startswith(b"v=") else "no-cache"
        headers["cache-control"] = kept if is_static else "no-store"


def comes_from_elsewhere(headers: Headers) -> bool:
    """Whether a browser says that another site sent this. A program that is no browser says nothing and holds no
    cookie. ``Origin: null`` alone proves nothing: without a referrer old browsers send it on our own forms as well,
    which carry the form token."""
    site = headers.get("sec-fetch-site")
    if site is not None:
        return site not in ("same-origin", "none")
    origin = headers.get("origin")
    if origin is None or origin == "null":
        return False
    try:
        return _host(urlsplit(origin).netloc) != _host(headers.get("host", ""))
    except ValueError:  # no address at all
        return True


def _host(netloc: str) -> str:
    return re.sub(r":(80|443)$", "", netloc.lower())


def _counted(receive: Receive) -> Receive:
    """A body without a stated length may not grow beyond the limit either."""
    num_bytes = 0

    async def counted() -> Message:
        nonlocal num_bytes
        message = await receive()
        num_bytes += len(message.get("body", b""))
        if num_bytes > MAX_BODY_BYTES:
            raise HTTPException(413, "This is too large.")
        return message

    return counted
