"""PPO asks a reward server about the answers that are there while it decodes the others, and learns the same."""

from __future__ import annotations

import json
import re

import pytest

from heedful.config.ppo import SamplingConfig
from heedful.data.chat import end_token_ids
from heedful.errors import EngineError
from heedful.rollout.hf import HFEngine
from heedful.rollout.scaling import Running
from heedful.rollout.sources import HTTPReward
from toy_parts import roles
from toy_ppo import train
from toy_server import Server, Watched, answer, lengths

PAIRS = {"prompts_per_step": 6, "sampling": SamplingConfig(max_new_tokens=8, answers_together=2), "steps": 2}
"""Three chunks a step."""


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return tmp_path_factory.mktemp("ppo-ahead-models")


class Afterwards:
    """A source that is asked when all answers are there."""

    def __init__(self, reward):
        self.name, self.weight, self._reward = reward.name, reward.weight, reward

    def __call__(self, prompts, completions):
        return self._reward(prompts, completions)


class Waiting:
    """An engine that decodes a chunk only when the server has scored all before it."""

    def __init__(self, policy, server):
        self._engine = HFEngine(policy, end_token_ids(policy.tokenizer), batch_size=2)
        self.sync, self.rest = self._engine.sync, self._engine.rest
        self._server, self.num_asked = server, 0

    def generate(self, requests, sampling, **options):
        assert self._server.has_answered(self.num_asked)
        self.num_asked += 1
        return self._engine.generate(requests, sampling, **options)


def numbers(folder):
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if not re.search("^time$|second|peak", k)} for row in rows]


def judge(parts, server, **options):
    return HTTPReward("judge", server.url, parts.policy.tokenizer, pause_seconds=0.001, retries=1, **options)


def test_a_step_learns_the_same_and_a_chunk_is_scored_before_the_next_is_decoded(models, tmp_path):
    with Watched(lengths) as server:
        parts = roles(models)
        engine = Waiting(parts.policy, server)
        train(parts, tmp_path / "ahead", engine=engine, rewards=[judge(parts, server)],
              scalers={"judge": Running()}, **PAIRS)  # fmt: skip
        assert engine.num_asked == len(server.requests) == 6 and server.at_once == 1
        parts = roles(models)
        train(parts, tmp_path / "after", rewards=[Afterwards(judge(parts, server))], scalers={"judge": Running()},
              **PAIRS)  # fmt: skip
        assert len(server.requests) == 6 + 2
    assert numbers(tmp_path / "ahead") == numbers(tmp_path / "after") != []


def test_a_server_that_fails_stops_the_step_and_a_resumed_one_decodes_nothing_again(models, tmp_path):
    one = {**PAIRS, "steps": 1}
    with Server(lengths, answer(b"", 500)) as server, pytest.raises(EngineError, match="gave no scores in 2 tries"):
        parts = roles(models)
        train(parts, tmp_path / "resumed", rewards=[judge(parts, server)], **one)
    with Watched(lengths) as server:
        parts = roles(models)
        engine = Waiting(parts.policy, server)
        train(parts, tmp_path / "resumed", engine=engine, rewards=[judge(parts, server)], **one)
        assert engine.num_asked == 0 and [len(r["query"]) for r in server.requests] == [2, 2, 2]
        parts = roles(models)
        train(parts, tmp_path / "straight", rewards=[judge(parts, server)], **one)
    assert numbers(tmp_path / "resumed") == numbers(tmp_path / "straight") != []
