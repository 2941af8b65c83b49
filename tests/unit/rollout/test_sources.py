"""Functions and servers as rewards: asked rightly, tried again where that may help, never zero in silence."""

from __future__ import annotations

import re
import socket
import time

import pytest

from heedful.errors import ConfigError, EngineError
from heedful.records import Completion, Message, Prompt
from heedful.rollout.line import Line
from heedful.rollout.score import Scoring
from heedful.rollout.sources import FunctionReward, HTTPReward, reward_url
from toy_parts import toy_tokenizer
from toy_server import Server, answer, lengths, say

TOKENIZER = toy_tokenizer()


def asked(num=3):
    prompts = [Prompt(f"p{n}", (Message("user", f"Say {n}"),), info={"label": n} if n else {}) for n in range(num)]
    completions = []
    for n, prompt in enumerate(prompts):
        prompt_ids = TOKENIZER.encode(f"<|im_start|>user\n{prompt.messages[0].content}<|im_end|>\n")
        ids = TOKENIZER.encode("x" * n + "<|im_end|>")
        completions.append(Completion(prompt.id, 0, prompt_ids, ids, [0.0] * len(ids), "stop", 0, "x" * n))
    return prompts, completions


def slow(handler, request):
    time.sleep(1.0)
    lengths(handler, request)


def dripping(handler, request):
    handler.send_response(200)
    handler.end_headers()
    for _ in range(20):
        handler.wfile.write(b" ")
        time.sleep(0.05)


def broken_off(handler, request):
    say(handler, b'{"rewards": [1, 2', length=100)


def hung_up(handler, request):
    handler.connection.shutdown(socket.SHUT_RDWR)


LENGTHS = [len("x" * n + "<|im_end|>") for n in range(3)]


def source(url, **options):
    said = []
    options = {"retries": 2, "timeout_seconds": 5.0, "pause_seconds": 0.001, "say": said.append, **options}
    reward = HTTPReward("judge", url, TOKENIZER, **options)
    return reward, said


def test_the_server_is_asked_in_openrlhfs_words():
    prompts, completions = asked()
    with Server(lengths) as server:
        reward, _ = source(server.url, weight=0.5)
        rollouts = Scoring([reward])(prompts, completions)
    assert [r.raw_parts["judge"] for r in rollouts] == LENGTHS
    assert [r.score for r in rollouts] == [x / 2 for x in LENGTHS]
    (request,) = server.requests
    assert request.keys() == {"query", "prompts", "labels"} and server.paths == ["/get_reward"]
    assert request["query"][2] == "<|im_start|>user\nSay 2<|im_end|>\nxx<|im_end|>"
    assert all(q.startswith(p) for q, p in zip(request["query"], request["prompts"], strict=True))
    assert request["labels"] == ["", 1, 2]


def test_many_answers_are_asked_in_several_requests_in_order():
    prompts, completions = asked(150)
    with Server(lengths) as server:
        reward, _ = source(server.url + "/other/path?key=1")
        found = reward(prompts, completions)
    assert found == [len("x" * n + "<|im_end|>") for n in range(150)]
    assert [len(r["query"]) for r in server.requests] == [64, 64, 22] and set(server.paths) == {"/other/path?key=1"}


@pytest.mark.parametrize("body", [
    {"rewards": [1, 2.5, -3]}, {"rewards": [[1], [2.5], [-3]]}, {"scores": [1, 2.5, -3]},
    {"scores": [0, 0, 0], "rewards": [1, 2.5, -3], "extra_logs": {}},
])  # fmt: skip
def test_forms_of_a_good_answer(body):
    with Server(answer(body)) as server:
        assert source(server.url)[0](*asked()) == [1.0, 2.5, -3.0]


def test_one_number_for_one_answer():
    with Server(answer({"rewards": 0.25})) as server:
        assert source(server.url)[0](*asked(1)) == [0.25]


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (answer({"error": "warming up"}, 503), "HTTP 503.*warming up"), (answer(b"", 500), "HTTP 500"),
        (answer(b"slow down", 429), "HTTP 429.*slow down"), (answer(b"", 408), "HTTP 408"),
        (broken_off, "broke off"), (hung_up, "closed|reset"), (slow, "no answer within 0.3 s"),
        (dripping, "no answer within 0.3 s"),
    ],
    ids=["503", "500", "429", "408", "broken-off", "hung-up", "slow", "dripping"],
)  # fmt: skip
def test_a_passing_failure_is_tried_again(bad, reason):
    prompts, completions = asked()
    patience = {"timeout_seconds": 0.3} if "0.3" in reason else {}
    with Server(bad, lengths) as server:
        reward, said = source(server.url, **patience)
        assert reward(prompts, completions) == LENGTHS
    assert len(server.requests) == 2 and server.requests[0] == server.requests[1]
    assert len(said) == 1 and re.match(f"reward judge: {server.url}/get_reward: .*({reason}).*; next try in", said[0])


def test_a_failure_that_stays_ends_the_run_after_the_tries():
    with Server(answer(b"", 500)) as server:
        reward, said = source(server.url, retries=3)
        with pytest.raises(EngineError, match=r"'judge': http.*/get_reward gave no scores in 4 tries \(HTTP 500") as e:
            Scoring([reward])(*asked())
    assert len(server.requests) == 4 and len(said) == 3 and "\n" not in str(e.value)


def test_no_retries_means_one_try():
    with Server(answer(b"", 500)) as server, pytest.raises(EngineError, match="in 1 tries"):
        source(server.url, retries=0)[0](*asked())
    assert len(server.requests) == 1


def test_pauses_grow(monkeypatch):
    monkeypatch.setattr(Line, "wait", lambda line, seconds: False)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    reward, said = source(url, retries=8, pause_seconds=1.0)
    with pytest.raises(EngineError, match="refused"):
        reward(*asked())
    pauses = [line.rpartition("next try in ")[2] for line in said]
    assert pauses == ["1 s", "2 s", "4 s", "8 s", "16 s", "32 s", "60 s", "60 s"]


@pytest.mark.parametrize(
    ("body", "status", "reason"),
    [
        ({"detail": "no such model"}, 422, "HTTP 422.*no such model"), (b"", 404, "HTTP 404"), (b"", 401, "HTTP 401"),
        ({"rewards": [1, 2]}, 200, "2 scores for 3 answers"), ({"rewards": [1, 2, 3, 4]}, 200, "4 scores for 3"),
        ({"rewards": []}, 200, "0 scores for 3"), ({"rewards": 1}, 200, "1 scores for 3"),
        ({"rewards": [1, float("nan"), 2]}, 200, "NaN; it must be a finite number"),
        ({"rewards": [1, float("inf"), 2]}, 200, "Infinity; it must"), ({"rewards": [1, None, 2]}, 200, "not None"),
        ({"rewards": [1, True, 2]}, 200, "not True"), ({"rewards": ["1", 2, 3]}, 200, "not '1'"),
        ({"rewards": [[1, 2], [1, 2], [1, 2]]}, 200, r"not \[1, 2\]"), ({"rewards": [[[1]], 2, 3]}, 200, r"not \[1\]"),
        ({"rewards": [1, 10**400, 2]}, 200, "beyond"), ({"rewards": [1, -1e308, 2]}, 200, "beyond"),
        (b"[" * 200_000, 200, "no JSON"), (b'{"rewards":' * 100_000, 200, "no JSON"),
        ({"reward": [1, 2, 3]}, 200, "it has the keys reward"),
        ({}, 200, "keys none"), ([1, 2, 3], 200, "it has list"), (b"<html>", 200, "no JSON"), (b"", 200, "no JSON"),
    ],
)  # fmt: skip
def test_a_wrong_answer_ends_the_run_at_once(body, status, reason):
    with Server(answer(body, status)) as server:
        reward, said = source(server.url)
        with pytest.raises(EngineError, match=f"reward 'judge': http.*{reason}") as caught:
            reward(*asked())
    assert len(server.requests) == 1 and said == [] and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("http://host:5000", "http://host:5000/get_reward"), ("https://host/", "https://host/get_reward"),
        ("http://host/a/b", "http://host/a/b"), ("http://host?x=1", "http://host/get_reward?x=1"),
    ],
)  # fmt: skip
def test_the_address_gets_its_path(url, expected):
    assert reward_url(url) == expected


@pytest.mark.parametrize("url", ["host:5000", "localhost", "ftp://host", "http://", "http://host:port", "http://[::1"])
def test_an_address_that_is_none_is_refused(url):
    with pytest.raises(ConfigError, match="write it as http"):
        HTTPReward("judge", url, TOKENIZER)


@pytest.fixture
def module(tmp_path, monkeypatch):
    (tmp_path / "my_rewards.py").write_text(
        "def length(prompts, answers):\n"
        "    return [len(a) + len(p.messages[-1].content) for p, a in zip(prompts, answers)]\n"
        "def breaks(prompts, answers): raise KeyError('x')\n"
        "def alone(answer): return 1.0\n"
        "def columns(prompts, answers): return [[1.0] for _ in answers]\n"
        "def speaks(prompts, answers): print('heard', len(answers)); return [1.0 for _ in answers]\n"
        "def few(prompts, answers): return [1.0]\n"
        "number = 3\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    return "my_rewards"


def test_REW_10_a_function_sees_the_prompts_and_the_answers_as_text(module):
    rollouts = Scoring([FunctionReward("length", f"{module}:length", weight=2.0)])(*asked())
    assert [r.score for r in rollouts] == [10, 12, 14] and rollouts[1].raw_parts == {"length": 6.0}


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("length", "module:function"), ("nowhere_at_all:f", "cannot import nowhere_at_all"),
        ("my_rewards:absent", "no function 'absent'"), ("my_rewards:number", "no function 'number'"),
        ("my_rewards:alone", r"must accept \(prompts, answers\)"),
    ],
)  # fmt: skip
def test_a_function_that_cannot_be_called_is_refused_before_anything_runs(module, name, problem):
    with pytest.raises(ConfigError, match=f"reward 'mine': function '{name}': .*{problem}|{problem}"):
        FunctionReward("mine", name)


def test_a_function_that_fails_is_named(module):
    with pytest.raises(EngineError, match=r"reward 'mine': my_rewards:breaks failed: KeyError\('x'\)"):
        Scoring([FunctionReward("mine", f"{module}:breaks")])(*asked())
    with pytest.raises(EngineError, match=r"reward 'mine' must give .*, not \[1.0\]"):  # a list is a server's privilege
        Scoring([FunctionReward("mine", f"{module}:columns")])(*asked())
    with pytest.raises(EngineError, match="reward 'mine' gave 1 scores for 3 answers"):
        Scoring([FunctionReward("mine", f"{module}:few")])(*asked())


def test_what_a_function_prints_goes_to_standard_error(module, capsys):
    Scoring([FunctionReward("mine", f"{module}:speaks")])(*asked())
    assert capsys.readouterr() == ("", "heard 3\n")
