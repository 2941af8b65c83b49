"""The languages of the pages: which one a visitor gets, and its catalogue.

The English text is the key of its translation; scripts/translate.py collects and compiles them.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from functools import cache
from gettext import NullTranslations
from pathlib import Path

from babel import Locale, negotiate_locale
from babel.dates import format_datetime, get_timezone
from babel.support import Translations

from heedful.annotate.wording import Wording

NAMES = {"en": "English", "zh_CN": "简体中文"}
"""Language → what its speakers call it."""
SIMPLIFIED = dict.fromkeys(("zh", "zh-hans", "zh-hans-cn", "zh-sg", "zh-hans-sg"), "zh_CN")
"""What a browser may call it."""
FOLDER = Path(__file__).parent / "locale"


@cache
def catalogue(language: str) -> NullTranslations:
    """The texts of a language; English ones are the keys themselves."""
    return Translations.load(FOLDER, [language], domain="heedful") if language != "en" else NullTranslations()


def translated(text: str, language: str) -> str:
    """A sentence in that language; of a Wording the template is looked up and its values are filled in."""
    if not isinstance(text, Wording):
        return catalogue(language).gettext(text)
    values = {n: translated(v, language) if isinstance(v, Wording) else v for n, v in text.values.items()}
    return catalogue(language).gettext(text.template).format(**values)


def choose(offered: Sequence[str], wanted: str | None, accept_language: str) -> str:
    """The language of a page: what the visitor chose, else what the browser asks for, else the first one offered."""
    if wanted in offered:
        return str(wanted)
    asked = []
    for part in accept_language[:500].split(","):
        name, _, weight = part.strip().partition(";q=")
        try:
            share = float(weight or 1)
        except ValueError:
            continue
        if share > 0:
            asked.append((share, SIMPLIFIED.get(name.lower(), name.replace("-", "_"))))
    asked.sort(key=lambda one: -one[0])
    return negotiate_locale([name for _, name in asked], list(offered)) or offered[0]


def tag(language: str) -> str:
    """The ``lang`` attribute: zh_CN → zh-CN."""
    return language.replace("_", "-")


def moment(at: float, language: str) -> str:
    """Seconds since 1970 as a date and time, UTC, the way the language writes them."""
    when = datetime.fromtimestamp(at, UTC)
    return format_datetime(when, "medium", tzinfo=get_timezone("UTC"), locale=Locale.parse(language)) + " UTC"
