"""Which weights of the policy are kept: the last, their moving average, or the best by answers to other prompts."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from heedful.config.ppo import PPOConfig
from heedful.errors import ConfigError
from heedful.models.parts import LanguageModel
from heedful.records import Completion, Prompt
from heedful.rollout.engine import Engine, Request, Sampling
from heedful.rollout.experience import answer_scores
from heedful.rollout.score import Scoring
from heedful.train.best import Best
from heedful.train.ema import EMA
from heedful.train.weights import put

Gold = Callable[[Sequence[Prompt], Sequence[Completion]], list[float]]
"""Scores answers for keeping the best; never trains anything."""


class Keeper:
    """Follows the policy's weights along the run, as ``ema_decay`` and ``best`` ask; without them it does nothing.

    Args:
        prompts: of which ``best.num_prompts``, drawn by the seed, are set aside; ``training_prompts`` are the others.
    """

    def __init__(
        self, policy: LanguageModel, prompts: Sequence[tuple[Prompt, list[int]]], config: PPOConfig, *, seed: int,
        scoring: Scoring, gold: Gold | None,
    ) -> None:  # fmt: skip
        weights = policy.trainable_parameters()
        self._policy, self._config, self._seed = policy, config, seed
        self._scoring, self._gold = scoring, gold
        self._ema = EMA(weights, config.ema_decay) if config.ema_decay is not None else None
        self._best = Best(weights) if config.best is not None else None
        self.training_prompts = list(prompts)
        self._validation: list[tuple[Prompt, list[int]]] = []
        if config.best is not None:
            self._set_aside(config.best.num_prompts)
            if config.best.by == "gold" and gold is None:
                raise ConfigError("ppo.best.by is gold and no gold scorer was given (evaluate.gold)")

    def _set_aside(self, num_prompts: int) -> None:
        if len(self.training_prompts) <= num_prompts:
            raise ConfigError(
                f"ppo.best.num_prompts sets {num_prompts} prompts aside and there are {len(self.training_prompts)}; "
                f"lower it (it is 32 unless set) or give more prompts"
            )
        chosen = set(random.Random(f"{self._seed}/validation").sample(range(len(self.training_prompts)), num_prompts))
        self._validation = [p for i, p in enumerate(self.training_prompts) if i in chosen]
        self.training_prompts = [p for i, p in enumerate(self.training_prompts) if i not in chosen]

    def after_step(self, step: int, engine: Engine, sampling: Sampling) -> dict[str, float]:
        """Take the new weights into account; the metrics of a measurement when one is due."""
        if self._ema is not None:
            self._ema.update()
        best = self._config.best
        due = best is not None and ((step + 1) % best.every_steps == 0 or step + 1 == self._config.steps)
        if best is None or not due:
            return {}
        assert self._best is not None
        requests = [Request(prompt.id, 0, ids) for prompt, ids in self._validation]
        prompts = [prompt for prompt, _ in self._validation]
        with self._averaged():
            engine.sync(self._policy, version=step + 1)
            answers = engine.generate(requests, sampling, seed=self._seed)  # the same random streams every time
            engine.rest()
            rollouts = self._scoring(prompts, answers, update=False)
            found = {
                "ppo/validation_score": sum(r.score for r in rollouts) / len(rollouts),
                "ppo/validation_reward": float(answer_scores(rollouts, self._config).mean()),
            }
            if self._gold is not None:
                golds = self._gold(prompts, answers)
                found["ppo/gold_mean"] = sum(golds) / len(golds)
            chosen_by = found["ppo/gold_mean" if best.by == "gold" else "ppo/validation_reward"]
            self._best.offer(step, chosen_by, self._policy.trainable_parameters())
        return found

    def _averaged(self) -> AbstractContextManager[Any]:
        return nullcontext() if self._ema is None else self._ema.applied()

    def finish(self) -> dict[str, Any]:
        """Leave the kept weights in the policy, for good, and say which they are."""
        if self._best is not None:
            put(self._best.parameters, self._best.weights)
            return {"kept": "best", "kept_step": self._best.step, "kept_score": self._best.score}
        if self._ema is not None:
            put(self._ema.parameters, self._ema.average)
            return {"kept": "average"}
        return {"kept": "last"}

    def state_dict(self) -> dict[str, Any]:
        """Average and best so far, weights included."""
        return {name: part.state_dict() for name, part in (("ema", self._ema), ("best", self._best)) if part}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raises KeyError when the state lacks what this run follows."""
        for name, part in (("ema", self._ema), ("best", self._best)):
            if part is not None:
                part.load_state_dict(state[name])
