"""How much a recipe gives a machine to do at once: the largest micro-batch of every stage, and what a step holds.

From the recipe alone these are its limits. Where the data are at hand, ``pipeline.plan`` reads the lengths from them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from heedful.config.ppo import PPOConfig
from heedful.config.recipe import Recipe
from heedful.plan.activations import Batch

HEAPS = 35
"""Distinct words among N tokens are at the most 35 √N: measured on instructions, on rankings and on dialogues of 500 to
380,000 tokens (10 to 35; SmolLM2's tokenizer)."""


@dataclass(frozen=True)
class StageWork:
    """What a stage works on."""

    largest: Batch
    """The largest micro-batch"""
    steps: int | None
    """Optimizer or PPO steps; None = unknown without the data"""
    tokens_per_step: float
    """Padded tokens that one step trains on"""
    in_self_test: Batch | None = None
    """A micro-batch of PPO's self-test: the largest that chance can bring, all as long as the longest"""

    @property
    def distinct_tokens(self) -> float:
        """Words of the vocabulary that the whole stage reads at the most, as Heaps' law has it; infinite where the
        number of steps is unknown."""
        if self.steps is None:
            return math.inf
        tokens = self.steps * self.tokens_per_step
        return min(tokens, HEAPS * math.sqrt(tokens))


@dataclass(frozen=True)
class Workload:
    """The stages' work, and the lengths of PPO's prompts."""

    sft: StageWork | None = None
    reward: StageWork | None = None
    ppo: StageWork | None = None
    prompt_tokens: int = 0
    """Of the longest prompt that is answered"""
    evaluate_prompt_tokens: int = 0
    source: str = "the recipe's limits"


def of_limits(recipe: Recipe, max_positions: int) -> Workload:
    """The work of a recipe whose sequences are all as long as it allows and the model can read."""
    sft = reward = ppo = None
    if recipe.sft is not None:
        length = min(recipe.sft.max_tokens, max_positions)
        budget, num = recipe.sft.micro_batch_tokens, recipe.sft.prompts_per_step
        if recipe.sft.packing:
            largest = Batch(1, max(budget, length), max(budget, length), max(1, num * length // budget), packed=True)
        else:
            largest = padded(num, length, length, budget)
        sft = StageWork(largest, None, num * length)
    if recipe.reward is not None:
        length, num = min(recipe.reward.max_tokens, max_positions), 2 * recipe.reward.prompts_per_step
        reward = StageWork(padded(num, length, 1, recipe.reward.micro_batch_tokens, least=2), None, num * length)
    prompt_tokens = 0
    if recipe.ppo is not None:
        answer = recipe.ppo.sampling.max_new_tokens
        prompt_tokens = max(1, min(recipe.data.max_prompt_tokens, max_positions - answer + 1))
        ppo = of_ppo(recipe.ppo, prompt_tokens)
    return Workload(sft, reward, ppo, prompt_tokens, min(recipe.data.max_prompt_tokens, max_positions))


def of_ppo(
    config: PPOConfig, prompt_tokens: int, others: Sequence[int] = (), *, in_pieces: bool = False
) -> StageWork:
    """PPO's work with answers that reach their limit.

    Args:
        prompt_tokens: of the longest prompt.
        others: of prompts drawn evenly; none = all are as long.
        in_pieces: padding is not computed (``models/ragged.py``). Sequences then count with E[T²] / E[T], what a token
            of theirs sees: somewhat above their mean, as is the largest of a run's random batches.
    """
    answer = config.sampling.max_new_tokens - 1  # the last token is not read
    lengths = [n + answer for n in others or [prompt_tokens]]
    longest, mean = prompt_tokens + answer, sum(lengths) / len(lengths)
    seen = math.ceil(sum(n * n for n in lengths) / sum(lengths)) if in_pieces else longest
    most, largest = (padded(config.samples_per_minibatch, n, answer + 1, config.micro_batch_tokens)
                     for n in (longest, min(seen, longest)))  # fmt: skip
    return StageWork(largest, config.steps, config.samples_per_step * mean, most)


def padded(num: int, length: int, counted: int, budget: int, *, least: int = 1) -> Batch:
    """The largest micro-batch of ``num`` sequences of one length within a budget of padded tokens.

    Args:
        counted: tokens of each that the loss counts.
        least: sequences that are never cut apart.
    """
    rows = max(min(least, num), min(num, budget // max(length, 1)))
    return Batch(rows, length, rows * counted, math.ceil(num / rows))
