"""Servers are asked about a chunk while the next one is decoded; scores, their order and errors stay the same."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time

import pytest

from heedful.errors import EngineError
from heedful.records import Message, Prompt
from heedful.rollout.ahead import Ahead
from heedful.rollout.buffer import RolloutBuffer
from heedful.rollout.engine import Request, Sampling
from heedful.rollout.fake import FakeEngine
from heedful.rollout.scaling import Running
from heedful.rollout.score import Scoring
from heedful.rollout.sources import HTTPReward
from toy_parts import toy_tokenizer
from toy_server import PATIENCE, Server, Watched, answer, lengths

TOKENIZER = toy_tokenizer()
END = TOKENIZER.eos_token_id
PROMPTS = [Prompt(f"p{n}", (Message("user", f"Say {n}"),), info={"label": n}) for n in (3, 0, 4, 1, 2)]
REQUESTS = [Request(p.id, 0, TOKENIZER.encode("y" * (1 + p.info["label"]))) for p in PROMPTS]
CHUNKS = [["p4"], ["p2", "p3"], ["p0", "p1"]]
"""Two at a time, the longest first."""


class Stop(BaseException):
    """Stands for Ctrl-C."""


class Told(FakeEngine):
    """A scripted engine that says before a chunk which it is, by its number from 0."""

    def __init__(self, before=lambda number: None):
        super().__init__(lambda r: TOKENIZER.encode("x" * len(r.prompt_ids)) + [END], [END], TOKENIZER)
        self._before, self.asked = before, []

    def generate(self, requests, sampling, **options):
        self._before(len(self.asked))
        self.asked.append([r.prompt_id for r in requests])
        return super().generate(requests, sampling, **options)


def source(server, name="judge", **options):
    said = []
    options = {"retries": 1, "timeout_seconds": PATIENCE, "pause_seconds": 0.001, "say": said.append, **options}
    return HTTPReward(name, server.url, TOKENIZER, **options), said


def generate(folder, scoring, engine, step=0):
    with scoring.ahead(PROMPTS) as begin:
        return RolloutBuffer(folder, chunk=2).generate(
            engine, REQUESTS, Sampling(9), seed=0, step=step, weights={}, on_chunk=begin
        )


def gate():
    """A behaviour that waits, and what lets it go on."""
    is_open = threading.Event()

    def behave(handler, request):
        assert is_open.wait(PATIENCE)
        lengths(handler, request)

    return behave, is_open


def test_every_server_has_scored_a_chunk_before_the_next_is_decoded(tmp_path):
    with Watched(lengths) as one, Watched(lengths) as other:
        scoring = Scoring([source(one)[0], source(other, "facts")[0]])
        engine = Told(lambda number: [server.has_answered(number) or pytest.fail("waits") for server in (one, other)])
        completions = generate(tmp_path, scoring, engine)
        assert engine.asked == CHUNKS
        rollouts = scoring(PROMPTS, completions)
        assert one.labels == other.labels == [[4], [2, 3], [0, 1]] and one.at_once == other.at_once == 1
    assert [r.raw_parts["judge"] for r in rollouts] == [n + 1.0 + len("<|im_end|>") for n in (3, 0, 4, 1, 2)]
    assert all(r.raw_parts["judge"] == r.raw_parts["facts"] for r in rollouts)


def test_who_computes_here_scores_while_a_server_is_still_at_work(tmp_path):
    behave, is_open = gate()

    class Local:
        name, weight = "local", 1.0

        def __call__(self, prompts, completions):
            is_open.set()  # the server answers from now on
            return [1.0] * len(completions)

    with Watched(behave) as server:
        scoring = Scoring([source(server)[0], Local()])
        rollouts = scoring(PROMPTS, generate(tmp_path, scoring, Told()))
    assert all(list(r.raw_parts) == ["judge", "local"] for r in rollouts)  # the order is the recipe's


def test_scores_and_statistics_are_those_without(tmp_path):
    def run(folder, ahead):
        with Server(lengths) as server:
            scoring = Scoring([source(server, weight=0.3)[0]], {"judge": Running()})
            found = []
            for step in range(3):
                before = scoring.state_dict()
                completions = generate(folder, scoring, Told(), step) if ahead else Told().generate(
                    REQUESTS, Sampling(9), seed=0)  # fmt: skip
                assert scoring.state_dict() == before
                rollouts = scoring(PROMPTS, completions)
                found.append((rollouts, scoring.state_dict()))
            return found

    assert run(tmp_path, True) == run(tmp_path, False)


def test_what_was_not_begun_is_asked_at_the_call(tmp_path):
    with Watched(lengths) as server:
        scoring = Scoring([source(server)[0]])
        completions = Told().generate(REQUESTS, Sampling(9), seed=0)
        with scoring.ahead(PROMPTS) as begin:
            begin([2, 0], [completions[2], completions[0]])
        rollouts = scoring(PROMPTS, completions)
        assert server.labels == [[4, 3], [0, 1, 2]] and server.at_once == 1
        assert rollouts == scoring(PROMPTS, completions) and len(server.requests) == 3  # nothing is remembered


def test_chunks_of_a_killed_rollout_are_asked_about_at_once(tmp_path):
    def stop(number):
        if number == 2:
            assert server.has_answered(2)
            raise Stop

    with Watched(lengths) as server:
        with pytest.raises(Stop):
            generate(tmp_path, Scoring([source(server)[0]]), Told(stop))
        asked = len(server.requests)
        scoring = Scoring([source(server)[0]])
        engine = Told(lambda number: server.has_answered(asked + 2) or pytest.fail("waits"))
        completions = generate(tmp_path, scoring, engine)
        assert engine.asked == CHUNKS[2:]
        rollouts = scoring(PROMPTS, completions)
        assert server.labels[asked:] == [[4], [2, 3], [0, 1]]
        assert rollouts == scoring(PROMPTS, completions)


@pytest.mark.parametrize(
    ("bad", "reason", "tries"),
    [
        (answer(b"", 500), "gave no scores in 2 tries \\(HTTP 500", 2), (answer(b"", 404), "HTTP 404", 1),
        (answer({"rewards": [1, 2, 3]}), "3 scores for 1 answers", 1), (answer({"rewards": [None]}), "not None", 1),
    ],
    ids=["down", "404", "too many", "no number"],
)  # fmt: skip
def test_an_error_appears_at_the_call_and_no_later_chunk_is_asked(tmp_path, bad, reason, tries):
    with Server(bad) as server:
        reward, said = source(server)
        scoring = Scoring([reward])
        completions = generate(tmp_path, scoring, Told())
        with pytest.raises(EngineError, match=f"reward 'judge': http.*{reason}") as found:
            scoring(PROMPTS, completions)
        assert len(server.requests) == tries and len(said) == tries - 1 and "\n" not in str(found.value)
        with pytest.raises(EngineError) as again:
            Scoring([source(server)[0]])(PROMPTS[2:3], completions[2:3])  # the chunk that failed, without
        assert str(found.value) == str(again.value)


def test_a_failed_chunk_of_a_step_that_was_given_up_is_no_error_of_the_next(tmp_path):
    def stop(number):
        assert server.has_answered(number)
        if number == 1:
            raise Stop

    with Watched(answer(b"", 404), lengths) as server:
        scoring = Scoring([source(server)[0]])
        with pytest.raises(Stop):
            generate(tmp_path, scoring, Told(stop))
        generate(tmp_path, scoring, Told(), step=1)  # given up as well, after its block
        completions = generate(tmp_path, scoring, Told(), step=2)
        assert len(scoring(PROMPTS, completions)) == 5


def test_a_step_that_was_given_up_asks_nothing_more(tmp_path):
    wait, is_open = gate()

    def stop(number):
        if number == 2:
            raise Stop

    with Watched(wait, lengths) as server:
        reward, said = source(server)
        scoring = Scoring([reward])
        with pytest.raises(Stop):
            generate(tmp_path, scoring, Told(stop))
        completions = generate(tmp_path, scoring, Told(), step=1)
        is_open.set()
        rollouts = scoring(PROMPTS, completions)
        assert server.labels in ([[4], [4], [2, 3], [0, 1]], [[4], [2, 3], [0, 1]])
        assert rollouts == scoring(PROMPTS, completions) and said == []


@pytest.mark.parametrize("server_waits", [True, False], ids=["in a request", "before the next try"])
def test_a_block_that_fails_leaves_no_thread_behind(server_waits):
    """One that still waits when the process ends makes CPython 3.11 with torch hang, one time in ten."""
    wait, is_open = gate()
    is_asked = threading.Event()

    def behave(handler, request):
        is_asked.set()
        (wait if server_waits else answer(b"", 500))(handler, request)

    with Server(behave) as server:
        reward, said = source(server, retries=5, timeout_seconds=600.0, pause_seconds=600.0)
        with pytest.raises(Stop), Scoring([reward]).ahead(PROMPTS) as begin:
            begin([0], Told().generate(REQUESTS[:1], Sampling(9), seed=0))
            (thread,) = (t for t in threading.enumerate() if t.name == "reward judge")
            while not (is_asked.is_set() and (server_waits or said)):
                time.sleep(0.01)
            raise Stop
        assert not thread.is_alive() and len(said) == (not server_waits) and len(server.requests) == 1
        is_open.set()


def test_another_source_that_fails_drops_what_was_begun(tmp_path):
    class Broken:
        name, weight = "broken", 1.0

        def __call__(self, prompts, completions):
            raise EngineError("broken")

    with Server(answer(b"", 404)) as server:
        reward, _ = source(server)
        scoring = Scoring([Broken(), reward])
        completions = generate(tmp_path, scoring, Told())
        with pytest.raises(EngineError, match="^broken$"):
            scoring(PROMPTS, completions)
        assert reward._ahead is None


def test_more_answers_than_go_into_a_request(tmp_path):
    requests = [Request("p0", n, [5] * (n % 7 + 1)) for n in range(150)]
    prompts = [PROMPTS[0]] * 150
    with Watched(lengths) as server:
        scoring = Scoring([source(server)[0]])
        with scoring.ahead(prompts) as begin:
            completions = RolloutBuffer(tmp_path, chunk=100).generate(
                Told(), requests, Sampling(9), seed=0, step=0, weights={}, on_chunk=begin
            )
        rollouts = scoring(prompts, completions)
        assert sorted(len(labels) for labels in server.labels) == [36, 50, 64] and server.at_once == 1
        assert rollouts == scoring(prompts, completions)


def test_whatever_is_raised_in_the_thread_comes_out_of_it():
    (completion,) = Told().generate(REQUESTS[:1], Sampling(9), seed=0)
    for error in (ValueError("odd"), SystemExit(3), MemoryError()):
        ahead = Ahead("odd")

        def fail(dropped, error=error):
            raise error

        ahead.begin([completion], fail)
        with pytest.raises(type(error)):
            ahead.collect([completion])


ENDLESS = """
import os, signal, sys, threading
from heedful.records import Completion, Message, Prompt
from heedful.rollout.score import Scoring
from heedful.rollout.sources import HTTPReward
from toy_parts import toy_tokenizer

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
prompt = Prompt("p", (Message("user", "Say"),))
said = Completion("p", 0, [5], [6], [0.0], "stop", 0, "x")
scoring = Scoring([HTTPReward("judge", sys.argv[1], toy_tokenizer(), timeout_seconds=600.0)])
with scoring.ahead([prompt]) as begin:
    begin([0], [said])
    print("begun", flush=True)
    if sys.argv[2] == "decoding":
        threading.Event().wait(600)
scoring([prompt], [said])
"""


@pytest.mark.parametrize("where", ["decoding", "scoring"])
def test_ctrl_c_does_not_wait_for_a_slow_server(where):
    wait, is_open = gate()
    with Watched(wait) as server:
        command = [sys.executable, "-c", ENDLESS, server.url, where]
        environment = {"PYTHONPATH": ":".join(p for p in sys.path if p), "OMP_NUM_THREADS": "1"}
        process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        try:
            assert process.stdout.readline() == "begun\n"
            while not server.requests:
                threading.Event().wait(0.01)
            process.send_signal(signal.SIGINT)
            _, told = process.communicate(timeout=PATIENCE)
        finally:
            process.kill()
            is_open.set()
    assert process.returncode == -signal.SIGINT and told.rstrip().endswith("KeyboardInterrupt")
