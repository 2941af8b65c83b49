"""What the log shows of one PPO step."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from heedful.batches import StepStats
from heedful.objectives import kl, value
from heedful.records import Prompt, Rollout
from heedful.rollout.experience import Experience
from heedful.train.step import StepOut
from heedful.train.update import Outcome

_INTERNAL = {"ratio_deviation_max"}
"""Metrics for the guard alone."""


class Clock:
    """Seconds between marks, with all that was asked of a GPU before them."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def mark(self, name: str) -> None:
        """The time since the last mark belongs to ``name``."""
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        now = time.perf_counter()
        self.seconds[name] = now - self._last
        self._last = now


def step_statistics(
    rollouts: Sequence[Rollout], experience: Experience, outcome: Outcome, clock: Clock
) -> StepStats:
    """Scalars and histograms of one step."""
    b, mask_BT = experience.batch, experience.batch.tokens.loss_mask_BT
    parts = rollouts[0].reward_parts
    kl_B = experience.kl_BT.sum(dim=1)
    gap_N = torch.cat([
        (b.old_logprobs_BT[row][mask_BT[row]] - torch.tensor(r.completion.logprobs)).abs()
        for row, r in enumerate(rollouts)
    ])  # fmt: skip
    scalars = {
        **_answers(rollouts, experience),
        **_learning(experience),
        **_updates(outcome),
        "ppo/logprob_gap_nats": gap_N.mean(),
        "ppo/tokens_per_second": int(mask_BT.sum()) / sum(clock.seconds.values()),
        **{f"ppo/{name}": seconds for name, seconds in clock.seconds.items()},
    }
    histograms = {
        "ppo/advantages": b.advantages_BT[mask_BT],
        "ppo/kl_per_sample_nats": kl_B,
        "ppo/rewards": b.rewards_BT.sum(dim=1),
        "ppo/scores": b.scores_B,
        "ppo/answer_tokens": mask_BT.sum(dim=1).float(),
        "ppo/values": b.old_values_BT[mask_BT],
        "ppo/logprob_gap": gap_N,
        **{f"ppo/score/{part}": torch.tensor([r.reward_parts[part] for r in rollouts]) for part in parts},
    }
    if outcome.ratios:
        histograms["ppo/ratios"] = torch.cat(outcome.ratios)
    return StepStats(
        {name: float(x) for name, x in scalars.items()}, {name: x.tolist() for name, x in histograms.items()}
    )


def _answers(rollouts: Sequence[Rollout], experience: Experience) -> dict[str, Tensor | float]:
    """What the policy said and earned, and how far it is from the reference."""
    b, mask_BT, num = experience.batch, experience.batch.tokens.loss_mask_BT, len(rollouts)
    counted = int(mask_BT.sum())
    k3_BT = kl.estimate(b.old_logprobs_BT, b.reference_logprobs_BT, kind="k3")
    found: dict[str, Tensor | float] = {
        "ppo/score_mean": b.scores_B.mean(),
        "ppo/score_std": b.scores_B.std(correction=0),
        "ppo/kl_nats": experience.kl_BT.sum() / num,
        "ppo/kl_per_token_nats": experience.kl_BT.sum() / counted,
        "ppo/kl_k3_nats": torch.where(mask_BT, k3_BT, 0.0).sum() / num,
        "ppo/kl_outlier_rate": (experience.kl_weights_B > 1).float().mean(),
        "ppo/kl_weight_max": experience.kl_weights_B.max(),
        "ppo/reward_mean": b.rewards_BT.sum() / num,
        "ppo/entropy_nats": experience.entropy_BT.sum() / counted,
        "ppo/answer_tokens_mean": counted / num,
        "ppo/end_token_rate": sum(r.completion.finish_reason == "stop" for r in rollouts) / num,
    }
    if experience.exact_kl_BT is not None:
        found["ppo/kl_exact_nats"] = experience.exact_kl_BT.sum() / num
    for part in rollouts[0].reward_parts:
        found[f"ppo/score/{part}"] = sum(r.reward_parts[part] for r in rollouts) / num
    for part in rollouts[0].raw_parts:
        found[f"ppo/raw_score/{part}"] = sum(r.raw_parts[part] for r in rollouts) / num
    return found


def _learning(experience: Experience) -> dict[str, Tensor | float]:
    """What the value model knew, and what is left to learn."""
    b, mask_BT = experience.batch, experience.batch.tokens.loss_mask_BT
    plain_N = experience.plain_advantages_BT[mask_BT]
    return {
        "ppo/explained_variance": value.explained_variance(b.old_values_BT, b.returns_BT, mask_BT),
        "ppo/advantage_mean": plain_N.mean(),
        "ppo/advantage_std": plain_N.std(correction=0),
        "ppo/return_mean": b.returns_BT[mask_BT].mean(),
    }


def _updates(outcome: Outcome) -> dict[str, float]:
    """Means over the optimizer steps of one PPO step; maxima stay maxima."""
    steps: list[StepOut] = [*outcome.policy, *outcome.value]
    numbers: dict[str, list[float]] = {}
    for step in steps:
        rates = {f"{name}_learning_rate": rate for name, rate in step.learning_rates.items()}
        norms = {f"{name}_gradient_norm": norm for name, norm in step.gradient_norms.items()}
        for name, number in {**step.metrics, **norms, **rates}.items():
            numbers.setdefault(name, []).append(number)
    found = {f"ppo/{name}": _summary(name, xs) for name, xs in numbers.items() if name not in _INTERNAL}
    return found | {
        "ppo/num_policy_updates": float(sum(s.moved for s in outcome.policy)),
        "ppo/num_skipped_minibatches": float(outcome.num_skipped),
        "ppo/stopped_early": float(outcome.stopped_at_epoch is not None),
    }


def _summary(name: str, numbers: list[float]) -> float:
    if name.endswith("_max"):
        return max(numbers)
    return numbers[-1] if name.endswith("_learning_rate") else sum(numbers) / len(numbers)


def sample_rows(
    chosen: Sequence[Prompt], rollouts: Sequence[Rollout], experience: Experience, num_rows: int
) -> list[dict[str, Any]]:
    """A few answers of the step as people read them."""
    by_id = {p.id: p for p in chosen}
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
        for row, r in list(enumerate(rollouts))[:num_rows]
    ]


class Trail:
    """First and last numbers of the run, for the stage's results."""

    kept = ("ppo/score_mean", "ppo/kl_nats", "ppo/end_token_rate", "ppo/answer_tokens_mean", "ppo/kl_coefficient")

    def __init__(self) -> None:
        self.first: dict[str, float] = {}
        self.last: dict[str, float] = {}

    def add(self, scalars: dict[str, float]) -> None:
        """The numbers of one more step."""
        self.last = {name: scalars[name] for name in self.kept}
        self.first = self.first or self.last

    def results(self) -> dict[str, float]:
        """``score_mean_first``, ``score_mean_last``, …"""
        named = {"first": self.first, "last": self.last}
        return {f"{name.removeprefix('ppo/')}_{when}": x for when, found in named.items() for name, x in found.items()}

    def state_dict(self) -> dict[str, Any]:
        return {"first": self.first, "last": self.last}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.first, self.last = state["first"], state["last"]
