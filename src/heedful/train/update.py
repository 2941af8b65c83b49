"""The update of a PPO step: every epoch over the step's answers, each loss, and what may hold the policy back.

    value of its own    per minibatch one optimizer step of the policy, then one of the value model
    value on the trunk  per minibatch one forward and one backward for both; both move, or neither
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from heedful.batches import ExperienceBatch, LossOut, TokenBatch, to_device
from heedful.config.ppo import PPOConfig
from heedful.models.roles import Roles
from heedful.objectives import kl, policy, value
from heedful.rollout.experience import NOTHING_KEPT, Experience, KeptForwards, PolicyForward, partition
from heedful.train import guard
from heedful.train.forensics import Recorder
from heedful.train.ptx import PTX
from heedful.train.step import Optimisation, StepOut, optimise


@dataclass
class Outcome:
    """What all epochs of one PPO step did."""

    policy: list[StepOut] = field(default_factory=list)
    """On a shared trunk the value's numbers are in here too."""
    value: list[StepOut] = field(default_factory=list)
    ratios: list[Tensor] = field(default_factory=list)
    """Of every token that a policy update saw."""
    num_skipped: int = 0
    """Minibatches left out for their mean ratio."""
    stopped_at_epoch: int | None = None
    """The epoch in which the KL limit ended the policy's updates."""


@dataclass(frozen=True)
class _Minibatch:
    """One optimizer step's worth of experience."""

    step: int
    epoch: int
    number: int
    batches: list[ExperienceBatch]
    denominators: list[float | Tensor]
    """Per micro-batch: the counted tokens of the whole minibatch, or [B, 1] length · number of answers."""
    kept: KeptForwards = NOTHING_KEPT
    """Of its only micro-batch, where the scoring kept any"""


@dataclass(frozen=True)
class Update:
    """Trains policy and value on the experience of a step."""

    roles: Roles
    config: PPOConfig
    policy: Optimisation
    value: Optimisation
    ptx: PTX | None
    recorder: Recorder

    def run(self, step: int, experience: Experience, generator: torch.Generator) -> Outcome:
        """All epochs; ``generator`` draws the minibatches of every epoch but the first, which the experience has."""
        out, shared = Outcome(), self.roles.value.is_shared
        warming_up = step < self.config.value_warmup_steps
        lengths = experience.batch.tokens.attention_mask_BT.sum(dim=1).tolist()
        for epoch in range(self.config.epochs):
            cut = experience.first_partition if epoch == 0 else partition(lengths, self.config, generator)
            for number, batches in enumerate(experience.minibatches(cut)):
                self.recorder.note(minibatch=(epoch, number))
                minibatch = _Minibatch(
                    step, epoch, number, batches, denominators(batches, self.config.loss_average), experience.kept
                )
                if not warming_up and out.stopped_at_epoch is None:
                    out.policy.append(self._step_policy(minibatch, out))
                elif not warming_up:
                    self.policy.skip()
                    if shared:
                        self.value.skip()
                if warming_up or not shared:
                    out.value.append(self._step_value(minibatch))
        return out

    def _step_policy(self, minibatch: _Minibatch, out: Outcome) -> StepOut:
        """One step of the policy; on a shared trunk of the value too."""
        ptx_batches, ptx_denominator = self.ptx.draw() if self.ptx else ([], 0)
        denominator_of = dict(zip(map(id, minibatch.batches), minibatch.denominators, strict=True))

        def loss_of(batch: ExperienceBatch | TokenBatch) -> LossOut:
            self.recorder.note(phase="policy update", micro_batch=batch)
            if isinstance(batch, TokenBatch):
                assert self.ptx is not None
                return self.ptx.loss(self.roles.policy, batch, ptx_denominator)
            return self.policy_loss(batch, denominator_of[id(batch)], out.ratios, minibatch.kept)

        def may_move(metrics: dict[str, float]) -> bool:
            return self._may_move(metrics, minibatch, out)

        moving = [self.policy, self.value] if self.roles.value.is_shared else [self.policy]
        batches: list[ExperienceBatch | TokenBatch] = [*minibatch.batches, *ptx_batches]
        return optimise(moving, batches, loss_of, step=minibatch.step, ids_of=_ids, before_update=may_move)

    def _may_move(self, metrics: dict[str, float], minibatch: _Minibatch, out: Outcome) -> bool:
        if minibatch.epoch == minibatch.number == 0:
            guard.first_minibatch(
                metrics["ratio_deviation_max"], metrics["clip_fraction"], dtype=self.roles.policy.dtype,
                step=minibatch.step,
            )  # fmt: skip
        limit, highest = self.config.kl.stop_above_nats, self.config.skip_ratio_above
        if limit is not None and metrics["approx_kl_nats"] > limit:
            out.stopped_at_epoch = minibatch.epoch
            return False
        if highest is not None and metrics["ratio_mean"] > highest:
            out.num_skipped += 1
            return False
        return True

    def policy_loss(
        self, batch: ExperienceBatch, denominator: float | Tensor, ratios: list[Tensor],
        kept: KeptForwards = NOTHING_KEPT,
    ) -> LossOut:  # fmt: skip
        """Clipped surrogate, entropy bonus, KL of the current token; on a shared trunk the value loss too.

        Args:
            kept: of this very batch by the weights as they are now; what is not kept is made.
        """
        roles, config, forward = self.roles, self.config, kept.policy
        batch = on_device(batch, roles.policy.device)
        tokens, mask_BT = batch.tokens, batch.tokens.loss_mask_BT
        if forward is None:
            hidden_BTD = roles.policy.hidden(tokens)
            logprobs_BT, entropy_BT = roles.policy.logprobs_of(
                hidden_BTD, tokens, temperature=config.sampling.temperature, with_entropy=config.entropy_coefficient > 0
            )
            forward = PolicyForward(hidden_BTD, logprobs_BT, entropy_BT)
        hidden_BTD, logprobs_BT = forward.hidden_BTD, forward.logprobs_BT
        log_ratio_BT = (logprobs_BT - batch.old_logprobs_BT).detach()
        guard.finite("ratio", log_ratio_BT, step=self.recorder.step, ids=tokens.ids, mask=mask_BT)
        ratios.append(log_ratio_BT[mask_BT].exp().cpu())
        terms = [
            policy.ppo_clip(
                logprobs_BT, batch.old_logprobs_BT, batch.advantages_BT, mask_BT, denominator=denominator,
                clip_low=config.clip_low, clip_high=config.clip_high, dual_clip=config.dual_clip,
            )
        ]  # fmt: skip
        terms[0].metrics["policy_loss"] = terms[0].loss.detach()
        if config.entropy_coefficient > 0:
            assert forward.entropy_BT is not None
            terms.append(
                policy.entropy_bonus(
                    forward.entropy_BT, mask_BT, coefficient=config.entropy_coefficient, denominator=denominator
                )
            )
        if config.kl.in_loss != "none":
            terms.append(self._kl_loss(batch, hidden_BTD, logprobs_BT, denominator))
        if roles.value.is_shared:
            terms.append(self.value_loss(batch, denominator, hidden_BTD, kept.values_BT))
        return LossOut(
            torch.stack([t.loss for t in terms]).sum(), {name: x for t in terms for name, x in t.metrics.items()}
        )

    def _kl_loss(
        self, batch: ExperienceBatch, hidden_BTD: Tensor, logprobs_BT: Tensor, denominator: float | Tensor
    ) -> LossOut:
        kind, mask_BT, weights_B = self.config.kl.in_loss, batch.tokens.loss_mask_BT, batch.kl_loss_weights_B
        if kind == "exact":
            assert batch.reference_hidden_BTD is not None
            kl_BT = self.roles.policy.exact_kl_of(
                hidden_BTD, batch.tokens, batch.reference_hidden_BTD, self.roles.reference.head,
                temperature=self.config.sampling.temperature,
            )  # fmt: skip
            return kl.exact_loss_term(kl_BT, mask_BT, weights_B=weights_B, denominator=denominator)
        assert kind != "none" and kind != "k1"
        return kl.loss_term(
            logprobs_BT, batch.reference_logprobs_BT, batch.old_logprobs_BT, mask_BT, kind=kind, weights_B=weights_B,
            denominator=denominator,
        )  # fmt: skip

    def _step_value(self, minibatch: _Minibatch) -> StepOut:
        """One step of the value model, or of the head alone on a shared trunk that does not move yet."""
        denominator_of = dict(zip(map(id, minibatch.batches), minibatch.denominators, strict=True))

        def loss_of(batch: ExperienceBatch) -> LossOut:
            self.recorder.note(phase="value update", micro_batch=batch)
            hidden_BTD, values_BT = None, minibatch.kept.values_BT
            denominator = denominator_of[id(batch)]
            batch = on_device(batch, self.roles.value.device)
            if values_BT is None and self.roles.value.is_shared:
                with torch.no_grad():
                    hidden_BTD = self.roles.policy.hidden(batch.tokens)
            return self.value_loss(batch, denominator, hidden_BTD, values_BT)

        return optimise([self.value], minibatch.batches, loss_of, step=minibatch.step, ids_of=_ids)

    def value_loss(
        self, batch: ExperienceBatch, denominator: float | Tensor, hidden_BTD: Tensor | None,
        values_BT: Tensor | None = None,
    ) -> LossOut:  # fmt: skip
        """Clipped squared error, weighted where a trunk that both train has a trade to make between two losses.

        Args:
            hidden_BTD: of the policy, where they are at hand.
            values_BT: of this very batch by the value as it is now; None makes them.
        """
        if values_BT is None:
            values_BT = self.roles.value.values(batch.tokens, hidden_BTD)
        out = value.clipped_mse(
            values_BT, batch.old_values_BT, batch.returns_BT, batch.tokens.loss_mask_BT, denominator=denominator,
            clip=self.config.value_clip,
        )  # fmt: skip
        weight = self.config.value_coefficient if self.config.value_from == "trunk" else 1.0
        return LossOut(weight * out.loss, {**out.metrics, "value_loss": out.loss.detach()})


def denominators(batches: Sequence[ExperienceBatch], average: str) -> list[float | Tensor]:
    """Per micro-batch what its losses are divided by: the counted tokens of the whole minibatch, or, so that every
    answer weighs the same, [B, 1] its own number of tokens times the number of answers."""
    if average == "tokens":
        return [float(sum(b.tokens.num_counted_tokens for b in batches))] * len(batches)
    lengths = [b.tokens.loss_mask_BT.sum(dim=1, keepdim=True).float() for b in batches]
    num_answers = sum(int((n_B1 > 0).sum()) for n_B1 in lengths)
    return [n_B1 * num_answers for n_B1 in lengths]


def on_device(batch: ExperienceBatch, device: torch.device) -> ExperienceBatch:
    """The batch and its tokens on ``device``."""
    moved = to_device(batch, device)
    return ExperienceBatch(**{**moved.__dict__, "tokens": to_device(batch.tokens, device)})


def _ids(batch: ExperienceBatch | TokenBatch) -> tuple[str, ...]:
    return batch.ids if isinstance(batch, TokenBatch) else batch.tokens.ids
