"""The pages of those who run a project."""

import io
import json
import re
import zipfile

import pytest
from sqlalchemy import select

from heedful.annotate import people, trail
from heedful.annotate.master import VIEWS
from heedful.annotate.project import guideline
from heedful.annotate.tables import Invitation, Person
from toy_project import NOW, claim, items, make_people, make_project, rank, work
from toy_rater import Clock, Page, Rater

HOSTILE = '<script>alert(1)</script>"\'><img src=x onerror=alert(1)>'


@pytest.fixture
def admin(tmp_path):
    """An admin at a project with items, a control item and two raters."""
    project = make_project(
        tmp_path, [*items(3), *items(1, gold=True, name="k", category=HOSTILE)], gold_rate=0.0, overlap_share=0.0
    )
    make_people(project, 2)
    return Rater(project, Clock(NOW), name="ann", role="admin")


def change(admin, who, verb, **fields):
    return admin.post(f"/admin/people/{who}/{verb}", fields)


def row(admin, pseudonym):
    with admin.project.database.reading() as session:
        return people.by_pseudonym(session, pseudonym)


def excluded(admin, pseudonym):
    with admin.project.database.reading() as session:
        return people.live_exclusion(session, people.by_pseudonym(session, pseudonym))


def actions(admin):
    with admin.project.database.reading() as session:
        return [(r.who, r.action, r.object) for r in trail.newest(session)]


def test_progress_is_shown_by_category(admin):
    with admin.project.database.reading() as session:
        one = people.by_pseudonym(session, "rater-0")
    rank(admin.project, claim(admin.project, one))
    claim(admin.project, one)
    page = admin.get("/admin")
    cells = re.findall(r'<th scope="row">chat</th>(.*)</tr>', page.text)
    assert [re.findall(r">(\d+)<", row) for row in cells] == [["3", "3", "1", "1", "0", "0"]]
    assert "<script>" not in page.text and "<img" not in page.text and "&lt;script&gt;" in page.text


def test_an_empty_project_says_how_to_fill_it(tmp_path):
    admin = Rater(make_project(tmp_path), Clock(NOW), name="ann", role="admin")
    assert "heedful annotate add" in admin.get("/admin").text


def test_an_invitation_is_shown_once(admin):
    page = admin.post("/admin/invite", {"role": "reviewer"})
    [token] = re.findall(r"http://testserver/join/([\w-]{43})", page.text)
    assert token not in admin.get("/admin/people").text
    with admin.project.database.reading() as session:
        made = session.scalars(select(Invitation)).one()
    assert (made.role, made.expires_at, made.token_hash) == ("reviewer", NOW + 7 * 86400, people.digest(token))
    assert admin.post("/admin/invite", {"role": "owner"}).status_code == 422
    assert Page(page.text).choices["back"] == ["/admin/people"], "another language leads back to a page that is there"
    assert token not in admin.get("/admin/log").text


def test_accounts_are_closed_opened_and_given_roles(admin):
    for verb, fields, attribute, value in (
        ("disable", {}, "disabled_at", NOW),
        ("enable", {}, "disabled_at", None),
        ("role", {"role": "reviewer"}, "role", "reviewer"),
    ):
        answer = change(admin, "rater-0", verb, **fields)
        assert answer.status_code == 303 and answer.headers["location"] == "/admin/people#rater-0"
        assert getattr(row(admin, "rater-0"), attribute) == value
    assert change(admin, "rater-0", "role", role="owner").status_code == 422
    assert change(admin, "nobody", "disable").status_code == 404
    assert change(admin, "rater-0", "delete_all").status_code == 404
    answer = change(admin, "rater-ann", "disable")
    assert answer.status_code == 422 and "last admin" in answer.text and row(admin, "rater-ann").disabled_at is None


def test_exclusion_has_a_reason_is_shown_and_can_be_lifted(admin):
    assert change(admin, "rater-0", "exclude", reason=" ").status_code == 422 and excluded(admin, "rater-0") is None
    assert change(admin, "rater-0", "exclude", reason=HOSTILE).status_code == 303
    assert excluded(admin, "rater-0").reason == HOSTILE
    for path in ("/admin/people", "/admin/log"):
        text = admin.get(path).text
        assert "<script>" not in text and "<img" not in text and "&lt;script&gt;" in text, path
    assert change(admin, "rater-0", "exclude", reason="again").status_code == 422
    assert change(admin, "rater-0", "reinstate").status_code == 303 and excluded(admin, "rater-0") is None
    assert [entry for entry in actions(admin) if "person" in entry[1]] == [
        ("rater-ann", "reinstate person", "rater-0"),
        ("rater-ann", "exclude person", "rater-0"),
    ]


def test_an_excluded_rater_gets_no_more_items_until_it_is_lifted(admin):
    rater = Rater(admin.project, admin.clock)
    assert rater.next() != ""
    change(admin, "rater-mira", "exclude", reason="looks like a spammer")
    assert rater.next() == "" and "spammer" not in rater.get("/").text
    change(admin, "rater-mira", "reinstate")
    assert rater.next() != ""


def test_SEC_12_deleting_a_person_needs_the_pseudonym_typed(admin):
    answer = change(admin, "rater-0", "forget", pseudonym="rater-1")
    assert answer.status_code == 422 and row(admin, "rater-0").name == "person 0"
    assert change(admin, "rater-0", "forget", pseudonym=" rater-0 ").status_code == 303
    gone = row(admin, "rater-0")
    assert (gone.name, gone.password_hash, gone.deleted_at) == (None, None, NOW)
    page = admin.get("/admin/people").text
    assert "person 0" not in page and "rater-0" in page and "deleted" in page
    assert ("rater-ann", "forget person", "rater-0") in actions(admin)


def test_a_guideline_is_shown_before_it_is_saved_and_every_version_stays(admin):
    text = "# New\r\n\r\nBe *kind*. <script>alert(1)</script>"
    page = admin.post("/admin/guideline", {"text": text})
    assert page.status_code == 200 and "not saved yet" in page.text and "<em>kind</em>" in page.text
    assert "<script>" not in page.text
    with admin.project.database.reading() as session:
        assert guideline(session).version == 1
    shown = dict(Page(page.text).forms["/admin/guideline"])
    saved = admin.post("/admin/guideline", {"text": shown["text"], "save": "1"})
    assert saved.status_code == 303 and saved.headers["location"] == "/admin/guideline"
    with admin.project.database.reading() as session:
        now = guideline(session)
        assert (now.version, now.text, now.created_by) == (2, text.replace("\r\n", "\n"), "rater-ann")
    assert "Be fair." in admin.get("/guideline").text, "earlier versions can be read"
    for wrong in ("", " \n", "x" * 200_001):
        assert admin.post("/admin/guideline", {"text": wrong, "save": "1"}).status_code == 422


def test_the_log_is_paged_newest_first(admin):
    with admin.project.database.writing() as session:
        for i in range(250):
            trail.record(session, who="rater-x", action="test", object=f"entry {i}", now=NOW)
    seen, address = [], "/admin/log"
    while address:
        text = admin.get(address).text
        seen += [int(number) for number in re.findall(r"entry (\d+)<", text)]
        link = re.search(r'href="(/admin/log\?before=\d+)"', text)
        address = link.group(1) if link else ""
    assert seen == list(range(249, -1, -1))
    assert admin.get("/admin/log?before=x").status_code == 422


def test_an_export_is_a_zip_with_a_card_that_says_who_is_left_out(admin):
    with admin.project.database.reading() as session:
        one, two = (people.by_pseudonym(session, f"rater-{i}") for i in range(2))
    nothing = admin.get("/exports/trl_messages")
    assert nothing.status_code == 422 and "ranked yet" in nothing.text
    work(admin.project, one, 2)
    work(admin.project, two, 1)
    change(admin, "rater-1", "exclude", reason="clicks too fast")
    answer = admin.get("/exports/trl_messages")
    assert answer.headers["content-disposition"] == 'attachment; filename="heedful-trl_messages.zip"'
    assert answer.headers["cache-control"] == "no-store"
    archive = zipfile.ZipFile(io.BytesIO(answer.content))
    assert archive.namelist() == ["README.md", "card.json", "rankings.jsonl", "trl_messages.jsonl"]
    rankings = [json.loads(line) for line in archive.read("rankings.jsonl").splitlines()]
    assert [r["annotator"] for row in rankings for r in row["rankings"]] == ["rater-0"] * 2
    pairs = [json.loads(line) for line in archive.read("trl_messages.jsonl").splitlines()]
    assert len(pairs) == 2 * 6 and all("Answer 3" not in pair["chosen"][0]["content"] for pair in pairs)
    card = json.loads(archive.read("card.json"))
    assert [(one["annotator"], one["reason"]) for one in card["excluded"]] == [("rater-1", "clicks too fast")]
    assert "undefined" in card["agreement"]["Krippendorff's alpha"]
    everything = b"".join(archive.read(name) for name in archive.namelist())
    assert b"person 0" not in everything and b"person 1" not in everything, "pseudonyms only"
    assert ("rater-ann", "export", "trl_messages") in actions(admin)


def test_SEC_09_an_export_has_a_name_never_a_path(admin):
    page = admin.get("/exports")
    assert set(re.findall(r'href="/exports/(\w+)"', page.text)) == set(VIEWS)
    for name in ("..%2f..%2fetc%2fpasswd", "/etc/passwd", "%2e%2e", "master.jsonl", "master%00", "MASTER", "nothing"):
        assert admin.get(f"/exports/{name}").status_code == 404, name


def test_pages_work_in_chinese(admin):
    with admin.project.database.writing() as session:
        session.get_one(Person, admin.person.id).language = "zh_CN"
    for path in ("/admin", "/admin/people", "/admin/guideline", "/admin/log", "/account", "/exports"):
        answer = admin.get(path)
        assert answer.status_code == 200 and 'lang="zh-CN"' in answer.text, path
        assert len(re.findall("[\u4e00-\u9fff]", answer.text)) > 20, path
