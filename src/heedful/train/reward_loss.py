"""What the reward model is trained on: the ranking loss of a micro-batch, and what is added to keep scores honest.

A model may have H heads, each with labels of its own: every term is then the mean over the heads, of which one is the
usual case. All but one of the terms are means over prompts, so that micro-batches add up. The correlation of score and
length is one number of the whole step: its slope at every score is found first, from scores without gradient, and each
micro-batch then follows its own part of the slope. The gradient is exact however the step is cut.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from heedful.batches import LossOut, RankingBatch, to_device
from heedful.config.reward import RewardConfig
from heedful.errors import DataError
from heedful.models.heads import Heads, new_heads
from heedful.models.parts import ScalarModel
from heedful.objectives import masked, preference
from heedful.train.reward_metrics import pooled, step_metrics


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
    quality_slopes_PKH: Tensor | None = None
    """Of the length terms, at the scores; None where there are none."""
    length_slopes_PK: Tensor | None = None
    """Of the same at the scores of the length head."""


@dataclass(frozen=True)
class Labels:
    """What one head is taught of a batch."""

    ranks_PK: Tensor
    mask_PK: Tensor
    weights_P: Tensor | None = None


def labels_of(batch: RankingBatch) -> list[Labels]:
    """One per head; the ranking itself where there are no heads."""
    if batch.head_ranks_HPK is None or batch.head_weights_HP is None:
        return [Labels(batch.ranks_PK, batch.mask_PK)]
    heads = zip(batch.head_ranks_HPK, batch.head_weights_HP, strict=True)
    return [Labels(ranks_PK, batch.mask_PK & (ranks_PK > 0), weights_P) for ranks_PK, weights_P in heads]


class RewardLoss:
    """The loss of ``config`` on ``model``, with the parameters that only the training needs."""

    def __init__(self, model: ScalarModel, config: RewardConfig, *, seed: int) -> None:
        self.model, self.config = model, config
        self.length_head = LengthHead(model, seed=seed) if config.length_head else None
        self.length_weight = config.length_penalty or float(config.length_head)
        self.heads: Heads | None = None
        if config.attributes or config.ensemble > 1:
            members = {f"member_{h + 1}": 1 / config.ensemble for h in range(config.ensemble)}
            self.heads = new_heads(
                "attributes" if config.attributes else "ensemble", config.attributes or members,
                model.base.config.get_text_config().hidden_size, seed=seed, device=model.device,
            )  # fmt: skip
            model.freeze_head()  # it becomes the sum of the heads when they are trained
        self._weights_H: list[float] = []
        """Of all prompts with a pair of this head, together"""
        self._num_rankings = 0
        self._seen: list[tuple[Tensor, RankingBatch]] = []
        self.length_slopes_H = [0.0] * (1 if self.heads is None else len(self.heads.weight_HD))
        """Nats per unit of log length that the loss adds to every head's scores (``length_offset``)"""

    def fit_length(self, batches: Iterable[RankingBatch]) -> None:
        """Find what ``length_offset``, where it is not 0, gives to every answer: from all rankings to be trained on.

        Raises:
            DataError: length alone orders every pair of a head.
        """
        if not self.config.length_offset:
            return
        told: list[list[tuple[Tensor, Tensor, Tensor, dict[str, Any]]]] = []
        for batch in batches:
            people = replace(batch, mask_PK=batch.mask_PK & ~batch.baits_PK)  # the length of a bait is chance
            told.append([
                (people.lengths_PK, x.ranks_PK, x.mask_PK, self._options(x, people) | {"margins_PKK": None})
                for x in labels_of(people)
            ])  # fmt: skip
        slopes = [preference.length_slope(rankings) for rankings in zip(*told, strict=True)]
        if not all(map(math.isfinite, slopes)):
            raise DataError(
                "length alone orders every training pair, so nothing is left for reward.length_offset to hold apart; "
                "set it to 0, or give rankings in which a shorter answer wins here and a longer one there"
            )
        self.length_slopes_H = [self.config.length_offset * slope for slope in slopes]

    def parameters(self) -> dict[str, nn.Parameter]:
        """All that is trained, by name; heads that are not part of the model itself too."""
        own = {} if self.length_head is None else {"length_head.weight": self.length_head.weight_D}
        if self.heads is not None:
            own["heads.weight"] = cast(nn.Parameter, self.heads.weight_HD)
        return self.model.trainable_parameters() | own

    def parts(self, batches: Sequence[RankingBatch]) -> list[Part]:
        """The micro-batches of one optimizer step, made ready for :meth:`__call__`."""
        batches = [to_device(batch, self.model.device) for batch in batches]
        weights_NH = [[float(self._weights(x, batch).sum()) for x in labels_of(batch)] for batch in batches]
        self._weights_H = [sum(weights) for weights in zip(*weights_NH, strict=True)]
        self._num_rankings = sum(len(b.ranks_PK) for b in batches)
        self._seen = []
        return self._with_slopes(batches) if self.length_weight else [Part(batch) for batch in batches]

    def __call__(self, part: Part) -> LossOut:
        """The loss of one part, divided by the numbers of the whole step; ``loss_nats`` is that of the rankings."""
        batch = part.batch
        states_RTD = self.model.ranking_states(batch)
        last_PKD = states_RTD[batch.rows_PK, batch.columns_PK]
        scores_PKH = torch.where(batch.mask_PK[..., None], self._scalars(last_PKD), 0.0)
        self._seen.append((scores_PKH.detach(), batch))
        ranking = self._ranking_loss(batch, states_RTD, last_PKD, scores_PKH)
        loss = ranking + self._bounds(batch, scores_PKH)
        if part.quality_slopes_PKH is not None:
            loss = loss + (scores_PKH * part.quality_slopes_PKH).sum()
        if part.length_slopes_PK is not None and self.length_head is not None:
            length_PK = masked.counted(self.length_head.scalars(last_PKD), batch.mask_PK)
            loss = loss + (length_PK * part.length_slopes_PK).sum()
        return LossOut(loss, {"loss_nats": ranking.detach()})

    def step_metrics(self) -> dict[str, float]:
        """Of the scores that the parts of this step had (see :func:`~heedful.train.reward_metrics.step_metrics`)."""
        return step_metrics(pooled(self._seen), self.heads)

    def finish(self) -> None:
        """Let the model's own head be what the heads make, and the model have them."""
        if self.heads is not None:
            self.model.set_head(self.heads.row())
            self.model.heads = replace(self.heads, weight_HD=self.heads.weight_HD.detach())

    def _scalars(self, hidden: Tensor) -> Tensor:
        """[..., H] of hidden states [..., D]."""
        return self.model.scalars(hidden)[..., None] if self.heads is None else self.heads.scalars(hidden)

    def _ranking_loss(self, batch: RankingBatch, states_RTD: Tensor, last_PKD: Tensor, scores_PKH: Tensor) -> Tensor:
        """Mean over the heads of what their rankings cost."""
        heads = [
            (labels.ranks_PK, labels.mask_PK, self._options(labels, batch) | {"denominator": total})
            for labels, total in zip(labels_of(batch), self._weights_H, strict=True)
        ]
        offsets_PKH = self._length_offsets(batch)
        if self.config.form == "last":
            if self.length_head is not None:
                scores_PKH = scores_PKH + self.length_head.scalars(last_PKD)[..., None]
            explained_PKH = scores_PKH + offsets_PKH
            return _mean([
                preference.ranking(scores_PK, ranks_PK, mask_PK, **own).loss
                for scores_PK, (ranks_PK, mask_PK, own) in zip(explained_PKH.unbind(-1), heads, strict=True)
            ])  # fmt: skip
        place_T = torch.arange(int(batch.lengths_PK.max()), device=scores_PKH.device)
        columns_PKT = batch.columns_PK[..., None] - batch.lengths_PK[..., None] + 1 + place_T
        columns_PKT = torch.minimum(columns_PKT, batch.columns_PK[..., None])  # never past the answer's end
        rows_PK1 = batch.rows_PK[..., None]
        values_RTH = self._scalars(states_RTD)
        if self.length_head is not None:
            values_RTH = values_RTH + self.length_head.scalars(states_RTD)[..., None]
        return _mean([
            preference.every_token(
                values_RT[rows_PK1, columns_PKT] + offsets_PK[..., None], batch.ids_RT[rows_PK1, columns_PKT],
                batch.lengths_PK, ranks_PK, mask_PK, **own,
            ).loss
            for values_RT, offsets_PK, (ranks_PK, mask_PK, own)
            in zip(values_RTH.unbind(-1), offsets_PKH.unbind(-1), heads, strict=True)
        ])  # fmt: skip

    def _options(self, labels: Labels, batch: RankingBatch) -> dict[str, Any]:
        """What the loss of one head is told besides ranks and mask, but for the denominator."""
        return {
            "label_smoothing": self.config.label_smoothing, **_soft(batch, self.config),
            "margins_PKK": self.config.margin * batch.strengths_PKK if self.config.margin else None,
            "weights_P": self._weights(labels, batch) * (1.0 if labels.weights_P is None else labels.weights_P),
        }  # fmt: skip

    def _length_offsets(self, batch: RankingBatch) -> Tensor:
        """[P, K, H]: what the labels owe to length, which the scores then need not explain."""
        slopes_H = torch.tensor(self.length_slopes_H, device=batch.lengths_PK.device)
        return batch.lengths_PK.clamp(min=1).log()[..., None] * slopes_H

    def _weights(self, labels: Labels, batch: RankingBatch) -> Tensor:
        """[P]: what each prompt's mean over pairs weighs, 0 without a pair; no part of an ensemble's draws."""
        num_pairs_P = preference.num_pairs(labels.ranks_PK, labels.mask_PK, **_soft(batch, self.config))
        return (num_pairs_P if self.config.weigh == "pairs" else num_pairs_P.sign()).float()

    def _bounds(self, batch: RankingBatch, scores_PKH: Tensor) -> Tensor:
        """What a prompt's level and spread cost, for all its answers, rated or not."""
        coefficient, limit = self.config.zero_centre, self.config.max_spread
        costs = [torch.zeros((), device=scores_PKH.device)]
        for scores_PK in scores_PKH.unbind(-1):
            given: dict[str, Any] = {"denominator": self._num_rankings * scores_PKH.shape[-1]}
            if coefficient:
                found = preference.zero_centre(scores_PK, batch.mask_PK, coefficient=coefficient, **given)
                costs.append(found.loss)
            if limit is not None:
                costs.append(preference.spread_limit(scores_PK, batch.mask_PK, limit=limit, **given).loss)
        return torch.stack(costs).sum()

    def _with_slopes(self, batches: Sequence[RankingBatch]) -> list[Part]:
        """Parts with the slopes of weight · (ρ − target)², and with a length head of − its own correlation."""
        quality: list[tuple[Tensor, RankingBatch]] = []
        length: list[tuple[Tensor, RankingBatch]] = []
        with torch.no_grad():
            for batch in batches:
                last_PKD = self.model.answer_states(batch)
                quality.append((self._scalars(last_PKD), batch))
                if self.length_head is not None:
                    length.append((self.length_head.scalars(last_PKD)[..., None], batch))
        leaves = [scores_PKH.requires_grad_() for scores_PKH, _ in quality + length]
        correlations = zip(_length_correlations(quality), self._length_targets(quality), strict=True)
        cost = self.length_weight * _mean([(rho - target) ** 2 for rho, target in correlations])
        if length:
            cost = cost - _length_correlations(length)[0]
        slopes = torch.autograd.grad(cost, leaves)
        num = len(batches)
        return [Part(b, slopes[n], slopes[num + n][..., 0] if length else None) for n, b in enumerate(batches)]

    def _length_targets(self, found: Sequence[tuple[Tensor, RankingBatch]]) -> list[float]:
        """Of each head: the recipe's, or the correlation that the ranks of these very answers have."""
        pool, num_heads = pooled(found), found[0][0].shape[-1]
        if self.config.length_target is not None or self.length_head is not None:
            return [self.config.length_target or 0.0] * num_heads
        taught = [(pool.ranks_PK, pool.mask_PK)]
        if pool.head_ranks_HPK is not None:
            taught = [(ranks_PK, pool.mask_PK & (ranks_PK > 0)) for ranks_PK in pool.head_ranks_HPK]
        return [
            float(preference.length_correlation(-x_PK.float(), pool.lengths_PK, mask_PK)) for x_PK, mask_PK in taught
        ]


def _soft(batch: RankingBatch, config: RewardConfig) -> dict[str, Any]:
    """What makes a pair of two answers, besides their ranks."""
    return {"targets_PKK": batch.targets_PKK, "ties": config.ties}


def _length_correlations(found: Sequence[tuple[Tensor, RankingBatch]]) -> list[Tensor]:
    """One per head."""
    pool = pooled(found)
    return [preference.length_correlation(x_PK, pool.lengths_PK, pool.mask_PK) for x_PK in pool.scores_PKH.unbind(-1)]


def _mean(losses: Sequence[Tensor]) -> Tensor:
    return torch.stack(list(losses)).mean()
