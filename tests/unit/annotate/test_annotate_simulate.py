"""Simulated raters do what their profiles say, from what the interface shows; the client loses and doubles nothing."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import uvicorn
from sqlalchemy import select

from heedful.annotate.people import by_name, create_token
from heedful.annotate.simulate.client import Client, work, work_together
from heedful.annotate.simulate.crowd import simulate
from heedful.annotate.simulate.raters import PROFILES, Profile, Rater, num_characters, raters_of, to_ranks, utility_of
from heedful.annotate.tables import Assignment, Submission
from heedful.annotate.web.app import create_app
from heedful.errors import ConfigError, EngineError
from heedful.records import Message, Prompt
from toy_project import items, make_people, make_project

ASKS = {"attributes": [], "strength": True, "reason": "optional"}


def quality(messages, answer):
    """The number that an answer holds."""
    return float(next(word for word in answer.split() if word.lstrip("-").isdigit()))


def task(*texts, **asks):
    return {
        "assignment": "x", "nonce": "n", "prompt": [{"role": "user", "content": "?"}], "guideline_version": 3,
        "cards": [{"id": f"c{n}", "text": text} for n, text in enumerate(texts)], "asks": ASKS | asks,
    }  # fmt: skip


def first_places(profile, texts, num=400):
    """How often each card is ranked first."""
    rater = Rater("r", profile, quality, seed=1)
    found = Counter()
    for _ in range(num):
        ranks = rater.rank(task(*texts))["ranks"]
        found.update(card for card, rank in ranks.items() if rank == 1)
    return [found[f"c{n}"] / num for n in range(len(texts))]


def test_without_noise_a_rater_ranks_by_utility_and_ties_what_is_close():
    rater = Rater("r", Profile(noise=0.0, tie_width=0.15), quality)
    assert rater.rank(task("1", "3", "2", "3"))["ranks"] == {"c0": 3, "c1": 1, "c2": 2, "c3": 1}
    assert to_ranks({"a": 1.0, "b": 0.9, "c": 0.8}, 0.15) == {"a": 1, "b": 1, "c": 2}, "ties do not chain"
    assert rater.rank(task("1", "3"))["strength"] == 3 and "strength" not in rater.rank(task("2", "2"))
    assert "strength" not in rater.rank(task("1", "2", "3", strength=False))


def test_the_same_seed_gives_the_same_rankings_and_each_item_its_own_noise():
    def said(seed):
        rater = Rater("r", PROFILES["noisy"], quality, seed)
        return [rater.rank(task("0", "0", "0", "0"))["ranks"] for _ in range(20)]

    assert said(1) == said(1) != said(2)
    assert len({json.dumps(ranks) for ranks in said(1)}) > 10


@pytest.mark.parametrize("profile, texts, at_least", [
    ("honest", ("0 " + "word " * 40, "1"), (0.0, 0.9)),
    ("length_lover", ("0 " + "word " * 40, "1"), (0.9, 0.0)),
    ("position_lover", ("0", "0", "0", "0"), (0.7, 0.0, 0.0, 0.0)),
    ("spammer", ("0", "5"), (0.4, 0.4)),
])  # fmt: skip
def test_profiles_show_in_what_is_ranked_first(profile, texts, at_least):
    shares = first_places(PROFILES[profile], texts)
    assert all(share >= low for share, low in zip(shares, at_least)), shares


def test_a_drifter_becomes_worse():
    rater = Rater("r", PROFILES["drifter"], quality)
    right = [rater.rank(task("0", "1"))["ranks"]["c1"] == 1 for _ in range(1000)]
    assert sum(right[:50]) > 42 and sum(right[-100:]) < 75


def test_length_is_counted_without_white_space_and_reading_takes_its_time():
    assert num_characters("ab c\n　你好") == 5
    assert Rater("r", Profile(characters_per_second=2.0), quality).seconds_for(task("ab", "你好 吗")) == 3.0
    assert Rater("r", Profile(), quality).seconds_for(task("x" * 99)) == 0.0


def test_what_the_project_asks_for_is_said():
    said = Rater("r", Profile(noise=0.0), quality).rank(
        task("-9", "0", "9", attributes=["helpful", "true"], reason="required")
    )
    assert said["ratings"] == dict.fromkeys(["helpful", "true"], {"c0": 1, "c1": 3, "c2": 5}) and said["reason"]
    assert said["guideline_version"] == 3 and said["nonce"] == "n"


def test_a_gold_scorer_with_what_people_know_of_a_prompt():
    messages = (Message("user", "How high?"),)

    def scorer(prompt, answer, *, finished):
        return float(answer == prompt.info.get("answer"))

    assert utility_of(scorer)(messages, "9") == 0.0
    assert utility_of(scorer, [Prompt("p", messages, info={"answer": "9"})])(list(messages), "9") == 1.0


def test_a_crowd_is_named_by_profile():
    raters = raters_of({"honest": 2, "spammer": 1}, quality, seed=0)
    assert [r.name for r in raters] == ["honest-1", "honest-2", "spammer-1"] and raters[2].profile.spam == 1
    for crowd in ({"saint": 1}, {"honest": 1.5}):
        with pytest.raises(ConfigError, match="one of honest, noisy"):
            raters_of(crowd, quality, seed=0)


@pytest.fixture
def server(tmp_path):
    """A project of 30 items for two people each, served over a real socket; (project, url, tokens of four)."""
    settings = {"overlap": 2, "overlap_share": 0.0, "gold_rate": 0.0, "repeat_rate": 0.0}
    project = make_project(tmp_path, items(30), **settings)
    app = create_app(project, secure_cookies=False)
    config = uvicorn.Config(app, port=0, log_config=None, lifespan="off", ws="none")
    uvicorn_server = uvicorn.Server(config)
    thread = threading.Thread(target=uvicorn_server.run)
    thread.start()
    while not uvicorn_server.started:
        assert thread.is_alive()
        thread.join(0.01)
    (port,) = {sock.getsockname()[1] for one in uvicorn_server.servers for sock in one.sockets}
    people = make_people(project, 4)
    with project.database.writing() as session:
        tokens = [create_token(session, session.merge(person), "annotate", time.time()) for person in people]
    yield project, f"http://127.0.0.1:{port}", tokens
    uvicorn_server.should_exit = True
    thread.join(10)


def test_four_raters_do_all_items_together_and_each_ranking_is_stored_as_it_was_said(server):
    project, url, tokens = server
    raters = [Rater(f"r{n}", Profile(), quality, seed=n) for n in range(4)]
    done = work_together(url, tokens, raters)
    said = {name: ranks for one in done for name, ranks in one.acknowledged.items()}
    assert len(said) == 60 and sum(one.num_repeated + one.num_lost for one in done) == 0
    with project.database.reading() as session:
        for assignment in session.scalars(select(Assignment)):
            (stored,) = assignment.submissions
            by_card = {card.public_id: stored.said["ranks"][card.answer.answer_id] for card in assignment.shown}
            assert by_card == said[assignment.public_id] and assignment.state == "submitted"
        assert len(session.scalars(select(Submission)).all()) == 60
    assert work_together(url, tokens[:1], raters[:1])[0].acknowledged == {}


def test_a_limit_holds_and_an_item_can_be_skipped(server):
    _, url, tokens = server
    client = Client(url, tokens[0])
    assert len(work(client, Rater("r", Profile(), quality), limit=3).acknowledged) == 3
    held = client.next()
    assert client.skip(held["assignment"], "other") and client.next()["assignment"] != held["assignment"]
    assert client.submit(held["assignment"], Rater("r", Profile(), quality).rank(held)) is None
    client.close()


def test_what_the_server_refuses_is_said(server):
    _, url, tokens = server
    with pytest.raises(EngineError, match="refused .401."):
        Client(url, "heed_" + "x" * 43).next()
    client = Client(url, tokens[0])
    with pytest.raises(EngineError, match="refused .422..*unranked"):
        task = client.next()
        client.submit(task["assignment"], {"nonce": task["nonce"], "ranks": {}})
    client.close()
    for nowhere in ("127.0.0.1:8700", "http://127.0.0.1:99999", "http://[::1"):
        with pytest.raises(EngineError, match="give the address of the app"):
            Client(nowhere, "t")
    with pytest.raises(EngineError, match="give the address of the app"):
        work_together("nowhere", tokens[:1], raters_of({"honest": 1}, quality, seed=0))
    with pytest.raises(EngineError, match="cannot be reached"):
        Client("http://127.0.0.1:9", "t", patience_seconds=0.2).next()


class Flaky(BaseHTTPRequestHandler):
    """Stores, and loses every other confirmation: no answer, half an answer, 503, 429 with a time to wait."""

    protocol_version = "HTTP/1.1"
    stored: dict[str, str] = {}
    calls = 0

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        repeated = body["nonce"] in self.stored
        self.stored.setdefault(body["nonce"], json.dumps(body))
        kind = Flaky.calls = Flaky.calls + 1
        if kind == 1:
            self.close_connection = True
            return
        if kind == 2:
            self.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n{")
            self.close_connection = True
            return
        content = json.dumps({"stored": True, "revision": 1, "repeated": repeated, "nonce": "z"}).encode()
        status = {3: 503, 4: 429}.get(kind, 200)
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *arguments):
        pass


def test_a_crowd_that_finds_no_app_leaves_no_accounts(server):
    project, url, _ = server
    for nowhere in ("http://127.0.0.1:9", "nowhere"):
        with pytest.raises(EngineError, match="cannot be reached|give the address"):
            simulate(project.folder, {"noisy": 1}, quality, url=nowhere)
    with project.database.reading() as session:
        assert by_name(session, "simulated noisy-1") is None
    (done,) = simulate(project.folder, {"noisy": 1}, quality, url=url, limit=2)
    assert len(done.acknowledged) == 2


def test_what_is_lost_on_the_way_is_sent_again_with_the_same_nonce():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Flaky)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        client = Client(f"http://127.0.0.1:{server.server_port}", "t")
        answer = client.submit("a", {"nonce": "n", "ranks": {"c": 1}})
        client.close()
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
    assert answer["repeated"] and client.num_retries == 4 and list(Flaky.stored) == ["n"]
