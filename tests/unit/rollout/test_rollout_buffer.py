"""A rollout that was killed goes on: finished chunks are read, the rest is sampled, and the result is the same."""

from __future__ import annotations

import errno
import json
import os

import pytest
import torch

from heedful.config.section import LoraConfig
from heedful.data.chat import end_token_ids
from heedful.errors import CheckpointError
from heedful.rollout.buffer import RolloutBuffer
from heedful.rollout.engine import Request, Sampling
from heedful.rollout.hf import HFEngine
from toy_parts import disturb, policy, requests

TEXTS = ["a", "I", "up", "red", "two words", "a rather long question", "an even longer question than that one"]
SAMPLING = Sampling(6)
WEIGHTS = {"w": torch.arange(6.0).view(2, 3), "b": torch.tensor(0.5)}


class Killed(BaseException):
    """Stands for SIGKILL: nothing catches it."""


class Counting:
    """An engine that notes what it is asked and dies at the call numbered ``dies_at``."""

    def __init__(self, engine, dies_at=None):
        self._engine, self.dies_at, self.asked = engine, dies_at, []

    def generate(self, requests, sampling, *, seed, on_done=None):
        if len(self.asked) == self.dies_at:
            raise Killed
        self.asked.append([r.prompt_id for r in requests])
        return self._engine.generate(requests, sampling, seed=seed)


@pytest.fixture(scope="module")
def part(folder):
    return policy(folder("Llama"))


@pytest.fixture(scope="module")
def engine(part):
    return HFEngine(part, end_token_ids(part.tokenizer), batch_size=2)


@pytest.fixture
def wanted(part):
    chosen = requests(part.tokenizer, TEXTS)
    return [chosen[i] for i in (3, 0, 6, 5, 1, 4, 2)]  # not sorted by length


def generate(folder, engine, wanted, *, seed=1, step=4, sampling=SAMPLING, weights=WEIGHTS, chunk=2):
    counting = engine if isinstance(engine, Counting) else Counting(engine)
    found = RolloutBuffer(folder, chunk=chunk).generate(
        counting, wanted, sampling, seed=seed, step=step, weights=weights
    )
    return found, counting.asked


def file_of(folder, step=4):
    return folder / f"step-{step:08d}.jsonl"


def test_answers_are_the_engines_own_in_order_longest_chunk_first(tmp_path, engine, wanted):
    found, asked = generate(tmp_path, engine, wanted)
    assert found == engine.generate(wanted, SAMPLING, seed=1)
    assert asked == [["p6"], ["p4", "p5"], ["p2", "p3"], ["p0", "p1"]]


@pytest.mark.parametrize("dies_at", range(4))
def test_RES_05_a_killed_rollout_samples_only_what_is_missing(tmp_path, engine, wanted, dies_at):
    straight, asked = generate(tmp_path / "straight", engine, wanted)
    with pytest.raises(Killed):
        generate(tmp_path, Counting(engine, dies_at), wanted)
    found, asked_again = generate(tmp_path, engine, wanted)
    assert found == straight  # ids, texts and log-probs to the last bit
    assert asked_again == asked[dies_at:]
    assert generate(tmp_path, engine, wanted) == (straight, [])


def test_RES_07_wherever_a_write_was_cut_the_result_is_the_same(tmp_path, engine, wanted):
    straight, _ = generate(tmp_path, engine, wanted)
    content = file_of(tmp_path).read_bytes()
    rng = torch.Generator().manual_seed(0)
    lines = [i for i, byte in enumerate(content) if byte == ord("\n")]
    cuts = {*lines, *(i + 1 for i in lines), *torch.randint(len(content), (40,), generator=rng).tolist()}
    for cut in cuts:
        file_of(tmp_path).write_bytes(content[:cut])
        found, asked = generate(tmp_path, engine, wanted)
        whole_lines = sum(1 for line in content[:cut].split(b"\n") if line and line in content.split(b"\n"))
        assert found == straight and len(asked) == 4 - whole_lines
        assert generate(tmp_path, engine, wanted)[1] == []  # what was added after the torn line is found again


def test_RES_07_a_flipped_bit_anywhere_is_never_believed(tmp_path, engine, wanted):
    straight, _ = generate(tmp_path, engine, wanted)
    content = file_of(tmp_path).read_bytes()
    rng = torch.Generator().manual_seed(1)
    for place in torch.randint(len(content), (150,), generator=rng).tolist():
        damaged = bytearray(content)
        damaged[place] ^= 1 << int(torch.randint(8, (), generator=rng))
        file_of(tmp_path).write_bytes(damaged)
        assert generate(tmp_path, engine, wanted)[0] == straight
    file_of(tmp_path).write_bytes(b'\xff\xfe\x00{"\n[]\n1\nnull\n{"key": 1}\n' + content[:30])
    assert generate(tmp_path, engine, wanted)[0] == straight


def test_lines_that_were_made_for_something_else_are_not_used(tmp_path, engine, wanted):
    generate(tmp_path, engine, wanted)
    nudged = {name: weight.clone() for name, weight in WEIGHTS.items()}
    nudged["w"][1, 2] = torch.nextafter(nudged["w"][1, 2], torch.tensor(9.0))
    swapped = {**WEIGHTS, "w": WEIGHTS["w"].flip(0)}
    other_ids = [Request(r.prompt_id, r.sample_index, [*r.prompt_ids[:-1], 5]) for r in wanted]
    for change in (
        {"seed": 2}, {"sampling": Sampling(5)}, {"sampling": Sampling(6, 0.5)}, {"weights": nudged},
        {"weights": swapped}, {"weights": {"v": WEIGHTS["w"], "b": WEIGHTS["b"]}}, {"step": 5},
    ):  # fmt: skip
        assert len(generate(tmp_path, engine, wanted, **change)[1]) == 4, change
    assert len(generate(tmp_path, engine, other_ids)[1]) == 4
    assert len(generate(tmp_path, engine, [Request(r.prompt_id, 7, r.prompt_ids) for r in wanted])[1]) == 4
    content = file_of(tmp_path).read_bytes()  # a line under the name of another step is foreign as well
    file_of(tmp_path, 6).write_bytes(content)
    assert len(generate(tmp_path, engine, wanted, step=6)[1]) == 4


@pytest.mark.parametrize("lora", [None, LoraConfig(rank=4)], ids=["full", "lora"])
def test_the_policys_own_weights_tell_two_policies_apart(tmp_path, folder, lora):
    part = policy(folder("Llama"), lora=lora)
    wanted = requests(part.tokenizer)
    engine = HFEngine(part, end_token_ids(part.tokenizer))
    before, _ = generate(tmp_path, engine, wanted, weights=part.trainable_parameters())
    disturb(part)
    engine.sync(part, version=1)
    after, asked = generate(tmp_path, engine, wanted, weights=part.trainable_parameters())
    assert len(asked) == 3 and after != before


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_weights_of_any_dtype(tmp_path, engine, wanted, dtype):
    weights = {"w": torch.randn(3, 5).to(dtype).t(), "scalar": torch.tensor(1.0, dtype=dtype)}
    assert len(generate(tmp_path, engine, wanted, weights=weights)[1]) == 4
    assert generate(tmp_path, engine, wanted, weights=weights)[1] == []


def test_forget_before_keeps_the_steps_to_come_and_leaves_no_empty_folder(tmp_path, engine, wanted):
    folder = tmp_path / "rollouts"
    buffer = RolloutBuffer(folder, chunk=2)
    buffer.forget_before(3)  # nothing there yet
    for step in (3, 4, 5):
        generate(folder, engine, wanted, step=step)
    buffer.forget_before(5)
    assert [p.name for p in folder.iterdir()] == ["step-00000005.jsonl"]
    assert generate(folder, engine, wanted, step=5)[1] == []
    buffer.forget_before(6)
    assert not folder.exists()


def test_forget_before_touches_nothing_else(tmp_path, engine, wanted):
    generate(tmp_path, engine, wanted)
    (tmp_path / "notes.txt").write_text("mine")
    RolloutBuffer(tmp_path, chunk=2).forget_before(9)
    assert [p.name for p in tmp_path.iterdir()] == ["notes.txt"]


def test_RES_07_a_full_disk_says_so_and_loses_no_finished_chunk(tmp_path, engine, wanted, monkeypatch):
    real, calls = os.fsync, []

    def full(handle):
        calls.append(handle)
        if len(calls) == 4:  # file, folder, file, then this one
            os.ftruncate(handle, os.fstat(handle).st_size - 40)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(handle)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(CheckpointError, match=r"step-00000004\.jsonl: cannot write: No space left on device; fin"):
            generate(tmp_path, engine, wanted)
    found, asked = generate(tmp_path, engine, wanted)
    assert asked == [["p2", "p3"], ["p0", "p1"]] and found == engine.generate(wanted, SAMPLING, seed=1)


def test_every_chunk_is_on_disk_before_the_next_begins(tmp_path, engine, wanted, monkeypatch):
    events = []
    real = os.fsync
    monkeypatch.setattr(os, "fsync", lambda handle: (events.append("fsync"), real(handle))[1])

    class Telling(Counting):
        def generate(self, requests, sampling, *, seed, on_done=None):
            events.append("generate")
            return super().generate(requests, sampling, seed=seed)

    generate(tmp_path, Telling(engine), wanted)
    assert events == ["generate", "fsync", "fsync", *["generate", "fsync"] * 3]  # the folder once
    rows = [json.loads(line) for line in file_of(tmp_path).read_bytes().split(b"\n") if line]
    assert [len(row["entry"]["completions"]) for row in rows] == [1, 2, 2, 2]
