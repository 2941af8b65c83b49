"""The JSON interface: what it shows, what it takes, and what it refuses; the same checks as on the pages."""

from __future__ import annotations

import json

import pytest
from fastapi.testclient import TestClient
from sqlalchemy import select

from heedful.annotate.people import create_person, create_token, disable, exclude, open_login
from heedful.annotate.tables import ApiToken, Assignment, Person, Submission
from heedful.annotate.trail import newest
from heedful.annotate.web.app import create_app
from heedful.annotate.web.door import Limits
from heedful.records import Answer, Message, Ranking
from toy_project import NOW, items, make_people, make_project

ALONE = {"overlap_share": 0.0, "gold_rate": 0.0, "repeat_rate": 0.0}


class Clock:
    def __init__(self) -> None:
        self.now = NOW

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def world(tmp_path):
    """A project of three items for one person each, two people with tokens, and a client."""
    return World(tmp_path)


class World:
    def __init__(self, folder, rankings=None, limits=None, **settings) -> None:
        self.project = make_project(folder, rankings or items(3), **ALONE | settings)
        self.people = make_people(self.project, 2)
        self.clock = Clock()
        self.client = TestClient(
            create_app(self.project, clock=self.clock, secure_cookies=False, limits=limits), base_url="http://localhost"
        )
        self.tokens = [self.token(person) for person in self.people]

    def token(self, person, scope="annotate", days=30.0):
        with self.project.database.writing() as session:
            return create_token(session, session.merge(person), scope, NOW, days=days)

    def call(self, method, path, body=None, *, who=0, token=None, **options):
        headers = {"Authorization": f"Bearer {token or self.tokens[who]}"}
        return self.client.request(method, f"/api/v1{path}", json=body, headers=headers, **options)

    def next(self, who=0):
        return self.call("GET", "/next", who=who).json()

    def submissions(self):
        with self.project.database.reading() as session:
            return list(session.scalars(select(Submission)))


def said(task, **more):
    """Cards ranked as they stand."""
    return {"nonce": task["nonce"], "ranks": {card["id"]: n for n, card in enumerate(task["cards"], 1)}, **more}


def test_a_whole_project_through_the_interface(world):
    seen = []
    while (response := world.call("GET", "/next")).status_code == 200:
        task = response.json()
        assert world.next() == task, "the item in hand comes again until it is done"
        seen.append(task["prompt"][0]["content"])
        world.clock.now += 20
        more = {"flags": {task["cards"][0]["id"]: ["unsafe"]}, "all_bad": True, "reason": "because"}
        answer = world.call("POST", f"/assignments/{task['assignment']}", said(task, **more))
        assert answer.status_code == 200 and answer.json()["stored"] and answer.json()["revision"] == 1
    assert response.status_code == 204 and not response.content
    assert sorted(seen) == ["Question g0", "Question g1", "Question g2"]
    stored = world.submissions()
    assert len(stored) == 3 and {s.seconds for s in stored} == {20.0} and all(s.all_bad for s in stored)
    assert {name for s in stored for name in s.said["ranks"]} == {"a0", "a1", "a2", "a3"}


def hidden(name, gold=None):
    """An item whose every name is a word that is found nowhere else."""
    answers = tuple(Answer(f"{name}-answer-{n}", f"{n} says", f"{name}-policy-{n}", kind="bait") for n in range(3))
    return Ranking(f"{name}-group", (Message("user", f"ask {name}"),), answers, category=f"{name}-category",
                   source=f"{name}-source", info={"x": f"{name}-info"}, gold=gold)  # fmt: skip


def test_SEC_04_an_item_tells_nothing_of_where_it_comes_from(tmp_path):
    gold = (("quokka-answer-0", "quokka-answer-2"),)
    world = World(tmp_path, [hidden("quokka", gold), hidden("wombat")], gold_rate=1.0)
    for _ in range(2):
        response = world.call("GET", "/next")
        task = response.json()
        assert task.keys() == {"assignment", "nonce", "lease_until", "prompt", "cards", "guideline_version", "asks"}
        assert all(card.keys() == {"id", "text"} for card in task["cards"])
        (turn,) = task["prompt"]
        assert turn.keys() == {"role", "content"} and turn["content"].startswith("ask ")
        told = response.text.replace(turn["content"], "") + str(response.headers)
        assert not any(word in told for word in ("quokka", "wombat", "gold", "bait", "etag"))
        assert world.call("POST", f"/assignments/{task['assignment']}", said(task)).status_code == 200
    assert len(world.submissions()) == 2


def test_SEC_06_what_is_sent_twice_is_stored_once(world):
    task = world.next()
    path = f"/assignments/{task['assignment']}"
    first = world.call("POST", path, said(task)).json()
    reversed_ranks = {card["id"]: n for n, card in enumerate(reversed(task["cards"]), 1)}
    again = world.call("POST", path, {**said(task), "ranks": reversed_ranks}).json()
    assert first == {"stored": True, "revision": 1, "repeated": False, "nonce": first["nonce"]}
    assert again == {**first, "repeated": True} and len(world.submissions()) == 1
    other = world.call("POST", path, {**said(task), "nonce": first["nonce"]})
    assert other.status_code == 409 and other.json()["code"] == "submitted"
    correction = {"ranks": reversed_ranks, "nonce": first["nonce"], "correct": True}
    corrected = world.call("POST", path, correction)
    assert corrected.json()["revision"] == 2 and len(world.submissions()) == 2


def test_SEC_05_another_persons_item_is_as_unknown_as_none(world):
    mine, theirs = world.next(0), world.next(1)
    assert mine["assignment"] != theirs["assignment"]
    answers = []
    for name in (theirs["assignment"], "A" * 22, "x", "..%2f..", "%00", "a" * 500):
        for path, body in ((f"/assignments/{name}", said(theirs)), (f"/assignments/{name}/skip", {"reason": "other"})):
            response = world.call("POST", path, body, who=0)
            answers.append((response.status_code, response.text))
    assert set(answers) == {(404, '{"error":"There is no such page."}')}
    assert world.submissions() == [] and world.next(1) == theirs


def test_SEC_11_tokens_are_needed_scoped_expire_and_die_with_the_account(world):
    task, body = world.next(), {}
    for headers in ({}, {"Authorization": "Bearer "}, {"Authorization": f"Basic {world.tokens[0]}"},
                    {"Authorization": "Bearer heed_" + "x" * 43}, {"X-Token": world.tokens[0]}):  # fmt: skip
        for method, path in (("GET", "/next"), ("GET", "/guideline"), ("POST", f"/assignments/{task['assignment']}")):
            response = world.client.request(method, f"/api/v1{path}", headers=headers, json=body)
            assert response.status_code == 401 and response.headers["www-authenticate"] == "Bearer"
    in_url = world.client.get("/api/v1/next", params={"token": world.tokens[0]})
    assert in_url.status_code == 401
    short = world.token(world.people[1], days=1)
    assert world.call("GET", "/next", token=short).status_code == 200
    world.clock.now = NOW + 86_400 + 1
    assert world.call("GET", "/next", token=short).status_code == 401
    world.clock.now = NOW
    with world.project.database.writing() as session:
        admin = create_person(session, "boss", "a long pass phrase", "admin", NOW)
        reads = create_token(session, admin, "export", NOW)
        assert session.scalar(select(ApiToken).where(ApiToken.token_hash == reads)) is None, "kept as a hash only"
    assert world.call("GET", "/next", token=reads).status_code == 401, "a token that reads does not rank"
    with world.project.database.writing() as session:
        disable(session, session.get_one(Person, world.people[0].id), NOW)
    assert world.call("GET", "/next").status_code == 401


@pytest.mark.parametrize("change, code, field", [
    ({"ranks": {}}, "unranked", "ranks."),
    ({"ranks": None}, "bad_form", "ranks"),
    ({"ranks": [1, 2]}, "bad_form", "ranks"),
    ({"rank": 1}, "bad_form", "rank"),
    ({"nonce": None}, "bad_form", "nonce"),
    ({"nonce": "\ud800"}, "bad_form", "nonce"),
    ({"nonce": "\u0000"}, "bad_form", "nonce"),
    ({"nonce": "of-another-page"}, "stale", ""),
    ({"correct": "yes"}, "bad_form", "correct"),
    ({"guideline_version": 99}, "bad_form", "guideline_version"),
    ({"guideline_version": 10**30}, "bad_form", "guideline_version"),
    ({"reason": "x" * 5001}, "too_long", "reason"),
    ({"reason": "\u0000"}, "bad_text", "reason"),
    ({"strength": 1}, "no_strength", "strength"),
    ({"flags": {"nobody": ["wrong"]}}, "unknown_card", "flags"),
    ({"ratings": {"kind": {}}}, "unknown_attribute", "ratings"),
    ({"all_bad": 1}, "bad_form", "all_bad"),
])  # fmt: skip
def test_what_cannot_be_taken_is_named_and_nothing_is_stored(world, change, code, field):
    task = world.next()
    body = json.dumps({**said(task), **change})  # escapes half characters, as a program may
    response = world.client.post(
        f"/api/v1/assignments/{task['assignment']}", content=body,
        headers={"Authorization": f"Bearer {world.tokens[0]}", "Content-Type": "application/json"},
    )  # fmt: skip
    assert response.status_code == (409 if code == "stale" else 422)
    told = response.json()
    assert told["code"] == code and told["field"].startswith(field) and told["error"] and world.submissions() == []
    assert world.call("POST", f"/assignments/{task['assignment']}", said(task)).status_code == 200


@pytest.mark.parametrize("last", [0, 10, -1, 1.5, True, "4", None, [], 1e300])
def test_ranks_are_whole_numbers_from_1_to_9(world, last):
    task = world.next()
    body = said(task)
    body["ranks"][task["cards"][-1]["id"]] = last
    response = world.call("POST", f"/assignments/{task['assignment']}", body)
    assert response.status_code == 422 and response.json()["code"] == "bad_rank" and world.submissions() == []


@pytest.mark.parametrize("content", [
    b"", b"{", b"[]", b'"x"', b"[" * 100_000, b'{"nonce": 1' + b"0" * 6000 + b"}", b"\xff\xfe", b'{"ranks": NaN}',
])  # fmt: skip
def test_SEC_09_bodies_that_are_no_json_objects(world, content):
    task = world.next()
    for path in ("", "/skip"):
        response = world.client.post(
            f"/api/v1/assignments/{task['assignment']}{path}", content=content,
            headers={"Authorization": f"Bearer {world.tokens[0]}", "Content-Type": "application/json"},
        )  # fmt: skip
        assert response.status_code in (400, 422) and "error" in response.json()
    too_large = world.call("POST", f"/assignments/{task['assignment']}", {**said(task), "reason": "x" * (1 << 20)})
    assert too_large.status_code == 413 and world.submissions() == []


def test_skip_gives_an_item_back_for_good(world):
    task = world.next()
    path = f"/assignments/{task['assignment']}/skip"
    assert world.call("POST", path, {"reason": "bored"}).json()["code"] == "bad_reason"
    assert world.call("POST", path, {"reason": "other", "because": 1}).status_code == 422
    assert world.call("POST", path, {"reason": "not_my_field", "note": "law"}).status_code == 204
    assert world.call("POST", path, {"reason": "not_my_field"}).status_code == 204  # twice is once
    late = world.call("POST", f"/assignments/{task['assignment']}", said(task))
    assert late.status_code == 409 and late.json()["code"] == "skipped"
    assert world.next()["assignment"] != task["assignment"]


def test_a_lease_that_ran_out_is_taken_as_long_as_the_item_lacks_people(tmp_path):
    world = World(tmp_path, items(1))
    task = world.next(0)
    world.clock.now += 3600
    other = world.next(1)
    assert other["prompt"] == task["prompt"]
    late = world.call("POST", f"/assignments/{task['assignment']}", said(task), who=0)
    assert late.status_code == 409 and late.json()["code"] == "taken"
    assert world.call("POST", f"/assignments/{other['assignment']}", said(other), who=1).status_code == 200
    assert len(world.submissions()) == 1


def test_what_is_asked_is_told(tmp_path):
    world = World(tmp_path, items(1, num_answers=2), attributes=("helpful",), reason="required", allow_unranked=True)
    task = world.next()
    asks = task["asks"]
    assert asks["attributes"] == ["helpful"] and asks["strength"] and asks["reason"] == "required"
    assert asks["allow_unranked"] and "unsafe" in asks["flags"] and "upsetting" in asks["skip_reasons"]
    rated = {"helpful": {card["id"]: 4 for card in task["cards"]}}
    body = said(task, ratings=rated, strength=3, reason="because")
    assert world.call("POST", f"/assignments/{task['assignment']}", body).status_code == 200
    (stored,) = world.submissions()
    assert stored.strength == 3 and stored.said["ratings"] == {"helpful": {"a0": 4, "a1": 4}}
    assert world.call("GET", "/guideline").json() == {"version": 1, "text": "Be fair."}


def test_a_program_that_hurries_too_much_is_asked_to_wait(tmp_path):
    world = World(tmp_path, limits=Limits(token="3 per minute"))
    codes = [world.call("GET", "/next").status_code for _ in range(4)]
    assert codes == [200, 200, 200, 429]
    assert world.call("GET", "/next", who=1).status_code == 200, "others are not in its way"


def test_the_description_is_for_admins_who_are_logged_in(world):
    with world.project.database.writing() as session:
        admin = create_person(session, "boss", "a long pass phrase", "admin", NOW)
        cookies = {name: open_login(session, person, NOW) for name, person in
                   (("boss", admin), ("rater", session.merge(world.people[0])))}  # fmt: skip
    assert world.client.get("/api/v1/openapi.json").status_code == 401
    assert world.call("GET", "/openapi.json").status_code == 401
    as_rater = world.client.get("/api/v1/openapi.json", headers={"Cookie": f"heedful={cookies['rater']}"})
    assert as_rater.status_code == 404
    as_admin = world.client.get("/api/v1/openapi.json", headers={"Cookie": f"heedful={cookies['boss']}"})
    assert {"/api/v1/next", "/api/v1/assignments/{public_id}"} <= as_admin.json()["paths"].keys()
    for path in ("/openapi.json", "/docs", "/redoc"):
        assert world.client.get(path).status_code == 404


def test_a_cookie_does_not_open_the_interface(world):
    with world.project.database.writing() as session:
        cookie = open_login(session, session.merge(world.people[0]), NOW)
    response = world.client.get("/api/v1/next", headers={"Cookie": f"heedful={cookie}"})
    assert response.status_code == 401
    with world.project.database.reading() as session:
        assert session.scalars(select(Assignment)).all() == []


def test_results_come_out_by_view_for_those_who_may_read_them(world):
    for who in (0, 1):
        task = world.next(who)
        world.call("POST", f"/assignments/{task['assignment']}", said(task), who=who)
    with world.project.database.writing() as session:
        reviewer = create_person(session, "eve", "a long pass phrase", "reviewer", NOW)
        reads = create_token(session, reviewer, "export", NOW)
        exclude(session, session.merge(world.people[1]), "spam", NOW)
    response = world.call("GET", "/export/master", token=reads)
    assert response.headers["content-type"] == "application/x-ndjson"
    (row,) = [json.loads(line) for line in response.text.splitlines()]
    (judgement,) = row["rankings"]
    assert judgement["annotator"] == "rater-0" and sorted(judgement["ranks"].values()) == [1, 2, 3, 4]
    pairs = world.call("GET", "/export/trl_messages", token=reads).text.splitlines()
    assert len(pairs) == 6 and {"prompt", "chosen", "rejected"} <= json.loads(pairs[0]).keys()
    with world.project.database.reading() as session:
        (row,) = newest(session, limit=1)
        assert (row.who, row.action, row.object) == (reviewer.pseudonym, "export", "trl_messages")
    assert world.call("GET", "/export/master?round=7", token=reads).text == ""
    for path in ("/export/nothing", "/export/..%2f..%2fetc%2fpasswd", "/export/"):
        assert world.call("GET", path, token=reads).status_code == 404
    assert world.call("GET", "/export/pairs?min_agree=7", token=reads).status_code == 422
    assert world.call("GET", "/export/master").status_code == 401, "a token that ranks does not read"
    assert world.call("GET", "/next", token=reads).status_code == 401
    with world.project.database.writing() as session:
        session.get_one(Person, reviewer.id).role = "annotator"
    assert world.call("GET", "/export/master", token=reads).status_code == 401, "no longer a reviewer"
