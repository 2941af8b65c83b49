"""Text that a model or a person wrote → HTML that is safe to show; the one place that declares anything safe."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from html import escape

import nh3
from markdown_it import MarkdownIt
from markdown_it.renderer import RendererHTML
from markdown_it.token import Token
from markdown_it.utils import EnvType, OptionsDict
from markupsafe import Markup

MAX_MARKDOWN = 50_000
"""Characters; a longer text is shown as it is, since some nestings cost a parser the square of their length."""

TAGS = {
    "p", "br", "hr", "h2", "h3", "h4", "h5", "h6", "strong", "em", "s", "blockquote", "ul", "ol", "li", "pre", "code",
    "a", "table", "thead", "tbody", "tr", "th", "td",
}  # fmt: skip


def _heading(self: RendererHTML, tokens: Sequence[Token], at: int, options: OptionsDict, env: EnvType) -> str:
    """A text's headings stand below those that the page has above it."""
    level = min(6, int(tokens[at].tag[1]) + env["below"])
    return f"<h{level}>" if tokens[at].nesting == 1 else f"</h{level}>\n"


def _link_end(self: RendererHTML, tokens: Sequence[Token], at: int, options: OptionsDict, env: EnvType) -> str:
    """Behind a link stands where it leads, unless that is its text: a rater judges it without following it."""
    start = max(i for i in range(at) if tokens[i].type == "link_open")
    target = str(tokens[start].attrGet("href") or "")
    shown = "".join(token.content for token in tokens[start + 1 : at])
    return "</a>" if target in (shown, f"mailto:{shown}") else f"</a> ({escape(target)})"


@lru_cache(1)
def _parser() -> MarkdownIt:
    parser = MarkdownIt("commonmark", {"html": False, "breaks": True}).enable(["table", "strikethrough"])
    parser.disable(["image", "html_block", "html_inline"])  # an image tells its server who reads it
    for rule, render in (("heading_open", _heading), ("heading_close", _heading), ("link_close", _link_end)):
        parser.add_render_rule(rule, render)
    return parser


@lru_cache(2048)
def to_html(text: str, below: int = 3) -> Markup:
    """Markdown → HTML: no raw HTML, no images, no titles, ids or classes, links to absolute web addresses only.

    Two independent layers: the parser makes no HTML of what it reads, and an allow-list goes over what it made.
    ``below``: the level of the heading that the text stands under.
    """
    if len(text) > MAX_MARKDOWN:
        return Markup(f"<pre>{escape(text)}</pre>")
    clean = nh3.clean(
        _parser().render(text, {"below": below}),
        tags=TAGS,
        clean_content_tags=set(),
        attributes={"*": set(), "a": {"href"}, "ol": {"start"}},
        link_rel="nofollow noopener noreferrer",
        set_tag_attribute_values={"a": {"target": "_blank"}},
        url_schemes={"http", "https", "mailto"},
        url_relative="deny",
    )
    return Markup(clean)
