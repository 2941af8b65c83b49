"""Languages of the annotation pages: which one is chosen, and that every text has its Chinese."""

import copy
import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
from babel.messages.pofile import read_po

from heedful.annotate.web import language
from heedful.annotate.wording import Wording, undefined
from heedful.records import Answer, Message, Ranking
from toy_project import NOW, make_people, make_project
from toy_rater import Clock, Rater

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
    names = re.compile(r"%\(\w+\)s|\{\w+[^}]*\}")
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


def test_a_wording_is_its_english_and_knows_its_chinese():
    text = undefined("only {num} items were {what}; {needed} are needed", num=3, what=Wording("ranked"), needed=15)
    assert text == "undefined, because only 3 items were ranked; 15 are needed" and json.loads(json.dumps(text)) == text
    for one in (text, copy.deepcopy(text)):
        assert language.translated(one, "zh_CN") == "无法计算：只有 3 道题目排序过，至少需要 15 道"
        assert language.translated(one, "en") == text
    braces = Wording("scope {scope!r}: give one of {known}", scope="{0.__class__}{known}", known="annotate")
    assert language.translated(braces, "zh_CN") == "权限 '{0.__class__}{known}' 无效，可用的有：annotate"
    assert language.translated("no such text {x}", "zh_CN") == "no such text {x}"


class English(HTMLParser):
    """What a page says in two English words or more without Chinese; not code, nor what is marked as English."""

    VOID = ("input", "meta", "link", "br", "hr")
    SAID = ("title", "aria-label", "placeholder", "alt")

    def __init__(self, html):
        super().__init__()
        self.found, self.open = [], []
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        if tag not in self.VOID:
            self.open.append((tag, dict(attrs).get("lang")))
        for name, value in attrs:
            if name in self.SAID or name.startswith("data-say"):
                self.look_at(value)

    def handle_endtag(self, tag):
        assert self.open.pop()[0] == tag

    def handle_data(self, data):
        if not any(tag in ("code", "kbd", "style") or lang == "en" for tag, lang in self.open):
            self.look_at(data)

    def look_at(self, text):
        if len(re.findall(r"[A-Za-z]{2,}", text)) > 1 and not re.search(r"[\u4e00-\u9fff]", text):
            self.found.append(text.strip())


def test_english_is_noticed():
    page = '<p title="Nothing to see">Some words<br>更多 two words</p><code>a bc de</code><td lang="en">log in</td>'
    assert English(page).found == ["Nothing to see", "Some words"]


def test_no_page_of_a_chinese_admin_has_an_english_sentence(tmp_path):
    """Every page, and every error that its forms can bring. Names stay: of people, formats, policies."""
    asked = [
        Ranking(
            f"g{i}",
            (Message("user", f"问题 {i}"),),
            tuple(Answer(f"a{j}", f"回答 {j}", policy=f"p{j}") for j in (1, 2)),
        )
        for i in range(4)
    ]
    settings = {"overlap_share": 0.0, "gold_rate": 0.0, "strength": True, "reason": "optional", "attributes": ("有用",)}
    project = make_project(tmp_path, asked, name="项目", **settings)
    admin = Rater(project, Clock(NOW), name="ann", role="admin")
    admin.client.headers["accept-language"] = "zh-CN"
    make_people(project, 2)

    def look(answer, status=200, said=""):
        assert answer.status_code == status, answer.text
        assert 'lang="zh-CN"' in answer.text and said in answer.text, answer.text
        allowed = r"Be fair\.|person \d|rater-\w+"
        assert [text for text in English(answer.text).found if re.sub(allowed, "", text).strip()] == []

    def refused(path, said="", status=422, **fields):
        look(admin.post(path, fields), status, said)

    look(admin.get("/exports/trl"), 422, "尚无任何排序")
    address = admin.next()
    look(admin.get(address), said="单个字母或数字的按键")
    refused(address, **(admin.form(address) | {"strength": "9"}))
    look(admin.get("/dashboard"), said="无法计算：")
    for path in ("/", "/?nothing=1", "/mine", "/guideline", "/exports", "/account", "/login", "/admin", "/admin/people",
                 "/admin/guideline", "/admin/log"):  # fmt: skip
        look(admin.get(path))
    look(admin.get("/nowhere"), 404)
    look(admin.get("/join/nothing"), 404)
    refused("/login", status=401, name="x", password="y")
    refused("/admin/invite", "角色 &#39;boss&#39; 无效", role="boss")
    refused("/admin/guideline", "标注准则是空的", text=" ", save="1")
    refused("/admin/guideline", "个字符，最多允许", text="x" * 200_001, save="1")
    refused("/admin/people/rater-0/exclude", reason="")
    assert admin.post("/admin/people/rater-0/exclude", {"reason": "没有认真做"}).status_code == 303
    refused("/admin/people/rater-0/exclude", "rater-0 的工作已被排除。", reason="没有认真做")
    refused("/admin/people/rater-1/reinstate", "rater-1 的工作未被排除。")
    refused("/admin/people/rater-1/role", "可用的有：annotator, reviewer, admin", role="king")
    refused("/admin/people/rater-1/forget", pseudonym="somebody")
    refused("/admin/people/rater-ann/disable")
    assert admin.post("/admin/people/rater-1/forget", {"pseudonym": "rater-1"}).status_code == 303
    refused("/admin/people/rater-1/enable", "rater-1 已被删除")
    look(admin.get("/admin/people"))
    look(admin.get("/admin/log"))
    refused("/account/token", "最长 366 天", scope="annotate", days="999")
    refused("/account/token", "权限 &#39;all&#39; 无效", scope="all", days="1")
    refused("/account/token", scope="annotate", days="x")
    refused("/account/password", present_password="x", password="a", password_again="b")
