"""Scored rollouts become what PPO trains on: old log-probs, reference, values, rewards, advantages, returns.

Old log-probs are recomputed by the training forward: the sampler's incremental low-precision decoding differs from it
by up to 30 % in ratio. They are computed in exactly the micro-batches that the first epoch trains on, so that the
first ratio is 1 to the last bit.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from heedful.batches import ExperienceBatch, TokenBatch, to_device
from heedful.config.ppo import PPOConfig
from heedful.data.collate import completion_batch
from heedful.data.packing import token_budget_batches
from heedful.models.roles import Roles
from heedful.objectives import advantages, kl, masked, shaping
from heedful.records import Rollout

Partition = list[list[list[int]]]
"""Minibatches of micro-batches of row numbers."""


@dataclass(frozen=True)
class Experience:
    """The whole step, on the CPU, with the partition of its first epoch and what the log wants to know."""

    batch: ExperienceBatch
    first_partition: Partition
    kl_BT: Tensor
    """float32 [B, T]; log π − log π_ref (k1), 0 where nothing counts"""
    entropy_BT: Tensor
    """float32 [B, T]"""

    def minibatches(self, partition: Partition) -> Iterator[list[ExperienceBatch]]:
        """The micro-batches of every minibatch, each cut to its own longest row."""
        for minibatch in partition:
            yield [select(self.batch, rows) for rows in minibatch]


def partition(lengths: Sequence[int], config: PPOConfig, generator: torch.Generator) -> Partition:
    """A random cut of the step into minibatches, and of each into micro-batches by token budget."""
    order = torch.randperm(len(lengths), generator=generator).tolist()
    size = config.samples_per_minibatch
    minibatches = [order[i : i + size] for i in range(0, len(order), size)]
    cut: Partition = []
    for rows in minibatches:
        groups = token_budget_batches([lengths[r] for r in rows], config.micro_batch_tokens)
        cut.append([[rows[i] for i in group] for group in groups])
    return cut


def select(batch: ExperienceBatch, rows: Sequence[int]) -> ExperienceBatch:
    """The given rows, cut to the longest of them."""
    index = torch.tensor(rows)
    width = int(batch.tokens.attention_mask_BT[index].sum(dim=1).max())

    def cut(x: Tensor) -> Tensor:
        return x[index, :width] if x.dim() == 2 else x[index]

    streams = {f.name: cut(getattr(batch, f.name)) for f in dataclasses.fields(batch) if f.name != "tokens"}
    return ExperienceBatch(tokens=select_tokens(batch.tokens, rows), **streams)


def select_tokens(tokens: TokenBatch, rows: Sequence[int]) -> TokenBatch:
    """The given rows of a right-padded token batch, cut to the longest of them."""
    index = torch.tensor(rows)
    width = int(tokens.attention_mask_BT[index].sum(dim=1).max())
    return TokenBatch(
        inputs_BT=tokens.inputs_BT[index, :width],
        targets_BT=tokens.targets_BT[index, :width],
        loss_mask_BT=tokens.loss_mask_BT[index, :width],
        attention_mask_BT=tokens.attention_mask_BT[index, :width],
        position_ids_BT=tokens.position_ids_BT[index, :width],
        ids=tuple(tokens.ids[r] for r in rows),
    )


@torch.no_grad()
def build_experience(
    rollouts: Sequence[Rollout],
    roles: Roles,
    config: PPOConfig,
    *,
    kl_coefficient: float,
    pad_id: int,
    generator: torch.Generator,
    check: Callable[[str, Tensor, TokenBatch], None],
) -> Experience:
    """Run the four parts over the answers and derive rewards, advantages and returns.

    Args:
        kl_coefficient: β of this step, score deviations per nat.
        generator: draws the minibatches of the first epoch.
        check: called with the name of each stream, the stream and its tokens before anything is derived from it.
    """
    completions = [r.completion for r in rollouts]
    tokens = dataclasses.replace(
        completion_batch([c.prompt_ids for c in completions], [c.ids for c in completions], pad_id),
        ids=tuple(f"{c.prompt_id}/{c.sample_index}" for c in completions),
    )
    lengths = tokens.attention_mask_BT.sum(dim=1).tolist()
    first = partition(lengths, config, generator)
    mask_BT = tokens.loss_mask_BT
    streams = {name: torch.zeros(mask_BT.shape) for name in ("log-probs", "reference log-probs", "values", "entropy")}
    for rows in (rows for minibatch in first for rows in minibatch):
        part = select_tokens(tokens, rows)
        on_device = to_device(part, roles.policy.device)
        temperature = config.sampling.temperature
        logprobs_BT, entropy_BT = roles.policy.logprobs(on_device, temperature=temperature, with_entropy=True)
        reference_BT, _ = roles.reference.logprobs(on_device, temperature=temperature)
        found = {
            "log-probs": logprobs_BT,
            "entropy": entropy_BT,
            "reference log-probs": reference_BT,
            "values": roles.value.values(on_device),
        }
        for name, stream_BT in found.items():
            assert stream_BT is not None
            stream_BT = stream_BT.float().cpu()
            check(name, stream_BT, part)
            streams[name][torch.tensor(rows), : stream_BT.shape[1]] = torch.where(part.loss_mask_BT, stream_BT, 0.0)
    return _derive(rollouts, tokens, streams, config, kl_coefficient, first, roles, check)


def _derive(
    rollouts: Sequence[Rollout],
    tokens: TokenBatch,
    streams: dict[str, Tensor],
    config: PPOConfig,
    kl_coefficient: float,
    first: Partition,
    roles: Roles,
    check: Callable[[str, Tensor, TokenBatch], None],
) -> Experience:
    """Rewards, advantages and returns from the four streams."""
    mask_BT = tokens.loss_mask_BT
    logprobs_BT, reference_BT, values_BT = streams["log-probs"], streams["reference log-probs"], streams["values"]
    finished_B = torch.tensor([r.completion.finish_reason == "stop" for r in rollouts])
    scores_B = torch.tensor([r.score for r in rollouts], dtype=torch.float32)
    check("scores", scores_B, tokens)
    kl_BT = kl.estimate(logprobs_BT, reference_BT, kind="k1")
    kind = config.kl.in_reward
    penalty_BT = kl_BT if kind == "k1" else kl.estimate(logprobs_BT, reference_BT, kind=kind)
    rewards_BT = shaping.token_rewards(
        scores_B, penalty_BT, mask_BT, kl_coefficient=kl_coefficient, score_clip=config.score_clip,
        missing_end_penalty=config.missing_end_penalty, finished_B=finished_B,
    )  # fmt: skip
    check("rewards", rewards_BT, tokens)
    bootstrap_B = None
    if config.bootstrap_truncated:
        bootstrap_B = _last_values(rollouts, finished_B, roles, tokens)
    advantages_BT, returns_BT = advantages.gae(
        rewards_BT, values_BT, mask_BT, gamma=config.gamma, lam=config.lam, bootstrap_B=bootstrap_B
    )
    if config.whiten_advantages:
        advantages_BT = masked.whiten(advantages_BT, mask_BT)
    check("advantages", advantages_BT, tokens)
    batch = ExperienceBatch(
        tokens=tokens,
        old_logprobs_BT=logprobs_BT,
        reference_logprobs_BT=reference_BT,
        old_values_BT=values_BT,
        rewards_BT=rewards_BT,
        advantages_BT=advantages_BT,
        returns_BT=returns_BT,
        scores_B=scores_B,
    )
    return Experience(batch, first, torch.where(mask_BT, kl_BT, 0.0), streams["entropy"])


def _last_values(rollouts: Sequence[Rollout], finished_B: Tensor, roles: Roles, tokens: TokenBatch) -> Tensor:
    """[B]: the value after the last token of cut answers; 0 for finished ones, which always end for good (PPO-03)."""
    last_B = torch.zeros(len(rollouts))
    for row in (~finished_B).nonzero().flatten().tolist():
        c = rollouts[row].completion
        ids_1T = torch.tensor([c.prompt_ids + c.ids], device=roles.value.device)
        last_B[row] = roles.value.values_after(ids_1T)
    return last_B
