"""The page of quality control: who may see it, what it says, and that it does not compute the same thing twice."""

import re
import sys
from pathlib import Path

import pytest
from markupsafe import escape

from heedful.annotate import results, trail
from heedful.annotate.quality import report as quality
from heedful.annotate.submitted import Submitted
from heedful.annotate.web import dashboard
from toy_project import NOW, items, make_project
from toy_rater import Clock, Rater

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "benchmarks"))

from rater_flags import simulate  # noqa: E402


@pytest.fixture(scope="module")
def simulated():
    planted = ("spammer: ties", "length lover 2", "position lover 2")
    submitted, _ = simulate(0, num_raters=8, items=120, planted=planted, overlap_share=0.5)
    return [Submitted.from_json(s.to_json() | {"excluded": s.annotator == "r07"}) for s in submitted]


@pytest.fixture
def clock():
    return Clock(NOW)


@pytest.fixture
def reviewer(tmp_path, clock):
    return Rater(make_project(tmp_path, items(2)), clock, "rio", "reviewer")


@pytest.fixture
def say(monkeypatch):
    """The page over these rankings instead of the project's."""

    def over(rows):
        monkeypatch.setattr(results, "submitted", lambda project: rows)

    return over


def test_annotators_do_not_find_the_page(reviewer, clock):
    assert Rater(reviewer.project, clock).get("/dashboard").status_code == 404


def test_the_page_says_what_to_review(reviewer, say, simulated):
    say(simulated)
    page = reviewer.get("/dashboard")
    assert page.status_code == 200
    words = re.sub(r"\s+", " ", re.sub(r"<[^>]+>", "", page.text))
    found = quality.report(simulated)
    assert {(f["rater"], f["kind"]) for f in found["findings"]} >= {("r00", "ties"), ("r01", "length"), ("r02", "slot")}
    assert "r00: ties 100 % of the pairs" in words
    assert re.search(r"r01: of two answers that the others rank alike, one twice as long wins 9\d %", words)
    assert re.search(r"r02: puts card A first in \d\d % of the items; chance is 25 %", words)
    assert f"{found['agreement']['alpha']['value']:.3f}" in words and "95 % interval" in words
    assert "r07 (left out)" in words and "/admin/people" not in page.text
    assert page.text.count(" *</strong>") == len(found["findings"])


def test_admins_come_to_the_person(reviewer, say, simulated, clock):
    say(simulated)
    admin = Rater(reviewer.project, clock, "ann", "admin")
    assert '<a href="/admin/people#r00">r00</a>' in admin.get("/dashboard").text


def test_the_page_speaks_chinese(reviewer, say, simulated):
    say(simulated)
    page = reviewer.get("/dashboard", headers={"accept-language": "zh-CN"}).text
    assert 'lang="zh-CN"' in page and "的回答对排为并列" in page and "For review" not in page
    assert "无法计算：所有回答都来自同一个模型" in page and "undefined" not in page


def test_an_empty_project_has_a_page(reviewer, say):
    say([])
    page = reviewer.get("/dashboard")
    assert page.status_code == 200 and "Nothing to review." in page.text and "undefined, because" in page.text


def test_policies_and_hostile_names_are_text(reviewer, say):
    hostile = "<script>alert(1)</script>"
    say([
        Submitted(
            annotator="r", group_id=f"i{i}", category=hostile, round=i % 2, lang="en", ranks={"a": 1, "b": 2},
            slots={"a": 0, "b": 1}, num_characters={"a": 9, "b": 9}, policies={"a": hostile, "b": "other"}, at=0.0,
        )
        for i in range(4)
    ])  # fmt: skip
    page = reviewer.get("/dashboard").text
    assert hostile not in page and page.count(str(escape(hostile))) == 2


def test_a_report_is_made_anew_when_something_changed(reviewer, say, monkeypatch, clock):
    say([])
    made, nothing = [], quality.report([])
    monkeypatch.setattr(quality, "report", lambda rows: made.append(1) or nothing)
    for _ in range(3):
        reviewer.get("/dashboard")
    assert len(made) == 1
    with reviewer.project.database.writing() as session:
        trail.record(session, who="rater-rio", action="exclude", object="rater-x", now=clock())
    reviewer.get("/dashboard")
    assert len(made) == 2, "the audit log has a new entry"
    rater = Rater(reviewer.project, clock)
    rater.rank(rater.next(), [1, 2, 3, 4])
    known = len(made)
    reviewer.get("/dashboard")
    assert len(made) <= known + 1
    known = len(made)
    rater.rank(rater.next(), [1, 2, 3, 4])
    reviewer.get("/dashboard")
    assert len(made) == known, "new rankings wait"
    clock.now += dashboard.KEPT_SECONDS
    reviewer.get("/dashboard")
    assert len(made) == known + 1


def test_the_page_over_the_database(reviewer, clock):
    rater = Rater(reviewer.project, clock)
    while address := rater.next():
        rater.rank(address, [1, 2, 3, 3])
        clock.now += 40
    page = reviewer.get("/dashboard")
    assert page.status_code == 200 and rater.person.pseudonym in page.text and "policy-0" in page.text


def test_an_interval_is_told_in_the_unit_of_its_sentence():
    def told(kind, low, high):
        return dashboard.between({"kind": kind, "low": low, "high": high})

    assert told("length", 0.0, 2.1972) == "50 – 90 %" and told("gold", 0.24, 0.641) == "24 – 64 %"
    assert told("agreement", -0.13, 0.1) == "-0.13 – 0.10" and told("speed", 3.1, 5.0) == "3.10 – 5.00"
