"""Scores on disk: found again by content, shared by processes, bounded, and never worse than having none."""

from __future__ import annotations

import math
import shutil
import sqlite3
import subprocess
import sys

import pytest
import torch

from heedful.models.folders import folder_digest
from heedful.models.roles import build_reward
from heedful.pipeline.scorer import open_scorer
from heedful.records import Message, Prompt
from heedful.rollout.cache import CachedReward, ScoreCache
from heedful.rollout.score import LastRead, LearnedReward
from toy_parts import CPU, model_folder

PROMPTS = [(Message("user", f"Say {n}"),) for n in range(6)]
ANSWERS = ["a", "two words", "a", "Ünïcode 汉字", "", "long " * 9]


class Counting:
    """Two outputs a text; counts how often each is asked."""

    def __init__(self, of=lambda prompt, answer: [len(answer) / 3, -1.0]):
        self.asked, self._of = [], of

    def output_texts(self, prompts, answers, *, micro_batch_tokens):
        self.asked += [(p[-1].content, a) for p, a in zip(prompts, answers, strict=True)]
        return [self._of(p, a) for p, a in zip(prompts, answers, strict=True)]


def ask(model, prompts=PROMPTS, answers=ANSWERS):
    return model.output_texts(prompts, answers, micro_batch_tokens=100)


def test_every_text_is_asked_once_and_order_is_kept(tmp_path):
    model = Counting()
    cache = CachedReward(model, "m", ScoreCache(tmp_path / "deep" / "scores.sqlite"))
    expected = [[len(a) / 3, -1.0] for a in ANSWERS]
    assert ask(cache) == expected and len(model.asked) == 6
    assert ask(cache, PROMPTS[::-1], ANSWERS[::-1]) == expected[::-1] and len(model.asked) == 6
    assert ask(cache, [PROMPTS[0], PROMPTS[1], PROMPTS[0], PROMPTS[1]], ["a", "b", "a", "b"])[2] == [1 / 3, -1.0]
    assert len(model.asked) == 7  # "b" to prompt 1, once
    again = Counting()
    assert ask(CachedReward(again, "m", ScoreCache(tmp_path / "deep" / "scores.sqlite"))) == expected
    assert again.asked == [] and ask(cache, [], []) == []


def test_another_model_role_or_border_is_another_key(tmp_path):
    cache, model = ScoreCache(tmp_path / "s"), Counting()
    ask(CachedReward(model, "m", cache), [(Message("user", "ab"),)], ["c"])
    for digest, prompt, answer in [
        ("n", (Message("user", "ab"),), "c"), ("m", (Message("system", "ab"),), "c"),
        ("m", (Message("user", "a"),), "bc"), ("m", (Message("user", "a"), Message("user", "b")), "c"),
    ]:  # fmt: skip
        before = len(model.asked)
        ask(CachedReward(model, digest, cache), [prompt], [answer])
        assert len(model.asked) == before + 1


def test_the_digest_goes_by_content_not_by_place(tmp_path):
    first = model_folder(tmp_path / "one", scalar=1)
    digest = folder_digest(first)
    shutil.copytree(first, tmp_path / "two")
    (tmp_path / "two" / "reward_card.json").write_text("{}")
    (tmp_path / "two" / "README.md").write_text("about")
    assert folder_digest(tmp_path / "two") == digest
    for change in ("model.safetensors", "tokenizer.json", "chat_template.jinja"):
        file = tmp_path / "two" / change
        whole = file.read_bytes()
        file.write_bytes(whole[:-2] + bytes([whole[-2] ^ 1]) + whole[-1:])
        assert folder_digest(tmp_path / "two") != digest, change
        file.write_bytes(whole)
    assert folder_digest(tmp_path / "two") == digest


def test_the_oldest_go_when_it_is_full(tmp_path):
    cache, model = ScoreCache(tmp_path / "s", max_entries=4), Counting()
    for prompt, answer in zip(PROMPTS, ANSWERS, strict=True):
        ask(CachedReward(model, "m", cache), [prompt], [answer])
    with sqlite3.connect(tmp_path / "s") as connection:
        assert connection.execute("SELECT count(*) FROM scores").fetchone() == (4,)
    connection.close()
    model.asked.clear()
    ask(CachedReward(model, "m", cache))
    assert model.asked == [("Say 0", "a"), ("Say 1", "two words")]


@pytest.mark.parametrize("damage", ["no database", "torn", "flipped bit"])
def test_damage_is_said_and_a_new_file_begun(tmp_path, damage):
    path, said, model = tmp_path / "s", [], Counting()
    ask(CachedReward(model, "m", ScoreCache(path)))
    content = path.read_bytes()
    if damage == "flipped bit":  # in the middle of a value, which SQLite does not check
        with sqlite3.connect(path) as connection:
            (value,) = connection.execute("SELECT value FROM scores WHERE id = 2").fetchone()
        connection.close()
        at = content.index(value) + 7
        path.write_bytes(content[:at] + bytes([content[at] ^ 64]) + content[at + 1 :])
    else:
        path.write_bytes(b"hello" * 3000 if damage == "no database" else content[: len(content) // 2])
    cache = CachedReward(model, "m", ScoreCache(path, say=said.append))
    expected = [[len(a) / 3, -1.0] for a in ANSWERS]
    assert ask(cache) == expected and len(model.asked) == 12
    assert len(said) == 1 and "damaged" in said[0] and str(path) in said[0]
    assert ask(cache) == expected and len(model.asked) == 12  # the new file works


def test_a_file_that_cannot_be_written_is_said_once(tmp_path):
    said, model = [], Counting()
    (tmp_path / "file").write_text("")
    cache = CachedReward(model, "m", ScoreCache(tmp_path / "file" / "s", say=said.append))
    assert ask(cache) == ask(cache) == [[len(a) / 3, -1.0] for a in ANSWERS]
    assert len(said) == 1 and "going on without it" in said[0]


def test_what_is_not_finite_is_not_kept(tmp_path):
    model = Counting(lambda prompt, answer: [math.nan if answer == "" else 1.0])
    cache = CachedReward(model, "m", ScoreCache(tmp_path / "s"))
    ask(cache), model.asked.clear(), ask(cache)
    assert model.asked == [("Say 4", "")]


WRITER = """
import sys
from pathlib import Path
from heedful.rollout.cache import ScoreCache
cache = ScoreCache(Path(sys.argv[1]), say=lambda line: sys.exit(line))
for i in range(60):
    keys = [b"%32d" % (2 * i + n + int(sys.argv[2]) * (n == 1)) for n in range(2)]
    cache.get(keys)
    cache.put({key: [float(key)] for key in keys})
"""


def test_two_processes_write_at_once(tmp_path):
    command = [sys.executable, "-c", WRITER, str(tmp_path / "s")]
    writers = [subprocess.Popen([*command, n], stderr=subprocess.PIPE, text=True) for n in ("0", "1000")]
    for writer in writers:
        _, said = writer.communicate(timeout=60)
        assert writer.returncode == 0, said
    keys = [b"%32d" % (2 * i + n + more * (n == 1)) for i in range(60) for n in range(2) for more in (0, 1000)]
    found = ScoreCache(tmp_path / "s").get(keys)
    assert len(found) == 180 and all(value == [float(key)] for key, value in found.items())


def test_live_and_cached_scores_are_equal(tmp_path):
    path = model_folder(tmp_path / "reward", scalar=1)
    live = build_reward(path, device=CPU, dtype=torch.float32)
    expected = live.score_texts(PROMPTS, ANSWERS, micro_batch_tokens=64)
    prompts = [Prompt(f"p{n}", p) for n, p in enumerate(PROMPTS)]
    cache = ScoreCache(tmp_path / "s")
    for _ in range(2):
        scorer = open_scorer(str(path), device="cpu", dtype="float32", cache=cache)
        assert scorer(prompts, ANSWERS) == pytest.approx(expected, abs=1e-4)
    assert scorer(prompts, ANSWERS) == scorer(prompts[::-1], ANSWERS[::-1])[::-1]  # to the bit
    assert len(cache.get([key for (key,) in rows(tmp_path / "s")])) == 6


def rows(path):
    connection = sqlite3.connect(path)
    found = connection.execute("SELECT key FROM scores").fetchall()
    connection.close()
    return found


def test_the_model_behind_what_remembers_is_found(tmp_path):
    model = Counting()
    remembering = LastRead(CachedReward(model, "m", ScoreCache(tmp_path / "s")))
    assert LearnedReward(remembering, micro_batch_tokens=64).model is model
