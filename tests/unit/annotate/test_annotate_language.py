"""Languages of the annotation pages: which one is chosen, and that every text has its Chinese."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from babel.messages.pofile import read_po

from heedful.annotate.web import language

ROOT = Path(__file__).resolve().parents[3]
OFFERED = ("en", "zh_CN")


@pytest.mark.parametrize(
    "header, expected",
    [
        ("zh-CN,zh;q=0.9,en;q=0.8", "zh_CN"), ("zh-Hans", "zh_CN"), ("zh", "zh_CN"), ("zh-TW,zh;q=0.5", "zh_CN"),
        ("en-GB,en;q=0.9", "en"), ("en;q=0.2, zh-CN;q=0.7", "zh_CN"), ("en;q=0,zh", "zh_CN"), ("de, fr", "en"),
        ("", "en"), ("*", "en"), ("zh;q=high,en", "en"), (";q=;,,=\x00" * 999, "en"),
    ],
)  # fmt: skip
def test_the_browser_is_heard(header, expected):
    assert language.choose(OFFERED, None, header) == expected


def test_the_choice_of_a_person_goes_first_where_the_project_offers_it():
    assert language.choose(OFFERED, "zh_CN", "en") == "zh_CN"
    assert language.choose(OFFERED, "fr", "zh") == "zh_CN"
    assert language.choose(("zh_CN",), "en", "en") == "zh_CN"


def test_every_text_is_translated_and_compiled():
    command = [sys.executable, str(ROOT / "scripts" / "translate.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, f"run scripts/translate.py:\n{done.stdout}{done.stderr}"


def test_translations_keep_the_names_of_what_is_filled_in():
    path = language.FOLDER / "zh_CN" / "LC_MESSAGES" / "heedful.po"
    catalog = read_po(path.open("rb"), "zh_CN")
    names = re.compile(r"%\(\w+\)s|\{\w+\}")
    assert len(catalog) > 100
    for message in catalog:
        if not message.id:
            continue
        one = isinstance(message.id, str)
        wanted = set(names.findall(message.id if one else message.id[-1]))
        for text in [message.string] if one else message.string:
            assert set(names.findall(text)) == wanted, message.id
            assert re.search(r"[\u4e00-\u9fff]", text), f"{message.id!r} is not in Chinese: {text!r}"


def test_catalogues_answer():
    assert language.catalogue("en").gettext("Submit") == "Submit"
    assert language.catalogue("zh_CN").gettext("Submit") == "提交"
    assert language.catalogue("zh_CN").ngettext("%(count)s answer", "%(count)s answers", 4) == "%(count)s 个回答"


def test_moments_are_written_as_the_language_writes_them():
    assert language.moment(0, "zh_CN").startswith("1970年1月1日")
    assert language.moment(0, "en").startswith("Jan 1, 1970") and language.moment(0, "en").endswith("UTC")
    assert language.tag("zh_CN") == "zh-CN"
