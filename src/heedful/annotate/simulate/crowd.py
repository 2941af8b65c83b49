"""A crowd of simulated people in a project: accounts, tokens, and their work through the app."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path

from heedful.annotate import people
from heedful.annotate.project import Project, open_project
from heedful.annotate.simulate.client import Work, check_served, work_together
from heedful.annotate.simulate.raters import Utility, raters_of
from heedful.annotate.simulate.server import ServerProcess

NAME = "simulated {}"
"""Of the accounts, so that nobody takes them for people."""


def simulate(
    folder: str | Path,
    crowd: Mapping[str, float],
    utility: Utility,
    *,
    url: str | None = None,
    limit: int | None = None,
    seed: int = 0,
    on_stored: Callable[[], None] = lambda: None,
) -> list[Work]:
    """Let simulated raters work on a project until nothing is left for them.

    Args:
        crowd: profile (a name of ``raters.PROFILES``) → how many.
        url: where the project is served; None = it is served here meanwhile, for this machine alone.
        limit: of rankings by one rater.

    Raises:
        ConfigError: no such profile, or no project there.
        EngineError: the app does not start, cannot be reached, or refuses what is sent.
    """
    raters = raters_of(crowd, utility, seed)
    project = open_project(folder)
    if url is not None:  # before accounts are made
        check_served(url)
    tokens = [_token(project, NAME.format(rater.name), time.time()) for rater in raters]
    with ExitStack() as stack:
        if url is None:
            url = stack.enter_context(ServerProcess(folder)).url
        return work_together(url, tokens, raters, limit=limit, on_stored=on_stored)


def _token(project: Project, name: str, now: float) -> str:
    """Of the account of that name, which is made where it is missing, with a password that nobody knows."""
    with project.database.writing() as session:
        person = people.by_name(session, name)
        if person is None:
            person = people.create_person(session, name, secrets.token_urlsafe(32), "annotator", now)
            session.flush()
        return people.create_token(session, person, "annotate", now, days=1)
