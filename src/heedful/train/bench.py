"""What the start-up self-test works on: the set-up, and a few answers sampled and scored once for all proofs.

Dimension letters: B sequences, T tokens, N counted tokens, D hidden width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from heedful.batches import TokenBatch, to_device
from heedful.config.ppo import PPOConfig
from heedful.data.collate import completion_batch
from heedful.data.packing import token_budget_batches
from heedful.models.roles import Reward, Roles
from heedful.records import Completion, Prompt
from heedful.rollout.engine import Engine, Request, Sampling
from heedful.rollout.experience import forward_streams, graphs_to_keep, is_single_update, partition, select_tokens
from heedful.rollout.score import Scoring

NUM_PROMPTS = 8
"""Prompts that are answered, from the shortest to the longest of the run."""
MAX_NEW_TOKENS = 64
"""Answers of the self-test are cut here at the latest, so that it costs no more than a step."""


@dataclass(frozen=True)
class Streams:
    """The scoring forwards on the counted tokens of all answers, float32 [N] on the CPU."""

    logprobs_N: Tensor
    entropy_N: Tensor
    reference_logprobs_N: Tensor
    exact_kl_N: Tensor
    values_N: Tensor


class Bench:
    """The set-up under test, with a few answers that are sampled and scored once for all proofs."""

    def __init__(
        self,
        roles: Roles,
        scoring: Scoring,
        prompts: Sequence[tuple[Prompt, list[int]]],
        config: PPOConfig,
        engine: Engine,
        seed: int,
    ) -> None:
        self.roles, self.scoring, self.config, self.engine, self.seed = roles, scoring, config, engine, seed
        by_length = sorted(prompts, key=lambda p: len(p[1]))
        num = min(NUM_PROMPTS, len(prompts))
        self.prompts = [by_length[i * (len(prompts) - 1) // max(num - 1, 1)] for i in range(num)]
        self.longest_ids = by_length[-1][1]
        engine.rest()

    @property
    def tokenizer(self) -> Any:
        return self.roles.policy.tokenizer

    @property
    def longest_batch(self) -> str:
        """The shape of :meth:`full_batch` in words."""
        rows, length = self._full_shape()
        return f"{rows} × {length} tokens"

    def _full_shape(self) -> tuple[int, int]:
        """Rows and tokens per row of the largest micro-batch that the run can meet."""
        length = len(self.longest_ids) + self.config.sampling.max_new_tokens
        rows = min(self.config.micro_batch_tokens // max(length - 1, 1), self.config.samples_per_minibatch)
        return max(rows, 1), length

    def full_batch(self) -> TokenBatch:
        """The largest micro-batch, on the policy's device: the longest prompt with answers of full length."""
        rows, length = self._full_shape()
        answer = self.longest_ids[-1:] * (length - len(self.longest_ids))
        batch = completion_batch([self.longest_ids] * rows, [answer] * rows, self.roles.policy.pad_id)
        return to_device(batch, self.roles.policy.device)

    @property
    def holds_two_graphs(self) -> bool:
        """Whether a step of the largest micro-batch keeps the forward of a value model beside the policy's."""
        lengths = [self._full_shape()[1] - 1] * self.config.samples_per_step
        is_single = is_single_update(partition(lengths, self.config, torch.Generator()), self.config)
        keeps_value = "value" in graphs_to_keep(self.config, policy_moves=True)
        return is_single and keeps_value and not self.roles.value.is_shared

    @property
    def readers(self) -> dict[str, Reward]:
        """The reward models that judge, each once, by the name of a part that it judges."""
        found = {id(m): (name, m) for name, m in self.scoring.models.items() if isinstance(m, Reward)}
        return dict(found.values())

    @cached_property
    def completions(self) -> list[Completion]:
        """One answer per prompt, by the run's own engine at the run's own temperature."""
        self.engine.sync(self.roles.policy, version=0)
        limit = min(self.config.sampling.max_new_tokens, MAX_NEW_TOKENS)
        requests = [Request(prompt.id, n, ids) for n, (prompt, ids) in enumerate(self.prompts)]
        answers = self.engine.generate(requests, Sampling(limit, self.config.sampling.temperature), seed=self.seed)
        self.engine.rest()
        return answers

    @cached_property
    def parts(self) -> list[tuple[list[int], TokenBatch]]:
        """The sampled answers in micro-batches."""
        return self.micro_batches([c.prompt_ids for c in self.completions], [c.ids for c in self.completions])

    def micro_batches(
        self, prompts: Sequence[list[int]], answers: Sequence[list[int]]
    ) -> list[tuple[list[int], TokenBatch]]:
        """Prompts with their answers in micro-batches on the policy's device, with the numbers of their rows."""
        tokens = completion_batch(prompts, answers, self.roles.policy.pad_id)
        lengths = tokens.attention_mask_BT.sum(dim=1).tolist()
        num_rows, length = self._full_shape()  # no batch of the test is larger
        cut = token_budget_batches(lengths, num_rows * (length - 1))
        return [(rows, to_device(select_tokens(tokens, rows), self.roles.policy.device)) for rows in cut]

    @cached_property
    def streams(self) -> Streams:
        """What the scoring forwards of a PPO step give for the answers."""
        found: dict[str, list[Tensor]] = {}
        for _, part in self.parts:
            streams, _ = forward_streams(self.roles, part, temperature=self.config.sampling.temperature, exact_kl=True)
            for name, x_BT in streams.items():
                found.setdefault(name, []).append(x_BT[part.loss_mask_BT].float().cpu())
        joined = {name: torch.cat(of_parts) for name, of_parts in found.items()}
        return Streams(
            joined["log-probs"], joined["entropy"], joined["reference log-probs"], joined["exact KL"], joined["values"]
        )

    def logprobs_of_trainer(self) -> Tensor:
        """[N]: log-probs by the forward that training differentiates."""
        found = []
        for _, part in self.parts:
            hidden_BTD = self.roles.policy.hidden(part)
            logprobs_BT, _ = self.roles.policy.logprobs_of(
                hidden_BTD, part, temperature=self.config.sampling.temperature,
                with_entropy=self.config.entropy_coefficient > 0,
            )  # fmt: skip
            found.append(logprobs_BT.detach()[part.loss_mask_BT].float().cpu())
        return torch.cat(found)

    def logprobs_of_sampler(self) -> Tensor:
        """[N]: the sampler's own log-probs, in the order of the streams."""
        return torch.tensor([x for rows, _ in self.parts for row in rows for x in self.completions[row].logprobs])
