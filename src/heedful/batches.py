"""The nouns that are not saved: tensors with their shapes.

Dimension letters, everywhere: B sequences, T predicted tokens, V vocabulary, P prompts, G samples per prompt,
K ranked answers, D hidden width, N any number of items.

A full sequence of T+1 ids gives T predictions. The shift happens once, in ``data/collate.py``: ``inputs_BT`` are the
first T ids, ``targets_BT`` the last T, and every per-token stream (log-probs, values, rewards, masks) is aligned with
the *targets*: entry t belongs to predicting ``targets[:, t]`` from the state after ``inputs[:, t]``.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

B = TypeVar("B")


def to_device(batch: B, device: torch.device | str) -> B:
    """A copy of a batch dataclass with every tensor moved to ``device``."""
    moved = {
        f.name: getattr(batch, f.name).to(device, non_blocking=True)
        for f in dataclasses.fields(batch)  # type: ignore[arg-type]
        if isinstance(getattr(batch, f.name), Tensor)
    }
    return dataclasses.replace(batch, **moved)  # type: ignore[type-var]


@dataclass(frozen=True)
class TokenBatch:
    """Sequences for a language model, right-padded or packed."""

    inputs_BT: Tensor
    """int64 [B, T]"""
    targets_BT: Tensor
    """int64 [B, T]; padding holds the pad id and is never read where loss_mask is False"""
    loss_mask_BT: Tensor
    """bool [B, T]; True = this target counts"""
    attention_mask_BT: Tensor
    """int64 [B, T]; 1 = real input token. For packed rows: the 1-based number of the packed sample, 0 = padding"""
    position_ids_BT: Tensor
    """int64 [B, T]; counts from 0 at the start of each sample, 0 on padding"""
    ids: tuple[str, ...] = ()
    """sample ids, for messages"""
    packed: bool = False

    @property
    def num_counted_tokens(self) -> int:
        """Targets that count."""
        return int(self.loss_mask_BT.sum())


@dataclass(frozen=True)
class RankingBatch:
    """P prompts with up to K answers each, in R right-padded rows.

    Separate: every row is a prompt and one answer. Packed: a row holds several blocks of a prompt and one or more of
    its answers, which see the prompt and themselves only; every answer's positions go on from the prompt's end.
    """

    ids_RT: Tensor
    """int64 [R, T]"""
    attention_mask_RT: Tensor
    """int64 [R, T]; 0 = padding, 1 = real token. In packed rows the number of the piece, a prompt or an answer"""
    position_ids_RT: Tensor
    """int64 [R, T]; 0 on padding"""
    rows_PK: Tensor
    """int64 [P, K]; row of each answer's last token, 0 where ``mask_PK`` is False"""
    columns_PK: Tensor
    """int64 [P, K]; column of each answer's last token"""
    ranks_PK: Tensor
    """int64 [P, K]; 1 = best, equal = tie"""
    mask_PK: Tensor
    """bool [P, K]; True = a real answer"""
    baits_PK: Tensor
    """bool [P, K]; True = fluent and wrong on purpose"""
    lengths_PK: Tensor
    """int64 [P, K]; tokens of each answer, which end at its last token"""
    strengths_PKK: Tensor
    """float32 [P, K, K]; by how much the better of two answers leads"""
    targets_PKK: Tensor | None = None
    """float32 [P, K, K]; P(i better than j), NaN = nobody compared them; None = the ranks say all"""
    head_ranks_HPK: Tensor | None = None
    """int64 [H, P, K]; the ranks that each head is taught, 0 = none; None = ``ranks_PK``"""
    head_weights_HP: Tensor | None = None
    """float32 [H, P]; what each prompt weighs in each head's loss"""
    prompts_RT: Tensor | None = None
    """int64 [R, T]; the number of the piece that is the token's prompt, itself for a prompt; None = separate rows"""
    ids: tuple[str, ...] = ()
    """group ids, for messages"""


@dataclass(frozen=True)
class ExperienceBatch:
    """Scored rollouts, everything PPO needs, aligned with ``tokens.targets_BT``. All streams float32 [B, T]."""

    tokens: TokenBatch
    """``loss_mask_BT`` is True on the sampled answer tokens"""
    old_logprobs_BT: Tensor
    reference_logprobs_BT: Tensor
    old_values_BT: Tensor
    rewards_BT: Tensor
    advantages_BT: Tensor
    returns_BT: Tensor
    scores_B: Tensor
    """float32 [B]; the weighted sum of the scaled reward parts, before clipping and penalties"""
    kl_loss_weights_B: Tensor
    """float32 [B]; what the KL of the current token weighs in the loss: β · outlier weight · scale of the advantages"""
    reference_hidden_BTD: Tensor | None = None
    """[B, T, D] in the compute dtype; only where the loss has the exact KL"""


@dataclass(frozen=True)
class LossOut:
    """What every objective returns: the scalar to differentiate and detached numbers to log."""

    loss: Tensor
    metrics: dict[str, Tensor] = field(default_factory=dict)
    """float32 scalars, detached. Means are already divided by the denominator, so that sums over micro-batches are the
    means of the step"""


@dataclass
class StepStats:
    """What one optimizer step or PPO step hands to the log."""

    scalars: dict[str, float] = field(default_factory=dict)
    """metric name → number"""
    histograms: dict[str, list[float]] = field(default_factory=dict)
    """name → raw values"""
    samples: list[dict[str, Any]] = field(default_factory=list)
    """rows of the sample table"""
