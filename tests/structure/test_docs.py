"""What people read is true: links lead somewhere, examples are valid, every verb is explained."""

import argparse
import ast
import re
import shlex
from pathlib import Path

import pytest

from heedful.cli.main import parser
from heedful.cli.run import TAKE_KEYS, take_overrides
from heedful.config.read import dotted_keys
from heedful.config.recipe import Recipe

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "src").rglob("*.md")])
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.M | re.S)
LINK = re.compile(r"\]\(([^)\s]+)\)")
KEYS = set(dotted_keys(Recipe))


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def text(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def anchors(path: Path) -> set[str]:
    """The anchors that GitHub makes of a page's headings."""
    headings = re.findall(r"^#+ (.+)$", FENCE.sub("", text(path)), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def verbs(of: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    return next((dict(a.choices) for a in of._actions if isinstance(a, argparse._SubParsersAction)), {})


def is_verb(words: list[str]) -> bool:
    """Whether the words only name a verb, as in "see `heedful models pull`"."""
    of = parser()
    for word in words:
        if word not in verbs(of):
            return False
        of = verbs(of)[word]
    return True


def commands(page: str) -> list[str]:
    """Every ``heedful …`` command line of a page, in fences and in backticks, without comments and usage brackets."""
    found = [line for language, block in FENCE.findall(page) if language in ("", "bash") for line in block.splitlines()]
    found += re.findall(r"`([^`\n]+)`", FENCE.sub("", page))
    lines = [re.split(r"\s+#|\s{3,}", line.strip().removeprefix("$ "))[0] for line in found]
    return [re.sub(r"[\[\]]", "", line) for line in lines if line.startswith("heedful ")]


def test_the_pages_are_found():
    assert {"README.md", "README.zh-CN.md", "CHANGELOG.md", "docs/00-index.md"} <= {name(p) for p in PAGES}
    assert sum(len(commands(text(p))) for p in PAGES) > 30


@pytest.mark.parametrize("path", PAGES, ids=name)
def test_every_relative_link_leads_somewhere(path):
    for target in LINK.findall(FENCE.sub("", text(path))):
        if re.match(r"\w+:", target):
            continue
        file, _, anchor = target.partition("#")
        there = (path.parent / file).resolve() if file else path
        assert there.exists(), f"{name(path)} links to {target}, which is not there"
        assert not anchor or anchor in anchors(there), f"{name(path)} links to {target}, which has no such heading"


@pytest.mark.parametrize("path", PAGES, ids=name)
def test_every_python_example_is_valid_python(path):
    for language, block in FENCE.findall(text(path)):
        if language == "python":
            ast.parse(block, name(path))


@pytest.mark.parametrize("path", PAGES, ids=name)
def test_every_command_line_parses(path):
    for command in commands(text(path)):
        words = shlex.split(command)[1:]
        if is_verb(words):
            continue
        overrides: list[str] = []
        if words[0] in TAKE_KEYS:
            words[1:], overrides = take_overrides(words[1:])
        try:
            parser().parse_args(words)
        except SystemExit as stop:
            assert stop.code == 0, f"{name(path)}: `{command}` does not parse"  # 0: --help and --version
            continue
        options = {word[2:].partition("=")[0] for word in overrides if word.startswith("--")}
        assert options <= KEYS, f"{name(path)}: `{command}` sets keys that a recipe does not have"


def test_every_verb_is_explained_in_the_docs():
    docs = "\n".join(text(p) for p in PAGES if p.parent.name == "docs")
    for verb, its_parser in verbs(parser()).items():
        for command in [f"heedful {verb}", *(f"heedful {verb} {sub}" for sub in verbs(its_parser))]:
            assert command in docs, f"no page in docs/ mentions `{command}`"


def test_every_page_is_in_the_index():
    linked = set(LINK.findall(text(ROOT / "docs" / "00-index.md")))
    for page in (ROOT / "docs").glob("*.md"):
        assert page.name == "00-index.md" or page.name in {link.partition("#")[0] for link in linked}, page.name


def test_the_two_readmes_show_the_same_code():
    """The twins may differ in words and comments, not in what is run."""
    code = [
        [re.sub(r"\s+#.*", "", block) for language, block in FENCE.findall(text(ROOT / page)) if language]
        for page in ("README.md", "README.zh-CN.md")
    ]
    assert code[0] == code[1]
