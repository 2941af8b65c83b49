"""The order of copies and steps on a GPU's streams, without a GPU: streams are played on the CPU.

What a step gives to a stream is noted, then done in random order as far as the events allow, with one stream far ahead
or far behind. A missing wait then ends in other weights or moments.
"""

from __future__ import annotations

import random
from contextlib import contextmanager

import pytest
import torch
from test_adam_offload import BUCKETS, STEPS, Model, equal, optimisation, same, step, stored
from torch.utils._python_dispatch import TorchDispatchMode

from heedful.models import offload
from heedful.train import adam, moments

PACES = [(1, 1, 1), (1, 1000, 1), (1, 1, 1000), (1000, 1, 1), (1, 1000, 1000), (1000, 1000, 1)]
"""How often computing, coming and going have their turn."""


class Event:
    def __init__(self, play):
        self.play, self.is_over = play, False

    def synchronize(self):
        self.play.go_on(until=self)


class Stream:
    """Work in the order in which it was given."""

    def __init__(self, play):
        self.play, self.work = play, []

    def wait_event(self, event):
        self.work.append(event)

    def record_event(self):
        event = Event(self.play)
        self.work.append(lambda: setattr(event, "is_over", True))
        return event

    @property
    def waits(self):
        return isinstance(self.work[0], Event) and not self.work[0].is_over


class Play:
    """A computing stream and two others."""

    def __init__(self, seed, pace):
        self.random, self.pace = random.Random(seed), pace
        self.streams = [Stream(self) for _ in pace]
        self.current = self.streams[0]

    @contextmanager
    def on(self, stream):
        before, self.current = self.current, stream
        yield
        self.current = before

    def go_on(self, *, until=None):
        """Do work until an event is over, or all of it."""
        while until is None or not until.is_over:
            ready = [(s, turns) for s, turns in zip(self.streams, self.pace, strict=True) if s.work and not s.waits]
            if not ready:
                assert until is None and not any(s.work for s in self.streams), "streams wait for each other"
                return
            ((stream, _),) = self.random.choices(ready, [turns for _, turns in ready])
            done = stream.work.pop(0)
            if not isinstance(done, Event):
                done()


class Noted(TorchDispatchMode):
    """What would run on the GPU is left to the current stream."""

    def __init__(self, play):
        super().__init__()
        self.play = play

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func.name() == "aten::clone":
            func, args, kwargs = torch.ops.aten.copy_.default, (torch.empty_like(args[0]), args[0]), {}
        if func.name() not in ("aten::copy_", "aten::_fused_adamw_", "aten::_foreach_add_.Scalar"):
            return func(*args, **kwargs)
        self.play.current.work.append(lambda: func(*args, **kwargs))
        return args[0] if func.name() == "aten::copy_" else None


@pytest.fixture(params=BUCKETS)
def play(request, monkeypatch):
    """One bucket, a few or many, on a device whose freed memory is at once somebody else's."""
    monkeypatch.setattr(offload, "is_apart", lambda device: True)
    monkeypatch.setattr(moments, "BUCKET_BYTES", request.param)
    monkeypatch.setattr(adam, "MIN_ROWS", 16)
    run, empty = moments.Shuttle.run, torch.empty

    def start(seed, pace):
        found = Play(seed, pace)

        def noted_run(shuttle, *given):
            shuttle._has_streams, (shuttle._coming, shuttle._going) = True, found.streams[1:]
            buffers = []

            def room(*size, **options):
                buffers.append(empty(*size, **options))
                spoil(buffers[-1])
                return buffers[-1]

            with monkeypatch.context() as patch, Noted(found):
                patch.setattr(torch, "empty", room)
                patch.setattr(torch.cuda, "current_stream", lambda device: found.current)
                patch.setattr(torch.cuda, "stream", found.on)
                run(shuttle, *given)
            for buffer in buffers:
                spoil(buffer)

        def spoil(buffer):
            """As whoever has the room before and after; four such bytes are not a number."""
            found.current.work.append(lambda: buffer.fill_(255))

        monkeypatch.setattr(moments.Shuttle, "run", noted_run)
        return found

    return start


@pytest.mark.parametrize("pace", PACES)
def test_no_copy_is_read_or_overwritten_too_early(play, pace):
    for seed in range(5):
        played = play(seed, pace)
        stay, wait = Model(), Model()
        plain, away = optimisation(stay, offloads=False), optimisation(wait, offloads=True)
        for n in range(len(STEPS)):
            step(stay, plain, n)
            step(wait, away, n)
            if (n + seed) % 2:
                assert same(stored(plain.adam.state_dict()), stored(away.adam.state_dict()))
            played.go_on()  # as the next forward has it
            assert equal(stay, wait)


@pytest.mark.parametrize("kind", [Stream, Event])
def test_without_the_waits_it_would_show(play, kind, monkeypatch):
    if kind is Stream:
        monkeypatch.setattr(Stream, "wait_event", lambda self, event: None)
    else:
        monkeypatch.setattr(Event, "synchronize", lambda self: None)
    with pytest.raises(AssertionError):
        for pace in PACES:
            test_no_copy_is_read_or_overwritten_too_early(play, pace)
