"""What every loop shares: stop at a step border, save, go on."""

from __future__ import annotations

import json
import os
import signal

import pytest
import torch

from heedful.batches import StepStats
from heedful.config.section import CheckpointConfig
from heedful.errors import CheckpointError
from heedful.runs.folder import StageFolder
from heedful.train import checkpoint
from heedful.train.loop import Interrupted, Loop


class Sum:
    """A state that every step changes."""

    def __init__(self):
        self.total = 0.0

    def step(self, i):
        self.total += float(torch.rand(()))  # moves with the random stream
        return StepStats({"sft/loss_nats": self.total})

    def state_dict(self):
        return {"total": self.total}

    def load_state_dict(self, state):
        self.total = state["total"]


def loop(path, part, *, every_steps=100, total_steps=6, **options):
    stage = StageFolder(path, "sft", 1)
    return Loop("Toy", stage, total_steps, CheckpointConfig(every_steps=every_steps), parts={"sum": part}, **options)


def interrupted_by(number, at, part):
    def step(i):
        if i == at:
            os.kill(os.getpid(), number)
        return part.step(i)

    return step


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("at", [0, 3, 5])
def test_a_signal_stops_after_the_step_and_the_run_goes_on_as_if_nothing_was(tmp_path, number, at):
    """Also in the last step: what follows (saving a model, the next stage) would be hours more."""
    torch.manual_seed(0)
    straight = Sum()
    loop(tmp_path / "a", straight).run(straight.step)
    torch.manual_seed(0)
    part = Sum()
    handlers = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with pytest.raises(Interrupted, match=f"stopped after step {at + 1} of 6"):
        loop(tmp_path / "b", part).run(interrupted_by(number, at, part))
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == handlers
    assert checkpoint.load_newest(tmp_path / "b/checkpoints")[0] == at + 1
    torch.manual_seed(7)
    resumed = Sum()
    loop(tmp_path / "b", resumed).run(resumed.step)
    assert resumed.total == straight.total

    def losses(name):
        lines = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line)["sft/loss_nats"] for line in lines]

    assert losses("a") == losses("b") and len(losses("b")) == 6


def test_who_asks_is_told_of_every_complete_checkpoint_and_of_no_other(tmp_path, monkeypatch):
    told = []
    part = Sum()
    loop(tmp_path, part, every_steps=2, on_saved=lambda done: told.append(
        (done, checkpoint.load_newest(tmp_path / "checkpoints")[0])
    )).run(part.step)  # fmt: skip
    assert told == [(2, 2), (4, 4)]

    def full(*_, **__):
        raise CheckpointError("disk full")

    monkeypatch.setattr(checkpoint, "save", full)
    with pytest.raises(CheckpointError, match="disk full"):
        loop(tmp_path, part, every_steps=5, on_saved=told.append).run(part.step)
    assert len(told) == 2


def test_a_second_signal_stops_at_once(tmp_path):
    handler = signal.getsignal(signal.SIGINT)  # SIG_IGN where a shell started the tests in the background
    part = Sum()

    def step(i):
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        raise AssertionError("went on")

    with pytest.raises(KeyboardInterrupt) as caught:
        loop(tmp_path, part).run(step)
    assert not isinstance(caught.value, Interrupted) and signal.getsignal(signal.SIGINT) is handler


@pytest.mark.parametrize("every_steps, saved", [(1, [5]), (2, [4]), (4, [4]), (6, []), (100, [])])
def test_checkpoints_come_every_so_many_steps_and_the_end_needs_none(tmp_path, every_steps, saved):
    part = Sum()
    loop(tmp_path, part, every_steps=every_steps).run(part.step)
    names = sorted(p.name for p in (tmp_path / "checkpoints").glob("*"))
    assert names == [f"step-{n:08d}" for n in saved]


def test_rows_after_the_checkpoint_are_written_anew(tmp_path):
    """Killed two steps after a save: those two steps are not logged twice."""
    part = Sum()

    def dies(i):
        if i == 5:
            raise RuntimeError("killed")
        return part.step(i)

    with pytest.raises(RuntimeError, match="killed"):
        loop(tmp_path, part, every_steps=3).run(dies)
    resumed = Sum()
    loop(tmp_path, resumed, every_steps=3).run(resumed.step)
    rows = [json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert rows == [0, 1, 2, 3, 4, 5]


def test_RES_05_a_run_whose_checkpoints_are_all_damaged_does_not_begin_again_by_itself(tmp_path):
    part = Sum()
    loop(tmp_path, part, every_steps=2).run(part.step)
    for file in (tmp_path / "checkpoints").glob("*/sum.pt"):
        file.write_bytes(file.read_bytes()[:20])
    with pytest.raises(CheckpointError, match="none of the checkpoints is usable, so this run cannot go on"):
        loop(tmp_path, Sum()).run(part.step)
