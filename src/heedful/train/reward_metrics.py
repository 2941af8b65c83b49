"""What is told of an optimizer step of the reward model, from the scores that its micro-batches had."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from heedful.batches import RankingBatch
from heedful.models.heads import Heads
from heedful.objectives import preference


@dataclass(frozen=True)
class Pool:
    """The answers of a whole step."""

    scores_PKH: Tensor
    ranks_PK: Tensor
    lengths_PK: Tensor
    mask_PK: Tensor
    """True = an answer; baits are none, their length is chance"""
    baits_PK: Tensor
    head_ranks_HPK: Tensor | None


def pooled(found: Sequence[tuple[Tensor, RankingBatch]]) -> Pool:
    """The micro-batches of a step as one, each with the scores [P, K, H] of its answers."""
    width = max(scores_PKH.shape[1] for scores_PKH, _ in found)

    def joined(parts: Sequence[Tensor]) -> Tensor:
        return torch.cat([pad(x_PK, (0, width - x_PK.shape[-1])) for x_PK in parts], dim=-2)

    batches = [batch for _, batch in found]
    heads = [batch.head_ranks_HPK for batch in batches if batch.head_ranks_HPK is not None]
    return Pool(
        joined([scores_PKH.movedim(-1, 0) for scores_PKH, _ in found]).movedim(0, -1),
        joined([b.ranks_PK for b in batches]),
        joined([b.lengths_PK for b in batches]),
        joined([b.mask_PK & ~b.baits_PK for b in batches]),
        joined([b.mask_PK & b.baits_PK for b in batches]),
        joined(heads) if heads else None,
    )


def step_metrics(pool: Pool, heads: Heads | None) -> dict[str, float]:
    """``length_correlation``, ``accuracy`` and ``margin`` over the pairs of people, ``bait_accuracy``; of attributes
    ``accuracy/<name>`` over the pairs of its ratings, of an ensemble ``disagreement``.

    What has no pair in the step is left out. Several attributes are summed with their deviations in this step.
    """
    scores_PK = combined(pool.scores_PKH, pool.mask_PK, heads)
    found = {
        "length_correlation": float(preference.length_correlation(scores_PK, pool.lengths_PK, pool.mask_PK)),
        **_order(scores_PK, preference.better(pool.ranks_PK, pool.mask_PK)),
    }
    better_PKK = preference.better(pool.ranks_PK, pool.mask_PK | pool.baits_PK)
    baited = _order(scores_PK, better_PKK & pool.mask_PK[:, :, None] & pool.baits_PK[:, None, :])
    if baited:
        found["bait_accuracy"] = baited["accuracy"]
    if heads is not None and heads.kind == "attributes" and pool.head_ranks_HPK is not None:
        for h, name in enumerate(heads.names):
            ranks_PK = pool.head_ranks_HPK[h]
            told = _order(pool.scores_PKH[..., h], preference.better(ranks_PK, pool.mask_PK & (ranks_PK > 0)))
            if told:
                found[f"accuracy/{name}"] = told["accuracy"]
    if heads is not None and heads.kind == "ensemble":
        found["disagreement"] = float(preference.disagreement(pool.scores_PKH, pool.mask_PK))
    return found


def combined(scores_PKH: Tensor, mask_PK: Tensor, heads: Heads | None) -> Tensor:
    """[P, K]: the score that the heads make, their deviations being those of these answers."""
    if heads is None:
        return scores_PKH[..., 0]
    deviations = [float(preference.deviation(scores_PK, mask_PK)) for scores_PK in scores_PKH.unbind(-1)]
    return scores_PKH @ torch.tensor(heads.factors(deviations), device=scores_PKH.device)


def _order(scores_PK: Tensor, pair_PKK: Tensor) -> dict[str, float]:
    """Accuracy and margin; {} where there is no pair."""
    if not bool(pair_PKK.any()):
        return {}
    return {name: float(value) for name, value in preference.order(scores_PK, pair_PKK).items()}
