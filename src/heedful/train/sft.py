"""Supervised fine-tuning: imitate the assistant's turns of the demonstrations."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch

from heedful.batches import LossOut, StepStats, TokenBatch, to_device
from heedful.config.recipe import SFTConfig
from heedful.data.collate import packed_batch, token_batch
from heedful.data.packing import pack, token_budget_batches
from heedful.data.stream import EpochStream, fingerprint
from heedful.models.parts import LanguageModel
from heedful.objectives import likelihood
from heedful.records import TokenSample
from heedful.runs.folder import StageFolder
from heedful.train.loop import Loop
from heedful.train.step import Optimisation, optimise


def train_sft(
    policy: LanguageModel,
    samples: Sequence[TokenSample],
    heldout: Sequence[TokenSample],
    config: SFTConfig,
    stage: StageFolder,
    *,
    seed: int,
) -> dict[str, Any]:
    """Train ``policy`` in place and return the stage's results.

    The loss is the mean negative log-likelihood over all counted tokens of the step (nats per token), however the
    step is cut into micro-batches or packed.
    """
    stream = EpochStream(len(samples), config.prompts_per_step, seed, fingerprint=fingerprint(s.ids for s in samples))
    total_steps = stream.num_steps(config.epochs)
    optimisation = Optimisation("policy", policy.trainable_parameters(), config.optimizer, total_steps)
    before = heldout_loss(policy, heldout, config)
    after: list[float | None] = []

    def step(i: int) -> StepStats:
        started = time.perf_counter()
        chosen = [samples[j] for j in next(stream)]
        batches = micro_batches(chosen, config, policy.pad_id)
        denominator = sum(b.num_counted_tokens for b in batches)

        def loss_of(batch: TokenBatch) -> LossOut:
            return _nll(policy, batch, denominator)

        out = optimise([optimisation], batches, loss_of, step=i, ids_of=lambda b: b.ids)
        scalars = {
            "sft/loss_nats": out.loss,
            "sft/gradient_norm": out.gradient_norms["policy"],
            "sft/learning_rate": out.learning_rates["policy"],
            "sft/num_tokens": denominator,
            "sft/tokens_per_second": sum(len(s.ids) for s in chosen) / (time.perf_counter() - started),
            "sft/epoch": stream.epoch + stream.offset / stream.num_items,
        }
        if i + 1 == total_steps:
            after.append(heldout_loss(policy, heldout, config))
            if after[-1] is not None:
                scalars["sft/heldout_loss_nats"] = after[-1]
        return StepStats(scalars)

    loop = Loop(
        "SFT", stage, total_steps, config.checkpoint,
        parts={"policy": optimisation, "data": stream},
        shown={"sft/loss_nats": "loss", "sft/tokens_per_second": "tok/s"}, keeps_pages=config.lora is None,
    )  # fmt: skip
    loop.run(step)
    return {
        "num_demonstrations": len(samples),
        "num_heldout": len(heldout),
        "steps": total_steps,
        "heldout_loss_before_nats": before,
        "heldout_loss_nats": after[-1] if after else heldout_loss(policy, heldout, config),
    }


def micro_batches(samples: Sequence[TokenSample], config: SFTConfig, pad_id: int) -> list[TokenBatch]:
    """The samples of one step as padded batches by token budget, or packed into rows of ``micro_batch_tokens``."""
    if config.packing:
        rows = pack(samples, max(config.micro_batch_tokens, max(len(s.ids) for s in samples)))
        return [packed_batch([row], pad_id) for row in rows]
    groups = token_budget_batches([len(s.ids) for s in samples], config.micro_batch_tokens)
    return [token_batch([samples[i] for i in group], pad_id) for group in groups]


@torch.no_grad()
def heldout_loss(policy: LanguageModel, samples: Sequence[TokenSample], config: SFTConfig) -> float | None:
    """Mean negative log-likelihood per counted token (nats) over ``samples``; None where nothing counts."""
    batches = micro_batches(samples, config, policy.pad_id) if samples else []
    denominator = sum(b.num_counted_tokens for b in batches)
    if not denominator:
        return None
    return sum(float(_nll(policy, b, denominator).loss) for b in batches)


def _nll(policy: LanguageModel, batch: TokenBatch, denominator: int) -> LossOut:
    batch = to_device(batch, policy.device)
    logprobs_BT, _ = policy.logprobs(batch)
    return likelihood.token_nll(logprobs_BT, batch.loss_mask_BT, denominator=denominator)
