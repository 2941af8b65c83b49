"""Scored rollouts become what PPO trains on: old log-probs, reference, values, rewards, advantages, returns.

Old log-probs are recomputed by the training forward: the sampler's incremental low-precision decoding differs from it
by up to 30 % in ratio. They are computed in exactly the micro-batches that the first epoch trains on, so that the
first ratio is 1 to the last bit.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from heedful.batches import ExperienceBatch, TokenBatch, to_device
from heedful.config.ppo import PPOConfig
from heedful.data.collate import completion_batch
from heedful.data.packing import token_budget_batches
from heedful.models.roles import Roles
from heedful.objectives import advantages, kl, masked, shaping
from heedful.records import Rollout

WHITENING_EPSILON = 1e-8
"""The ε of :func:`masked.whiten`."""

Partition = list[list[list[int]]]
"""Minibatches of micro-batches of row numbers."""


@dataclass(frozen=True)
class PolicyForward:
    """A forward of the policy with its graph, from which a backward can start. Dimensions as its micro-batch's."""

    hidden_BTD: Tensor
    logprobs_BT: Tensor
    entropy_BT: Tensor | None
    """None where nobody asked for it"""


@dataclass(frozen=True)
class KeptForwards:
    """Of the only micro-batch of a step's only update, what the update would make again; each None if not kept."""

    policy: PolicyForward | None = None
    values_BT: Tensor | None = None
    """With their graph"""


NOTHING_KEPT = KeptForwards()
Trained = Literal["policy", "value"]


@dataclass(frozen=True)
class Experience:
    """The whole step, on the CPU, with the partition of its first epoch and what the log wants to know."""

    batch: ExperienceBatch
    first_partition: Partition
    kl_BT: Tensor
    """float32 [B, T]; log π − log π_ref (k1), 0 where nothing counts"""
    exact_kl_BT: Tensor | None
    """float32 [B, T]; KL over the vocabulary, where the recipe has it anywhere"""
    entropy_BT: Tensor
    """float32 [B, T]"""
    plain_advantages_BT: Tensor
    """float32 [B, T]; before whitening"""
    kl_weights_B: Tensor
    """float32 [B]; 1, or more for answers far outside the step's KL distribution"""
    kept: KeptForwards = NOTHING_KEPT

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


def is_single_update(cut: Partition, config: PPOConfig) -> bool:
    """Whether the step is one update of one micro-batch, whose forwards the scoring has made already."""
    return config.epochs == 1 and sum(map(len, cut)) == 1


def graphs_to_keep(config: PPOConfig, *, policy_moves: bool) -> set[Trained]:
    """Whose forwards of the scoring a single update starts from, at no more memory than if it made them itself.

    Advantages need the values and returns the log-probs, so that two kept graphs are there together: see
    :attr:`PPOConfig.keeps_both_forwards`. The policy comes first.
    """
    if not policy_moves:  # the value alone is trained
        return {"value"}
    return {"policy", "value"} if config.keeps_both_forwards else {"policy"}


def select(batch: ExperienceBatch, rows: Sequence[int]) -> ExperienceBatch:
    """The given rows, cut to the longest of them."""
    index = torch.tensor(rows)
    width = int(batch.tokens.attention_mask_BT[index].sum(dim=1).max())

    def cut(x: Tensor | None) -> Tensor | None:
        return None if x is None else x[index, :width] if x.dim() > 1 else x[index]

    streams: dict[str, Any] = {
        f.name: cut(getattr(batch, f.name)) for f in dataclasses.fields(batch) if f.name != "tokens"
    }
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
    keep_graphs: Collection[Trained] = (),
) -> Experience:
    """Run the four parts over the answers and derive rewards, advantages and returns.

    Args:
        kl_coefficient: β of this step, score deviations per nat.
        generator: draws the minibatches of the first epoch.
        check: called with the name of each stream, the stream and its tokens before anything is derived from it.
        keep_graphs: whose forwards to keep where the step has one update of one micro-batch: it would make the same.
    """
    completions = [r.completion for r in rollouts]
    tokens = dataclasses.replace(
        completion_batch([c.prompt_ids for c in completions], [c.ids for c in completions], pad_id),
        ids=tuple(f"{c.prompt_id}/{c.sample_index}" for c in completions),
    )
    lengths = tokens.attention_mask_BT.sum(dim=1).tolist()
    first = partition(lengths, config, generator)
    streams: dict[str, Tensor] = {}
    cut = [rows for minibatch in first for rows in minibatch]
    keep_graphs = keep_graphs if is_single_update(first, config) else ()
    kept = NOTHING_KEPT
    for rows in cut:
        part = select_tokens(tokens, rows)
        found, kept = forward_streams(
            roles, part, temperature=config.sampling.temperature, keep_graphs=keep_graphs,
            exact_kl="exact" in (config.kl.in_reward, config.kl.in_loss), reference_hidden=config.kl.in_loss == "exact",
        )  # fmt: skip
        for name, stream in found.items():
            stream = stream.cpu()
            if name != "reference hidden":
                check(name, stream, part)
                stream = torch.where(part.loss_mask_BT, stream.float(), 0.0)
            if name not in streams:
                streams[name] = stream.new_zeros((*tokens.inputs_BT.shape, *stream.shape[2:]))
            streams[name][torch.tensor(rows), : stream.shape[1]] = stream
    made = _derive(rollouts, tokens, streams, config, kl_coefficient, first, roles, check)
    return dataclasses.replace(made, kept=kept)


@torch.no_grad()
def forward_streams(
    roles: Roles, part: TokenBatch, *, temperature: float, exact_kl: bool, reference_hidden: bool = False,
    keep_graphs: Collection[Trained] = (),
) -> tuple[dict[str, Tensor], KeptForwards]:  # fmt: skip
    """[B, T] of every part over one micro-batch, in the order in which they are checked; one forward a model.

    Args:
        exact_kl: the KL over the vocabulary too.
        reference_hidden: the reference's hidden states [B, T, D] too.
        keep_graphs: whose forwards a backward is to start from; they are given besides. What has no graph is made
            before what has one, while there is room.
    """
    part = to_device(part, roles.policy.device)
    reference_BTD = roles.reference.hidden(part)
    reference_BT, _ = roles.reference.logprobs_of(reference_BTD, part, temperature=temperature)
    keeps_policy, keeps_value, values_BT = "policy" in keep_graphs, "value" in keep_graphs, None
    if keeps_policy and not exact_kl:  # this was the only micro-batch; the graph is the step's largest
        roles.offload.send_away()
    if not keeps_value and not roles.value.is_shared:
        values_BT = roles.value.values(part)
    with torch.set_grad_enabled(keeps_policy):
        hidden_BTD = roles.policy.hidden(part)
        logprobs_BT, entropy_BT = roles.policy.logprobs_of(hidden_BTD, part, temperature=temperature, with_entropy=True)
    assert entropy_BT is not None
    if values_BT is None:
        with torch.set_grad_enabled(keeps_value):
            values_BT = roles.value.values(part, hidden_BTD if roles.value.is_shared else None)
    found = {
        "log-probs": logprobs_BT,
        "entropy": entropy_BT,
        "reference log-probs": reference_BT,
        "values": values_BT,
    }
    if exact_kl:
        found["exact KL"] = roles.policy.exact_kl_of(
            hidden_BTD, part, reference_BTD, roles.reference.head, temperature=temperature
        )
    if reference_hidden:
        found["reference hidden"] = reference_BTD
    kept = KeptForwards(
        PolicyForward(hidden_BTD, logprobs_BT, entropy_BT) if keeps_policy else None,
        values_BT if keeps_value else None,
    )
    return {name: stream.detach() for name, stream in found.items()}, kept


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
    """Rewards, advantages and returns from the streams."""
    mask_BT = tokens.loss_mask_BT
    logprobs_BT, reference_BT, values_BT = streams["log-probs"], streams["reference log-probs"], streams["values"]
    scores_B = torch.tensor([r.score for r in rollouts], dtype=torch.float32)
    check("scores", scores_B, tokens)
    kl_BT = torch.where(mask_BT, kl.estimate(logprobs_BT, reference_BT, kind="k1"), 0.0)
    exact_BT = streams.get("exact KL")
    kl_weights_B = torch.ones_like(scores_B)
    if config.kl.outliers is not None:
        o, measured_BT = config.kl.outliers, kl_BT if exact_BT is None else exact_BT
        kl_weights_B = kl.outlier_weights(
            measured_BT.sum(dim=1), threshold=o.threshold, slope=o.slope, max_weight=o.max_weight
        )
    penalty_BT = _penalty(config, kl_BT, exact_BT, logprobs_BT, reference_BT, mask_BT)
    check("KL", penalty_BT, tokens)
    beta_B = kl_coefficient * kl_weights_B
    answer_scores_B = answer_scores(rollouts, config, score_clip=config.score_clip)
    rewards_BT = shaping.token_rewards(answer_scores_B, penalty_BT, mask_BT, kl_coefficient=beta_B[:, None])
    check("rewards", rewards_BT, tokens)
    scale = torch.ones(())  # of rewards and advantages, and hence of the KL in the loss
    if config.whiten_rewards:
        scale = _whitening(rewards_BT, mask_BT)
        rewards_BT = masked.whiten(rewards_BT, mask_BT, shift_mean=False, eps=WHITENING_EPSILON)
    bootstrap_B = None
    if config.bootstrap_truncated:
        bootstrap_B = _last_values(rollouts, roles)
        check("values after the cut", bootstrap_B, tokens)
    advantages_BT, returns_BT = advantages.gae(
        rewards_BT, values_BT, mask_BT, gamma=config.gamma, lam=config.lam, value_lam=config.value_lam,
        bootstrap_B=bootstrap_B,
    )  # fmt: skip
    plain_advantages_BT = advantages_BT
    if config.whiten_advantages:
        scale = scale * _whitening(advantages_BT, mask_BT)
        advantages_BT = masked.whiten(advantages_BT, mask_BT, eps=WHITENING_EPSILON)
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
        kl_loss_weights_B=beta_B * scale,
        reference_hidden_BTD=streams.get("reference hidden"),
    )
    return Experience(batch, first, kl_BT, exact_BT, streams["entropy"], plain_advantages_BT, kl_weights_B)


def answer_scores(rollouts: Sequence[Rollout], config: PPOConfig, *, score_clip: float | None = None) -> Tensor:
    """[B]: what the answers are worth without KL: their scores, and what a missing end and their lengths cost."""
    return shaping.answer_scores(
        torch.tensor([r.score for r in rollouts], dtype=torch.float32), score_clip=score_clip,
        finished_B=torch.tensor([r.completion.finish_reason == "stop" for r in rollouts]),
        lengths_B=torch.tensor([len(r.completion.ids) for r in rollouts]),
        missing_end_penalty=config.missing_end_penalty, missing_end_score=config.missing_end_score,
        overlong_from_tokens=config.overlong_from_tokens, overlong_full_tokens=config.sampling.max_new_tokens,
        overlong_penalty=config.overlong_penalty,
    )  # fmt: skip


def _penalty(
    config: PPOConfig, kl_BT: Tensor, exact_BT: Tensor | None, logprobs_BT: Tensor, reference_BT: Tensor,
    mask_BT: Tensor,
) -> Tensor:  # fmt: skip
    """[B, T]: the KL that each token's reward carries; with a KL in the loss only that of later tokens."""
    kind = config.kl.in_reward
    if kind == "none":
        return torch.zeros_like(kl_BT)
    if kind == "exact":
        assert exact_BT is not None
        penalty_BT = exact_BT
    else:
        penalty_BT = kl_BT if kind == "k1" else kl.estimate(logprobs_BT, reference_BT, kind=kind)
    return penalty_BT if config.kl.in_loss == "none" else shaping.of_later_tokens(penalty_BT, mask_BT)


def _whitening(x_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """What :func:`masked.whiten` multiplies deviations by."""
    return torch.rsqrt(masked.var(x_BT, mask_BT) + WHITENING_EPSILON)


def _last_values(rollouts: Sequence[Rollout], roles: Roles) -> Tensor:
    """[B]: the value after the last token of cut answers; 0 for finished ones, which always end for good (PPO-03)."""
    last_B = torch.zeros(len(rollouts))
    for row, c in enumerate(r.completion for r in rollouts):
        if c.finish_reason != "stop":
            ids_1T = torch.tensor([c.prompt_ids + c.ids], device=roles.value.device)
            last_B[row] = roles.value.values_after(ids_1T)
    return last_B
