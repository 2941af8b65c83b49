"""Rewards: answers become scores, each part of the reward apart."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

from heedful.errors import EngineError
from heedful.models.parts import ScalarModel
from heedful.models.roles import Reward
from heedful.records import Completion, Message, Prompt, Rollout


class RewardSource(Protocol):
    """One named part of the reward."""

    name: str
    weight: float

    def __call__(self, prompts: Sequence[Prompt], completions: Sequence[Completion]) -> list[float]:
        """One number per completion, in order; higher is better."""
        ...


class LearnedReward:
    """A reward model read on the answer's text, re-encoded with the reward model's own tokenizer (REW-09).

    The score is standardised with the mean and deviation of the reward card: (raw − mean) / std.
    """

    def __init__(
        self,
        model: ScalarModel | Reward,
        *,
        micro_batch_tokens: int,
        mean: float = 0.0,
        std: float = 1.0,
        name: str = "reward_model",
        weight: float = 1.0,
    ) -> None:
        self.name, self.weight = name, weight
        self._model, self._micro_batch_tokens, self._mean, self._std = model, micro_batch_tokens, mean, std

    def __call__(self, prompts: Sequence[Prompt], completions: Sequence[Completion]) -> list[float]:
        messages: list[tuple[Message, ...]] = [p.messages for p in prompts]
        raw = self._model.score_texts(
            messages, [c.text for c in completions], micro_batch_tokens=self._micro_batch_tokens
        )
        return [(r - self._mean) / self._std for r in raw]


def score(
    prompts: Sequence[Prompt], completions: Sequence[Completion], sources: Sequence[RewardSource]
) -> list[Rollout]:
    """Every completion with the parts of its reward and their weighted sum.

    Raises:
        EngineError: a source gave another number of scores than it was asked for, or one that is not finite.
    """
    parts: dict[str, list[float]] = {}
    for source in sources:
        values = source(prompts, completions)
        if len(values) != len(completions):
            raise EngineError(f"reward {source.name!r} gave {len(values)} scores for {len(completions)} answers")
        for value, completion in zip(values, completions, strict=True):
            if not math.isfinite(value):
                raise EngineError(
                    f"reward {source.name!r} gave {value} for prompt {completion.prompt_id!r}, sample "
                    f"{completion.sample_index}; a reward must be a finite number"
                )
        parts[source.name] = [float(v) for v in values]
    rollouts = []
    for i, completion in enumerate(completions):
        own = {name: values[i] for name, values in parts.items()}
        rollouts.append(Rollout(completion, own, sum(s.weight * own[s.name] for s in sources)))
    return rollouts
