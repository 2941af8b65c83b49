"""The reward model: a scalar read at the last token, trained on all pairs of every ranking from K encodings."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch.nn.utils.rnn import pad_sequence

from heedful.batches import RankingBatch, StepStats, to_device
from heedful.config.reward import RewardConfig
from heedful.data.baits import with_baits
from heedful.data.collate import ranking_batch, ranking_shape
from heedful.data.heads import with_attributes, with_resamples
from heedful.data.packing import ranking_batches
from heedful.data.stream import EpochStream, fingerprint
from heedful.data.tokenise import RankingSample
from heedful.evaluate.heads_card import with_accuracies, with_disagreement
from heedful.evaluate.reward_card import ScoredRanking, build_card
from heedful.models import packing
from heedful.models.heads import Heads
from heedful.models.parts import ScalarModel
from heedful.objectives import preference
from heedful.records import RewardCard
from heedful.runs.folder import StageFolder
from heedful.train.best import Best
from heedful.train.length_correction import correct_length, some_rankings
from heedful.train.loop import Loop, tell
from heedful.train.reward_loss import RewardLoss, labels_of
from heedful.train.step import Optimisation, optimise
from heedful.train.watch import OverfittingWatch
from heedful.train.weights import put

T = TypeVar("T")


def train_reward(
    model: ScalarModel,
    samples: Sequence[RankingSample],
    heldout: Sequence[RankingSample],
    config: RewardConfig,
    stage: StageFolder,
    *,
    seed: int,
    controls: Sequence[RankingSample] = (),
) -> RewardCard:
    """Train ``model`` in place and return its card, measured on ``heldout``.

    Every prompt weighs the same: the mean over the pairs of its ranking, then the mean over the prompts of the step; or
    with ``weigh: pairs`` every pair of the step.

    Args:
        controls: gold controls, a check on the card that is never trained on.
    """
    if config.train == "head":
        model.freeze_trunk()
    samples = _lessons(samples, config, seed)
    of_data = fingerprint((s.sequences, s.ranks, s.targets, [(h.ranks, h.weight) for h in s.heads]) for s in samples)
    stream = EpochStream(len(samples), config.prompts_per_step, seed, fingerprint=of_data)
    total_steps = stream.num_steps(config.epochs)
    loss = _loss_of(model, samples, config, seed=seed)
    optimisation = Optimisation("reward", loss.parameters(), config.optimizer, total_steps)
    attention_tokens = packing.attention_tokens(model) if config.share_prompts else None
    watch, best = OverfittingWatch(), Best(optimisation.parameters)
    cards: list[RewardCard] = []

    def step(i: int) -> StepStats:
        started = time.perf_counter()
        chosen = [samples[j] for j in next(stream)]
        parts = loss.parts(micro_batches(chosen, config, model.pad_id, attention_tokens=attention_tokens))
        out = optimise([optimisation], parts, loss, step=i, ids_of=lambda part: part.batch.ids)
        told = out.metrics | loss.step_metrics()
        scalars = {
            **{f"reward/{name}": value for name, value in told.items()},
            "reward/gradient_norm": out.gradient_norms["reward"],
            "reward/learning_rate": out.learning_rates["reward"],
            "reward/epoch": stream.epoch + stream.offset / stream.num_items,
            "reward/rankings_per_second": len(chosen) / (time.perf_counter() - started),
        }
        if "accuracy" in told:
            watch.trained(told["accuracy"])
        last = i + 1 == total_steps
        if last or (i + 1) % config.evaluate_every_steps == 0:
            scalars |= look(i, last)
        return StepStats(scalars)

    def look(i: int, last: bool) -> dict[str, float]:
        """Measure the model as it is on the held-out rankings."""
        card = reward_card(
            model, heldout, config, seed=seed, controls=controls, heads=loss.heads,
            attention_tokens=None if last else attention_tokens,
        )  # fmt: skip
        cards.append(card)
        heldout_loss = card.labels_loss or 0.0
        watch.looked(i + 1, heldout_loss)
        if config.keep == "best":
            best.offer(i + 1, -heldout_loss, optimisation.parameters)
        return _seen(card)

    loop = Loop(
        "Reward model", stage, total_steps, config.checkpoint, keeps_pages=config.lora is None,
        parts={"reward": optimisation, "data": stream, "watch": watch, "best": best},
        shown={"reward/loss_nats": "loss", "reward/accuracy": "accuracy", "reward/heldout_accuracy": "held-out"},
    )  # fmt: skip
    loop.run(step)
    if best.step is not None:
        put(optimisation.parameters, best.weights)
        tell(f"reward model: the weights after step {best.step} of {total_steps} had the lowest held-out loss")
    corrected = _corrected(model, samples, config, seed=seed) if config.correct_length else {}
    if corrected or best.step not in (None, total_steps) or not cards:  # or stopped after the last step
        cards.append(reward_card(model, heldout, config, seed=seed, controls=controls, heads=loss.heads))
    loss.finish()
    told: dict[str, Any] = {"kept_step": best.step or total_steps, "overfitting": watch.verdict(), **corrected}
    if told["overfitting"]:
        tell(f"reward model: {told['overfitting']}")
    return dataclasses.replace(cards[-1], train_accuracy=watch.train_accuracy, data={**cards[-1].data, **told})


def _loss_of(model: ScalarModel, samples: Sequence[RankingSample], config: RewardConfig, *, seed: int) -> RewardLoss:
    loss = RewardLoss(model, config, seed=seed)
    loss.fit_length(ranking_batch(samples[n : n + 64], model.pad_id) for n in range(0, len(samples), 64))
    return loss


def _corrected(
    model: ScalarModel, samples: Sequence[RankingSample], config: RewardConfig, *, seed: int
) -> dict[str, Any]:
    """Turn the finished head away from length; what was done, for the card."""
    batches = micro_batches(some_rankings(samples, seed), config, model.pad_id, attention_tokens=None)
    done = correct_length(model, batches, target=config.length_target)
    tell(
        f"reward model: the head was turned by {done.factor:.2f} per unit of log length: correlation with length "
        f"{done.before:.2f} → {done.after:.2f} (it is read with a correlation of {done.readable:.2f})"
    )
    return {"length_correction": dataclasses.asdict(done)}


def _seen(card: RewardCard) -> dict[str, float]:
    """What is logged of a look at the held-out rankings."""
    found = {f"heldout_accuracy/{name}": x.value for name, x in card.attributes.items()}
    if card.disagreement is not None:
        found["heldout_disagreement"] = card.disagreement
    found |= {"heldout_accuracy": card.accuracy, "heldout_loss_nats": card.labels_loss or 0.0,
              "score_mean": card.score_mean, "score_std": card.score_std}  # fmt: skip
    return {f"reward/{name}": value for name, value in found.items()}


def _lessons(samples: Sequence[RankingSample], config: RewardConfig, seed: int) -> list[RankingSample]:
    """What the model is taught: with baits and each head's labels, without rankings of which no head has a pair."""
    samples = with_baits(samples, config.baits_per_ranking, max_tokens=config.max_tokens, seed=seed)
    if config.ensemble > 1:
        return with_resamples(samples, config.ensemble, seed=seed)
    samples = with_attributes(samples, config.attributes)

    def teaches(sample: RankingSample) -> bool:
        rated = [[rank for rank in head.ranks if rank] for head in sample.heads]
        return not rated or any(len(ranks if config.ties == "half" else set(ranks)) > 1 for ranks in rated)

    kept = [sample for sample in samples if teaches(sample)]
    if len(kept) < len(samples):
        tell(f"{len(samples) - len(kept)} of {len(samples)} rankings tell no answers apart in any attribute: left out")
    return kept


def micro_batches(
    samples: Sequence[RankingSample], config: RewardConfig, pad_id: int, *, attention_tokens: float | None
) -> list[RankingBatch]:
    """Whole rankings grouped so that padded tokens stay within the budget; a ranking is never cut apart."""
    groups = _groups(samples, config, attention_tokens)
    return [ranking_batch([samples[i] for i in group], pad_id, attention_tokens=attention_tokens) for group in groups]


def _groups(samples: Sequence[RankingSample], config: RewardConfig, attention_tokens: float | None) -> list[list[int]]:
    return ranking_batches([ranking_shape(s) for s in samples], config.micro_batch_tokens, attention_tokens)


@torch.no_grad()
def reward_card(
    model: ScalarModel,
    samples: Sequence[RankingSample],
    config: RewardConfig,
    *,
    seed: int,
    controls: Sequence[RankingSample] = (),
    attention_tokens: float | None = None,
    heads: Heads | None = None,
) -> RewardCard:
    """What :func:`build_card` says of the model on held-out rankings, and on gold controls where there are some.

    ``labels_loss`` is that of the labels that were trained, without smoothing, margin or penalties, so that runs
    compare; the answers of people alone count in it. Of several attributes it is the mean of each on its own ratings.

    Args:
        heads: make the score in place of the model's own head; their means and deviations become those of the held-out
            answers. No label is read for that, and the score that they make is the one that the card is about.
        attention_tokens: packs the rankings, for a look during training; a card for others encodes every answer alone,
            as they will.
    """
    everything = with_attributes([*samples, *controls], config.attributes)
    outputs: list[list[list[float]]] = [[]] * len(everything)
    ordinary: list[list[int]] = [[]] * len(everything)
    """Places of the answers that are neither baits nor controls"""
    losses: dict[int, list[tuple[float, int]]] = {}
    for group in _groups(everything, config, attention_tokens):
        rankings = [everything[i] for i in group]
        batch = to_device(ranking_batch(rankings, model.pad_id, attention_tokens=attention_tokens), model.device)
        last_PKD = model.answer_states(batch)
        outputs_PKH = model.scalars(last_PKD)[..., None] if heads is None else heads.scalars(last_PKD)
        is_mean = heads is not None and heads.kind == "ensemble"
        scores_PKH = outputs_PKH.mean(dim=-1, keepdim=True) if is_mean else outputs_PKH
        is_known_PK = batch.baits_PK | _is_control(group, rankings, batch.mask_PK, len(samples))
        for h, labels in enumerate(labels_of(batch)):
            mask_PK = labels.mask_PK & ~is_known_PK
            options: dict[str, Any] = {"targets_PKK": batch.targets_PKK, "ties": config.ties}
            num = int(preference.num_prompts(labels.ranks_PK, mask_PK, **options))
            found = preference.ranking(scores_PKH[..., h], labels.ranks_PK, mask_PK, denominator=1, **options)
            losses.setdefault(h, []).append((float(found.loss), num))
        for i, s, rows, known in zip(group, rankings, outputs_PKH.tolist(), is_known_PK.tolist(), strict=True):
            outputs[i], ordinary[i] = rows[: len(s.ranks)], [k for k in range(len(s.ranks)) if not known[k]]
    said = [_chosen(rows, places) for rows, places in zip(outputs, ordinary, strict=True)]
    if heads is not None:
        _measure(heads, said)
    factors = [1.0] if heads is None else heads.factors(heads.deviations)
    scored = [
        ScoredRanking(
            [sum(f * x for f, x in zip(factors, row, strict=True)) for row in rows], s.ranks, s.num_answer_chars,
            category=s.category, source=s.source, kinds=s.kinds, gold=s.gold,
        )
        for s, rows in zip(everything, outputs, strict=True)
    ]  # fmt: skip
    card = dataclasses.replace(build_card(scored, seed=seed), labels_loss=_mean_loss(losses))
    if heads is None:
        return card
    if heads.kind == "ensemble":
        return with_disagreement(card, said, [_chosen(s.ranks, k) for s, k in zip(everything, ordinary)], seed=seed)
    ranks = {
        name: [_chosen(s.heads[h].ranks, places) for s, places in zip(everything, ordinary, strict=True)]
        for h, name in enumerate(heads.names)
    }
    return with_accuracies(card, said, ranks, seed=seed)


def _chosen(row: Sequence[T], places: Sequence[int]) -> list[T]:
    return [row[k] for k in places]


def _mean_loss(losses: Mapping[int, Sequence[tuple[float, int]]]) -> float:
    """Mean over the heads of their means over prompts; heads without a pair are left out."""
    sums = [(sum(loss for loss, _ in found), sum(num for _, num in found)) for found in losses.values()]
    means = [loss / num for loss, num in sums if num]
    return sum(means) / max(1, len(means))


def _measure(heads: Heads, outputs: Sequence[Sequence[list[float]]]) -> None:
    """Note the means and deviations of the heads' scores [prompt][answer][head]."""
    rows = [torch.tensor(said, dtype=torch.float64) for said in outputs if said]
    scores_PKH = pad_sequence(rows, batch_first=True)
    mask_PK = pad_sequence([torch.ones(len(said), dtype=torch.bool) for said in rows], batch_first=True)
    heads.means = tuple(scores_PKH[mask_PK].mean(dim=0).tolist())
    heads.deviations = tuple(float(preference.deviation(x_PK, mask_PK)) for x_PK in scores_PKH.unbind(-1))


def _is_control(
    group: Sequence[int], rankings: Sequence[RankingSample], mask_PK: torch.Tensor, num_samples: int
) -> torch.Tensor:
    """[P, K]: answers whose place is known, and all answers of a control item, numbered from ``num_samples`` on."""
    is_control_PK = torch.zeros_like(mask_PK)
    for p, (i, sample) in enumerate(zip(group, rankings, strict=True)):
        is_control_PK[p] = i >= num_samples
        for k, kind in enumerate(sample.kinds):
            is_control_PK[p, k] |= kind == "gold"
    return is_control_PK
