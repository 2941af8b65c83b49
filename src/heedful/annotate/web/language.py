"""The languages of the pages: which one a visitor gets, and its catalogue.

The English text is the key. After a change of a text: ``pybabel extract -F pyproject.toml -k _ -o /tmp/heedful.pot src``,
``pybabel update``, a translation in ``locale/zh_CN/LC_MESSAGES/heedful.po``, ``pybabel compile`` (see CONTRIBUTING.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from gettext import NullTranslations
from pathlib import Path

from babel import Locale, negotiate_locale
from babel.dates import format_datetime, get_timezone
from babel.support import Translations

NAMES = {"en": "English", "zh_CN": "简体中文"}
"""Language → what its speakers call it."""
FOLDER = Path(__file__).parent / "locale"


@cache
def catalogue(language: str) -> NullTranslations:
    """The texts of a language; English ones are the keys themselves."""
    return Translations.load(FOLDER, [language], domain="heedful") if language != "en" else NullTranslations()


def choose(offered: Sequence[str], wanted: str | None, accept_language: str) -> str:
    """The language of a page: what the visitor chose, else what the browser asks for, else the first one offered."""
    if wanted in offered:
        return str(wanted)
    preferred = []
    for place, part in enumerate(accept_language[:500].split(",")):
        tag, _, weight = part.strip().partition(";q=")
        try:
            preferred.append((-float(weight or 1), place, tag.replace("-", "_")))
        except ValueError:
            continue
    # Chinese of any kind but the traditional one is nearer to zh_CN than to English
    tags = ["zh_CN" if tag.lower() in ("zh", "zh_hans", "zh_sg", "zh_hans_cn") else tag for _, _, tag in sorted(preferred)]
    return negotiate_locale(tags, list(offered)) or offered[0]


def tag(language: str) -> str:
    """The ``lang`` attribute: zh_CN → zh-CN."""
    return language.replace("_", "-")


def moment(at: float, language: str) -> str:
    """Seconds since 1970 as a date and time, UTC, the way the language writes them."""
    from datetime import UTC, datetime

    when = datetime.fromtimestamp(at, UTC)
    return format_datetime(when, "medium", tzinfo=get_timezone("UTC"), locale=Locale.parse(language)) + " UTC"
