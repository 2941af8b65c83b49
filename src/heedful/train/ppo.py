"""Proximal policy optimisation: the policy answers, the reward judges, the leash holds, policy and value learn."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from heedful.batches import ExperienceBatch, LossOut, StepStats, TokenBatch, to_device
from heedful.config.ppo import PPOConfig
from heedful.control.kl import AdaptiveKL, FixedKL
from heedful.data.chat import end_token_ids
from heedful.data.stream import EpochStream, fingerprint
from heedful.models.hardware import release_memory
from heedful.models.roles import Roles
from heedful.objectives import kl, policy, value
from heedful.records import Prompt, Rollout
from heedful.rollout.engine import Engine, Request, Sampling
from heedful.rollout.experience import Experience, build_experience, partition
from heedful.rollout.hf import HFEngine
from heedful.rollout.score import RewardSource, score
from heedful.runs.folder import StageFolder
from heedful.train import guard
from heedful.train.loop import Loop
from heedful.train.step import Optimisation, StepOut, optimise

EncodedPrompt = tuple[Prompt, list[int]]


def train_ppo(
    roles: Roles,
    rewards: Sequence[RewardSource],
    prompts: Sequence[EncodedPrompt],
    config: PPOConfig,
    stage: StageFolder,
    *,
    seed: int,
    engine: Engine | None = None,
) -> dict[str, Any]:
    """Train ``roles.policy`` and ``roles.value`` in place and return the stage's results."""
    end_ids = end_token_ids(roles.policy.tokenizer)
    of_data = fingerprint(ids for _, ids in prompts)
    stream = EpochStream(len(prompts), config.prompts_per_step, seed, fingerprint=of_data)
    updates = config.steps * config.epochs * config.minibatches
    policy_updates = updates - config.value_warmup_steps * config.epochs * config.minibatches
    policy_optimisation = Optimisation(
        "policy", roles.policy.trainable_parameters(), config.optimizer, max(policy_updates, 1)
    )
    value_optimisation = Optimisation("value", roles.value.trainable_parameters(), config.value_optimizer, updates)
    controller = (
        FixedKL(config.kl.coefficient)
        if config.kl.target is None
        else AdaptiveKL(config.kl.coefficient, config.kl.target, config.kl.horizon)
    )
    sampling = Sampling(config.sampling.max_new_tokens, config.sampling.temperature)
    trail = _Trail()

    def step(i: int) -> StepStats:
        nonlocal engine
        clock = _Clock()
        if engine is None:
            engine = HFEngine(roles.policy, end_ids)  # after the loop has restored the weights
        engine.sync(roles.policy, version=i)
        chosen = [prompts[j] for j in next(stream)]
        requests = _requests(chosen, config.samples_per_prompt)
        completions = engine.generate(requests, sampling, seed=_mix(seed, i))
        release_memory()
        clock.mark("seconds_rollout")
        rollouts = score([p for p, _ in chosen for _ in range(config.samples_per_prompt)], completions, rewards)
        generator = torch.Generator().manual_seed(_mix(seed, i))
        experience = build_experience(
            rollouts, roles, config, kl_coefficient=controller.coefficient, pad_id=roles.policy.pad_id,
            generator=generator, check=lambda name, x, tokens: _check(name, x, tokens, step=i),
        )  # fmt: skip
        if i == 0:
            tokens = experience.batch.tokens
            guard.reference_is_start(
                experience.kl_BT, tokens.loss_mask_BT, dtype=roles.policy.dtype, ids=tokens.ids
            )
        clock.mark("seconds_score")
        ratios: list[Tensor] = []
        outs = _update(i, roles, experience, config, policy_optimisation, value_optimisation, generator, ratios)
        release_memory()
        clock.mark("seconds_train")
        stats = _statistics(rollouts, experience, outs, clock)
        if ratios:
            stats.histograms["ppo/ratios"] = torch.cat(ratios).tolist()
        stats.scalars["ppo/kl_coefficient"] = controller.coefficient  # the one used in this step (PPO-11)
        controller.update(stats.scalars["ppo/kl_nats"], num_samples=len(rollouts))
        if i % config.histogram_every_steps:
            stats.histograms = {}
        stats.samples = _sample_rows(chosen, rollouts, experience, config)
        trail.add(stats.scalars)
        return stats

    loop = Loop(
        "PPO", stage, config.steps, config.checkpoint,
        parts={"policy": policy_optimisation, "value": value_optimisation, "kl": controller, "data": stream,
               "trail": trail},
        shown={"ppo/score_mean": "score", "ppo/kl_nats": "KL", "ppo/answer_tokens_mean": "length",
               "ppo/end_token_rate": "ended"},
    )  # fmt: skip
    loop.run(step)
    return {"steps": config.steps, "num_prompts": len(prompts), **trail.results()}


def _requests(chosen: Sequence[EncodedPrompt], samples_per_prompt: int) -> list[Request]:
    """Samples of a prompt numbered from 0; a prompt that a batch meets twice (at the border of two epochs) goes on
    counting, so that no two answers of a step share their random stream."""
    seen: Counter[str] = Counter()
    requests = []
    for prompt, ids in chosen:
        for _ in range(samples_per_prompt):
            requests.append(Request(prompt.id, seen[prompt.id], ids))
            seen[prompt.id] += 1
    return requests


def _update(
    step: int,
    roles: Roles,
    experience: Experience,
    config: PPOConfig,
    policy_optimisation: Optimisation,
    value_optimisation: Optimisation,
    generator: torch.Generator,
    ratios: list[Tensor],
) -> dict[str, list[StepOut]]:
    """All epochs over the step's answers; every ratio that a policy update saw is put into ``ratios``."""
    outs: dict[str, list[StepOut]] = {"policy": [], "value": []}
    lengths = experience.batch.tokens.attention_mask_BT.sum(dim=1).tolist()
    for epoch in range(config.epochs):
        cut = experience.first_partition if epoch == 0 else partition(lengths, config, generator)
        for minibatch, batches in enumerate(experience.minibatches(cut)):
            denominator = sum(b.tokens.num_counted_tokens for b in batches)

            def prove(metrics: dict[str, float], first: bool = epoch == minibatch == 0) -> None:
                if first:
                    guard.first_minibatch(
                        metrics["ratio_deviation_max"], metrics["clip_fraction"], dtype=roles.policy.dtype, step=step
                    )

            def policy_loss(batch: ExperienceBatch, denominator: int = denominator) -> LossOut:
                return _policy_loss(roles, batch, config, denominator, ratios)

            def value_loss(batch: ExperienceBatch, denominator: int = denominator) -> LossOut:
                return _value_loss(roles, batch, config, denominator)

            if step >= config.value_warmup_steps:
                outs["policy"].append(
                    optimise(policy_optimisation, batches, policy_loss, step=step, ids_of=_ids, before_update=prove)
                )
            outs["value"].append(optimise(value_optimisation, batches, value_loss, step=step, ids_of=_ids))
    return outs


def _policy_loss(
    roles: Roles, batch: ExperienceBatch, config: PPOConfig, denominator: int, ratios: list[Tensor]
) -> LossOut:
    batch = _on_device(batch, roles.policy.device)
    logprobs_BT, _ = roles.policy.logprobs(batch.tokens, temperature=config.sampling.temperature)
    ratios.append((logprobs_BT - batch.old_logprobs_BT).detach()[batch.tokens.loss_mask_BT].exp().cpu())
    return policy.ppo_clip(
        logprobs_BT, batch.old_logprobs_BT, batch.advantages_BT, batch.tokens.loss_mask_BT, denominator=denominator,
        clip_low=config.clip_low, clip_high=config.clip_high, dual_clip=config.dual_clip,
    )  # fmt: skip


def _value_loss(roles: Roles, batch: ExperienceBatch, config: PPOConfig, denominator: int) -> LossOut:
    batch = _on_device(batch, roles.value.device)
    return value.clipped_mse(
        roles.value.values(batch.tokens), batch.old_values_BT, batch.returns_BT, batch.tokens.loss_mask_BT,
        denominator=denominator, clip=config.value_clip,
    )  # fmt: skip


def _on_device(batch: ExperienceBatch, device: torch.device) -> ExperienceBatch:
    moved = to_device(batch, device)
    return ExperienceBatch(**{**moved.__dict__, "tokens": to_device(batch.tokens, device)})


def _ids(batch: ExperienceBatch) -> tuple[str, ...]:
    return batch.tokens.ids


def _check(name: str, stream: Tensor, tokens: TokenBatch, *, step: int) -> None:
    guard.finite(name, stream, step=step, ids=tokens.ids, mask=tokens.loss_mask_BT if stream.dim() == 2 else None)


def _statistics(
    rollouts: Sequence[Rollout], experience: Experience, outs: dict[str, list[StepOut]], clock: _Clock
) -> StepStats:
    """Everything the log shows of one step."""
    b, mask_BT = experience.batch, experience.batch.tokens.loss_mask_BT
    lengths_B = mask_BT.sum(dim=1).float()
    kl_B = experience.kl_BT.sum(dim=1)
    scores_B, counted = b.scores_B, int(mask_BT.sum())
    plain_advantages = (b.returns_BT - b.old_values_BT)[mask_BT]  # before whitening
    k3_BT = kl.estimate(b.old_logprobs_BT, b.reference_logprobs_BT, kind="k3")
    gap = torch.cat([
        (b.old_logprobs_BT[row][mask_BT[row]] - torch.tensor(r.completion.logprobs)).abs()
        for row, r in enumerate(rollouts)
    ])  # fmt: skip
    scalars: dict[str, Tensor | float] = {
        "ppo/score_mean": scores_B.mean(),
        "ppo/score_std": scores_B.std(correction=0),
        "ppo/kl_nats": kl_B.mean(),
        "ppo/kl_per_token_nats": kl_B.sum() / counted,
        "ppo/kl_k3_nats": torch.where(mask_BT, k3_BT, 0.0).sum() / len(rollouts),
        "ppo/reward_mean": b.rewards_BT.sum() / len(rollouts),
        "ppo/entropy_nats": experience.entropy_BT.sum() / counted,
        "ppo/explained_variance": value.explained_variance(b.old_values_BT, b.returns_BT, mask_BT),
        "ppo/advantage_mean": plain_advantages.mean(),
        "ppo/advantage_std": plain_advantages.std(correction=0),
        "ppo/return_mean": b.returns_BT[mask_BT].mean(),
        "ppo/answer_tokens_mean": lengths_B.mean(),
        "ppo/end_token_rate": sum(r.completion.finish_reason == "stop" for r in rollouts) / len(rollouts),
        "ppo/logprob_gap_nats": gap.mean(),
        "ppo/tokens_per_second": counted / sum(clock.seconds.values()),
        **{f"ppo/{name}": seconds for name, seconds in clock.seconds.items()},
    }
    for part in rollouts[0].reward_parts:
        scalars[f"ppo/score/{part}"] = sum(r.reward_parts[part] for r in rollouts) / len(rollouts)
    for name, steps in outs.items():
        if steps:
            scalars |= _update_statistics(name, steps)
    histograms = {
        "ppo/advantages": b.advantages_BT[mask_BT],
        "ppo/kl_per_sample_nats": kl_B,
        "ppo/rewards": b.rewards_BT.sum(dim=1),
        "ppo/scores": scores_B,
        "ppo/answer_tokens": lengths_B,
        "ppo/values": b.old_values_BT[mask_BT],
        "ppo/logprob_gap": gap,
    }
    return StepStats(
        {name: float(x) for name, x in scalars.items()}, {name: x.tolist() for name, x in histograms.items()}
    )


def _update_statistics(name: str, steps: list[StepOut]) -> dict[str, float]:
    """Means over the optimizer steps of one PPO step; maxima stay maxima."""
    metrics = {
        f"ppo/{key}": (max if key.endswith("_max") else _mean)([s.metrics[key] for s in steps])
        for key in steps[0].metrics
        if key != "ratio_deviation_max"
    }
    return metrics | {
        f"ppo/{name}_loss": _mean([s.loss for s in steps]),
        f"ppo/{name}_gradient_norm": _mean([s.gradient_norm for s in steps]),
        f"ppo/{name}_learning_rate": steps[-1].learning_rate,
    }


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def _sample_rows(
    chosen: Sequence[EncodedPrompt], rollouts: Sequence[Rollout], experience: Experience, config: PPOConfig
) -> list[dict[str, Any]]:
    """A few answers of the step as people read them."""
    by_id = {p.id: p for p, _ in chosen}
    return [
        {
            "prompt_id": r.completion.prompt_id,
            "prompt": by_id[r.completion.prompt_id].messages[-1].content,
            "answer": r.completion.text,
            "score": r.score,
            "reward_parts": r.reward_parts,
            "kl_nats": float(experience.kl_BT[row].sum()),
            "finish_reason": r.completion.finish_reason,
        }
        for row, r in list(enumerate(rollouts))[: config.sample_rows]
    ]


def _mix(seed: int, step: int) -> int:
    """A seed for one step of one run."""
    return (seed * 1_000_003 + step) & 0x7FFF_FFFF_FFFF_FFFF


class _Clock:
    """Seconds between marks."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def mark(self, name: str) -> None:
        now = time.perf_counter()
        self.seconds[name] = now - self._last
        self._last = now


class _Trail:
    """First and last numbers of the run, for the stage's results."""

    kept = ("ppo/score_mean", "ppo/kl_nats", "ppo/end_token_rate", "ppo/answer_tokens_mean", "ppo/kl_coefficient")

    def __init__(self) -> None:
        self.first: dict[str, float] = {}
        self.last: dict[str, float] = {}

    def add(self, scalars: dict[str, float]) -> None:
        self.last = {name: scalars[name] for name in self.kept}
        self.first = self.first or self.last

    def results(self) -> dict[str, float]:
        named = {"first": self.first, "last": self.last}
        return {f"{name.removeprefix('ppo/')}_{when}": x for when, found in named.items() for name, x in found.items()}

    def state_dict(self) -> dict[str, Any]:
        return {"first": self.first, "last": self.last}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.first, self.last = state["first"], state["last"]
