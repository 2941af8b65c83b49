"""Lines of the security checklist that have no other home, and attacks that once got through."""

import json
import re
import threading
from collections import Counter

import pytest
from fastapi.testclient import TestClient
from sqlalchemy import select

from heedful.annotate import people
from heedful.annotate.master import VIEWS, export
from heedful.annotate.progress import by_category, of_round
from heedful.annotate.submissions import find
from heedful.annotate.tables import Assignment, Person, Submission
from heedful.annotate.web import pages
from heedful.annotate.web.app import create_app
from heedful.annotate.web.door import Limits
from heedful.annotate.web.shield import HEADERS
from heedful.data.load import load_rankings
from heedful.errors import DataError
from toy_project import NOW, claim, items, make_people, make_project, new_postgresql, work
from toy_rater import Clock, Rater

PASSWORD = "correct horse battery"
PLAIN = {"overlap_share": 0.0, "gold_rate": 0.0, "repeat_rate": 0.0}


pytestmark = pytest.mark.usefixtures("light_hashes")


@pytest.fixture
def clock():
    return Clock(NOW)


# --- 4. blindness ---------------------------------------------------------------------------------------------------


def test_SEC_04_the_start_page_does_not_count_single_rankings(tmp_path, clock):
    """A percentage that stands still after a ranking said: that was a control item, or a repetition."""
    settings = PLAIN | {"gold_rate": 0.3}
    rater = Rater(make_project(tmp_path, items(50) + items(20, gold=True, name="h"), **settings), clock)
    shown = []
    for _ in range(30):
        rater.rank(rater.next(), [1, 2, 3, 4])
        clock.now += 60
        (percent,) = re.findall(r"<dd>(\d+) %</dd>", rater.get("/").text)
        shown.append(int(percent))
    assert set(shown) == {0, 10, 20, 30, 40} and shown == sorted(shown)


def test_SEC_04_control_items_and_others_differ_in_no_header_length_or_order(tmp_path, clock):
    """To a program: lengths of ids, order of names, number of cards; with texts of one length."""
    project = make_project(tmp_path, items(9, name="x") + items(9, gold=True, name="y"), **PLAIN | {"gold_rate": 0.5})
    (person,) = make_people(project, 1)
    with project.database.writing() as session:
        token = people.create_token(session, session.merge(person), "annotate", NOW)
    client = TestClient(create_app(project, clock=clock, secure_cookies=False))
    client.headers["authorization"] = f"Bearer {token}"
    shapes, kinds = set(), Counter()

    def shape(answer):
        """Names and lengths of the headers in their order, and the body without what is random."""
        body = re.sub(r'"[\w-]{20,32}"', '"ID"', answer.text)
        return str([(name, len(value)) for name, value in answer.headers.items()]), re.sub(
            r"[0-9] to [xy][0-9]", "", body
        )

    for _ in range(12):
        answer = client.get("/api/v1/next")
        task = answer.json()
        shapes.add(shape(answer)[0] + re.sub("Question [xy][0-9]", "", shape(answer)[1]))
        with project.database.reading() as session:
            kinds[find(session, person, task["assignment"]).item.is_gold] += 1
        ranks = {card["id"]: 1 for card in task["cards"]}
        answer = client.post(f"/api/v1/assignments/{task['assignment']}", json={"nonce": task["nonce"], "ranks": ranks})
        assert answer.status_code == 200
        shapes.add(str(shape(answer)))
    assert kinds[True] >= 4 and kinds[False] >= 4
    assert len(shapes) == 2


# --- 6. forms of other sites, and headers that are no headers ---------------------------------------------------------


@pytest.mark.parametrize("origin", ["http://[", "http://rank]", "http://[::1", "null ", "x" * 5000])
def test_SEC_06_an_origin_that_is_no_address_is_another_site_and_no_fault(tmp_path, clock, origin):
    client = TestClient(create_app(make_project(tmp_path), clock=clock, secure_cookies=False))
    answer = client.post("/login", headers={"origin": origin})
    assert answer.status_code == 403 and answer.headers["content-security-policy"] == HEADERS["content-security-policy"]


# --- 7, 12. claim, exclusion and deletion at the same moment ----------------------------------------------------------


def test_SEC_12_a_request_that_began_before_its_person_was_forgotten_leaves_nothing(tmp_path):
    """The person was read, then forgotten; the claim, the reason or the draft comes after."""
    project = make_project(tmp_path, items(3), **PLAIN)
    (person,) = make_people(project, 1)
    held = claim(project, person)
    with project.database.writing() as session:
        people.forget(session, session.get_one(Person, person.id), NOW)
    assert claim(project, person) is None
    with project.database.writing() as session:
        assert find(session, person, held.public_id) is None


def test_SEC_12_it_is_said_when_the_files_still_hold_what_was_deleted(tmp_path, monkeypatch):
    project = make_project(tmp_path, **PLAIN)
    make_people(project, 1)
    monkeypatch.setattr(people, "BUSY_SECONDS", 0.1)
    with project.database.reading() as session:
        session.scalars(select(Person)).all()
        with pytest.raises(DataError, match="person again"):
            people.erase_remains(project.database)
    people.erase_remains(project.database)


def test_SEC_07_claims_submissions_exclusions_and_deletions_in_a_race(tmp_path, clock):
    """Eight people rank as fast as they can, while some are excluded, taken back, closed and forgotten."""
    project = make_project(tmp_path, items(40), **PLAIN | {"overlap": 2})
    everybody = make_people(project, 8)
    app = create_app(project, clock=clock, secure_cookies=False, limits=Limits(submit="100000 per minute"))
    with project.database.writing() as session:
        tokens = [people.create_token(session, session.merge(one), "annotate", NOW) for one in everybody]
    statuses: Counter[int] = Counter()
    acknowledged: list[str] = []
    start = threading.Barrier(9)

    def ranks(token):
        with TestClient(app) as client:
            start.wait()
            for _ in range(40):
                answer = client.get("/api/v1/next", headers={"authorization": f"Bearer {token}"})
                statuses[answer.status_code] += 1
                if answer.status_code != 200:
                    break
                task = answer.json()
                said = {"nonce": task["nonce"], "ranks": {card["id"]: 1 for card in task["cards"]}, "reason": "my name"}
                answer = client.post(f"/api/v1/assignments/{task['assignment']}", json=said,
                                     headers={"authorization": f"Bearer {token}"})  # fmt: skip
                statuses[answer.status_code] += 1
                if answer.status_code == 200:
                    acknowledged.append(task["assignment"])

    def decides():
        start.wait()
        for number in range(4):
            with project.database.writing() as session:
                people.exclude(session, session.get_one(Person, everybody[0].id), "a trial", NOW)
            with project.database.writing() as session:
                people.reinstate(session, session.get_one(Person, everybody[0].id), NOW)
            with project.database.writing() as session:
                people.forget(session, session.get_one(Person, everybody[number + 1].id), NOW, with_reasons=True)
            people.erase_remains(project.database)

    threads = [threading.Thread(target=ranks, args=(token,)) for token in tokens] + [threading.Thread(target=decides)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert set(statuses) <= {200, 204, 401, 404} and statuses[200] > 40, statuses
    with project.database.reading() as session:
        done = session.scalars(select(Assignment).where(Assignment.state == "submitted")).all()
        assert sorted(one.public_id for one in done) == sorted(acknowledged)
        forgotten = {one.id for one in everybody[1:5]}
        said = session.execute(select(Submission.reason, Assignment.person_id).join(Assignment)).all()
        assert len(said) == len(done)
        assert not any(reason for reason, person_id in said if person_id in forgotten)
        steady = Counter(one.item_id for one in done if one.person_id != everybody[0].id)
        assert max(steady.values()) <= 2


@pytest.mark.parametrize("kind", ["sqlite", "postgresql"])
def test_an_item_with_too_many_rankings_makes_up_for_none_that_lacks_some(kind, request, tmp_path):
    """After an exclusion is lifted; or else a round would close while items wait for people."""
    url = None if kind == "sqlite" else new_postgresql(request.getfixturevalue("postgresql_folder"))
    project = make_project(tmp_path, items(2), database=url, **PLAIN)
    first, second = make_people(project, 2)
    work(project, first, limit=1)
    with project.database.writing() as session:
        people.exclude(session, session.get_one(Person, first.id), "a trial", NOW)
    work(project, second, limit=1)
    with project.database.writing() as session:
        people.reinstate(session, session.get_one(Person, first.id), NOW)
    with project.database.reading() as session:
        assert len(session.scalars(select(Submission)).all()) == 2
        (row,) = by_category(session)
        assert (row.num_submitted, row.num_wanted) == of_round(session, 0) == (1, 2)


# --- 8. tables ------------------------------------------------------------------------------------------------------


def test_SEC_08_no_result_is_a_table_that_a_spreadsheet_computes(tmp_path):
    """There is no CSV to inject formulas into: every view is JSON lines or Parquet."""
    project = make_project(tmp_path, items(2), **PLAIN)
    work(project, make_people(project, 1)[0])
    for name in VIEWS:
        files = export(project, tmp_path / name, to=(name,)).files
        assert {path.suffix for path in files} <= {".json", ".jsonl", ".parquet", ".md"}, name


# --- 9. what is sent in ---------------------------------------------------------------------------------------------


def test_SEC_09_an_items_file_that_is_nested_too_deep_is_refused_by_its_line(tmp_path):
    path = tmp_path / "items.jsonl"
    good = json.dumps({"prompt": "Why?", "answers": [{"id": "a", "text": "x"}, {"id": "b", "text": "y"}]})
    path.write_text(f'{good}\n{{"prompt": {"[" * 100_000}{"]" * 100_000}}}\n', encoding="utf-8")
    with pytest.raises(DataError, match="line 2"):
        load_rankings(path)


# --- 10. the login --------------------------------------------------------------------------------------------------


def test_SEC_10_a_name_in_other_letters_is_not_another_ten_attempts(tmp_path, clock):
    """ｂｅｎ, 𝐛𝐞𝐧 and ben are one account, so one count."""
    project = make_project(tmp_path)
    with project.database.writing() as session:
        people.create_person(session, "ben", PASSWORD, "annotator", NOW)
    app = create_app(project, clock=clock, secure_cookies=False, limits=Limits(login_per_account="3 per 15 minutes"))
    client = TestClient(app, follow_redirects=False)
    client.get("/login")
    token = pages.form_token(client.cookies["heedful"])

    def log_in(name, password="not the password"):
        return client.post("/login", data={"form_token": token, "name": name, "password": password}).status_code

    assert [log_in(name) for name in ("ben", "ｂｅｎ", "𝐛𝐞𝐧", "ｂen", " BEN ")] == [401, 401, 401, 429, 429]
    assert log_in("ben", PASSWORD) == 429 and log_in("eve") == 401


# --- 11. tokens -----------------------------------------------------------------------------------------------------


def test_SEC_11_a_token_in_an_address_or_a_form_opens_nothing(tmp_path, clock):
    project = make_project(tmp_path, items(1))
    (person,) = make_people(project, 1)
    with project.database.writing() as session:
        token = people.create_token(session, session.merge(person), "annotate", NOW)
    client = TestClient(create_app(project, clock=clock, secure_cookies=False), follow_redirects=False)
    for name in ("token", "access_token", "api_key", "authorization"):
        assert client.get("/api/v1/next", params={name: token}).status_code == 401
        assert client.get("/api/v1/next", cookies={name: token}).status_code == 401
    assert client.get("/", headers={"authorization": f"Bearer {token}"}).status_code == 303
    assert client.get("/api/v1/next", headers={"authorization": f"Bearer {token}"}).status_code == 200
