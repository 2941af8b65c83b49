"""Whatever happens while a checkpoint is saved, the newest complete one survives and is used.

A save runs in a forked process in which every system call that changes the disk is counted. The process dies before the
n-th one, for every n, as by SIGKILL: nothing is flushed, closed or tidied. A write may also stop half way. Then what a
resumed run does is done: load, go on, save.
"""

from __future__ import annotations

import errno
import io
import os
import resource
import shutil
from pathlib import Path

import pytest
import torch

from heedful.errors import CheckpointError
from heedful.train import checkpoint

CALLS = ("mkdir", "rename", "replace", "fsync", "unlink", "remove", "rmdir")
KILLED, DONE = 9, 0


def state(value):
    return {"policy": {"w": torch.full((300,), float(value))}, "loop": {"step": value, "history": list(range(50))}}


def is_state(found, value):
    return found.keys() == state(value).keys() and torch.equal(found["policy"]["w"], state(value)["policy"]["w"]) and (
        found["loop"] == state(value)["loop"]
    )  # fmt: skip


class Faults:
    """Counts the calls that change the disk; what happens at the n-th is ``act(name)``, all others are real."""

    def __init__(self, patch, at, act):
        self.seen, self._at, self._act = [], at, act
        for name in CALLS:
            patch.setattr(os, name, self._counted(name, getattr(os, name)))
        faults, real_open = self, Path.open

        class Raw(io.FileIO):
            def write(self, data):
                faults.count("write", lambda: super(Raw, self).write(bytes(data)[: len(data) // 2]))
                return super().write(data)

        def open_counted(path, mode="r", *rest, **options):
            if "b" not in mode or mode == "rb":
                return real_open(path, mode, *rest, **options)
            faults.count("open")
            return io.BufferedWriter(Raw(path, mode))

        patch.setattr(Path, "open", open_counted)

    def _counted(self, name, real):
        def call(*arguments, **options):
            self.count(name)
            return real(*arguments, **options)

        return call

    def count(self, name, half=None):
        self.seen.append(name)
        if len(self.seen) - 1 == self._at:
            self._act(half)


def die(half):
    if half is not None:
        half()
    os._exit(KILLED)


def dies_at(n, work):
    """Run ``work`` in a process that dies at call ``n``; whether it got there."""
    child = os.fork()
    if child == 0:
        try:
            with pytest.MonkeyPatch.context() as patch:
                Faults(patch, n, die)
                work()
            os._exit(DONE)
        finally:
            os._exit(1)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (KILLED, DONE)
    return code == KILLED


def fail(number):
    def act(half):
        if half is not None:
            half()
        raise OSError(number, os.strerror(number), "somewhere")

    return act


def flip(folder, name="policy.pt", place=0.5):
    data = bytearray((folder / name).read_bytes())
    data[int(place * len(data))] ^= 1
    (folder / name).write_bytes(data)


def load(folder):
    """(step, state, what was said)."""
    said = []
    found = checkpoint.load_newest(folder, say=said.append)
    assert found is not None
    return (*found, said)


def names(folder):
    return sorted(p.name for p in folder.iterdir())


def prepared(folder, steps, keep):
    for step in steps:
        checkpoint.save(folder, step, state(step), keep=keep)
    return folder


@pytest.mark.parametrize(("num_before", "keep"), [(0, 1), (1, 1), (2, 2), (3, 3)])
def test_RES_07_killed_before_every_system_call_of_a_save(tmp_path, num_before, keep):
    start = prepared(tmp_path / "start", range(1, num_before + 1), keep)
    start.mkdir(exist_ok=True)
    new, kills = num_before + 1, 0
    while True:
        folder = shutil.copytree(start, tmp_path / str(kills))
        if not dies_at(kills, lambda folder=folder: checkpoint.save(folder, new, state(new), keep=keep)):
            break
        found = checkpoint.load_newest(folder)
        if num_before or found is not None:  # before the very first one is complete there is nothing to load
            step, loaded = found
            assert step in (num_before, new) and is_state(loaded, step)
            assert step == new or not (folder / f"step-{new:08d}").exists()
        checkpoint.save(folder, new, state(new), keep=keep)  # the resumed run gets there again
        checkpoint.save(folder, new + 1, state(new + 1), keep=keep)
        kept = [f"step-{n:08d}" for n in range(max(1, new + 2 - keep), new + 2)]
        assert names(folder) == kept  # no rubbish, not one too many
        assert is_state(load(folder)[1], new + 1)
        kills += 1
    assert kills > 12, "the faults were not where the save works"
    assert is_state(load(folder)[1], new)


def test_RES_07_killed_while_a_step_is_saved_again(tmp_path):
    """Whether the one there is whole or damaged: never a moment without a complete checkpoint."""
    for damaged in (False, True):
        start = prepared(tmp_path / f"start-{damaged}", (1, 2), keep=2)
        if damaged:
            flip(start / "step-00000002")
        kills = 0
        while True:
            folder = shutil.copytree(start, tmp_path / f"{kills}-{damaged}")
            if not dies_at(kills, lambda folder=folder: checkpoint.save(folder, 2, state(20), keep=2)):
                break
            step, loaded, said = load(folder)
            if damaged:
                assert (step, is_state(loaded, step)) == (1, True) or is_state(loaded, 20)
            else:
                assert step == 2 and (is_state(loaded, 2) or is_state(loaded, 20)) and not said
            checkpoint.save(folder, 2, state(20), keep=2)
            assert names(folder) == ["step-00000001", "step-00000002"] and is_state(load(folder)[1], 20)
            kills += 1
        assert kills > 12


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EACCES, errno.EIO], ids=["disk full", "no permission", "i/o"])
def test_RES_07_every_system_call_of_a_save_refused(tmp_path, monkeypatch, number):
    """One sentence, no rubbish where it can be removed, the old one or the new one complete."""
    start = prepared(tmp_path / "start", (1, 2), keep=1)
    outcomes = []
    while True:
        folder, said = shutil.copytree(start, tmp_path / str(len(outcomes))), []
        with monkeypatch.context() as patch:
            faults = Faults(patch, len(outcomes), fail(number))
            try:
                checkpoint.save(folder, 3, state(3), keep=1, say=said.append)
                outcome = "saved"
            except CheckpointError as error:
                outcome = "refused"
                assert "\n" not in str(error) and os.strerror(number) in str(error) and "step-00000003" in str(error)
        if len(faults.seen) <= len(outcomes):
            break
        step, loaded, _ = load(folder)
        assert is_state(loaded, step) and step == (3 if (folder / "step-00000003").exists() else 2)
        assert step == 3 if outcome == "saved" else not list(folder.glob("*.partial"))
        if outcome == "saved" and names(folder) != ["step-00000003"]:
            assert len(said) == 1 and os.strerror(number) in said[0]  # an old one that cannot go is told
        checkpoint.save(folder, 4, state(4), keep=1)
        assert names(folder) == ["step-00000004"]
        outcomes.append(outcome)
    assert outcomes.count("refused") > 10 and outcomes.count("saved") >= 3


@pytest.mark.parametrize("limit", [50, 600, 3000])
def test_RES_07_a_limit_of_the_system_on_file_size(tmp_path, limit):
    """A real refusal by the kernel, in the manifest, a small and a large file; torch reports it as something else."""
    folder = prepared(tmp_path / "c", (1,), keep=1)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    big = {**state(2), "value": torch.zeros(100_000)}
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        with pytest.raises(CheckpointError, match=r"could not be saved \(File too large\); older checkpoints are unt"):
            checkpoint.save(folder, 2, big)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert names(folder) == ["step-00000001"] and is_state(load(folder)[1], 1)
    checkpoint.save(folder, 2, big)
    assert load(folder)[0] == 2


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_RES_07_a_folder_without_write_permission(tmp_path):
    folder = prepared(tmp_path / "c", (1,), keep=1)
    folder.chmod(0o500)
    try:
        with pytest.raises(CheckpointError, match="Permission denied"):
            checkpoint.save(folder, 2, state(2))
        assert is_state(load(folder)[1], 1)
    finally:
        folder.chmod(0o700)


def test_a_place_where_no_folder_can_be(tmp_path):
    (tmp_path / "stage").write_text("a file")
    with pytest.raises(CheckpointError, match=r"step-00000001: could not be saved \(Not a directory\)"):
        checkpoint.save(tmp_path / "stage" / "checkpoints", 1, state(1))
    with pytest.raises(CheckpointError, match="cannot be read: Not a directory"):
        checkpoint.load_newest(tmp_path / "stage")


def test_RES_07_every_byte_of_the_newest_flipped(tmp_path):
    """The manifest included, whose own bytes nobody sums: it is used only when nothing it says has changed."""
    folder = prepared(tmp_path / "c", (1, 2), keep=2)
    newest = folder / "step-00000002"
    for file in sorted(newest.iterdir()):
        whole = file.read_bytes()
        every = 1 if file.suffix == ".json" else 97
        for place in range(0, len(whole), every):
            for bit in (0, 3, 5):
                changed = bytearray(whole)
                changed[place] ^= 1 << bit
                file.write_bytes(changed)
                step, loaded, said = load(folder)
                assert is_state(loaded, step), (file.name, place, bit)
                assert (step, len(said)) == (1, 1) or (step, said, file.suffix) == (2, [], ".json")
        file.write_bytes(whole)
    assert load(folder)[0] == 2


def test_RES_07_the_newest_cut_at_any_length_or_with_a_file_too_many_or_too_few(tmp_path):
    folder = prepared(tmp_path / "c", (1, 2), keep=2)
    newest = folder / "step-00000002"
    for file in sorted(newest.iterdir()):
        whole = file.read_bytes()
        for length in {0, 1, len(whole) // 2, len(whole) - 1}:
            file.write_bytes(whole[:length])
            step, loaded, said = load(folder)
            assert step == 1 and is_state(loaded, 1) and "step-00000002 is skipped" in said[0]
        file.unlink()
        assert load(folder)[0] == 1 and file.name in load(folder)[2][0]
        file.write_bytes(whole)
    (newest / "ema.pt").write_bytes(b"")
    assert load(folder)[0] == 1 and "ema.pt is missing" in load(folder)[2][0]


def test_RES_07_files_that_cannot_be_read_are_skipped_aloud(tmp_path, monkeypatch):
    folder = prepared(tmp_path / "c", (1, 2), keep=2)
    real = Path.open

    def refused(path, *rest, **options):
        if path.parent.name == "step-00000002" and path.name == "policy.pt":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return real(path, *rest, **options)

    monkeypatch.setattr(Path, "open", refused)
    step, _, said = load(folder)
    assert step == 1 and "policy.pt cannot be read (Permission denied)" in said[0]


def test_nothing_but_damaged_ones_is_a_fresh_start_that_says_so(tmp_path):
    folder = prepared(tmp_path / "c", (1, 2), keep=2)
    for path in folder.iterdir():
        flip(path)
    said = []
    assert checkpoint.load_newest(folder, say=said.append) is None
    assert [line.split(" is ")[0] for line in said] == ["checkpoint step-00000002", "checkpoint step-00000001"]


def test_RES_07_rotation_counts_complete_ones_only(tmp_path):
    folder = prepared(tmp_path / "c", (2, 4, 5), keep=3)
    flip(folder / "step-00000005")
    assert load(folder)[0] == 4
    checkpoint.save(folder, 6, state(6), keep=2)
    assert names(folder) == ["step-00000004", "step-00000006"]  # not 5, which nobody could use
    flip(folder / "step-00000006")
    assert load(folder)[0] == 4


@pytest.mark.parametrize("keep", [1, 2])
def test_RES_07_what_was_just_saved_is_never_rotated_out(tmp_path, keep):
    """A damaged checkpoint of a later step lies there, left by Ctrl-C at that step, and the run began again below."""
    folder = prepared(tmp_path / "c", (5,), keep=1)
    flip(folder / "step-00000005")
    checkpoint.save(folder, 2, state(2), keep=keep)
    assert names(folder) == ["step-00000002"] and is_state(load(folder)[1], 2)
