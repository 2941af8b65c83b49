"""The reward model: a scalar read at the last token, trained on all pairs of every ranking from K encodings."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from heedful.batches import LossOut, RankingBatch, StepStats, to_device
from heedful.config.reward import RewardConfig
from heedful.data.collate import ranking_batch
from heedful.data.packing import token_budget_batches
from heedful.data.stream import EpochStream, fingerprint
from heedful.data.tokenise import RankingSample
from heedful.evaluate.reward_card import ScoredRanking, build_card
from heedful.models.parts import ScalarModel
from heedful.objectives import preference
from heedful.records import RewardCard
from heedful.runs.folder import StageFolder
from heedful.train.loop import Loop
from heedful.train.step import Optimisation, optimise


def train_reward(
    model: ScalarModel,
    samples: Sequence[RankingSample],
    heldout: Sequence[RankingSample],
    config: RewardConfig,
    stage: StageFolder,
    *,
    seed: int,
) -> RewardCard:
    """Train ``model`` in place and return its card, measured on ``heldout``.

    Every prompt weighs the same: the mean over the pairs of its ranking, then the mean over the prompts of the step.
    """
    of_data = fingerprint(s.sequences for s in samples)
    stream = EpochStream(len(samples), config.prompts_per_step, seed, fingerprint=of_data)
    total_steps = stream.num_steps(config.epochs)
    optimisation = Optimisation("reward", model.trainable_parameters(), config.optimizer, total_steps)
    share_prompts = config.share_prompts and model.can_share_prompts()
    cards: list[RewardCard] = []

    def step(i: int) -> StepStats:
        started = time.perf_counter()
        chosen = [samples[j] for j in next(stream)]
        batches = micro_batches(chosen, config, model.pad_id, share_prompts=share_prompts)

        def loss_of(batch: RankingBatch) -> LossOut:
            return _ranking_loss(model, batch, config, denominator=len(chosen))

        out = optimise([optimisation], batches, loss_of, step=i, ids_of=lambda b: b.ids)
        scalars = {
            "reward/loss_nats": out.loss,
            "reward/accuracy": out.metrics["accuracy"],
            "reward/margin": out.metrics["margin"],
            "reward/gradient_norm": out.gradient_norms["reward"],
            "reward/learning_rate": out.learning_rates["reward"],
            "reward/epoch": stream.epoch + stream.offset / stream.num_items,
            "reward/rankings_per_second": len(chosen) / (time.perf_counter() - started),
        }
        last = i + 1 == total_steps
        if last or (i + 1) % config.evaluate_every_steps == 0:
            card = reward_card(model, heldout, config, seed=seed, share_prompts=share_prompts and not last)
            cards.append(card)
            scalars |= {"reward/heldout_accuracy": card.accuracy, "reward/heldout_loss_nats": card.loss or 0.0,
                        "reward/score_mean": card.score_mean, "reward/score_std": card.score_std}  # fmt: skip
        return StepStats(scalars)

    loop = Loop(
        "Reward model", stage, total_steps, config.checkpoint,
        parts={"reward": optimisation, "data": stream},
        shown={"reward/loss_nats": "loss", "reward/accuracy": "accuracy", "reward/heldout_accuracy": "held-out"},
    )  # fmt: skip
    loop.run(step)
    return cards[-1] if cards else reward_card(model, heldout, config, seed=seed)  # stopped after the last step


def micro_batches(
    samples: Sequence[RankingSample], config: RewardConfig, pad_id: int, *, share_prompts: bool
) -> list[RankingBatch]:
    """Whole rankings grouped so that padded tokens stay within the budget; a ranking is never cut apart."""
    if share_prompts:
        lengths = [s.num_prompt_tokens + sum(len(x) - s.num_prompt_tokens for x in s.sequences) for s in samples]
    else:
        lengths = [len(s.sequences) * max(map(len, s.sequences)) for s in samples]
    groups = token_budget_batches(lengths, config.micro_batch_tokens)
    return [ranking_batch([samples[i] for i in group], pad_id, share_prompts=share_prompts) for group in groups]


@torch.no_grad()
def reward_card(
    model: ScalarModel,
    samples: Sequence[RankingSample],
    config: RewardConfig,
    *,
    seed: int,
    share_prompts: bool = False,
) -> RewardCard:
    """Accuracy with interval, by category, loss, scale and the length-only baseline on held-out rankings.

    Args:
        share_prompts: faster, for a look during training; a card for others encodes every answer as they will.
    """
    scores: list[list[float]] = [[] for _ in samples]
    loss = 0.0
    position = {s.group_id: i for i, s in enumerate(samples)}
    for batch in micro_batches(samples, config, model.pad_id, share_prompts=share_prompts):
        out, scores_PK = _scores_and_loss(model, batch, config, denominator=len(samples))
        loss += float(out.loss)
        for group_id, row, mask in zip(batch.ids, scores_PK.tolist(), batch.mask_PK.tolist(), strict=True):
            scores[position[group_id]] = [s for s, real in zip(row, mask, strict=True) if real]
    scored = [
        ScoredRanking(found, s.ranks, s.num_answer_chars, category=s.category, source=s.source, kinds=s.kinds)
        for found, s in zip(scores, samples, strict=True)
    ]
    return build_card(scored, loss=loss, seed=seed)


def _ranking_loss(model: ScalarModel, batch: RankingBatch, config: RewardConfig, *, denominator: int) -> LossOut:
    return _scores_and_loss(model, batch, config, denominator=denominator)[0]


def _scores_and_loss(
    model: ScalarModel, batch: RankingBatch, config: RewardConfig, *, denominator: int
) -> tuple[LossOut, torch.Tensor]:
    """The loss of a batch and its scores [P, K]."""
    batch = to_device(batch, model.device)
    scores_PK = model.ranking_scores(batch)
    out = preference.ranking(
        scores_PK, batch.ranks_PK, batch.mask_PK, label_smoothing=config.label_smoothing, denominator=denominator
    )
    return out, scores_PK
