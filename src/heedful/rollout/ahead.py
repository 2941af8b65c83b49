"""Scores that are asked for in the background, chunk by chunk, while further answers are decoded."""

from __future__ import annotations

import atexit
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from queue import SimpleQueue
from threading import Thread
from typing import final

from heedful.records import Completion
from heedful.rollout.line import Line

Ask = Callable[[Line], list[float]]
"""Fetches the scores of one chunk over the line; where that is broken off it may raise anything, but soon."""
SECONDS_TO_END = 2.0
"""For a thread whose line was broken off; one that looks for the server's address cannot be woken."""


@final
class Ahead:
    """What one source has been asked about one step's answers: one chunk after the other, in the order they came.

    A chunk that fails ends the run, so those behind it are not asked. The thread is a daemon: a process that ends does
    not wait for a slow server.
    """

    def __init__(self, name: str) -> None:
        """``name`` is the thread's."""
        self._chunks: list[tuple[Sequence[Completion], Future[list[float]]]] = []
        self._queue: SimpleQueue[tuple[Ask, Future[list[float]]] | None] = SimpleQueue()
        self._line = Line()
        self._thread = Thread(target=self._work, name=name, daemon=True)
        self._thread.start()
        atexit.register(self.drop)

    def begin(self, completions: Sequence[Completion], ask: Ask) -> None:
        """``ask`` is called in the thread, for one score per completion."""
        future: Future[list[float]] = Future()
        self._chunks.append((completions, future))
        self._queue.put((ask, future))

    def collect(self, completions: Sequence[Completion]) -> dict[int, float]:
        """The scores of those that were asked about, by their place among ``completions``; waits for them, and drops
        the rest. Answers are told apart as objects, so that no score can be another step's.

        Raises:
            what ``ask`` has raised.
        """
        places = {id(completion): i for i, completion in enumerate(completions)}
        found: dict[int, float] = {}
        try:
            for chunk, future in self._chunks:
                if any(id(completion) in places for completion in chunk):
                    scores = future.result()
                    found |= {places[id(c)]: x for c, x in zip(chunk, scores, strict=True) if id(c) in places}
        finally:
            self.drop()
        return found

    def drop(self) -> None:
        """Nobody wants what is not there yet: the request that is under way is broken off, no other is made."""
        self._queue.put(None)
        self._line.set()
        self._thread.join(SECONDS_TO_END)
        atexit.unregister(self.drop)

    def _work(self) -> None:
        failure: BaseException | None = None
        while (asked := self._queue.get()) is not None and not self._line.is_set():
            ask, future = asked
            try:
                if failure is None:
                    future.set_result(ask(self._line))
            except BaseException as error:  # for whoever collects: no thread of ours ends with a traceback
                failure = error
            if failure is not None:
                future.set_exception(failure)
