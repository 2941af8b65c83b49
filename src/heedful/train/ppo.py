"""Proximal policy optimisation: the policy answers, the reward judges, the leash holds, policy and value learn."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from heedful.batches import StepStats, TokenBatch
from heedful.config.ppo import PPOConfig
from heedful.control.guarded import GuardedKL
from heedful.control.kl import KLController, Measurement, build_controller
from heedful.data.stream import EpochStream, fingerprint
from heedful.models.hardware import release_between_phases
from heedful.models.roles import Roles
from heedful.records import Completion, Prompt, Rollout, TokenSample
from heedful.rollout.buffer import RolloutBuffer
from heedful.rollout.engine import Engine, Request, Sampling
from heedful.rollout.experience import Experience, build_experience, graphs_to_keep
from heedful.rollout.hf import build_engine
from heedful.rollout.scaling import mean_and_std
from heedful.rollout.score import Scoring
from heedful.runs.folder import StageFolder
from heedful.train import guard
from heedful.train.forensics import Recorder
from heedful.train.keep import Gold, Keeper
from heedful.train.loop import Loop
from heedful.train.ptx import PTX
from heedful.train.statistics import Clock, Trail, sample_rows, step_statistics
from heedful.train.step import Optimisation
from heedful.train.update import Update

SHOWN = {"ppo/score_mean": "score", "ppo/kl_nats": "KL", "ppo/answer_tokens_mean": "length",
         "ppo/end_token_rate": "ended"}  # fmt: skip
"""Metric → its name on the progress line."""

EncodedPrompt = tuple[Prompt, list[int]]


def train_ppo(
    roles: Roles,
    scoring: Scoring,
    prompts: Sequence[EncodedPrompt],
    config: PPOConfig,
    stage: StageFolder,
    *,
    seed: int,
    engine: Engine | None = None,
    demonstrations: Sequence[TokenSample] = (),
    gold: Gold | None = None,
    on_first_scores: Callable[[list[Rollout]], None] = lambda rollouts: None,
) -> dict[str, Any]:
    """Train ``roles.policy`` and ``roles.value`` in place and return the stage's results.

    At the end the policy holds the weights that are to be saved: the last, their average, or the best.

    Args:
        scoring: the parts of the reward.
        engine: speaks for the policy; None makes an :class:`HFEngine`.
        demonstrations, gold: for ``config.ptx``, and a scorer of answers for ``config.best.by: gold``.
        on_first_scores: is told the rollouts of the first step, before anything moves.
    """
    keeper = Keeper(roles.policy, prompts, config, seed=seed, scoring=scoring, gold=gold)
    prompts = keeper.training_prompts
    stream = EpochStream(len(prompts), config.prompts_per_step, seed, fingerprint=fingerprint(x for _, x in prompts))
    sampling = Sampling(config.sampling.max_new_tokens, config.sampling.temperature)
    policy, value = _optimisations(roles, config)
    controller = build_controller(config.kl)
    ptx = PTX.of(demonstrations, config, pad_id=roles.policy.pad_id, seed=seed)
    recorder, trail = Recorder(stage, roles, config), Trail()
    update = Update(roles, config, policy, value, ptx, recorder)
    buffer = RolloutBuffer(stage.path / "rollouts", chunk=config.sampling.answers_together)
    voice: Engine = engine or build_engine(roles.policy, config.sampling)

    def step(i: int) -> StepStats:
        clock = Clock()
        roles.offload.send_away()  # what the self-test or a validation has brought
        voice.sync(roles.policy, version=i)
        asked = [prompts[j] for j in next(stream)]
        generate = partial(buffer.generate, voice, seed=_mix(seed, i), step=i, weights=policy.parameters)
        of_answers, completions = _rollout(generate, asked, scoring, sampling, config.samples_per_prompt)
        voice.rest()
        roles.offload.fetch()
        release_between_phases()
        clock.mark("seconds_rollout")
        generator = torch.Generator().manual_seed(_mix(seed, i))  # draws the minibatches
        recorder.begin(i)
        with recorder:
            rollouts = scoring(of_answers, completions)
            recorder.note(phase="scoring", rollouts=rollouts, kl_coefficient=controller.coefficient)
            experience = build_experience(
                rollouts, roles, config, kl_coefficient=controller.coefficient, pad_id=roles.policy.pad_id,
                generator=generator, check=partial(_check, recorder, i),
                keep_graphs=graphs_to_keep(config, policy_moves=i >= config.value_warmup_steps),
            )  # fmt: skip
            if i == 0:
                _prove_start(experience, roles)
                on_first_scores(rollouts)
            roles.offload.send_away()
            clock.mark("seconds_score")
            outcome = update.run(i, experience, generator)
        release_between_phases()
        clock.mark("seconds_train")
        stats = step_statistics(rollouts, experience, outcome, clock)
        _log_leash(controller, stats)
        if i >= config.value_warmup_steps:  # before that the policy cannot answer to β, which would drift away
            controller.update(_measured(stats, scoring.comparable(rollouts)))
        stats.scalars |= keeper.after_step(i, voice, sampling)
        if i % config.histogram_every_steps:
            stats.histograms = {}
        stats.samples = sample_rows([p for p, _ in asked], rollouts, experience, config.sample_rows)
        trail.add(stats.scalars)
        return stats

    parts = {"policy": policy, "value": value, "kl": controller, "data": stream, "scoring": scoring, "keeper": keeper,
             "trail": trail, **({"ptx": ptx} if ptx else {})}  # fmt: skip
    Loop("PPO", stage, config.steps, config.checkpoint, parts, SHOWN, buffer.forget_before, not config.lora).run(step)
    buffer.forget_before(config.steps)
    return {"steps": config.steps, "num_prompts": len(prompts), **trail.results(), **keeper.finish()}


def _prove_start(experience: Experience, roles: Roles) -> None:
    """Before anything has moved the policy is the reference, by every measure of the KL."""
    tokens = experience.batch.tokens
    for kl_BT in (experience.kl_BT, experience.exact_kl_BT):
        if kl_BT is not None:
            guard.reference_is_start(
                kl_BT, tokens.loss_mask_BT, dtype=roles.policy.dtype, ids=tokens.ids, is_exact=roles.reference.is_exact
            )


def _log_leash(controller: KLController, stats: StepStats) -> None:
    """The KL coefficient that the step used (PPO-11)."""
    stats.scalars["ppo/kl_coefficient"] = controller.coefficient
    if isinstance(controller, GuardedKL):
        stats.scalars["ppo/kl_guard"] = controller.multiplier


def _measured(stats: StepStats, scores: Sequence[float]) -> Measurement:
    """What the controller finds the next coefficient by; ``scores`` in units that stay the same over the run."""
    return Measurement(stats.scalars["ppo/kl_nats"], len(scores), *mean_and_std(scores))


def _optimisations(roles: Roles, config: PPOConfig) -> tuple[Optimisation, Optimisation]:
    """Of policy and value; schedules end with the last planned update, whatever is skipped on the way."""
    per_step = config.epochs * config.minibatches
    updates = config.steps * per_step
    policy_updates = updates - config.value_warmup_steps * per_step
    return (
        Optimisation("policy", roles.policy.trainable_parameters(), config.optimizer, max(policy_updates, 1)),
        Optimisation("value", roles.value.trainable_parameters(), config.value_optimizer, updates),
    )


def _rollout(
    generate: Callable[..., list[Completion]], asked: Sequence[EncodedPrompt], scoring: Scoring, sampling: Sampling,
    samples_per_prompt: int,
) -> tuple[list[Prompt], list[Completion]]:  # fmt: skip
    """The answers of a step, and the prompt of each; servers that judge are asked while others are still sampled."""
    prompts = [prompt for prompt, _ in asked for _ in range(samples_per_prompt)]
    with scoring.ahead(prompts) as begin:
        completions = generate(_requests(asked, samples_per_prompt), sampling, on_chunk=begin)
    return prompts, completions


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


def _check(recorder: Recorder, step: int, name: str, stream: Tensor, tokens: TokenBatch) -> None:
    recorder.note(micro_batch=tokens)
    guard.finite(name, stream, step=step, ids=tokens.ids, mask=tokens.loss_mask_BT if stream.dim() == 2 else None)


def _mix(seed: int, step: int) -> int:
    """A seed for one step of one run."""
    return (seed * 1_000_003 + step) & 0x7FFF_FFFF_FFFF_FFFF
