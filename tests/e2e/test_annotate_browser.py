"""A real browser does a project: ranks, ties, flags, skips, reloads, goes back, clicks twice, comes late, exports."""

from __future__ import annotations

import json
import os
import re
import shutil
import threading
import time
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from sqlalchemy import select

from heedful.annotate import people
from heedful.annotate.project import Project
from heedful.annotate.tables import Assignment, Person, Submission
from heedful.annotate.web.app import create_app
from heedful.records import Answer, Message, Ranking
from toy_project import NOW, items, make_project
from toy_rater import Clock

playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright")
CHROMIUM = next(
    (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), ""
)
pytestmark = pytest.mark.skipif(not CHROMIUM, reason="no Chromium on this machine")
PASSWORD = "a quiet green hill"
LONG = "A long answer says the same thing again and again. " * 60


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        yield browser
        browser.close()


class Site:
    """A running server of one project, and people who are signed in to it."""

    def __init__(self, chromium: Any, project: Project) -> None:
        self.chromium, self.project, self.clock = chromium, project, Clock(NOW)
        app = create_app(project, clock=self.clock, secure_cookies=False)
        self.server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="critical", lifespan="off"))
        self.thread = threading.Thread(target=self.server.run)
        self.thread.start()
        give_up = time.monotonic() + 30
        while not self.server.started and time.monotonic() < give_up:
            time.sleep(0.01)
        self.address = f"http://127.0.0.1:{self.server.servers[0].sockets[0].getsockname()[1]}"
        self.contexts: list[Any] = []
        self.faults: list[str] = []

    def close(self) -> None:
        for context in self.contexts:
            context.close()
        self.server.should_exit = True
        self.thread.join(30)

    def browser(self, name: str = "", role: str = "annotator", **options: Any) -> Any:
        """A browser of its own; signed in as a new person of that name, if one is given."""
        context = self.chromium.new_context(base_url=self.address, **{"locale": "en-GB"} | options)
        context.set_default_timeout(20_000)
        self.contexts.append(context)
        if name:
            with self.project.database.writing() as session:
                person = Person(name=name, pseudonym=f"rater-{name}", role=role, created_at=NOW)
                session.add(person)
                session.flush()
                token = people.open_login(session, person, self.clock())
            context.add_cookies([{"name": "heedful", "value": token, "url": self.address}])
        context.on("page", self._watch)
        return context

    def _watch(self, page: Any) -> None:
        page.on("pageerror", lambda error: self.faults.append(f"{page.url}: {error}"))
        page.on("dialog", lambda dialog: (self.faults.append(f"a dialog: {dialog.message}"), dialog.dismiss()))
        page.on(
            "console", lambda said: self.faults.append(said.text) if "Content Security Policy" in said.text else None
        )

    def ranked(self) -> list[dict[str, Any]]:
        """What is stored: the ranks from left to right, and the rest."""
        with self.project.database.reading() as session:
            rows = session.scalars(select(Submission).order_by(Submission.id)).all()
            return [
                {
                    "ranks": [row.said["ranks"].get(shown.answer.answer_id) for shown in row.assignment.shown],
                    "flags": [row.said["flags"].get(shown.answer.answer_id, []) for shown in row.assignment.shown],
                    "who": row.assignment.person.name, "item": row.assignment.item.group_id, "revision": row.revision,
                    "reason": row.reason, "strength": row.strength, "all_bad": row.all_bad,
                }
                for row in rows
            ]  # fmt: skip


@pytest.fixture
def serve(chromium: Any, tmp_path: Path) -> Iterator[Any]:
    sites = []

    def start(rankings: Sequence[Ranking], **settings: Any) -> Site:
        plain = {"gold_rate": 0.0, "repeat_rate": 0.0, "overlap_share": 0.0, "name": "Helpful answers"}
        sites.append(Site(chromium, make_project(tmp_path, rankings, **plain | settings)))
        return sites[-1]

    yield start
    for site in sites:
        site.close()
        assert site.faults == []


def begin(context: Any) -> Any:
    """A page with an item to rank."""
    page = context.new_page()
    page.goto("/")
    page.click("main button.primary")
    page.wait_for_url("**/rank/*")
    return page


def press(page: Any, keys: str) -> None:
    for key in keys.split():
        page.keyboard.press(key)


def order(page: Any) -> str:
    return str(page.inner_text("[data-order]"))


def submit(page: Any, *, tap: bool = False) -> None:
    old = page.url
    if tap:
        page.tap("[data-submit]")
    else:
        press(page, "Control+Enter")
    page.wait_for_url(lambda url: url != old)


def focused(page: Any) -> str:
    return str(page.evaluate("document.activeElement.closest('[data-card]')?.dataset.card ?? ''"))


def wait_for_draft(page: Any) -> None:
    page.wait_for_selector("[data-state]:has-text('Draft saved')")


def test_a_person_ranks_by_keyboard_alone(serve):
    site = serve(items(4))
    with site.project.database.writing() as session:
        people.create_person(session, "mira", PASSWORD, "annotator", NOW)
    page = site.browser().new_page()
    page.goto("/")
    assert page.url.endswith("/login")
    page.wait_for_function("document.activeElement.name === 'name'")  # keys typed before the focus is there are lost
    page.keyboard.type("mira")
    press(page, "Tab")
    page.keyboard.type(PASSWORD)
    press(page, "Enter")
    page.wait_for_url(site.address + "/")
    while page.evaluate("document.activeElement.textContent") != "Begin":
        press(page, "Tab")
    press(page, "Enter")
    page.wait_for_url("**/rank/*")

    # nothing is ranked, nothing can be sent
    assert order(page) == "" and page.is_disabled("[data-submit]")
    assert page.locator(".ranks :checked").evaluate_all("all => all.map(one => one.value)") == ["", "", "", ""]
    press(page, "Control+Enter 3")
    assert "Not ranked yet: A B C D" in page.inner_text("[data-live]") and order(page) == ""

    # by n and p, by letter, by Tab; ties; 0
    press(page, "n 2 n 1 n 2")
    assert order(page) == "B > A = C" and focused(page) == "C"
    assert page.inner_text("[data-live]") == "Answer C: rank 2, tied with A"
    assert page.locator(".tied").count() == 2
    press(page, "p p p p")
    assert focused(page) == "A"
    press(page, "n 0")
    assert order(page) == "A = C" and page.inner_text("[data-live]") == "Answer B: no rank"
    press(page, "b 1 d 7")
    assert focused(page) == "D" and order(page) == "B > A = C" and page.is_disabled("[data-submit]")
    press(page, "4")
    assert order(page) == "B > A = C > D" and page.is_enabled("[data-submit]")
    press(page, "Tab")
    assert page.evaluate("document.activeElement.type") == "radio" and focused(page) == "D"
    press(page, "ArrowLeft")
    assert order(page) == "B > A = C > D" and "rank 3" in page.inner_text("[data-live]"), (
        "the radios work by themselves"
    )
    press(page, "Tab Space Tab Tab")
    assert page.locator(".flags :checked").evaluate_all("all => all.map(one => one.value)") == ["wrong"]
    press(page, "n 1 Tab")
    while page.evaluate("document.activeElement.tagName") != "TEXTAREA":
        press(page, "Tab")
    page.keyboard.type("1 n p a: typed, not ranked")
    assert order(page) == "B = D > A = C"
    submit(page)
    assert page.url.startswith(site.address + "/rank/"), "the next item comes at once"
    [row] = site.ranked()
    assert row["ranks"] == [2, 1, 2, 1] and row["flags"] == [[], [], [], ["wrong"]]
    assert row["reason"] == "1 n p a: typed, not ranked" and row["who"] == "mira"

    # skip
    while page.evaluate("document.activeElement.textContent.trim()") != "Skip this item":
        press(page, "Tab")
    press(page, "Enter Tab")
    page.keyboard.type("Not my field")
    press(page, "Tab Tab Enter")
    old = page.url
    page.wait_for_url(lambda url: url != old)
    with site.project.database.reading() as session:
        skipped = session.scalars(select(Assignment).where(Assignment.state == "skipped")).one()
        assert skipped.skip_reason == "not_my_field"
    assert len(site.ranked()) == 1


def test_single_keys_can_be_turned_off(serve):
    """WCAG 2.1.4: for who speaks to the computer, where a word is many keys."""
    site = serve(items(2, num_answers=2))
    page = begin(site.browser("mira"))
    page.click(".keys summary")
    page.click("[data-single-keys]")
    press(page, "a 1 n p b 2")
    assert order(page) == "" and focused(page) == ""
    page.focus("[data-card=A]")
    press(page, "1 n")
    assert order(page) == "" and focused(page) == "A"
    press(page, "Control+Enter")
    assert "Not ranked yet" in page.inner_text("[data-live]"), "keys with Ctrl work on"
    page.check("[data-card=A] .ranks [value='1']", force=True)
    page.check("[data-card=B] .ranks [value='2']", force=True)
    submit(page)
    press(page, "a 1 b 2")
    assert order(page) == "", "remembered on the next page"
    page.click(".keys summary")
    page.click("[data-single-keys]")
    press(page, "a 2 b 1")
    assert order(page) == "B > A"


def test_refresh_back_and_second_tab_change_nothing(serve):
    site = serve(items(3))
    context = site.browser("mira")
    page = begin(context)
    first = page.url
    press(page, "a 3 c 1")
    page.fill("[name=reason]", "so far")
    wait_for_draft(page)
    page.reload()
    assert order(page) == "C > A" and page.input_value("[name=reason]") == "so far"
    second = begin(context)
    assert second.url == first and order(second) == "C > A", "what one holds comes back"
    press(page, "b 4 d 4")
    submit(page)
    press(second, "b 1 d 1")
    assert order(second) == "B = C = D > A"
    submit(second)
    assert second.url == page.url, "both go on to the same item"
    [row] = site.ranked()
    assert row["ranks"] == [2, 3, 1, 3], "the first one stays"

    page.go_back()
    page.wait_for_selector("h1:has-text('You have ranked this item')")
    page.go_forward()
    page.wait_for_selector("#ranking")
    page.reload()
    assert len(site.ranked()) == 1

    page.goto("/mine")
    assert "C > A > B = D" in page.inner_text("main")
    page.click("main a.button")
    assert order(page) == "C > A > B = D"
    press(page, "a 1")
    submit(page)
    assert page.url.endswith("/mine") and "A = C > B = D" in page.inner_text("main")
    assert [row["revision"] for row in site.ranked()] == [1, 2]


def test_a_double_click_stores_once(serve):
    site = serve(items(3))
    page = begin(site.browser("mira"))
    posts = []
    page.on("request", lambda request: posts.append(request.url) if request.method == "POST" else None)
    press(page, "a 1 b 2 c 3 d 4")
    old = page.url
    page.dblclick("[data-submit]", no_wait_after=True)
    page.wait_for_url(lambda url: url != old)
    assert posts == [old] and len(site.ranked()) == 1

    # the same without the page's own guard: two submissions leave before the first answer is there
    press(page, "a 1 b 2 c 3 d 4")
    old = page.url
    statuses = page.evaluate("""async () => {
        const body = new URLSearchParams(new FormData(ranking));
        const send = () => fetch(location.pathname, { method: "POST", body });
        return (await Promise.all([send(), send(), send()])).map((answer) => answer.status);
    }""")
    assert statuses == [200, 200, 200] and len(site.ranked()) == 2


def test_two_browsers_race_for_the_last_item(serve):
    site = serve(items(1))
    pages = [site.browser(name).new_page() for name in ("mira", "noor")]
    for page in pages:
        page.goto("/")
    for page in pages:
        page.click("main button.primary", no_wait_after=True)
    for page in pages:
        page.wait_for_url(re.compile(r"/rank/|nothing=1"))
    [winner] = [page for page in pages if "/rank/" in page.url]
    [loser] = [page for page in pages if "nothing=1" in page.url]
    assert "Nothing left for you at present" in loser.inner_text("h1")
    loser.goto(winner.url)
    assert "There is no such page" in loser.inner_text("main")
    press(winner, "a 1 b 2 c 3 d 4")
    submit(winner)
    assert "nothing=1" in winner.url and len(site.ranked()) == 1


def test_a_lease_runs_out_an_exclusion_bites_and_an_export_says_so(serve):
    site = serve(items(1), lease_minutes=10)
    slow, quick, admin = (site.browser(name, role) for name, role in
                          [("slow", "annotator"), ("quick", "annotator"), ("ada", "admin")])  # fmt: skip
    page = begin(slow)
    press(page, "a 1 b 2 c 3 d 4")
    wait_for_draft(page)
    site.clock.now += 601
    other = begin(quick)
    press(other, "a 2 b 2 c 2 d 1")
    submit(other)
    press(page, "Control+Enter")
    page.wait_for_selector("text=Your time for this item ran out")
    assert [row["who"] for row in site.ranked()] == ["quick"]

    office = admin.new_page()
    office.goto("/admin/people")
    row = office.locator("#rater-quick")
    row.locator("summary").click()
    row.locator("[name=reason]").fill("too fast to have read them")
    row.get_by_role("button", name="Leave the work out").click()
    office.wait_for_selector("text=too fast to have read them")
    page = begin(slow)
    press(page, "a 1 b 1 c 1 d 1")
    submit(page)
    assert [row["who"] for row in site.ranked()] == ["quick", "slow"], "the item was needed again"
    other.goto("/")
    other.click("main button.primary")
    other.wait_for_url("**nothing=1")
    assert "too fast" not in other.content()

    office.goto("/exports")
    with office.expect_download() as coming:
        office.get_by_role("link", name="Download master").click()
    with zipfile.ZipFile(coming.value.path()) as packed:
        files = {name: packed.read(name).decode() for name in packed.namelist()}
    [line] = next(text for name, text in files.items() if name.endswith(".jsonl")).splitlines()
    [judgement] = json.loads(line)["rankings"]
    assert judgement["annotator"] == "rater-slow" and set(judgement["ranks"].values()) == {1}
    card = next(text for name, text in files.items() if name.endswith(".md"))
    assert "rater-quick" in card and "too fast to have read them" in card


def test_two_answers_and_how_much_better(serve):
    site = serve(items(2, num_answers=2))
    page = begin(site.browser("mira"))
    much = page.locator("[name=strength][value='3']")
    assert much.is_disabled()
    press(page, "a 2 b 1")
    much.check()
    press(page, "b 2")
    assert much.is_disabled() and not much.is_checked(), "a tie has no strength"
    press(page, "b 1")
    much.check()
    submit(page)
    press(page, "a 1 b 1")
    submit(page)
    assert [(row["ranks"], row["strength"]) for row in site.ranked()] == [([2, 1], 3), ([1, 1], None)]


def test_attributes_and_a_required_reason_hold_the_submission_back(serve):
    site = serve(items(1, num_answers=2), attributes=("helpful",), reason="required")
    page = begin(site.browser("mira"))
    press(page, "a 1 b 2")
    assert page.inner_text("[data-state]") == "Rate “helpful” of answer A" and page.is_disabled("[data-submit]")
    for select_ in page.locator(".attributes select").all():
        select_.select_option("4")
    assert page.inner_text("[data-state]") == "A reason is required"
    page.fill("[name=reason]", "clearer")
    page.wait_for_selector("[data-submit]:enabled")
    page.check("[name=all_bad]")
    submit(page)
    assert site.ranked()[0]["reason"] == "clearer" and site.ranked()[0]["all_bad"]


def test_without_scripts_on_a_phone(serve):
    site = serve([*items(1), *items(1, num_answers=9, name="h")], overlap=1)
    context = site.browser("mira", java_script_enabled=False, viewport={"width": 360, "height": 740}, has_touch=True)
    page = begin(context)
    for _ in range(2):
        wide, inner = page.evaluate("[document.documentElement.scrollWidth, document.documentElement.clientWidth]")
        assert wide <= inner, "nothing sticks out sideways"
        for card in page.locator(".card").all():
            card.locator(".ranks label").first.tap()
        page.locator(".flags label").last.tap()
        submit(page, tap=True)
    assert sorted(row["ranks"] for row in site.ranked()) == [[1] * 4, [1] * 9]
    assert all(row["flags"][-1] == ["broken"] for row in site.ranked())


def test_long_answers_fold(serve):
    item = Ranking("g", (Message("user", "Why?"),), (Answer("a", LONG), Answer("b", "Short."), Answer("c", LONG)))
    page = begin(serve([item]).browser("mira"))
    assert page.locator(".fold").count() == 2
    tall = page.locator(".answer").evaluate_all("all => Math.max(...all.map(one => one.clientHeight))")
    button = page.locator(".fold").first
    button.click()
    assert button.get_attribute("aria-expanded") == "false" and button.inner_text() == "Unfold"
    assert page.locator(".answer.folded").evaluate("one => one.clientHeight") < tall / 2
    button.click()
    assert page.locator(".answer.folded").count() == 0


def test_SEC_01_hostile_answers_are_inert(serve):
    hostile = (
        "<script>document.title='run'</script><img src=https://evil.example/x onerror=\"document.title='run'\">\n\n"
        "[click](javascript:document.title='run') [go](https://evil.example/go) ![i](https://evil.example/pixel)\n\n"
        "</textarea></form></section><h1>Taken over</h1><style>body{display:none}</style>\n\n"
        "```\n<svg onload=document.title='run'>\n```"
    )
    item = Ranking("g", (Message("user", hostile),), tuple(Answer(f"a{i}", f"{i} {hostile}") for i in range(3)))
    site = serve([item])
    context = site.browser("mira")
    asked: list[str] = []
    context.on("request", lambda request: asked.append(request.url))
    page = begin(context)
    page.fill("[name=reason]", hostile)
    wait_for_draft(page)
    page.reload()
    assert page.input_value("[name=reason]") == hostile and page.title().startswith("Rank the answers")
    assert (
        page.locator("h1").all_inner_texts() == ["Rank the answers"] and page.locator("main img, main svg").count() == 0
    )
    assert all(url.startswith(site.address) for url in asked), "nothing was loaded from elsewhere"
    links = page.locator(".text a").evaluate_all("all => all.map(one => [one.href, one.rel, one.target])")
    assert links and {tuple(link) for link in links} == {
        ("https://evil.example/go", "nofollow noopener noreferrer", "_blank"),
        ("https://evil.example/pixel", "nofollow noopener noreferrer", "_blank"),
    }
    page.locator(".card").first.focus()
    press(page, "a 1 b 1 c 2")
    submit(page)
    assert site.ranked()[0]["reason"] == hostile


def test_SEC_02_a_script_that_gets_into_the_page_does_not_run(serve):
    """The second wall, should the first one have a hole."""
    site = serve(items(1))
    page = begin(site.browser("mira"))
    page.evaluate(r"""() => {
        const script = document.createElement("script");
        script.textContent = "document.title = 'run'";
        const image = document.createElement("div");
        image.innerHTML = "<img src=/x.png onerror=\"document.title=1\"><p style=\"position:fixed\">x</p>";
        document.body.append(script, image);
        const far = document.createElement("script");
        far.src = "https://evil.example/x.js";
        document.body.append(far);
    }""")
    page.wait_for_timeout(200)
    assert page.title().startswith("Rank the answers")
    assert page.evaluate("getComputedStyle(document.querySelector('body > div > p')).position") == "static"
    assert len(site.faults) >= 4 and all("Content Security Policy" in fault for fault in site.faults)
    site.faults.clear()


@pytest.mark.parametrize("locale, title, state", [("en-GB", "Rank the answers", "Not ranked yet: A B C D"),
                                                  ("zh-CN", "给回答排序", "尚未排序：A B C D")])  # fmt: skip
def test_both_languages_fit_wide_and_narrow(serve, locale, title, state, tmp_path):
    site = serve(items(1))
    page = begin(site.browser("mira", locale=locale))
    for width in (1280, 390):
        page.set_viewport_size({"width": width, "height": 800})
        assert page.title().startswith(title) and page.inner_text("[data-state]") == state
        assert page.get_attribute("html", "lang") == locale.replace("en-GB", "en")
        wide, inner = page.evaluate("[document.documentElement.scrollWidth, document.documentElement.clientWidth]")
        assert wide <= inner
        page.screenshot(path=tmp_path / f"{locale}-{width}.png")
        assert (tmp_path / f"{locale}-{width}.png").stat().st_size > 10_000


def test_what_a_screen_reader_is_told(serve):
    """Names and roles as the browser computes them; with HEEDFUL_AXE=axe.min.js also the rules of axe-core."""
    site = serve(items(2, num_answers=2), attributes=("helpful",))
    page = begin(site.browser("mira"))
    told = page.locator("body").aria_snapshot()
    for line in ['link "Skip to the content"', "banner", "main", 'heading "Rank the answers" [level=1]',
                 'group "Answer A"', 'group "Rank of answer A"', 'radio "1"', 'radio "no rank" [checked]',
                 'group "Answer B is"', 'checkbox "Unsafe"', 'combobox "helpful"', 'textbox "Why? (optional)"',
                 'button "Submit" [disabled]', "status"]:  # fmt: skip
        assert line in told, f"{line} is missing from\n{told}"
    press(page, "Tab")
    assert page.evaluate("document.activeElement.matches(':focus-visible')"), "the focus is seen"
    if script := os.environ.get("HEEDFUL_AXE"):
        for path in (page.url, "/", "/mine", "/guideline", "/account"):
            page.goto(path)
            found = page.evaluate(Path(script).read_text(encoding="utf-8") + ";axe.run()")["violations"]
            assert found == [], json.dumps(found, indent=1)
