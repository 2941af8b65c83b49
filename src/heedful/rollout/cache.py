"""Scores on disk: what a reward model has once said about a text is read, not computed again.

An entry is found by the model's digest (weights, tokenizer and template, wherever the folder lies), its compute
precision, and the text. One SQLite file; any number of processes may use it at once, and deleting it costs only time.
"""

from __future__ import annotations

import hashlib
import json
import math
import sqlite3
import struct
import zlib
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar, final

from heedful.models.cache import cache_folder
from heedful.models.folders import folder_digest
from heedful.records import Message
from heedful.runs.progress import tell

if TYPE_CHECKING:
    from heedful.rollout.score import RewardModel

T = TypeVar("T")

MAX_ENTRIES = 2_000_000
"""About 300 MiB."""
_PER_QUERY = 500  # SQLite may allow as few as 999 variables in a statement
_TIMEOUT_SECONDS = 30.0
_TABLE = "CREATE TABLE IF NOT EXISTS scores (id INTEGER PRIMARY KEY, key BLOB UNIQUE NOT NULL, value BLOB NOT NULL)"


@final
class ScoreCache:
    """Key → the outputs of a reward model, in a file. A file that cannot be used is said and costs only time."""

    def __init__(
        self,
        path: Path | None = None,
        *,
        max_entries: int = MAX_ENTRIES,
        say: Callable[[str], None] = tell,
    ) -> None:
        """
        Args:
            path: the file; None takes the user's own, ``scores.sqlite`` in the cache of models.
            max_entries: beyond it the oldest go.
            say: takes the line about a file that is damaged or cannot be written.
        """
        self.path = path or cache_folder() / "scores.sqlite"
        self._max_entries, self._say, self._usable = max_entries, say, True

    def get(self, keys: Sequence[bytes]) -> dict[bytes, list[float]]:
        """The outputs of those keys that are there."""

        def read(connection: sqlite3.Connection) -> dict[bytes, list[float]]:
            found: dict[bytes, list[float]] = {}
            for start in range(0, len(keys), _PER_QUERY):
                part = keys[start : start + _PER_QUERY]
                marks = ",".join("?" * len(part))
                rows = connection.execute(f"SELECT key, value FROM scores WHERE key IN ({marks})", part).fetchall()
                found |= {bytes(key): _unpack(key, value) for key, value in rows}
            return found

        return self._use(read) or {}

    def put(self, entries: dict[bytes, list[float]]) -> None:
        """Add entries; those that are there stay as they are."""

        def write(connection: sqlite3.Connection) -> None:
            rows = [(key, _pack(key, outputs)) for key, outputs in entries.items()]
            connection.executemany("INSERT OR IGNORE INTO scores (key, value) VALUES (?, ?)", rows)
            (last,) = connection.execute("SELECT max(id) FROM scores").fetchone()
            connection.execute("DELETE FROM scores WHERE id <= ?", ((last or 0) - self._max_entries,))

        if entries:
            self._use(write)

    def _use(self, work: Callable[[sqlite3.Connection], T]) -> T | None:
        """What ``work`` gives in a transaction of its own, or None where the file cannot be used."""
        for _ in range(2 if self._usable else 0):
            try:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                with closing(sqlite3.connect(self.path, timeout=_TIMEOUT_SECONDS)) as connection, connection:
                    connection.execute(_TABLE)
                    return work(connection)
            except (sqlite3.OperationalError, OSError) as error:  # locked for long, read-only, disk full
                self._say(f"score cache {self.path}: cannot be used ({error}); going on without it")
                break
            except (sqlite3.DatabaseError, ValueError) as error:
                self._say(f"score cache {self.path}: damaged ({error}); starting a new one")
                self.path.unlink(missing_ok=True)
                self.path.with_name(self.path.name + "-journal").unlink(missing_ok=True)
        self._usable = False
        return None


def _pack(key: bytes, outputs: Sequence[float]) -> bytes:
    packed = struct.pack(f"<{len(outputs)}d", *outputs)
    return packed + struct.pack("<I", zlib.crc32(key + packed))


def _unpack(key: bytes, value: bytes) -> list[float]:
    """Raises ValueError when the entry is not as it was written: SQLite itself does not notice a flipped bit."""
    if len(value) % 8 != 4 or struct.unpack("<I", value[-4:])[0] != zlib.crc32(key + value[:-4]):
        raise ValueError("an entry does not match its checksum")
    return list(struct.unpack(f"<{len(value) // 8}d", value[:-4]))


@final
class CachedReward:
    """A frozen reward model that reads the scores of known texts from a cache; equal texts are read once."""

    def __init__(self, model: RewardModel, digest: str, cache: ScoreCache) -> None:
        """``digest`` stands for everything that the scores depend on besides the text."""
        self.model = model
        self._digest, self._cache = digest, cache

    def output_texts(
        self, prompts: Sequence[Sequence[Message]], answers: Sequence[str], *, micro_batch_tokens: int
    ) -> list[list[float]]:
        """As :meth:`ScalarModel.output_texts`."""
        keys = [_key(self._digest, p, a) for p, a in zip(prompts, answers, strict=True)]
        known = self._cache.get(keys)
        new = {key: row for row, key in reversed(list(enumerate(keys))) if key not in known}
        if new:
            rows = sorted(new.values())
            found = self.model.output_texts(
                [prompts[row] for row in rows], [answers[row] for row in rows], micro_batch_tokens=micro_batch_tokens
            )
            added = {keys[row]: outputs for row, outputs in zip(rows, found, strict=True)}
            self._cache.put({key: outputs for key, outputs in added.items() if all(map(math.isfinite, outputs))})
            known |= added
        return [known[key] for key in keys]


def _key(digest: str, prompt: Sequence[Message], answer: str) -> bytes:
    text = json.dumps([digest, [[m.role, m.content] for m in prompt], answer])
    return hashlib.sha256(text.encode()).digest()


def cached(model: RewardModel, path: Path, dtype: object, cache: ScoreCache | None) -> RewardModel:
    """``model`` behind ``cache``, if there is one.

    Args:
        path: the folder that the model was loaded from.
        dtype: its compute precision; scores differ by it.
    """
    return CachedReward(model, f"{folder_digest(path)} {dtype}", cache) if cache else model
