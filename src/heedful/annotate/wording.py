"""A sentence that pages can say in another language."""

from __future__ import annotations

from typing import Any


class Wording(str):
    """English text with values filled in, which still knows its template and values; the template is the key of its
    translation (scripts/translate.py collects them). A value may be a Wording itself.

    Wherever a str goes it is one: in JSON, in exceptions, on the terminal.
    """

    template: str
    values: dict[str, Any]

    def __new__(cls, template: str, /, **values: Any) -> Wording:
        self = super().__new__(cls, template.format(**values))
        self.template, self.values = template, values
        return self

    def __getnewargs_ex__(self) -> tuple[tuple[str], dict[str, Any]]:  # to be copied
        return (self.template,), self.values


def undefined(template: str, /, **values: Any) -> Wording:
    """Why a figure cannot be computed: "undefined, because …"."""
    return Wording("undefined, because {because}", because=Wording(template, **values))
