"""In which order training meets its rows: endless, the same for the same seed, and resumable in the middle."""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Iterable
from typing import Any

from heedful.errors import CheckpointError, DataError


def fingerprint(rows: Iterable[object]) -> str:
    """A short hash of rows (texts, ids, records: anything whose ``repr`` tells it all), order included."""
    digest = hashlib.sha256()
    for row in rows:
        digest.update(repr(row).encode("utf-8", "surrogatepass") + b"\n")
    return digest.hexdigest()[:16]


class EpochStream:
    """Batches of exactly ``batch_size`` indices, for ever; epoch e is a permutation drawn from (seed, e).

    A batch may cross the border of two epochs, so no row is lost to rounding.

    Args:
        num_items: rows of the data.
        batch_size: indices per batch.
        seed: draws the order.
        shuffle: False = file order in every epoch.
        fingerprint: of the data; a state saved with another one is refused.
    """

    def __init__(
        self, num_items: int, batch_size: int, seed: int, *, shuffle: bool = True, fingerprint: str = ""
    ) -> None:
        if num_items < 1 or batch_size < 1:
            raise DataError(f"a stream needs rows and a batch size, got {num_items} rows in batches of {batch_size}")
        self.num_items = num_items
        self.batch_size = batch_size
        self.epoch = 0
        self.offset = 0
        self._identity = {"num_items": num_items, "seed": seed, "shuffle": shuffle, "fingerprint": fingerprint}
        self._order = self._permutation()

    def __iter__(self) -> EpochStream:
        return self

    def __next__(self) -> list[int]:
        batch: list[int] = []
        while len(batch) < self.batch_size:
            taken = self._order[self.offset : self.offset + self.batch_size - len(batch)]
            batch += taken
            self.offset += len(taken)
            if self.offset == self.num_items:
                self.epoch, self.offset = self.epoch + 1, 0
                self._order = self._permutation()
        return batch

    def num_steps(self, epochs: float) -> int:
        """Batches until every row was met ``epochs`` times; the last one may reach into the next epoch."""
        return math.ceil(round(self.num_items * epochs / self.batch_size, 6))

    def state_dict(self) -> dict[str, Any]:
        """Where the stream stands and on which data; plain JSON."""
        return {"epoch": self.epoch, "offset": self.offset, **self._identity}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where ``state`` was taken; the batch size may have changed, since the place is counted in rows.

        Raises:
            CheckpointError: the state is of other data or another order; the stream stays where it was.
        """
        for name, value in self._identity.items():
            if state.get(name) != value:
                raise CheckpointError(
                    f"the checkpoint's data order has {name} {state.get(name)!r}, this run has {value!r}; "
                    "resume with the data and seed of the checkpoint, or start a new run"
                )
        epoch, offset = int(state["epoch"]), int(state["offset"])
        if epoch < 0 or not 0 <= offset < self.num_items:
            raise CheckpointError(f"the checkpoint's data order stands at epoch {epoch}, row {offset}: no such place")
        self.epoch, self.offset = epoch, offset
        self._order = self._permutation()

    def _permutation(self) -> list[int]:
        order = list(range(self.num_items))
        if self._identity["shuffle"]:
            random.Random(f"{self._identity['seed']}/{self.epoch}").shuffle(order)
        return order
