"""PPO on tiny models, by hand and without a run; for tests of the loop."""

from __future__ import annotations

import json

from heedful.config.ppo import PPOConfig, SamplingConfig
from heedful.rollout.score import LearnedReward, Scoring
from heedful.runs.folder import StageFolder
from heedful.train.ppo import train_ppo
from toy_parts import prompts

RATE = {"learning_rate": 1e-2, "schedule": "constant", "warmup_fraction": 0.0, "epsilon": 1e-2}


class Longer:
    """The reward is the length of the answer."""

    name, weight = "length", 1.0

    def __call__(self, prompts, completions):
        return [len(c.ids) / 8 for c in completions]


class AtTheThird:
    """Beside a reward: a Ctrl-C while it scores the third batch of answers."""

    num_calls = 0

    def __call__(self, *asked):
        self.num_calls += 1
        if self.num_calls == 3:
            raise KeyboardInterrupt
        return super().__call__(*asked)


class StopsAtTheThird(AtTheThird, LearnedReward):
    """A learned reward."""


def train(parts, path, *, engine=None, seed=0, rewards=None, scalers=None, texts=None, demonstrations=(), gold=None,
          **options):  # fmt: skip
    """Run PPO and return the rows of its metrics."""
    config = PPOConfig(**{"steps": 1, "prompts_per_step": 6, "optimizer": RATE, "value_optimizer": RATE,
                          "sampling": SamplingConfig(max_new_tokens=8), **options})  # fmt: skip
    stage = StageFolder(path, "ppo", 3)
    asked = prompts(parts.policy.tokenizer, texts) if texts else prompts(parts.policy.tokenizer)
    train_ppo(parts, Scoring(rewards or [Longer()], scalers), asked, config, stage, seed=seed, engine=engine,
              demonstrations=demonstrations, gold=gold)  # fmt: skip
    return [json.loads(line) for line in stage.metrics.read_text().splitlines()]


def weights(parts):
    return {f"{side}/{name}": p.detach().clone() for side in ("policy", "value")
            for name, p in getattr(parts, side).trainable_parameters().items()}  # fmt: skip


def largest_gap(a, b):
    assert a.keys() == b.keys()
    return max(float((a[name] - b[name]).abs().max()) for name in a)
