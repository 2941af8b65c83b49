"""What models and people wrote is shown and does nothing: the hostile corpus, and ordinary Markdown (SEC-01)."""

import re
import time
from html.parser import HTMLParser
from pathlib import Path

import pytest

from heedful.annotate.web.text import MAX_MARKDOWN, TAGS, to_html

WEB = Path(__file__).resolve().parents[3] / "src" / "heedful" / "annotate" / "web"

HOSTILE = [
    "<script>alert(1)</script>",
    "<SCRIPT SRC=//evil.example/x.js></SCRIPT>",
    "<img src=x onerror=alert(1)>",
    "<svg/onload=alert(1)><svg><script>alert(1)</script></svg>",
    "<iframe srcdoc='<script>alert(1)</script>'></iframe>",
    "<math><mtext></p><img src=x onerror=alert(1)>",
    "<style>*{display:none}</style><link rel=stylesheet href=//evil.example>",
    "<base href=//evil.example><meta http-equiv=refresh content='0;url=//evil.example'>",
    "<form action=/logout method=post><button>x</button></form>",
    "<input name=rank autofocus onfocus=alert(1)>",
    "</div></form></section><h1>Taken over</h1>",
    "<details open ontoggle=alert(1)>",
    "<!-- --><!DOCTYPE x [<!ENTITY y 'z'>]>",
    "<noscript><p title='</noscript><img src=x onerror=alert(1)>'>",
    "```html\n<script>alert(1)</script>\n```",
    "``` \"onmouseover=alert(1) x=\"\ny\n```",
    "`<img src=x onerror=alert(1)>`",
    "    <script>alert(1)</script>",
    "[x](javascript:alert(1))",
    "[x](JaVaScRiPt:alert(1))",
    "[x](java\nscript:alert(1))",
    "[x](&#106;avascript:alert(1))",
    "[x](&#x6A;&#x61;vascript&colon;alert(1))",
    "[x]( javascript:alert(1))",
    "[x](\x01javascript:alert(1))",
    "[x](vbscript:msgbox(1))",
    "[x](data:text/html;base64,PHNjcmlwdD5hbGVydCgxKTwvc2NyaXB0Pg==)",
    "[x](data:image/svg+xml,<svg onload=alert(1)>)",
    "[x](file:///etc/passwd)",
    "[x](//evil.example/y)",
    "[x](/logout)",
    "[x](\\\\evil.example\\y)",
    "[x](#main)",
    "[x](https://evil.example 'title=\" onmouseover=alert(1)')",
    "[x]: javascript:alert(1)\n\n[x]",
    "[x]: https://evil.example \"a title\"\n\n[x]",
    "<javascript:alert(1)>",
    "<https://evil.example/\"onmouseover=alert(1)>",
    "![x](https://evil.example/pixel.png)",
    "![x](javascript:alert(1))",
    "![x][y]\n\n[y]: https://evil.example/pixel.png",
    "[![x](https://evil.example/pixel.png)](https://evil.example)",
    "| a |\n|---|\n| <img src=x onerror=alert(1)> |",
    "# <script>alert(1)</script>\n\n> <b onclick=alert(1)>x</b>",
    "1. a\n2. <a href=javascript:alert(1)>b</a>",
    "&lt;script&gt;alert(1)&lt;/script&gt;",
    "\x00<script>\x00alert(1)</script>",
    "<scr\x00ipt>alert(1)</scr\x00ipt>",
    "\u202egnp.exe\u2028<script>alert(1)</script>",
    "{{ 7 * 7 }} {% raw %} ${7*7} <%= 7*7 %>",
    "<a href='https://evil.example' target=_self rel=opener>x</a>",
    "*a **b _c ~~d `e [f](g",
]  # fmt: skip


class Reader(HTMLParser):
    """Every tag and attribute that a browser would see."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: list[tuple[str, str, str]] = []
        self.words: list[str] = []
        self.open: list[str] = []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        if tag not in ("br", "hr"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag, "a text closes what it has not opened"

    def handle_data(self, data):
        self.words.append(data)

    def handle_comment(self, data):
        raise AssertionError(f"a comment: {data}")

    handle_decl = handle_pi = unknown_decl = handle_comment


@pytest.mark.parametrize("text", HOSTILE)
@pytest.mark.parametrize("around", ["{}", "> - {}", "| a |\n|---|\n| {} |", "Before {} after\n{}"])
def test_SEC_01_hostile_text_is_inert(text, around):
    page = Reader(to_html(around.replace("{}", text)))
    assert page.tags <= TAGS
    assert not page.open, "a text leaves something open"
    for tag, name, value in page.attributes:
        assert (tag, name) in {("a", "href"), ("a", "rel"), ("a", "target"), ("ol", "start")}
        if name == "href":
            assert re.match(r"(https?://|mailto:)", value), value
        if name == "rel":
            assert value == "nofollow noopener noreferrer"


def test_SEC_01_hostile_text_stays_readable():
    """A rater must see what a model wrote, a script included."""
    assert "<script>alert(1)</script>" in "".join(Reader(to_html("x <script>alert(1)</script>")).words)
    assert "javascript:alert(1)" in "".join(Reader(to_html("[x](javascript:alert(1))")).words)
    assert "https://evil.example/pixel.png" in "".join(Reader(to_html("![x](https://evil.example/pixel.png)")).words)


def test_no_load_from_anywhere():
    for text in HOSTILE:
        assert not re.search(r"<[^>]*(src|srcset|poster|background|style|xlink:href)\s*=", to_html(text)), text


def test_ordinary_markdown_is_formatted():
    text = "# Head\n\none\ntwo **b** *i* ~~s~~ `c`\n\n3. x\n4. y\n\n| a | b |\n|---|---|\n| 1 | 2 |\n\n```py\nf()\n```"
    page = to_html(text)
    for part in ["<h4>Head</h4>", "one<br>\ntwo", "<strong>b</strong>", "<em>i</em>", "<s>s</s>", "<code>c</code>",
                 '<ol start="3">', "<td>2</td>", "<pre><code>f()\n</code></pre>"]:  # fmt: skip
        assert part in page, part
    assert "**粗体**" not in to_html("这是**粗体**字") and "<strong>粗体</strong>" in to_html("这是**粗体**字")


def test_headings_stand_below_those_of_the_page():
    page = to_html("\n\n".join("#" * level + " x" for level in range(1, 7)))
    assert re.findall(r"<(h\d)>", page) == ["h4", "h5", "h6", "h6", "h6", "h6"]
    assert "<h2>x</h2>" in to_html("# x", 1) and "<h3>x</h3>" in to_html("## x", 1)


def test_where_a_link_leads_is_read_without_following_it():
    assert to_html("[bank](https://evil.example/login)").endswith("bank</a> (https://evil.example/login)</p>\n")
    assert to_html("<https://a.example>").count("https://a.example") == 2
    assert to_html("<me@a.example>").count("me@a.example") == 2
    nested = to_html('[**b** `c`](https://a.example/?q=<&x="y)')
    assert "(https://a.example/?q=%3C&amp;x=%22y)" in nested


def test_a_text_of_any_shape_takes_little_time():
    shapes = [">" * 50_000, "[" * 50_000, "*a " * 16_000, "**x" * 16_000, "`" * 50_000, "[a](b" * 10_000, "<" * 50_000,
              "|a" * 800 + "\n" + "|-" * 800 + "\n" + "|x\n" * 15_000, "".join(" " * i + "- a\n" for i in range(300)),
              "*_" * 25_000, "<a " * 16_000, "![" * 25_000, "&" * 50_000, "x" * 200_000]  # fmt: skip
    for text in shapes:
        began = time.process_time()
        assert to_html(text)
        assert time.process_time() - began < 5, text[:20]


def test_a_very_long_text_is_shown_as_it_is():
    page = to_html("<b>&" * (MAX_MARKDOWN // 4 + 1))
    assert page.startswith("<pre>&lt;b&gt;&amp;") and Reader(page).tags == {"pre"}


def test_SEC_03_one_place_alone_declares_text_safe():
    for path in [*WEB.rglob("*.py"), *WEB.rglob("*.j2")]:
        source = path.read_text(encoding="utf-8")
        assert not re.search(r"\|\s*safe\b|autoescape\s+false|autoescape=False", source), path
        assert ("Markup" not in source) or path.name == "text.py", f"{path}: only text.py may declare text safe"


def test_SEC_02_templates_hold_no_inline_script_or_style():
    for path in WEB.rglob("*.j2"):
        source = path.read_text(encoding="utf-8")
        assert not re.search(r"\sstyle=|<style|\son\w+=|javascript:", source), path
        assert all("src=" in tag for tag in re.findall(r"<script[^>]*>", source)), path
    for path in WEB.rglob("*.js"):
        source = path.read_text(encoding="utf-8")
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", source)
