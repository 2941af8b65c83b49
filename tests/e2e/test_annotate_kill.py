"""The server of a project is killed again and again while simulated raters submit: nothing is lost, nothing doubled."""

from __future__ import annotations

import queue
import random
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

pytest.importorskip("fastapi")

from sqlalchemy import select

from heedful.annotate.people import create_person, create_token
from heedful.annotate.project import Project, add_rankings, create_project
from heedful.annotate.settings import Settings
from heedful.annotate.simulate.client import Work, work_together
from heedful.annotate.simulate.raters import Profile, Rater
from heedful.annotate.simulate.server import ServerProcess
from heedful.annotate.tables import Assignment, Item, Submission
from heedful.records import Answer, Message, Ranking

PASSWORD = "correct horse battery staple"


def items(num: int) -> list[Ranking]:
    """Items of four answers."""
    return [
        Ranking(f"g{n}", (Message("user", f"Question {n}"),), tuple(Answer(f"a{k}", f"{n} {k}") for k in range(4)))
        for n in range(num)
    ]


def new_project(folder: Path, num_items: int, overlap: int, num_people: int) -> tuple[Project, list[str]]:
    """A project and a token for each of its people."""
    settings = Settings(overlap=overlap, overlap_share=0.0, gold_rate=0.0, repeat_rate=0.0)
    project = create_project(folder, settings, "Prefer what is true.", now=time.time())
    add_rankings(project, items(num_items), now=time.time())
    with project.database.writing() as session:
        people = [
            create_person(session, f"person {n}", f"{PASSWORD} {n}", "annotator", time.time())
            for n in range(num_people)
        ]
        return project, [create_token(session, person, "annotate", time.time()) for person in people]


@dataclass
class Outcome:
    """What a run with kills came to."""

    done: list[Work]
    num_kills: int
    seconds: float

    @property
    def acknowledged(self) -> dict[str, dict[str, int]]:
        """Assignment → ranks by card, as the server confirmed them."""
        return {name: ranks for one in self.done for name, ranks in one.acknowledged.items()}


def rate_under_fire(
    folder: Path, tokens: Sequence[str], *, seed: int, rankings_per_kill: int, min_kills: int
) -> Outcome:
    """All raters work until nothing is left, while their server dies at random moments and is started again."""
    rng, started = random.Random(seed), time.monotonic()
    raters = [Rater(f"r{n}", Profile(), lambda messages, text: float(text.split()[1]), n) for n in range(len(tokens))]
    found: list[list[Work] | BaseException] = []
    stored: queue.Queue[None] = queue.Queue()
    server = ServerProcess(folder)
    url = server.start()

    def rate() -> None:
        try:
            found.append(work_together(url, tokens, raters, on_stored=lambda: stored.put(None), patience_seconds=120.0))
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=rate)
    thread.start()
    num_kills, left = 0, rng.randrange(2 * rankings_per_kill)
    while thread.is_alive():
        try:
            stored.get(timeout=0.2)
            left -= 1
        except queue.Empty:
            continue
        if left <= 0:
            time.sleep(rng.uniform(0, 0.1))  # anywhere in a request or between two
            server.kill()
            num_kills += 1
            assert server.start() == url
            left = rng.randrange(2 * rankings_per_kill)
    server.stop()
    (outcome,) = found
    if isinstance(outcome, BaseException):
        raise outcome
    assert num_kills >= min_kills, f"only {num_kills} kills"
    return Outcome(outcome, num_kills, time.monotonic() - started)


def check(project: Project, outcome: Outcome, num_items: int, overlap: int) -> None:
    """Every confirmed ranking is there as it was said, none is there twice, and no item has too many people."""
    with project.database.reading() as session:
        assignments = {a.public_id: a for a in session.scalars(select(Assignment))}
        submissions = list(session.scalars(select(Submission)))
        for name, ranks in outcome.acknowledged.items():
            assignment = assignments[name]
            (stored,) = assignment.submissions
            by_card = {card.public_id: stored.said["ranks"][card.answer.answer_id] for card in assignment.shown}
            assert by_card == ranks and assignment.state == "submitted", name
        people: dict[int, set[int]] = {}
        for assignment in assignments.values():
            if assignment.state == "submitted":
                of_item = people.setdefault(assignment.item_id, set())
                assert assignment.person_id not in of_item
                of_item.add(assignment.person_id)
        assert len(session.scalars(select(Item)).all()) == num_items == len(people)
    assert {len(of_item) for of_item in people.values()} == {overlap}
    assert len(submissions) == len({s.assignment_id for s in submissions}) == num_items * overlap
    assert len(outcome.acknowledged) == num_items * overlap, "a stored ranking was never confirmed to its rater"


def test_every_ranking_that_was_confirmed_survives_sigkill_and_none_is_doubled(tmp_path):
    num_items, overlap = 100, 3
    project, tokens = new_project(tmp_path / "project", num_items, overlap, num_people=6)
    outcome = rate_under_fire(tmp_path / "project", tokens, seed=0, rankings_per_kill=40, min_kills=3)
    check(project, outcome, num_items, overlap)
    print(
        f"{num_items * overlap} rankings, {outcome.num_kills} kills, {sum(w.num_repeated for w in outcome.done)} sent "
        f"again after they had been stored, {outcome.seconds:.0f} s"
    )
