"""A small annotation project with people, and a PostgreSQL server of its own; for tests of the annotate room."""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from heedful.annotate.project import Project, add_rankings, create_project
from heedful.annotate.queue import claim_next
from heedful.annotate.settings import Settings
from heedful.annotate.submissions import Said, Stored, submit
from heedful.annotate.tables import Assignment, Person
from heedful.records import Answer, Message, Ranking

NOW = 1_700_000_000.0
POSTGRESQL = Path("/usr/lib/postgresql/15/bin")


def items(
    number: int, *, category: str = "chat", num_answers: int = 4, gold: bool = False, name: str = "g"
) -> list[Ranking]:
    """Items without judgements; of a control item the first answer is better than the last."""
    return [
        Ranking(
            f"{name}{i}",
            (Message("user", f"Question {name}{i}"),),
            tuple(Answer(f"a{j}", f"Answer {j} to {name}{i}", policy=f"policy-{j}") for j in range(num_answers)),
            category=category,
            lang="en",
            gold=(("a0", f"a{num_answers - 1}"),) if gold else None,
        )
        for i in range(number)
    ]


def make_project(
    folder: Path, rankings: Sequence[Ranking] = (), *, database: str | None = None, **settings: Any
) -> Project:
    """A project with these items and settings."""
    project = create_project(folder / "project", Settings(**settings), "Be fair.", database, now=NOW)
    if rankings:
        add_rankings(project, rankings, now=NOW)
    return project


def make_people(project: Project, number: int) -> list[Person]:
    """Annotators who cannot log in (no password)."""
    people = [
        Person(name=f"person {i}", pseudonym=f"rater-{i}", role="annotator", created_at=NOW) for i in range(number)
    ]
    with project.database.writing() as session:
        session.add_all(people)
    return people


def claim(project: Project, person: Person, now: float = NOW) -> Assignment | None:
    """What the person is given."""
    with project.database.writing() as session:
        return claim_next(session, person, project.settings, now)


def in_order(assignment: Assignment, **more: Any) -> Said:
    """The answers ranked in the order of their ids (a0 best)."""
    order = sorted(card.answer.answer_id for card in assignment.shown)
    return Said({card.public_id: order.index(card.answer.answer_id) + 1 for card in assignment.shown}, **more)


def rank(
    project: Project, assignment: Assignment, said: Said | None = None, now: float = NOW, **more: Any
) -> Stored:
    """Submit, in the order of the ids unless told otherwise."""
    more = {"nonce": assignment.nonce, "settings": project.settings, "now": now} | more
    with project.database.writing() as session:
        return submit(session, session.merge(assignment, load=False), said or in_order(assignment), **more)


def work(project: Project, person: Person, limit: int = 1000, now: float = NOW) -> list[Assignment]:
    """Everything the person is given, ranked, a minute each."""
    done = []
    while len(done) < limit and (assignment := claim(project, person, now)) is not None:
        rank(project, assignment, now=now + 50)
        done.append(assignment)
        now += 60
    return done


def missing_postgresql() -> str:
    """Why there can be no PostgreSQL server; "" where there can."""
    if not (POSTGRESQL / "initdb").exists():
        return f"no PostgreSQL server in {POSTGRESQL}"
    return "" if os.getuid() or shutil.which("runuser") else "PostgreSQL does not run as root, and runuser is missing"


@contextmanager
def postgresql_server() -> Iterator[Path]:
    """A server on a socket in a new folder, which is the value; it ends with the block."""
    folder = Path(tempfile.mkdtemp(prefix="heedful-pg-"))
    as_user = [] if os.getuid() else ["runuser", "-u", "postgres", "--"]

    def run(program: str, *arguments: str) -> None:
        command = [*as_user, str(POSTGRESQL / program), "-D", str(folder / "data"), *arguments]
        subprocess.run(command, check=True, cwd=folder, stdout=subprocess.DEVNULL, timeout=60)

    if as_user:
        shutil.chown(folder, "postgres")
    try:
        run("initdb", "-U", "postgres", "-A", "trust", "--no-sync", "-E", "UTF8", "--locale=C.UTF-8")
        options = f"-c listen_addresses= -c unix_socket_directories={folder} -c fsync=off"
        run("pg_ctl", "-w", "-l", str(folder / "log"), "-o", options, "start")
        try:
            yield folder
        finally:
            run("pg_ctl", "-w", "-m", "immediate", "stop")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def new_postgresql(folder: Path) -> str:
    """The URL of a new, empty database of the server."""
    import psycopg

    name = f"d{secrets.token_hex(8)}"
    with psycopg.connect(host=str(folder), user="postgres", dbname="postgres", autocommit=True) as connection:
        connection.execute(f'create database "{name}"')
    return f"postgresql+psycopg://postgres@/{name}?host={folder}"
