"""A stage that is stopped after its last step, before its model is saved, goes on to the same results."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
from test_reward_loop import samples_of, separable

from heedful.config.recipe import SFTConfig
from heedful.config.reward import RewardConfig
from heedful.data import tokenise
from heedful.records import Demonstration, Message
from heedful.runs.folder import StageFolder
from heedful.train import loop
from heedful.train.reward import train_reward
from heedful.train.sft import train_sft
from toy_parts import model_folder, policy, scalar


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return model_folder(tmp_path_factory.mktemp("stop") / "model")


def stop_at(step):
    """Stands in for the signals: the stop is asked for during step number ``step`` of the loop."""

    @contextmanager
    def signals():
        asked = iter(range(1, 10**6))
        yield lambda: next(asked) >= step

    return signals


def straight_and_stopped(train, num_steps, tmp_path, monkeypatch):
    straight = train(StageFolder(tmp_path / "straight", "x", 1))
    stage = StageFolder(tmp_path / "stopped", "x", 1)
    with monkeypatch.context() as patch:
        patch.setattr(loop, "_stop_signals", stop_at(num_steps))
        with pytest.raises(loop.Interrupted, match=f"after step {num_steps} of {num_steps}"):
            train(stage)
    return straight, train(stage)


def test_sft(folder, tmp_path, monkeypatch):
    def train(stage):
        part = policy(folder)
        records = [Demonstration(f"d{n}", (Message("user", f"{n}"), Message("assistant", "ok"))) for n in range(8)]
        samples = tokenise.demonstrations(records, part.tokenizer, max_tokens=64).samples
        config = SFTConfig(epochs=1, prompts_per_step=4)
        return train_sft(part, samples[:6], samples[6:], config, stage, seed=0)

    straight, stopped = straight_and_stopped(train, 2, tmp_path, monkeypatch)
    assert straight["heldout_loss_nats"] == stopped["heldout_loss_nats"]
    assert straight["steps"] == stopped["steps"] == 2


def test_reward(folder, tmp_path, monkeypatch):
    def train(stage):
        model = scalar(folder)
        samples = samples_of(model, separable(8))
        return train_reward(model, samples, samples, RewardConfig(prompts_per_step=4), stage, seed=0)

    straight, stopped = straight_and_stopped(train, 2, tmp_path, monkeypatch)
    assert straight == stopped
