"""The rater's pages, as a browser without scripts uses them."""

import re

import pytest
from sqlalchemy import func, select

from heedful.annotate import people
from heedful.annotate.project import add_guideline
from heedful.annotate.submissions import MAX_REASON
from heedful.annotate.tables import Assignment, Submission
from heedful.records import Answer, Message, Ranking
from toy_project import NOW, items, make_project
from toy_rater import Clock, Page, Rater


@pytest.fixture
def clock():
    return Clock(NOW)


@pytest.fixture
def make(tmp_path, clock):
    """A project and its first rater."""

    def build(rankings, **settings):
        plain = {"gold_rate": 0.0, "repeat_rate": 0.0, "overlap_share": 0.0}
        return Rater(make_project(tmp_path, rankings, **plain, **settings), clock)

    return build


def stored(rater):
    """All submissions, oldest first, with the order in which their answers were shown."""
    with rater.project.database.reading() as session:
        rows = session.scalars(select(Submission).order_by(Submission.id)).all()
        return [(row, [shown.answer.answer_id for shown in row.assignment.shown]) for row in rows]


def test_a_ranking_is_stored_as_it_was_shown_and_the_next_item_comes(make, clock):
    rater = make(items(2))
    first = rater.next()
    words = rater.page(first).words
    letters = re.findall(r"Answer (\d) to g", words)
    clock.now += 42
    answer = rater.rank(first, [2, 1, 4, 2])
    assert answer.status_code == 303 and answer.headers["location"] not in (first, "/?nothing=1")
    [(row, shown)] = stored(rater)
    assert shown == [f"a{number}" for number in letters], "the order on the page is the order that is stored"
    assert row.said["ranks"] == dict(zip(shown, [2, 1, 3, 2])) and row.seconds == 42 and row.revision == 1


def test_nothing_is_ranked_beforehand_and_an_untouched_form_is_refused(make):
    rater = make(items(1))
    address = rater.next()
    form = rater.form(address)
    assert [value for name, value in form.items() if name.startswith("rank.")] == [""] * 4
    answer = rater.post(address, form)
    assert answer.status_code == 422 and "A: Give every answer a rank" in answer.text
    assert stored(rater) == []
    form |= {f"rank.{card}": "1" for card in rater.cards(address)[:3]} | {"all_bad": "1", "reason": "half <done>"}
    answer = rater.post(address, form)
    assert answer.status_code == 422
    assert "D: Give every answer a rank" in answer.text and "half &lt;done&gt;" in answer.text
    kept = dict(Page(answer.text).forms[address])
    assert list(kept.values()).count("1") == 5, "three ranks, the guideline's version and all_bad stay filled in"
    assert stored(rater) == []


def test_flags_all_bad_and_reason_are_stored(make):
    rater = make(items(1))
    address = rater.next()
    cards = rater.cards(address)
    fields = [*rater.form(address).items(), ("all_bad", "1"), ("reason", " because\r\nso ")]
    fields = [(name, value) for name, value in fields if not name.startswith("rank.")]
    fields += [(f"rank.{card}", "1") for card in cards]
    fields += [(f"flag.{cards[1]}", "unsafe"), (f"flag.{cards[1]}", "wrong"), (f"flag.{cards[3]}", "broken")]
    assert rater.post(address, fields).status_code == 303
    [(row, shown)] = stored(rater)
    assert row.said["flags"] == {shown[1]: ["wrong", "unsafe"], shown[3]: ["broken"]}
    assert row.all_bad and row.reason == "because\nso" and set(row.said["ranks"].values()) == {1}


def test_two_answers_ask_how_much_better(make):
    rater = make(items(3, num_answers=2))
    address = rater.next()
    assert rater.page(address).choices["strength"] == ["", "1", "2", "3"]
    answer = rater.rank(address, [1, 1], strength="2")
    assert answer.status_code == 422 and "two answers of different rank" in answer.text
    assert rater.rank(address, [2, 1], strength="3").status_code == 303
    address = rater.next()
    assert rater.rank(address, [1, 2]).status_code == 303
    assert [row.strength for row, _ in stored(rater)] == [3, None]


def test_answers_may_stay_unranked_where_the_project_allows_it(make):
    rater = make(items(1), allow_unranked=True)
    address = rater.next()
    assert rater.rank(address, ["", "", "", ""]).status_code == 422
    assert rater.rank(address, ["", 2, "", 1]).status_code == 303
    [(row, shown)] = stored(rater)
    assert row.said["ranks"] == {shown[1]: 2, shown[3]: 1} and "D > B > (A C)" in rater.page("/mine").words


def test_four_answers_do_not_ask_how_much_better(make):
    rater = make(items(1))
    assert "strength" not in rater.page(rater.next()).choices


def test_attributes_are_asked_of_every_answer(make):
    rater = make(items(1, num_answers=2), attributes=("helpful", "a.b"))
    address = rater.next()
    left, right = rater.cards(address)
    answer = rater.rank(address, [1, 2], **{f"rating.helpful.{left}": "5"})
    assert answer.status_code == 422 and "B: Rate “helpful” of every answer" in answer.text
    rated = {f"rating.helpful.{left}": "5", f"rating.helpful.{right}": "1"}
    rated |= {f"rating.a.b.{left}": "3", f"rating.a.b.{right}": "4"}
    assert rater.rank(address, [1, 2], **rated).status_code == 303
    [(row, shown)] = stored(rater)
    assert row.said["ratings"] == {"helpful": dict(zip(shown, [5, 1])), "a.b": dict(zip(shown, [3, 4]))}


@pytest.mark.parametrize(
    "fields",
    [
        {"rank.CARD": "0"}, {"rank.CARD": "10"}, {"rank.CARD": "-1"}, {"rank.CARD": "first"}, {"rank.CARD": "1.5"},
        {"rank.CARD": "99999999999"}, {"rank.CARD": "²"}, {"rank.nobody": "1"}, {"flag.CARD": "stolen"},
        {"flag.nobody": "wrong"}, {"rating.size.CARD": "3"}, {"strength": "1"}, {"reason": "x" * (MAX_REASON + 1)},
        {"reason": "\x00"},
    ],
)  # fmt: skip
def test_what_is_wrong_is_refused_and_nothing_is_stored(make, fields):
    rater = make(items(1))
    address = rater.next()
    card = rater.cards(address)[0]
    answer = rater.rank(address, [1, 2, 3, 4], **{name.replace("CARD", card): value for name, value in fields.items()})
    assert answer.status_code in (400, 422) and stored(rater) == []
    assert answer.status_code == 400 or 'role="alert"' in answer.text


def test_SEC_06_the_same_form_twice_is_stored_once(make):
    rater = make(items(3))
    address = rater.next()
    form = rater.form(address)
    cards = rater.cards(address)
    answers = []
    for ranks in ([1, 2, 3, 4], [4, 3, 2, 1]):
        form |= {f"rank.{card}": str(rank) for card, rank in zip(cards, ranks)}
        answers.append(rater.post(address, form))
    assert [a.status_code for a in answers] == [303, 303]
    assert answers[0].headers["location"] == answers[1].headers["location"]
    [(row, shown)] = stored(rater)
    assert row.said["ranks"] == dict(zip(shown, [1, 2, 3, 4])), "the first one stays"


def test_going_back_and_reloading_change_nothing(make):
    rater = make(items(2))
    first = rater.next()
    rater.rank(first, [1, 2, 3, 4])
    for _ in range(2):
        page = rater.page(first)
        assert "You have ranked this item" in page.words and first not in page.forms
    assert rater.next() == rater.next(), "what one holds comes back"
    assert len(stored(rater)) == 1
    with rater.project.database.reading() as session:
        assert session.scalar(select(func.count(Assignment.id))) == 2
    old = rater.post(first, {"nonce": "made-up"} | {"rank.x": "1"})
    assert old.status_code in (409, 422) and len(stored(rater)) == 1


def test_a_correction_is_a_further_revision(make):
    rater = make(items(1))
    address = rater.next()
    rater.rank(address, [1, 2, 3, 4], reason="first thought")
    assert "A > B > C > D" in rater.page("/mine").words
    form = rater.form(f"{address}?correct=1")
    cards = rater.cards(f"{address}?correct=1")
    assert [form[f"rank.{card}"] for card in cards] == ["1", "2", "3", "4"] and form["correct"] == "1"
    assert "first thought" in rater.get(f"{address}?correct=1").text
    answer = rater.rank(f"{address}?correct=1", [2, 1, 1, 1])
    assert answer.headers["location"] == "/mine"
    words = rater.page("/mine").words
    assert "B = C = D > A" in words and "corrected once" in words
    assert [(row.revision, row.said["ranks"][shown[0]]) for row, shown in stored(rater)] == [(1, 1), (2, 2)]


def test_a_draft_is_kept_and_comes_back(make):
    rater = make(items(2))
    address = rater.next()
    form = rater.form(address)
    cards = rater.cards(address)
    form |= {f"rank.{cards[2]}": "3", f"flag.{cards[0]}": "broken", "reason": "so far"}
    answer = rater.post(f"{address}/draft", form)
    assert answer.status_code == 204 and not answer.content
    again = rater.form(address)
    assert [again[f"rank.{card}"] for card in cards] == ["", "", "3", ""] and again[f"flag.{cards[0]}"] == "broken"
    assert "so far" in rater.get(address).text
    assert "Continue where you were" in rater.page("/").words and rater.next() == address
    assert rater.rank(address, [1, 2, 3, 4]).status_code == 303
    assert rater.post(f"{address}/draft", form).status_code == 409, "a late draft does not undo what was submitted"
    assert "You have ranked this item" in rater.page(address).words


def test_a_draft_may_hold_anything(make):
    rater = make(items(1), attributes=("helpful",))
    address = rater.next()
    card = rater.cards(address)[0]
    odd = {f"rank.{card}": "best", f"rating.helpful.{card}": "[]", "rating.": "1", "flag.x": "y", "strength": "much"}
    assert rater.post(f"{address}/draft", odd).status_code == 204
    assert rater.form(address)[f"rank.{card}"] == ""
    assert rater.post(f"{address}/draft", {"reason": "x" * 30_000}).status_code == 409


def test_an_item_is_skipped_with_a_reason(make):
    rater = make(items(2))
    address = rater.next()
    refused = rater.post(f"{address}/skip", {"reason": "bored"})
    assert refused.status_code == 422 and "Choose why you skip" in refused.text
    answer = rater.post(f"{address}/skip", {"reason": "not_my_field", "note": "chemistry"})
    assert answer.status_code == 303 and answer.headers["location"] != address
    assert "You have skipped this item" in rater.page(address).words
    assert rater.rank(answer.headers["location"], [1, 1, 2, 2]).headers["location"] == "/?nothing=1"
    assert rater.post(address, {"nonce": "x"}).status_code in (409, 422)
    with rater.project.database.reading() as session:
        assert session.scalars(select(Assignment.skip_note).order_by(Assignment.id)).all() == ["chemistry", ""]


def test_when_nothing_is_left_the_start_page_says_so(make):
    rater = make(items(1))
    assert "Begin" in rater.page("/").words
    rater.rank(rater.next(), [1, 2, 3, 4])
    words = rater.page("/?nothing=1").words
    assert "Nothing left for you" in words and "100 %" in words
    assert rater.next() == ""


def test_a_lease_that_ran_out_counts_only_while_the_item_needs_it(make, clock):
    rater = make(items(1), lease_minutes=10)
    other = Rater(rater.project, clock, "other")
    address = rater.next()
    assert other.next() == ""
    clock.now += 601
    theirs = other.next()
    assert theirs and "may have gone to somebody else" in rater.page(address).words
    answer = rater.rank(address, [1, 2, 3, 4])
    assert answer.status_code == 409 and "Your time for this item ran out" in answer.text
    clock.now += 601
    assert rater.rank(address, [1, 2, 3, 4]).status_code == 303, "the other one's lease ran out as well"
    answer = other.rank(theirs, [1, 2, 3, 4])
    assert answer.status_code == 409 and len(stored(rater)) == 1


def test_an_excluded_person_is_told_nothing_and_given_nothing(make, clock):
    rater = make(items(3))
    rater.rank(rater.next(), [1, 2, 3, 4])
    with rater.project.database.writing() as session:
        admin = people.create_person(session, "ada", "correct horse 9", "admin", NOW)
        person = people.by_pseudonym(session, rater.person.pseudonym)
        people.exclude(session, person, "too fast", clock(), by=admin)
    assert rater.next() == ""
    for path in ("/", "/mine", "/?nothing=1"):
        assert "too fast" not in rater.page(path).words and "exclu" not in rater.page(path).words.lower()


def test_the_version_of_the_guideline_on_the_page_is_stored(make):
    rater = make(items(3))
    address = rater.next()
    assert "new to you" in rater.page(address).words
    form = rater.form(address)
    with rater.project.database.writing() as session:
        add_guideline(session, "Be *brief*.", who="ada", now=NOW + 1)
    form |= {f"rank.{card}": "1" for card in rater.cards(address)}
    form["guideline_version"] = "1"
    assert rater.post(address, form).status_code == 303
    second = rater.next()
    assert "new to you" in rater.page(second).words, "there is a newer one since"
    rater.rank(second, [1, 2, 3, 4])
    third = rater.next()
    assert "new to you" not in rater.page(third).words
    assert [row.guideline_version for row, _ in stored(rater)] == [1, 2]
    page = rater.get("/guideline").text
    assert "<em>brief</em>" in page and "Be fair." in page and page.index("brief") < page.index("Be fair.")


# --- what a page does not tell --------------------------------------------------------------------------------------


def test_SEC_05_another_persons_item_is_a_page_that_does_not_exist(make, clock):
    rater = make(items(4))
    other = Rater(rater.project, clock, "other")
    admin = Rater(rater.project, clock, "ada", "admin")
    open_one, done_one = rater.next(), None
    rater.rank(open_one, [1, 2, 3, 4])
    done_one, open_one = open_one, rater.next()
    form = rater.form(open_one) | {f"rank.{card}": "1" for card in rater.cards(open_one)}
    unknown = "/rank/" + "x" * 22

    def answers(person, address):
        given = [person.get(address), person.get(f"{address}?correct=1"), person.post(address, form)]
        given += [person.post(f"{address}/draft", form), person.post(f"{address}/skip", {"reason": "other"})]
        return [(a.status_code, re.sub(r"/rank/[\w-]+", "", a.text), set(a.headers)) for a in given]

    for person in (other, admin):
        expected = answers(person, unknown)
        assert {status for status, _, _ in expected} == {404}
        assert answers(person, open_one) == expected and answers(person, done_one) == expected
    assert "g0" not in other.page("/mine").words and len(stored(rater)) == 1
    assert "Question" not in other.page("/mine").words
    rater.post(open_one, form)
    assert len(stored(rater)) == 2


def test_SEC_04_a_page_does_not_tell_where_answers_come_from(tmp_path, clock):
    """A control item's page is an ordinary one's, but for the texts and the random ids."""
    told = "policy-secret kind-bait flag-secret source-secret category-secret group-secret answer-secret"
    policy, kind, flag, source, category, group, answer = told.split()
    texts = ["alpha alpha", "beta beta beta beta", "gamma", "delta delta"]

    def item(number, gold):
        answers = tuple(
            Answer(f"{answer}-{number}-{i}", text, policy=f"{policy}-{i}", kind=kind, flags=(flag,), score=0.123)
            for i, text in enumerate(texts)
        )
        pairs = ((answers[0].id, answers[2].id),) if gold else None
        return Ranking(f"{group}-{number}", (Message("user", "Which?"),), answers, category=category, source=source,
                       round=7531, gold=pairs)  # fmt: skip

    project = make_project(
        tmp_path, [item(number, number >= 6) for number in range(12)], gold_rate=0.5, repeat_rate=0.2,
        repeat_after_hours=0.0, overlap_share=0.0,
    )  # fmt: skip
    rater = Rater(project, clock)
    kinds, pages, headers = [], set(), set()
    for _ in range(14):
        address = rater.next()
        if not address:
            break
        response = rater.get(address)
        for word in [*told.split(), "gold", "bait", "0.123", "7531"]:
            assert word not in response.text.lower() and word not in str(response.headers).lower(), word
        assert "etag" not in response.headers and response.headers["cache-control"] == "no-store"
        page = response.text
        for number, card in enumerate(rater.cards(address)):
            page = page.replace(card, f"card{number}")
        page = page.replace(address, "").replace(rater.form(address)["nonce"], "").replace(" open>", ">")
        page = re.sub(r" · new to you|alpha|beta|gamma|delta", "", page)
        page = re.sub(r"(<div class=\"text answer\" dir=\"auto\">)<p> *</p>", r"\1", page)
        pages.add(page)
        headers.add(tuple(sorted(set(response.headers) - {"x-request-id"})) + (response.headers["content-type"],))
        with project.database.reading() as session:
            found = session.scalars(select(Assignment).order_by(Assignment.id.desc())).first()
            kinds.append((found.item.is_gold, found.repetition))
        clock.now += 60
        rater.rank(address, [1, 2, 3, 4])
    assert {gold for gold, _ in kinds} == {True, False} and {again for _, again in kinds} == {0, 1}
    assert len(pages) == 1, "pages differ by more than texts and random ids"
    assert len(headers) == 1
    listing = rater.get("/mine").text
    assert not any(word in listing.lower() for word in [*told.split(), "gold", "bait"])


def test_SEC_04_ids_on_a_page_are_random_and_of_one_assignment_only(make, clock):
    rater = make(items(1), overlap=2)
    other = Rater(rater.project, clock, "other")
    mine, theirs = rater.next(), other.next()
    cards = rater.cards(mine) + other.cards(theirs)
    assert len(set(cards)) == 8 and all(re.fullmatch(r"[\w-]{20,32}", card) for card in cards)
    answer = other.rank(theirs, [1, 2, 3, 4], **{f"rank.{rater.cards(mine)[0]}": "1"})
    assert answer.status_code == 422 and stored(rater) == []


def test_SEC_03_stored_texts_are_shown_and_not_run(make, clock, tmp_path):
    bad = "<script>alert('x')</script><img src=x onerror=alert(1)>\" onfocus=alert(1) x=\""
    item = Ranking("g", (Message("system", bad), Message("user", bad), Message("assistant", bad), Message("user", bad)),
                   (Answer("a", bad), Answer("b", f"[x](javascript:alert(1)) {bad}")), category=bad[:90],
                   lang="en\" onclick=")  # fmt: skip
    rater = make([item], name=f"<b>{bad}", attributes=(f'"><script>{bad}',), reason="optional")
    address = rater.next()
    card = rater.cards(address)[0]
    rater.post(f"{address}/draft", {"reason": bad, f"rank.{card}": bad, f"flag.{card}": bad})
    answers = [rater.get(path) for path in (address, "/", "/mine", f"/rank/{bad}", f"/?nothing={bad}")]
    answers += [rater.post(address, {"reason": f"</textarea>{bad}"}), rater.post(f"{address}/skip", {"reason": bad})]
    for answer in answers:
        assert not re.search(r"<script(?! type=\"module\" src=\"/static/)", answer.text)
        page = Page(answer.text)
        assert not page.tags & {"img", "b"} and not any(name.startswith("on") for name in page.attributes)


# --- languages, people, limits --------------------------------------------------------------------------------------


def test_the_pages_speak_chinese(make):
    rater = make(items(2))
    rater.client.headers["accept-language"] = "zh-CN,zh;q=0.9"
    address = rater.next()
    page = rater.get(address)
    assert '<html lang="zh-CN">' in page.text and page.headers["content-language"] == "zh-CN"
    assert "给回答排序" in page.text and "4 个回答" in page.text and "答非所问" in page.text
    refused = rater.post(address, rater.form(address))
    assert refused.status_code == 422 and "A: 请给每个回答一个名次" in refused.text
    for path in ("/", "/mine", "/guideline"):
        visible = re.sub(r"Be fair\.|project|English|mira|UTC|heedful", "", rater.page(path).words)
        assert not re.search(r"[A-Za-z]{3,}", visible), visible


@pytest.mark.parametrize("turns", [0, 1, 2, 3, 6])
def test_a_conversation_of_any_length_is_shown(make, turns):
    prompt = tuple(Message(("user", "assistant")[turn % 2], f"turn number {turn}") for turn in range(turns))
    rater = make([Ranking("g", prompt, (Answer("a", "yes"), Answer("b", "no")))])
    address = rater.next()
    words = rater.page(address).words
    assert [f"turn number {turn}" in words for turn in range(turns)] == [True] * turns
    assert rater.rank(address, [1, 2]).status_code == 303 and rater.get("/mine").status_code == 200


def test_the_language_of_a_text_is_marked(make):
    asked = Ranking("g", (Message("user", "为什么？"),), (Answer("a", "因为"), Answer("b", "不知道")), lang="zh_CN")
    rater = make([asked])
    page = rater.get(rater.next()).text
    assert page.count('lang="zh-CN"') == 4, "the question, two answers and the name of the language in the header"


@pytest.mark.parametrize("path", ["/", "/mine", "/guideline", "/rank/" + "x" * 22])
def test_pages_are_for_people_who_are_signed_in(make, path):
    rater = make(items(1))
    rater.client.cookies.clear()
    answer = rater.get(path)
    assert answer.status_code == 303 and answer.headers["location"].startswith("/login")
    assert rater.post("/next").status_code in (303, 403)
    with rater.project.database.reading() as session:
        assert session.scalar(select(func.count(Assignment.id))) == 0


def test_SEC_06_a_form_without_its_token_is_refused(make):
    rater = make(items(1))
    address = rater.next()
    form = rater.form(address) | {f"rank.{card}": "1" for card in rater.cards(address)}
    rater.form_token = "0" * 64
    for path in ("/next", address, f"{address}/draft", f"{address}/skip"):
        assert rater.post(path, form).status_code == 403
    assert stored(rater) == []


def test_every_field_has_a_label_and_every_id_is_there_once(make):
    rater = make(items(1, num_answers=2), attributes=("helpful",))
    page = rater.get(rater.next()).text
    ids = re.findall(r"\sid=\"([^\"]+)\"", page)
    assert len(ids) == len(set(ids))
    for target in re.findall(r"aria-labelledby=\"([^\"]+)\"", page):
        assert target in ids
    for field in re.finditer(r"<(input|select|textarea)\b[^>]*>", page):
        if 'type="hidden"' in field.group():
            continue
        before = page[: field.start()]
        assert before.rfind("<label") > before.rfind("</label"), f"no label around {field.group()}"
    assert page.count("<h1") == 1 and 'aria-live="polite"' in page and 'href="#main"' in page
