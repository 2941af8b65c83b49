"""Moments of AdamW that wait in main memory and come to the device a bucket at a time.

A step reads and writes every moment once, forward and backward never do: 8 bytes per parameter that the device need
not hold. While a bucket is computed with, the next one is on its way on a stream of its own and the last one goes home
on another, so that the bus is used both ways at once. AdamW moves every number by itself, so a parameter may be cut
between two buckets, and what is moved does not depend on where.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

from heedful.models import offload

BUCKET_BYTES = 256 * 2**20
"""Of both moments, as much as hides the latency of a copy; a step holds two buckets."""
ALIGNED_BYTES = 256
"""Where a parameter is cut and begins in a bucket: kernels read vectors, and on a CPU a rest is rounded otherwise."""


def wait_at_home(device: torch.device, *, wanted: bool) -> bool:
    """Whether moments are kept in main memory: where the device's is another."""
    return wanted and offload.is_apart(device)


def reserve(parameters: Iterable[Tensor], *, offloaded: bool) -> list[Tensor]:
    """Room on the device as AdamW will take it for those parameters: their moments, or two buckets of them.

    It is untouched, which costs nothing on a CPU.
    """
    parameters = list(parameters)
    if not parameters or not wait_at_home(parameters[0].device, wanted=offloaded):
        return [torch.empty_like(p) for p in parameters for _ in range(2)]
    num_bytes = min(2 * BUCKET_BYTES, sum(2 * p.nbytes for p in parameters))
    return [torch.empty(num_bytes, dtype=torch.uint8, device=parameters[0].device)]


@dataclass(frozen=True)
class Piece:
    """What of one parameter is moved at once, all of it flat."""

    weights: Tensor
    gradient: Tensor
    home: tuple[Tensor, Tensor]
    """First and second moment in main memory"""
    step: Tensor
    """The parameter's count of steps, float32 on the device"""
    is_last: bool
    """Whether the parameter ends here"""
    offset_bytes: int
    """In either half of the buffer"""

    def room_in(self, buffer: Tensor) -> tuple[Tensor, Tensor]:
        """Where its moments are on the device; ``buffer``: uint8 [2, bytes]."""
        start, stop = self.offset_bytes, self.offset_bytes + self.weights.nbytes
        first, second = buffer[:, start:stop]
        return first.view(self.weights.dtype), second.view(self.weights.dtype)


@dataclass(frozen=True)
class Bucket:
    """Pieces of one parameter group that travel together."""

    group: Mapping[str, Any]
    pieces: list[Piece]

    @property
    def num_bytes(self) -> int:
        """Of either moment, with the gaps after the pieces."""
        return self.pieces[-1].offset_bytes + _aligned(self.pieces[-1].weights.nbytes)


def cut(group: Mapping[str, Any], state: Mapping[Tensor, Mapping[str, Tensor]]) -> Iterator[Bucket]:
    """The parameters of a group that have a gradient, in buckets of ``BUCKET_BYTES``."""
    size, used = BUCKET_BYTES // 2, 0
    pieces: list[Piece] = []
    for p in group["params"]:
        if p.grad is None:
            continue
        moments = [state[p][name].view(-1) for name in ("exp_avg", "exp_avg_sq")]
        weights, gradient = p.detach().view(-1), p.grad.reshape(-1)  # weights are written: never a copy of them
        start = 0
        while start < p.numel():
            if used >= size:
                yield Bucket(group, pieces)
                pieces, used = [], 0
            stop = min(p.numel(), start + (size - used) // p.itemsize)
            first, second = (x[start:stop] for x in moments)
            pieces.append(Piece(weights[start:stop], gradient[start:stop], (first, second), state[p]["step"],
                                stop == p.numel(), used))  # fmt: skip
            used += _aligned(pieces[-1].weights.nbytes)
            start = stop
    if pieces:
        yield Bucket(group, pieces)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNED_BYTES) * ALIGNED_BYTES


Move = Callable[[Bucket, list[tuple[Tensor, Tensor]]], None]
"""Moves the weights of a bucket and changes its moments, which are on the device, one pair per piece."""


@final
class Shuttle:
    """Takes buckets to a device and back."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._has_streams = device.type == "cuda"
        self._coming, self._going = (torch.cuda.Stream(device) if self._has_streams else None for _ in range(2))
        self._home: torch.cuda.Event | None = None

    def run(self, buckets: Sequence[Bucket], move: Move) -> None:
        """Move every bucket. What the computing stream is given afterwards finds all moments at home; the program does
        so after :meth:`wait` only."""
        computing = torch.cuda.current_stream(self._device) if self._has_streams else None
        num_bytes = max((bucket.num_bytes for bucket in buckets), default=0)
        # Given by the computing stream and taken back by it: others are done with them by then, since it waits below.
        buffers = [torch.empty((2, num_bytes), dtype=torch.uint8, device=self._device) for _ in buckets[:2]]
        free = [self._mark()] * 2  # not before: the room may still be somebody else's
        for n, bucket in enumerate(buckets):
            moments = [piece.room_in(buffers[n % 2]) for piece in bucket.pieces]
            pairs = [pair for piece, here in zip(bucket.pieces, moments, strict=True)
                     for pair in zip(piece.home, here, strict=True)]  # fmt: skip
            with self._on(self._coming, free[n % 2]):
                for home, here in pairs:
                    here.copy_(home, non_blocking=True)
                arrived = self._mark()
            with self._on(computing, arrived):
                move(bucket, moments)
                moved = self._mark()
            with self._on(self._going, moved):
                for home, here in pairs:
                    home.copy_(here, non_blocking=True)
                free[n % 2] = self._home = self._mark()
        if computing is not None and self._home is not None:
            computing.wait_event(self._home)  # before the buffers go, and before the next step reads what is home

    def wait(self) -> None:
        """When this returns all moments are at home, for whoever reads them there."""
        if self._home is not None:
            self._home.synchronize()

    def _mark(self) -> torch.cuda.Event | None:
        """The work that the current stream has been given so far."""
        return torch.cuda.current_stream(self._device).record_event() if self._has_streams else None

    @contextmanager
    def _on(self, stream: torch.cuda.Stream | None, after: torch.cuda.Event | None) -> Iterator[None]:
        """Give work to a stream, which waits for other work before."""
        if stream is None or after is None:
            yield
            return
        stream.wait_event(after)
        with torch.cuda.stream(stream):
            yield
