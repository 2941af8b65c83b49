"""How fast the ranking page and a submission are with 50 people at work, beside an empty FastAPI route.

    python benchmarks/annotate_load.py                            # 50 raters, a ranking every 4 seconds each
    python benchmarks/annotate_load.py --think_seconds 0          # as fast as the server answers

Browsers are played by threads of this process on one connection each; app and empty route are processes of their own,
measured one after the other with the same rhythm. Texts are of ordinary length (four answers of 150 words). Prints one
line of JSON: milliseconds, and ratios to the empty route.
"""

from __future__ import annotations

import argparse
import http.client
import json
import random
import re
import select
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlencode, urlsplit

from heedful.annotate.people import create_person, open_login
from heedful.annotate.project import add_rankings, create_project
from heedful.annotate.settings import Settings
from heedful.annotate.simulate.server import ServerProcess
from heedful.records import Answer, Message, Ranking

EMPTY = """
import socket, uvicorn
from fastapi import FastAPI
app = FastAPI(telemetry={"tracing": False, "logs": False, "auto_configure": False})
@app.get("/")
def empty():
    return {}
listening = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
listening.bind(("127.0.0.1", 0))
listening.listen(512)
print(f"http://127.0.0.1:{listening.getsockname()[1]}", flush=True)
uvicorn.Server(uvicorn.Config(app, log_config=None, lifespan="off", ws="none")).run(sockets=[listening])
"""
WORDS = "the quick brown fox jumps over a lazy dog while it thinks about *bread*, **salt** and `code`".split()  # noqa: SIM905
NUM_WORDS = 150


class Browser:
    """One person's connection; every answer is timed."""

    def __init__(self, url: str, cookie: str = "") -> None:
        parts = urlsplit(url)
        self._connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=120)
        self._cookie = cookie
        self.milliseconds: dict[str, list[float]] = {}

    def ask(self, what: str, method: str, path: str, form: list[tuple[str, str]] | None = None) -> tuple[str, str]:
        """Body and Location."""
        headers = {"Cookie": f"heedful={self._cookie}", "Accept-Language": "en"}
        if form is not None:
            headers["Content-Type"] = "application/x-www-form-urlencoded"
        began = time.perf_counter()
        self._connection.request(method, path, urlencode(form) if form is not None else None, headers)
        response = self._connection.getresponse()
        body = response.read().decode()
        self.milliseconds.setdefault(what, []).append(1000 * (time.perf_counter() - began))
        if response.status not in (200, 303):
            raise RuntimeError(f"{method} {path}: {response.status} {body[:200]}")
        return body, response.getheader("Location", "")


def fields(page: str) -> list[tuple[str, str]]:
    """The ranking form filled in: the hidden fields, and a rank for every card."""
    form = page[page.index('name="form_token"') - 100 :]
    hidden = [(name, re.search(rf'name="{name}" value="([^"]*)"', form)) for name in
              ("form_token", "nonce", "guideline_version")]  # fmt: skip
    cards = list(dict.fromkeys(re.findall(r'name="rank\.([\w-]+)"', page)))
    assert len(cards) == 4 and all(found for _, found in hidden)
    return [(name, found.group(1)) for name, found in hidden if found] + [
        (f"rank.{card}", str(n)) for n, card in enumerate(cards, 1)
    ]


def rate(browser: Browser, num_items: int, pause: Callable[[], None]) -> None:
    """Take items, look, rank, submit, follow to the next."""
    home, _ = browser.ask("home", "GET", "/")
    token = re.search(r'name="form_token" value="([^"]*)"', home)
    assert token is not None
    _, where = browser.ask("next", "POST", "/next", [("form_token", token.group(1))])
    for _ in range(num_items):
        page, _ = browser.ask("page", "GET", where)
        pause()
        _, where = browser.ask("submit", "POST", where, fields(page))


def ask_empty(browser: Browser, num_items: int, pause: Callable[[], None]) -> None:
    """As many requests in the same rhythm."""
    for _ in range(num_items):
        browser.ask("empty", "GET", "/")
        pause()
        browser.ask("empty", "GET", "/")


def together(
    browsers: list[Browser], work: Callable[..., None], num_items: int, think_seconds: float
) -> dict[str, list[float]]:
    """All at once, their pauses drawn evenly between half and one and a half of the mean."""
    failed: list[BaseException] = []

    def run(number: int) -> None:
        rng = random.Random(number)
        try:
            time.sleep(rng.uniform(0, think_seconds))
            work(browsers[number], num_items, lambda: time.sleep(rng.uniform(0.5, 1.5) * think_seconds))
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=run, args=(n,)) for n in range(len(browsers))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]
    found: dict[str, list[float]] = {}
    for browser in browsers:
        for what, times in browser.milliseconds.items():
            found.setdefault(what, []).extend(times)
    return found


def quantile(times: list[float], share: float) -> float:
    return sorted(times)[min(len(times) - 1, int(share * len(times)))]


def new_project(folder: Path, num_raters: int, num_items: int) -> list[str]:
    """A project with plenty of items; the cookie of every rater."""
    rng = random.Random(0)
    settings = Settings(overlap=1, overlap_share=0.2, overlap_on_share=3)
    project = create_project(folder, settings, "Prefer what is true.\n\n* then what is clear", now=time.time())

    def ranking(name: str, gold: bool) -> Ranking:
        answers = tuple(Answer(f"a{k}", " ".join(rng.choices(WORDS, k=NUM_WORDS))) for k in range(4))
        prompt = (Message("user", " ".join(rng.choices(WORDS, k=30))),)
        return Ranking(name, prompt, answers, category="chat", gold=(("a0", "a3"),) if gold else None)

    num_needed = num_raters * num_items
    add_rankings(project, [ranking(f"g{n}", False) for n in range(num_needed)], now=time.time())
    add_rankings(project, [ranking(f"c{n}", True) for n in range(30)], now=time.time())
    with project.database.writing() as session:
        return [
            open_login(session, create_person(session, f"p{n}", f"a long pass phrase {n}", "annotator", time.time()),
                       time.time())
            for n in range(num_raters)
        ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--raters", type=int, default=50)
    parser.add_argument("--items", type=int, default=20, help="ranked by each")
    parser.add_argument("--think_seconds", type=float, default=4.0, help="between page and submission, on average")
    options = parser.parse_args()
    empty = subprocess.Popen([sys.executable, "-c", EMPTY], stdout=subprocess.PIPE)
    try:
        assert empty.stdout is not None and select.select([empty.stdout], [], [], 60)[0]
        url = empty.stdout.readline().decode().strip()
        browsers = [Browser(url) for _ in range(options.raters)]
        times = together(browsers, ask_empty, options.items, options.think_seconds)
    finally:
        empty.terminate()
        empty.wait()
    with tempfile.TemporaryDirectory() as folder:
        cookies = new_project(Path(folder) / "project", options.raters, options.items)
        with ServerProcess(Path(folder) / "project") as server:
            began = time.monotonic()
            browsers = [Browser(server.url, cookie) for cookie in cookies]
            times |= together(browsers, rate, options.items, options.think_seconds)
            seconds = time.monotonic() - began
    p95 = {what: quantile(ms, 0.95) for what, ms in times.items()}
    print(json.dumps({
        "raters": options.raters, "items_each": options.items, "think_seconds": options.think_seconds,
        "rankings_per_second": round(options.raters * options.items / seconds, 1),
        "p50_ms": {what: round(quantile(ms, 0.5), 1) for what, ms in times.items()},
        "p95_ms": {what: round(value, 1) for what, value in p95.items()},
        "p95_to_empty": {what: round(value / p95["empty"], 1) for what, value in p95.items()},
    }))  # fmt: skip


if __name__ == "__main__":
    main()
