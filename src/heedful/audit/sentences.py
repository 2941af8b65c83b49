"""Texts cut into sentences and words, English and Chinese."""

from __future__ import annotations

import re
from collections.abc import Sequence

_CHINESE = re.compile("[\u3400-\u4dbf\u4e00-\u9fff]")
_END = re.compile(r"(?<=[.!?])\s+|(?<=[。！？])\s*|\n+")
_WORD = re.compile(r"[\u3400-\u4dbf\u4e00-\u9fff]|[^\s\u3400-\u4dbf\u4e00-\u9fff]+")
_MARKDOWN = re.compile(r"^\s*(?:[-*+] |\d+[.)] |#+ )|\*\*|```|^\|", re.M)
MOSTLY = 0.3


def language(text: str) -> str:
    """ "zh" where at least three in ten characters are Chinese, else "en" for everything that is spaced."""
    letters = re.sub(r"\s", "", text)
    return "zh" if letters and len(_CHINESE.findall(letters)) / len(letters) >= MOSTLY else "en"


def sentences(text: str) -> list[str]:
    """The sentences of a text, without blanks around them."""
    return [s.strip() for s in _END.split(text) if s and s.strip()]


def join(parts: Sequence[str], lang: str) -> str:
    """Sentences as one paragraph."""
    return ("" if lang == "zh" else " ").join(parts)


def words(text: str) -> list[str]:
    """Words with what is attached to them; every Chinese character is one."""
    return _WORD.findall(text)


def first_words(text: str, share: float) -> str | None:
    """The text up to a share of its words; None where that leaves nothing or takes nothing away."""
    found = list(_WORD.finditer(text))
    keep = int(len(found) * share)
    return text[: found[keep - 1].end()] if 0 < keep < len(found) else None


def is_formatted(text: str) -> bool:
    """Whether there are lists, headings, bold words, code or tables."""
    return bool(_MARKDOWN.search(text))
