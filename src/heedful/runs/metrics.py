"""The list of every metric: what it means, its unit, which way is better, and what a healthy run shows.

The writer refuses a name that is not listed here, so the list is complete. ``<part>`` in a name stands for one word
(``ppo/score/<part>`` covers ``ppo/score/reward_model``).
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from functools import cache
from typing import Literal

from heedful.errors import ConfigError

Direction = Literal["up", "down", "none"]


@dataclass(frozen=True, slots=True)
class Metric:
    """One number (or distribution) that a loop may log."""

    name: str
    unit: str
    """"nats", "tokens", "seconds", "bytes", "fraction", "tokens/second", …; "" = a plain number."""
    direction: Direction
    """Which way is better; "none" when neither is."""
    room: str
    """The room that measures it."""
    description: str
    healthy: str = ""
    """What a healthy run shows."""
    is_timing: bool = False
    """True when a repeated run gives another value (clocks, memory): left out when two runs are compared."""


def _m(
    name: str, unit: str, direction: Direction, description: str, healthy: str = "", *, room: str = "train",
    timing: bool = False,
) -> Metric:  # fmt: skip
    return Metric(name, unit, direction, room, description, healthy, timing)


METRICS: tuple[Metric, ...] = (
    # sft
    _m("sft/loss_nats", "nats", "down", "Mean loss per counted token", "falls fast, then slowly"),
    _m("sft/heldout_loss_nats", "nats", "down", "Loss on held-out demonstrations", "falls; a rise means overfitting"),
    _m("sft/learning_rate", "", "none", "Learning rate", "warms up, then decays"),
    _m("sft/gradient_norm", "", "none", "Gradient norm before clipping", "steady, no lone spikes"),
    _m("sft/tokens_per_second", "tokens/second", "up", "Training speed", "steady", timing=True),
    _m("sft/num_tokens", "tokens", "none", "Counted tokens in the step", "steady"),
    _m("sft/epoch", "epochs", "none", "Passes over the data", "rises evenly"),
    # reward
    _m("reward/loss_nats", "nats", "down", "Bradley–Terry loss", "starts near 0.693 (a coin flip) and falls"),
    _m("reward/accuracy", "fraction", "up", "Training pairs ordered as people did", "0.5 at the start, then rises"),
    _m("reward/bait_accuracy", "fraction", "up", "Pairs of an answer and a bait in which the bait scores lower",
       "rises fast to about 1"),
    _m("reward/length_correlation", "", "none", "Correlation of score and log length within the step's prompts",
       "not above that of the labels; near 0 with a length penalty"),
    _m("reward/margin", "", "up", "Mean score of chosen minus rejected", "rises, then flattens"),
    _m("reward/heldout_loss_nats", "nats", "down", "Loss on held-out prompts", "below 0.693; a rise means overfitting"),
    _m("reward/heldout_accuracy", "fraction", "up", "Held-out pairs ordered as people did", "0.65 to 0.85"),
    _m("reward/score_mean", "", "none", "Mean score of the step's answers", "near 0"),
    _m("reward/score_std", "", "none", "Spread of the step's scores", "grows; a collapse to 0 means no learning"),
    _m("reward/accuracy/<attribute>", "fraction", "up", "Training pairs that the attribute's own head orders as rated",
       "0.5 at the start, then rises"),
    _m("reward/heldout_accuracy/<attribute>", "fraction", "up", "The same of held-out pairs", "well above 0.5"),
    _m("reward/disagreement", "", "none", "Deviation over an ensemble's heads of an answer's score within its prompt",
       "falls from near 1, stays above 0"),
    _m("reward/heldout_disagreement", "", "none", "The same of held-out answers", "above reward/disagreement"),
    _m("reward/learning_rate", "", "none", "Learning rate", "warms up, then decays"),
    _m("reward/gradient_norm", "", "none", "Gradient norm before clipping", "steady"),
    _m("reward/rankings_per_second", "rankings/second", "up", "Training speed", "steady", timing=True),
    _m("reward/epoch", "epochs", "none", "Passes over the data", "rises evenly"),
    # ppo: what the policy earns
    _m("ppo/score_mean", "", "up", "Mean score of the answers, before any KL", "rises, then flattens", room="rollout"),
    _m("ppo/score_std", "", "none", "Spread of the scores", "does not collapse to 0", room="rollout"),
    _m("ppo/score/<part>", "", "up", "Mean of one part of the score", "rises or holds", room="rollout"),
    _m("ppo/raw_score/<part>", "", "up", "Mean of one part before it is scaled", "rises or holds", room="rollout"),
    _m("ppo/gold_mean", "", "up", "Mean gold score of the answers (never trained on)",
       "rises with the score; a fall while the score rises is over-optimisation", room="evaluate"),
    _m("ppo/reward_mean", "", "up", "Mean summed reward per answer, KL included", "rises"),
    _m("ppo/validation_score", "", "up", "Mean score of answers to prompts set aside from training",
       "rises with ppo/score_mean; a gap means the prompts are learnt by heart", room="evaluate"),
    _m("ppo/validation_reward", "", "up", "That score, less what missing ends and overlong answers cost",
       "rises; the best policy is chosen by it", room="evaluate"),
    # ppo: how far it moved
    _m("ppo/kl_nats", "nats", "none", "KL to the reference per answer (summed k1)", "0 at first, grows to the target"),
    _m("ppo/kl_per_token_nats", "nats", "none", "KL to the reference per token", "below about 0.2"),
    _m("ppo/kl_k3_nats", "nats", "none", "KL per answer by the k3 estimator (never negative)", "close to ppo/kl_nats"),
    _m("ppo/kl_exact_nats", "nats", "none", "KL per answer over the vocabulary", "close to ppo/kl_nats, less noisy"),
    _m("ppo/kl_outlier_rate", "fraction", "none", "Answers whose KL penalty is raised as outliers", "below about 0.1"),
    _m("ppo/kl_weight_max", "", "none", "Largest weight on one answer's KL penalty", "1, or a few above"),
    _m("ppo/kl_guard", "", "none", "What the guard multiplies the KL coefficient by", "1; above only for a while",
       room="control"),
    _m("ppo/kl_coefficient", "", "none", "KL coefficient", "moves slowly, off its bounds", room="control"),
    # ppo: the update
    _m("ppo/policy_loss", "", "none", "Clipped policy loss", "near 0; its level means little"),
    _m("ppo/kl_loss_nats", "nats", "none", "KL of the loss per token, unweighted", "follows ppo/kl_per_token_nats"),
    _m("ppo/entropy_bonus_nats", "nats", "none", "Entropy that the bonus saw, per token", "as ppo/entropy_nats"),
    _m("ppo/ptx_loss_nats", "nats", "down", "Loss per demonstration token of the pretraining mix", "does not rise"),
    _m("ppo/num_policy_updates", "", "none", "Optimizer steps of the policy in the step", "epochs × minibatches"),
    _m("ppo/num_skipped_minibatches", "", "down", "Minibatches left out for their mean ratio", "0"),
    _m("ppo/stopped_early", "", "none", "1 when the KL limit ended the policy's epochs", "mostly 0"),
    _m("ppo/value_loss", "", "down", "Clipped value loss", "falls"),
    _m("ppo/entropy_nats", "nats", "none", "Entropy of the next token", "falls slowly; a fall to 0 is a collapse"),
    _m("ppo/approx_kl_nats", "nats", "none", "KL between the policy before and after the step", "below about 0.02"),
    _m("ppo/clip_fraction", "fraction", "none", "Tokens whose ratio was clipped", "0.01 to 0.3"),
    _m("ppo/ratio_mean", "", "none", "Mean ratio new to old", "within 0.02 of 1"),
    _m("ppo/ratio_max", "", "none", "Largest ratio new to old", "below about 5"),
    _m("ppo/value_clip_fraction", "fraction", "none", "Values whose update was clipped", "below about 0.3"),
    _m("ppo/dual_clip_fraction", "fraction", "none", "Tokens whose loss the dual clip bounds", "near 0"),
    _m("ppo/value_mean", "", "none", "Mean value prediction", "follows ppo/return_mean"),
    _m("ppo/explained_variance", "fraction", "up", "Share of the returns' variance the value model explains",
       "rises above 0"),
    _m("ppo/advantage_mean", "", "none", "Mean advantage before whitening", "near 0"),
    _m("ppo/advantage_std", "", "none", "Spread of the advantages before whitening", "above 0"),
    _m("ppo/return_mean", "", "up", "Mean return", "follows the reward"),
    _m("ppo/answer_tokens_mean", "tokens", "none", "Mean answer length", "no climb to the limit", room="rollout"),
    _m("ppo/end_token_rate", "fraction", "up", "Answers that end by themselves", "not below its start", room="rollout"),
    _m("ppo/policy_learning_rate", "", "none", "Learning rate of the policy", "warms up, then decays"),
    _m("ppo/value_learning_rate", "", "none", "Learning rate of the value model", "warms up, then decays"),
    _m("ppo/policy_gradient_norm", "", "none", "Gradient norm of the policy before clipping", "steady"),
    _m("ppo/value_gradient_norm", "", "none", "Gradient norm of the value model before clipping", "falls, then steady"),
    _m("ppo/logprob_gap_nats", "nats", "down", "Mean difference between the sampler's and the trainer's log-probs",
       "below 0.01 in float32, below 0.05 in bf16", room="rollout"),
    # ppo: time
    _m("ppo/seconds_rollout", "seconds", "down", "Time to sample the answers", "steady", room="rollout", timing=True),
    _m("ppo/seconds_score", "seconds", "down", "Time to score the answers", "steady", room="rollout", timing=True),
    _m("ppo/seconds_train", "seconds", "down", "Time to train", "steady", timing=True),
    _m("ppo/tokens_per_second", "tokens/second", "up", "Answer tokens per second of the whole step", "steady",
       timing=True),
    # any stage
    _m("run/seconds", "seconds", "none", "Time of the step", "", room="runs", timing=True),
    _m("run/peak_memory_bytes", "bytes", "down", "Largest memory so far", "flat after a few steps", room="runs",
       timing=True),
)  # fmt: skip
"""Every scalar, in the order in which the report shows them."""

HISTOGRAMS: tuple[Metric, ...] = (
    _m("ppo/scores", "", "up", "Scores of the answers", "moves right, keeps its spread", room="rollout"),
    _m("ppo/score/<part>", "", "up", "One part of the score", "moves right, keeps its spread", room="rollout"),
    _m("ppo/rewards", "", "none", "Summed reward per answer, KL included", "moves right"),
    _m("ppo/kl_per_sample_nats", "nats", "none", "KL to the reference per answer", "all 0 at first; few far outliers"),
    _m("ppo/advantages", "", "none", "Advantages", "centred on 0, no single far outlier"),
    _m("ppo/ratios", "", "none", "Ratios new to old", "a narrow peak at 1"),
    _m("ppo/values", "", "none", "Values per token", "covers the range of the returns"),
    _m("ppo/answer_tokens", "tokens", "none", "Answer lengths", "no pile at the limit", room="rollout"),
    _m("ppo/logprob_gap", "nats", "none", "Sampler minus trainer log-prob per token", "a narrow peak at 0",
       room="rollout"),
)  # fmt: skip
"""Every distribution."""


@cache
def _pattern(name: str) -> re.Pattern[str]:
    return re.compile(re.sub(r"<\w+>", r"[^/\\s]+", name))


def lookup(name: str, known: tuple[Metric, ...] = METRICS) -> Metric | None:
    """The entry for a concrete name, or None."""
    return next((metric for metric in known if _pattern(metric.name).fullmatch(name)), None)


def require(name: str, known: tuple[Metric, ...] = METRICS) -> Metric:
    """The entry for a concrete name.

    Raises:
        ConfigError: the name is not in the list; the message gives the nearest one.
    """
    metric = lookup(name, known)
    if metric is None:
        nearest = difflib.get_close_matches(name, [m.name for m in known], n=1)
        hint = f"did you mean {nearest[0]!r}?" if nearest else "add it to heedful/runs/metrics.py"
        raise ConfigError(f"{name!r} is not in the list of {'metrics' if known is METRICS else 'histograms'}; {hint}")
    return metric
