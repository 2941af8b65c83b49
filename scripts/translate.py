"""Collect the texts of the annotation pages and compile their Chinese catalogue.

New texts go into heedful.po; translate them there and run this again. With --check nothing is written: it complains
when a text is new, gone or untranslated, or when heedful.mo is older than heedful.po.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable, Iterator
from gettext import GNUTranslations
from io import BytesIO
from pathlib import Path

from babel.messages import Catalog
from babel.messages.extract import extract_from_file
from babel.messages.mofile import write_mo
from babel.messages.pofile import read_po, write_po

from heedful.annotate.master import VIEWS

ROOM = Path(__file__).resolve().parents[1] / "src" / "heedful" / "annotate"
FOLDER = ROOM / "web" / "locale" / "zh_CN" / "LC_MESSAGES"
SOURCES = [path for pattern in ("*.py", "quality/*.py", "web/*.py") for path in sorted(ROOM.glob(pattern))]
TEMPLATES = sorted(ROOM.glob("web/templates/*.j2"))
SENTENCE = {"DataError": 0, "Refused": 1, "HTTPException": 1, "refuse": 2, "refusal": 2}
"""Function → which argument is a text, if it is a sentence with a full stop; others are for the command line."""
WORDING = {"Wording": 0, "undefined": 0, "_none": 3, "_ratio": 3}
"""Function → which argument is a text, whatever it looks like."""


def texts() -> Iterator[str | tuple[str, ...]]:
    """Every text that a page may show."""
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call):
                name = getattr(node.func, "id", getattr(node.func, "attr", ""))
                if name in WORDING:
                    yield from _strings(node.args[WORDING[name] :][:1])
                    continue
                found = node.args[SENTENCE[name] :][:1] if name in SENTENCE else []
            elif isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "").isupper():
                found = list(ast.walk(node.value))
            else:
                continue
            yield from (text for text in _strings(found) if text.endswith(".") and " " in text)
    yield from VIEWS.values()
    for path in TEMPLATES:
        yield from (text for _, text, _, _ in extract_from_file("jinja2", path))


def _strings(nodes: Iterable[ast.AST]) -> Iterator[str]:
    return (n.value for n in nodes if isinstance(n, ast.Constant) and isinstance(n.value, str) and n.value)


def main() -> int:
    wanted = Catalog("zh_CN", fuzzy=False)
    for text in texts():
        wanted.add(text)
    po, mo = FOLDER / "heedful.po", FOLDER / "heedful.mo"
    FOLDER.mkdir(parents=True, exist_ok=True)
    known = read_po(BytesIO(po.read_bytes() if po.exists() else b""), "zh_CN")
    untranslated = [m.id for m in wanted if m.id and not (known.get(m.id) and all(_forms(known[m.id].string)))]
    if "--check" in sys.argv:
        unused = [m.id for m in known if m.id and m.id not in wanted]
        compiled = GNUTranslations(BytesIO(mo.read_bytes()))
        old = [m.id for m in known if m.id and _look_up(compiled, m.id) != _forms(m.string)[0]]
        for what, ids in (("not translated", untranslated), ("no longer used", unused), ("not compiled", old)):
            for id in ids:
                print(f"{what}: {id!r}")
        return 1 if untranslated or unused or old else 0
    catalog = Catalog("zh_CN", fuzzy=False, project="heedful", creation_date=known.creation_date)
    catalog.header_comment = "# Simplified Chinese texts of heedful's annotation pages; see scripts/translate.py."
    for message in sorted((m for m in wanted if m.id), key=lambda m: str(m.id).lower()):
        catalog.add(message.id, known[message.id].string if message.id in known else "", flags=message.flags)
    with po.open("wb") as file:
        write_po(file, catalog, width=120, omit_header=False)
    with mo.open("wb") as file:
        write_mo(file, catalog)
    print(f"{len(catalog)} texts, {len(untranslated)} of them not translated yet")
    return 0


def _forms(string: str | tuple[str, ...]) -> tuple[str, ...]:
    return string if isinstance(string, tuple) else (string,)


def _look_up(compiled: GNUTranslations, id: str | tuple[str, ...]) -> str:
    return compiled.gettext(id) if isinstance(id, str) else compiled.ngettext(*id, 2)


if __name__ == "__main__":
    sys.exit(main())
