"""What the reward model is trained on: the ranking loss of a micro-batch, and what is added to keep scores honest.

All but one of the terms are means over prompts, so that micro-batches add up. The correlation of score and length is
one number of the whole step: its slope at every score is found first, from scores without gradient, and each
micro-batch then follows its own part of the slope. The gradient is exact however the step is cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from heedful.batches import LossOut, RankingBatch, to_device
from heedful.config.reward import RewardConfig
from heedful.models.parts import ScalarModel
from heedful.objectives import masked, preference


class LengthHead:
    """A second head that learns length, so that the first need not (ODIN, Chen et al. 2024).

    The sum of both heads is trained on the rankings; the length head is drawn to the correlation with log length and
    the quality head away from it. Chen et al. add a penalty on the product of the two weight vectors; here the length
    head has no part along the quality head's in the first place, which needs no coefficient and holds exactly.
    """

    def __init__(self, model: ScalarModel, *, seed: int) -> None:
        self._model = model
        width = model.base.config.get_text_config().hidden_size
        weight_D = torch.randn(width, generator=torch.Generator().manual_seed(seed)).to(model.device)
        self.weight_D = nn.Parameter(weight_D)
        size = float(self.quality_weight_D().norm())
        self.weight_D.data *= size / weight_D.norm()  # as large as the other: its first guess must not drown the scores

    def scalars(self, hidden: Tensor) -> Tensor:
        """As :meth:`ScalarModel.scalars`, of length."""
        quality_D = self.quality_weight_D()
        along = (self.weight_D @ quality_D) / (quality_D @ quality_D).clamp(min=1e-12)
        with torch.autocast(hidden.device.type, enabled=False):
            scalars: Tensor = hidden.float() @ (self.weight_D - along * quality_D)
        return scalars

    @torch.no_grad()
    def quality_weight_D(self) -> Tensor:
        """The weight of the head that is kept, whatever wraps it."""
        unit_DD = torch.eye(len(self.weight_D), device=self._model.device)
        return self._model.scalars(unit_DD) - self._model.scalars(torch.zeros_like(unit_DD))


@dataclass(frozen=True)
class Part:
    """One micro-batch of a step, with what the whole step says about it."""

    batch: RankingBatch
    quality_slopes_PK: Tensor | None = None
    """Of the length terms, at the scores; None where there are none."""
    length_slopes_PK: Tensor | None = None
    """Of the same at the scores of the length head."""


class RewardLoss:
    """The loss of ``config`` on ``model``, with the parameters that only the training needs."""

    def __init__(self, model: ScalarModel, config: RewardConfig, *, seed: int) -> None:
        self.model, self.config = model, config
        self.length_head = LengthHead(model, seed=seed) if config.length_head else None
        self.length_weight = config.length_penalty or float(config.length_head)
        self._num_prompts = self._num_ordered = self._num_baited = 0
        self._seen: list[tuple[Tensor, RankingBatch]] = []

    def parameters(self) -> dict[str, nn.Parameter]:
        """All that is trained, by name; the length head too, which is not part of the model."""
        own = {} if self.length_head is None else {"length_head.weight": self.length_head.weight_D}
        return self.model.trainable_parameters() | own

    def parts(self, batches: Sequence[RankingBatch]) -> list[Part]:
        """The micro-batches of one optimizer step, made ready for :meth:`__call__`."""
        batches = [to_device(batch, self.model.device) for batch in batches]
        self._num_prompts = sum(
            int(preference.num_prompts(b.ranks_PK, b.mask_PK, targets_PKK=b.targets_PKK, ties=self.config.ties))
            for b in batches
        )
        self._num_ordered = sum(_num_prompts(ordered_pairs(b)) for b in batches)
        self._num_baited = sum(_num_prompts(bait_pairs(b)) for b in batches)
        self._seen = []
        return self._with_slopes(batches) if self.length_weight else [Part(batch) for batch in batches]

    def __call__(self, part: Part) -> LossOut:
        """The loss of one part, divided by the numbers of the whole step.

        Its metrics are ``loss_nats`` (of the rankings alone), ``accuracy`` and ``margin`` over the pairs of people, and
        ``bait_accuracy``; the latter three only where the step has such pairs.
        """
        batch = part.batch
        states_RTD = self.model.ranking_states(batch)
        last_PKD = states_RTD[batch.rows_PK, batch.columns_PK]
        scores_PK = masked.counted(self.model.scalars(last_PKD), batch.mask_PK)
        self._seen.append((scores_PK.detach(), batch))
        ranking = self._ranking_loss(batch, states_RTD, last_PKD, scores_PK)
        loss = ranking + self._bounds(scores_PK, batch.mask_PK)
        if part.quality_slopes_PK is not None:
            loss = loss + (scores_PK * part.quality_slopes_PK).sum()
        if part.length_slopes_PK is not None and self.length_head is not None:
            length_PK = masked.counted(self.length_head.scalars(last_PKD), batch.mask_PK)
            loss = loss + (length_PK * part.length_slopes_PK).sum()
        metrics = {"loss_nats": ranking.detach()}
        if self._num_ordered:
            metrics |= preference.order(scores_PK, ordered_pairs(batch), denominator=self._num_ordered)
        if self._num_baited:
            found = preference.order(scores_PK, bait_pairs(batch), denominator=self._num_baited)
            metrics["bait_accuracy"] = found["accuracy"]
        return LossOut(loss, metrics)

    def length_correlation(self) -> float:
        """Of the scores that the parts of this step had."""
        return float(preference.length_correlation(*_pooled(self._seen)))

    def _ranking_loss(self, batch: RankingBatch, states_RTD: Tensor, last_PKD: Tensor, scores_PK: Tensor) -> Tensor:
        options: dict[str, Any] = {
            "label_smoothing": self.config.label_smoothing, "denominator": self._num_prompts,
            "targets_PKK": batch.targets_PKK, "ties": self.config.ties,
            "margins_PKK": self.config.margin * batch.strengths_PKK if self.config.margin else None,
        }  # fmt: skip
        if self.config.form == "last":
            if self.length_head is not None:
                scores_PK = scores_PK + self.length_head.scalars(last_PKD)
            return preference.ranking(scores_PK, batch.ranks_PK, batch.mask_PK, **options).loss
        place_T = torch.arange(int(batch.lengths_PK.max()), device=scores_PK.device)
        columns_PKT = batch.columns_PK[..., None] - batch.lengths_PK[..., None] + 1 + place_T
        columns_PKT = torch.minimum(columns_PKT, batch.columns_PK[..., None])  # never past the answer's end
        rows_PK1 = batch.rows_PK[..., None]
        values_RT = self.model.scalars(states_RTD)
        if self.length_head is not None:
            values_RT = values_RT + self.length_head.scalars(states_RTD)
        return preference.every_token(
            values_RT[rows_PK1, columns_PKT], batch.ids_RT[rows_PK1, columns_PKT], batch.lengths_PK,
            batch.ranks_PK, batch.mask_PK, **options,
        ).loss  # fmt: skip

    def _bounds(self, scores_PK: Tensor, mask_PK: Tensor) -> Tensor:
        """What a prompt's level and spread cost."""
        total = torch.zeros((), device=scores_PK.device)
        if self.config.zero_centre:
            total = (
                total
                + preference.zero_centre(
                    scores_PK, mask_PK, coefficient=self.config.zero_centre, denominator=self._num_prompts
                ).loss
            )
        if self.config.max_spread is not None:
            total = (
                total
                + preference.spread_limit(
                    scores_PK, mask_PK, limit=self.config.max_spread, denominator=self._num_prompts
                ).loss
            )
        return total

    def _with_slopes(self, batches: Sequence[RankingBatch]) -> list[Part]:
        """Parts with the slopes of weight · ρ², and with a length head of − its own correlation."""
        quality: list[tuple[Tensor, RankingBatch]] = []
        length: list[tuple[Tensor, RankingBatch]] = []
        with torch.no_grad():
            for batch in batches:
                last_PKD = self.model.ranking_states(batch)[batch.rows_PK, batch.columns_PK]
                quality.append((self.model.scalars(last_PKD), batch))
                if self.length_head is not None:
                    length.append((self.length_head.scalars(last_PKD), batch))
        leaves = [scores_PK.requires_grad_() for scores_PK, _ in quality + length]
        cost = self.length_weight * preference.length_correlation(*_pooled(quality)) ** 2
        if length:
            cost = cost - preference.length_correlation(*_pooled(length))
        slopes = torch.autograd.grad(cost, leaves)
        num = len(batches)
        return [Part(b, slopes[n], slopes[num + n] if length else None) for n, b in enumerate(batches)]


def ordered_pairs(batch: RankingBatch) -> Tensor:
    """[P, K, K]: pairs that people told apart; no baits."""
    return preference.better(batch.ranks_PK, batch.mask_PK & ~batch.baits_PK)


def bait_pairs(batch: RankingBatch) -> Tensor:
    """[P, K, K]: pairs of an answer and a bait ranked behind it."""
    better_PKK = preference.better(batch.ranks_PK, batch.mask_PK)
    return better_PKK & ~batch.baits_PK[:, :, None] & batch.baits_PK[:, None, :]


def _num_prompts(pair_PKK: Tensor) -> int:
    return int(pair_PKK.any(dim=2).any(dim=1).sum())


def _pooled(found: Sequence[tuple[Tensor, RankingBatch]]) -> tuple[Tensor, Tensor, Tensor]:
    """Scores, lengths and mask of the answers of a whole step, [P, K]; baits are no answers, their length is chance."""
    width = max(scores_PK.shape[1] for scores_PK, _ in found)

    def wide(x_PK: Tensor) -> Tensor:
        return pad(x_PK, (0, width - x_PK.shape[1]))

    scores_PK = torch.cat([wide(x_PK) for x_PK, _ in found])
    lengths_PK = torch.cat([wide(batch.lengths_PK) for _, batch in found])
    return scores_PK, lengths_PK, torch.cat([wide(batch.mask_PK & ~batch.baits_PK) for _, batch in found])
