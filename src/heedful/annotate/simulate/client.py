"""A program that rates through the JSON interface; what is lost on the way is sent again, which stores it once."""

from __future__ import annotations

import http.client
import json
import ssl
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from heedful.annotate.simulate.raters import Rater
from heedful.errors import EngineError

WAIT_SECONDS = 0.05
"""Before the second try; each further one waits twice as long, up to ``LONGEST_WAIT_SECONDS``."""
LONGEST_WAIT_SECONDS = 2.0


class Client:
    """One connection for one token; for one thread at a time."""

    def __init__(self, url: str, token: str, *, timeout_seconds: float = 30.0, patience_seconds: float = 60.0) -> None:
        """
        Args:
            timeout_seconds: for one answer of the server.
            patience_seconds: how long the server may be away, or ask for patience, before the client gives up.

        Raises:
            EngineError: the URL is none.
        """
        try:
            parts = urlsplit(url)
            host, port = parts.hostname, parts.port  # ValueError: a port that is none
            if not host or parts.scheme not in ("http", "https"):
                raise ValueError
        except ValueError:
            raise EngineError(f"{url}: give the address of the app, such as http://127.0.0.1:8700") from None
        if parts.scheme == "https":
            context = ssl.create_default_context()
            self._connection: http.client.HTTPConnection = http.client.HTTPSConnection(
                host, port, timeout=timeout_seconds, context=context
            )
        else:
            self._connection = http.client.HTTPConnection(host, port, timeout=timeout_seconds)
        self._url, self._path, self._token = url, parts.path.rstrip("/"), token
        self._patience_seconds = patience_seconds
        self.num_retries = 0
        """Requests that had to be sent again"""

    def next(self) -> dict[str, Any] | None:
        """The item to rank now; None when nothing is left."""
        return self.call("GET", "/api/v1/next")[1]

    def submit(self, assignment: str, said: dict[str, Any]) -> dict[str, Any] | None:
        """What the server says of a ranking that it has stored; None when the item is no longer this person's."""
        status, answer = self.call("POST", f"/api/v1/assignments/{assignment}", said, accept=(200, 409))
        return answer if status == 200 else None

    def skip(self, assignment: str, reason: str) -> bool:
        """Give an item back; False when it was not this person's to give back."""
        body = {"reason": reason}
        return self.call("POST", f"/api/v1/assignments/{assignment}/skip", body, accept=(204, 409))[0] == 204

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()

    def call(
        self, method: str, path: str, body: Any = None, *, accept: Sequence[int] = (200, 204)
    ) -> tuple[int, dict[str, Any] | None]:
        """Status and JSON of an answer.

        Raises:
            EngineError: the server stays away for too long, or refuses the request.
        """
        give_up, wait = time.monotonic() + self._patience_seconds, WAIT_SECONDS
        while True:
            try:
                status, content, retry_after = self._once(method, path, body)
                if status in accept:
                    return status, json.loads(content) if content else None
                if status != 429 and status < 500:
                    raise EngineError(f"{self._url}{path}: the server refused ({status}): {content[:300]!r}")
                problem, wait = f"it answers {status}", max(wait, retry_after)
            except (OSError, http.client.HTTPException) as error:
                self._connection.close()  # the next request opens a new one
                problem = str(error) or type(error).__name__
            if time.monotonic() + wait > give_up:
                raise EngineError(f"{self._url}: cannot be reached or is overloaded ({problem})")
            self.num_retries += 1
            time.sleep(wait)
            wait = min(2 * wait, LONGEST_WAIT_SECONDS)

    def _once(self, method: str, path: str, body: Any) -> tuple[int, bytes, float]:
        headers = {"Authorization": f"Bearer {self._token}"}
        content = None
        if body is not None:
            content = json.dumps(body).encode()
            headers["Content-Type"] = "application/json"
        self._connection.request(method, self._path + path, content, headers)
        response = self._connection.getresponse()
        data = response.read()
        retry_after = response.getheader("Retry-After", "0")
        return response.status, data, float(retry_after) if retry_after.isdecimal() else 0.0


def check_served(url: str) -> None:
    """Ask for work without a token, which an app refuses.

    Raises:
        EngineError: nobody answers there, or something else than an app.
    """
    with closing(Client(url, "", patience_seconds=0.0)) as client:
        client.call("GET", "/api/v1/next", accept=(401,))


@dataclass
class Work:
    """What one rater did."""

    name: str
    acknowledged: dict[str, dict[str, int]] = field(default_factory=dict)
    """Assignment → ranks by card, as the server has confirmed them"""
    num_lost: int = 0
    """Items that went to somebody else meanwhile"""
    num_repeated: int = 0
    """Rankings whose first confirmation was lost"""
    num_retries: int = 0
    seconds: float = 0.0


def work(
    client: Client, rater: Rater, *, limit: int | None = None, on_stored: Callable[[], None] = lambda: None,
    sleep: Callable[[float], None] = time.sleep,
) -> Work:  # fmt: skip
    """Rank what the server hands out, until nothing is left or ``limit`` rankings are stored."""
    done, started = Work(rater.name), time.monotonic()
    while limit is None or len(done.acknowledged) < limit:
        task = client.next()
        if task is None:
            break
        said = rater.rank(task)
        if seconds := rater.seconds_for(task):
            sleep(seconds)
        answer = client.submit(task["assignment"], said)
        if answer is None:
            done.num_lost += 1
            continue
        done.acknowledged[task["assignment"]] = said["ranks"]
        done.num_repeated += answer["repeated"]
        on_stored()
    done.num_retries, done.seconds = client.num_retries, time.monotonic() - started
    return done


def work_together(
    url: str, tokens: Sequence[str], raters: Sequence[Rater], *, limit: int | None = None,
    on_stored: Callable[[], None] = lambda: None, **options: Any,
) -> list[Work]:  # fmt: skip
    """All raters at once, a thread each; raises what one of them raised.

    Args:
        tokens: one for each rater.
        limit: of rankings by one rater.
        options: of :class:`Client`.
    """
    found: list[Work | Exception | None] = [None] * len(raters)

    def run(number: int) -> None:
        try:
            with closing(Client(url, tokens[number], **options)) as client:
                found[number] = work(client, raters[number], limit=limit, on_stored=on_stored)
        except Exception as error:  # told by the thread that waits
            found[number] = error

    threads = [threading.Thread(target=run, args=(n,), name=rater.name) for n, rater in enumerate(raters)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for outcome in found:
        if isinstance(outcome, Exception):
            raise outcome
    return [outcome for outcome in found if isinstance(outcome, Work)]
