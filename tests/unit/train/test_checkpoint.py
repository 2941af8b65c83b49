"""A checkpoint is complete or it is not a checkpoint."""

import errno

import pytest
import torch

from heedful.errors import CheckpointError
from heedful.train import checkpoint


def state(value):
    return {"policy": {"w": torch.full((3,), float(value))}, "loop": {"step": value}}


def test_round_trip_is_exact(tmp_path):
    w = torch.randn(5, 7)
    checkpoint.save(tmp_path, 3, {"policy": {"w": w}, "loop": {"epoch": 1, "names": ["a"]}})
    step, found = checkpoint.load_newest(tmp_path)
    assert step == 3 and torch.equal(found["policy"]["w"], w) and found["loop"] == {"epoch": 1, "names": ["a"]}


def test_the_old_one_goes_only_when_the_new_one_is_complete(tmp_path):
    for step in (1, 2, 3):
        checkpoint.save(tmp_path, step, state(step), keep=2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-00000002", "step-00000003"]


def damage_cut(folder):
    path = folder / "policy.pt"
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def damage_flip(folder):
    data = bytearray((folder / "policy.pt").read_bytes())
    data[len(data) // 2] ^= 1
    (folder / "policy.pt").write_bytes(data)


def damage_missing(folder):
    (folder / "loop.pt").unlink()


def damage_manifest(folder):
    (folder / "manifest.json").write_text('{"step": 2, "fi')


@pytest.mark.parametrize("damage", [damage_cut, damage_flip, damage_missing, damage_manifest])
def test_RES_07_a_damaged_checkpoint_is_skipped_aloud(tmp_path, damage):
    checkpoint.save(tmp_path, 1, state(1), keep=2)
    checkpoint.save(tmp_path, 2, state(2), keep=2)
    damage(tmp_path / "step-00000002")
    said = []
    step, found = checkpoint.load_newest(tmp_path, say=said.append)
    assert step == 1 and found["loop"]["step"] == 1
    assert len(said) == 1 and "step-00000002 is skipped" in said[0]


def test_RES_07_leftovers_of_a_killed_save_never_count(tmp_path):
    checkpoint.save(tmp_path, 1, state(1))
    partial = tmp_path / "step-00000002.partial"
    partial.mkdir()
    (partial / "policy.pt").write_bytes(b"half")
    assert checkpoint.load_newest(tmp_path)[0] == 1
    checkpoint.save(tmp_path, 2, state(2))
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000002"]


def test_a_full_disk_leaves_the_older_checkpoint_and_no_rubbish(tmp_path, monkeypatch):
    checkpoint.save(tmp_path, 1, state(1))

    def full(value, handle):
        handle.write(b"x" * 100)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(CheckpointError, match="older checkpoints are untouched"):
        checkpoint.save(tmp_path, 2, state(2))
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000001"]
    assert checkpoint.load_newest(tmp_path)[0] == 1


def test_RES_05_a_missing_part_is_an_error_not_a_fresh_start():
    with pytest.raises(CheckpointError, match="has no 'value'"):
        checkpoint.take(state(1), "value")


def test_nothing_there_is_none(tmp_path):
    assert checkpoint.load_newest(tmp_path / "none") is None
