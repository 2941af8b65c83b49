"""A person at the pages of an annotation project without a browser: reads forms, fills them in, sends them."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from typing import Any

from fastapi.testclient import TestClient

from heedful.annotate import people
from heedful.annotate.project import Project
from heedful.annotate.tables import Person
from heedful.annotate.web import pages
from heedful.annotate.web.app import create_app


class Clock:
    """Time that stands still until a test moves it."""

    def __init__(self, now: float) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


class Page(HTMLParser):
    """What a page says: its forms by action, with the values that a browser would send, and its words."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.forms: dict[str, list[tuple[str, str]]] = {}
        self.choices: dict[str, list[str]] = {}
        """Of every field its possible values"""
        self.words = ""
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self._form: list[tuple[str, str]] = []
        self._select = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        have = {name: value or "" for name, value in attrs}
        self.tags.add(tag)
        self.attributes.update(have)
        if tag == "form":
            self._form = self.forms.setdefault(have["action"], [])
        elif tag == "input" and "name" in have:
            self.choices.setdefault(have["name"], []).append(have.get("value", ""))
            if have.get("type") not in ("radio", "checkbox") or "checked" in have:
                self._form.append((have["name"], have.get("value", "")))
        elif tag == "select":
            self._select = have["name"]
        elif tag == "option":
            self.choices.setdefault(self._select, []).append(have["value"])
            if "selected" in have:
                self._form.append((self._select, have["value"]))

    def handle_data(self, data: str) -> None:
        self.words += data


class Rater:
    """Somebody who is signed in."""

    def __init__(
        self, project: Project, clock: Clock, name: str = "mira", role: str = "annotator", **more: Any
    ) -> None:
        self.project, self.clock = project, clock
        with project.database.writing() as session:
            self.person = Person(name=name, pseudonym=f"rater-{name}", role=role, created_at=clock())
            session.add(self.person)
            session.flush()
            token = people.open_login(session, self.person, clock())
        self.client = TestClient(create_app(project, clock=clock, secure_cookies=False, **more), follow_redirects=False)
        self.client.cookies.set("heedful", token)
        self.form_token = pages.form_token(token)

    def get(self, path: str, **more: Any) -> Any:
        return self.client.get(path, **more)

    def post(self, path: str, fields: Any = (), **more: Any) -> Any:
        """A form; a field may stand more than once."""
        data: dict[str, list[str]] = {"form_token": [self.form_token]}
        for name, value in fields.items() if isinstance(fields, dict) else fields:
            data.setdefault(name, [])
            if name != "form_token":
                data[name].append(value)
        return self.client.post(path, data=data, **more)

    def next(self) -> str:
        """The address of the item that is handed out; "" when there is none."""
        answer = self.post("/next")
        assert answer.status_code == 303, answer.text
        address = answer.headers["location"]
        assert re.fullmatch(r"/rank/[\w-]{20,32}|/\?nothing=1", address), address
        return address if address.startswith("/rank/") else ""

    def page(self, address: str) -> Page:
        answer = self.get(address)
        assert answer.status_code == 200, answer.text
        return Page(answer.text)

    def form(self, address: str) -> dict[str, str]:
        """The fields of the ranking form as they stand."""
        return dict(self.page(address).forms[address.partition("?")[0]])

    def cards(self, address: str) -> list[str]:
        """The public ids of the cards, from left to right."""
        return [name.removeprefix("rank.") for name in self.form(address) if name.startswith("rank.")]

    def rank(self, address: str, ranks: Any, **fields: str) -> Any:
        """Fill in the ranks from left to right and submit."""
        form = self.form(address)
        form |= {f"rank.{card}": str(rank) for card, rank in zip(self.cards(address), ranks)} | fields
        return self.post(address.partition("?")[0], form)
