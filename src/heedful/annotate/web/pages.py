"""Templates → pages: autoescape always on, the visitor's language, the form token, addresses of static files."""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
from functools import cache
from importlib.resources import files
from typing import Any

from fastapi import Request
from fastapi.responses import HTMLResponse, RedirectResponse
from jinja2 import Environment, PackageLoader, StrictUndefined

from heedful.annotate.people import role_allows
from heedful.annotate.web import language as languages
from heedful.annotate.web.text import to_html
from heedful.errors import HeedfulError


def render(request: Request, template: str, /, *, status: int = 200, **context: Any) -> HTMLResponse:
    """A page. Every template knows ``_`` and ``ngettext``, ``visitor`` (None before the login), ``may(role)``,
    ``project_name``, ``language``, ``language_tag``, ``offered`` (code → name of the app's languages), ``form_token``,
    ``path`` (give it where the address takes no GET),
    ``static("style.css")``, and the filters ``markdown``, ``moment``, ``json`` and
    ``translated`` (for texts that do not stand in a template)."""
    settings = request.app.state.project.settings
    visitor = getattr(request.state, "visitor", None)
    language = language_of(request)
    token, is_new = _cookie_token(request)
    page = _environment(language).get_template(template).render(
        visitor=visitor, project_name=settings.name, language=language, language_tag=languages.tag(language),
        offered={code: languages.NAMES[code] for code in settings.languages}, form_token=form_token(token),
        may=lambda role: visitor is not None and role_allows(visitor.person.role, role),
        **({"path": request.url.path} | context),
    )  # fmt: skip
    response = HTMLResponse(page, status)
    response.headers["Content-Language"] = languages.tag(language)
    if is_new:
        set_cookie(request, response, token)
    return response


def see_other(address: str) -> RedirectResponse:
    """After a form: the browser gets another page, so that a reload sends nothing twice."""
    return RedirectResponse(address, 303)


def language_of(request: Request) -> str:
    """What the person chose, else the cookie of an anonymous choice, else what the browser asks for."""
    visitor = getattr(request.state, "visitor", None)
    wanted = (visitor.person.language if visitor is not None else None) or request.cookies.get("language")
    offered = request.app.state.project.settings.languages
    return languages.choose(offered, wanted, request.headers.get("accept-language", ""))


def text_of(request: Request, message: str | HeedfulError) -> str:
    """A message in the language of the visitor; the English text is the key."""
    return languages.translated(
        words_of(message) if isinstance(message, HeedfulError) else message, language_of(request)
    )


def words_of(error: HeedfulError) -> str:
    """The message of an error with its Wording, which str() would lose."""
    return error.args[0] if error.args and isinstance(error.args[0], str) else str(error)


# --- the cookie and the form token bound to it ----------------------------------------------------------------------


def cookie_name(request: Request) -> str:
    """With TLS the name binds the cookie to this very host and to TLS."""
    return "__Host-heedful" if request.app.state.secure_cookies else "heedful"


def cookie_of(request: Request) -> str | None:
    """The random token that the browser holds; before a login it is only the anchor of the form token."""
    token = request.cookies.get(cookie_name(request))
    return token if token is not None and 20 <= len(token) <= 100 else None


def set_cookie(request: Request, response: HTMLResponse | RedirectResponse, token: str) -> None:
    """Out of reach of scripts and of other sites; it ends with the browser, and on the server before that."""
    secure = request.app.state.secure_cookies
    response.set_cookie(cookie_name(request), token, path="/", httponly=True, samesite="lax", secure=secure)


def form_token(cookie: str) -> str:
    """What every form carries: only who holds the cookie can know it, and it does not tell the cookie."""
    return hmac.new(cookie.encode("utf-8", "surrogatepass"), b"form", hashlib.sha256).hexdigest()


def _cookie_token(request: Request) -> tuple[str, bool]:
    token = cookie_of(request)
    if token is not None:
        return token, False
    if not hasattr(request.state, "new_cookie"):
        request.state.new_cookie = secrets.token_urlsafe(32)
    return request.state.new_cookie, True


# --- templates ------------------------------------------------------------------------------------------------------


@cache
def _environment(language: str) -> Environment:
    environment = Environment(
        loader=PackageLoader("heedful.annotate.web"), autoescape=True, undefined=StrictUndefined,
        extensions=["jinja2.ext.i18n"], trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    environment.install_gettext_translations(languages.catalogue(language), newstyle=True)  # type: ignore[attr-defined]
    environment.globals["static"] = static
    environment.filters["markdown"] = to_html
    environment.filters["json"] = lambda data: json.dumps(data, ensure_ascii=False)
    environment.filters["translated"] = lambda text: languages.translated(text, language)
    environment.filters["moment"] = lambda at: languages.moment(at, language)
    return environment


@cache
def static(name: str) -> str:
    """The address of a static file; it changes with the content, so browsers may keep the file."""
    content = files("heedful.annotate.web").joinpath("static", name).read_bytes()
    return f"/static/{name}?v={hashlib.sha256(content).hexdigest()[:12]}"
