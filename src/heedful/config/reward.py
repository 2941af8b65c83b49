"""The reward model: how it is trained, what holds it honest, and what is asked of it before PPO may use it."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field, model_validator

from heedful.config.section import (
    CheckpointConfig,
    FineTuneOptimizer,
    Fraction,
    LoraConfig,
    NonNegative,
    Positive,
    Section,
    word,
)

AboveZero = Annotated[float, Field(gt=0)]


def _not_zero(weight: float) -> float:
    if weight == 0:
        raise ValueError("a weight of 0 would train a head for nothing; leave the attribute out")
    return weight


AttributeWeight = Annotated[float, Field(ge=-100, le=100), AfterValidator(_not_zero)]


class RewardConfig(Section):
    """The reward model: a scalar head on the SFT policy, read at the last token, trained on all pairs of a ranking."""

    epochs: Annotated[float, Field(gt=0)] = 1.0
    """Passes over the rankings; more than one or two overfits."""
    prompts_per_step: Positive = 8
    """Rankings per optimizer step; all pairs of a ranking stay together."""
    weigh: Literal["prompts", "pairs"] = "prompts"
    """What weighs the same in a step: every ranking, however many answers it has, or every pair, so that a ranking of
    five counts ten times one of two; they differ where rankings are of unlike length."""
    micro_batch_tokens: Positive = 4096
    """Padded tokens per forward; a ranking is never cut apart."""
    share_prompts: bool = True
    """Pack rankings into rows in training, a prompt encoded once for as many answers as pays; where the model's
    attention does not allow it, every answer has its own prompt and row."""
    max_tokens: Positive = 1024
    """Longest prompt + answer; longer answers are left out of their ranking and counted."""

    # the labels and the loss
    labels: Literal["ranks", "votes", "scores"] = "ranks"
    """ranks: the better answer wins for certain. votes: with the share of raters who said so. scores: with the
    probability that the answers' judge scores imply, each being P(better than one reference answer)."""
    ties: Literal["skip", "half"] = "skip"
    """Tied answers form no pair, or one in which either wins with probability one half."""
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.0
    """Share of labels taken to be wrong."""
    margin: NonNegative = 0.0
    """The winner must lead by this times the strength that the data give (margin of a pair, difference of scores), or
    else the distance of the ranks; 0 = off."""
    form: Literal["last", "every_token"] = "last"
    """Score differences at the last token alone, or averaged from the first differing token to the end
    (DeepSpeed-Chat), which makes a better start for a value model."""
    zero_centre: NonNegative = 0.0
    """Weight of the squared mean score of a prompt's answers (Eisenstein et al. 2023); 0.01 keeps scores near 0."""

    # several heads
    attributes: dict[Annotated[str, AfterValidator(word)], AttributeWeight] = {}
    """Attributes that the data rate, each with a head of its own, and what they weigh in the score in units of their
    deviation; {} = off. overall is the ranking itself; below 0 = less of it is better; −100 to 100."""

    ensemble: Annotated[int, Field(ge=0, le=100)] = 0
    """So many heads, each on its own sample of the prompts (with replacement); the score is their mean, and where they
    disagree the model does not know. 0 or 1 = off."""

    # against hacking
    length_penalty: NonNegative = 0.0
    """Weight of the squared distance of the within-prompt correlation of score and log length from length_target;
    0 = off, 1 where the data love length."""
    correct_length: bool = False
    """After the training, turn the head away from length: as far as the training pairs say when those that the shorter
    answer won weigh as much as the others, or to length_target. Nothing is trained; it costs less than a penalty."""
    length_target: Annotated[float, Field(ge=-1, le=1)] | None = None
    """What length_penalty and correct_length bring the correlation of score and log length to. None = for the penalty
    that of the ranks of the same answers, so that scores love length as much as people do and no more (0 with
    length_head); 0 = length must not show at all, which costs accuracy where people have reasons for longer answers."""
    length_offset: Annotated[float, Field(ge=0, le=2)] = 0.0
    """Share of what length alone explains of the training pairs (a logistic regression on log length) that is added to
    the scores in the loss and nowhere else, so that they learn what is left; 0 = off, 1 = all of it."""
    length_head: bool = False
    """A second head learns length so that the first need not (ODIN, Chen et al. 2024); only the first is kept, whose
    correlation length_penalty weighs, or 1 where that is 0."""
    max_spread: AboveZero | None = None
    """Within-prompt deviation of the scores above which a penalty sets in; None = off."""
    baits_per_ranking: Annotated[int, Field(ge=0)] = 0
    """Answers to other prompts, fluent and wrong, added to each ranking as its last."""

    # what is trained and kept
    train: Literal["all", "head"] = "all"
    """All weights (or the adapters, with lora), or the head on a frozen trunk."""
    keep: Literal["last", "best"] = "last"
    """The last weights, or those with the lowest held-out loss."""
    learning_curve: tuple[Annotated[float, Field(gt=0, lt=1)], ...] = ()
    """Shares of the prompts that further models are trained on, to see whether more data would help."""
    evaluate_every_steps: Positive = 20
    """Optimizer steps between held-out evaluations; the last step has one of its own."""
    min_accuracy: Fraction = 0.70
    """The gate: PPO refuses a reward model below this held-out pair accuracy (see ppo.accept_weak_reward)."""
    audit: bool = False
    """Probe the finished model for length, style and other biases; a failed probe closes the gate too."""
    optimizer: FineTuneOptimizer = FineTuneOptimizer()
    lora: LoraConfig | None = None
    checkpoint: CheckpointConfig = CheckpointConfig()

    @model_validator(mode="after")
    def _fits(self) -> RewardConfig:
        if self.train == "head" and self.lora is not None:
            raise ValueError("train: head leaves nothing for lora to adapt; take one of them")
        if self.length_target is not None and not (self.length_penalty or self.length_head or self.correct_length):
            raise ValueError(
                "length_target is what correct_length and length_penalty hold the scores to; set one of them"
            )
        if self.correct_length and (self.attributes or self.ensemble > 1):
            raise ValueError("correct_length works on one score; take length_penalty with attributes and ensembles")
        if self.length_offset and (self.length_penalty or self.length_head):
            raise ValueError(
                "length_offset, length_penalty and length_head do one thing in three ways; take one of them"
            )
        if self.attributes:
            self._attributes_fit()
        if self.ensemble > 1 and (self.attributes or self.length_head):
            raise ValueError("ensemble does not go with attributes or length_head; take one of them")
        return self

    def _attributes_fit(self) -> None:
        if self.labels != "ranks" or self.margin:
            raise ValueError("attributes are learned from the order of their ratings; take labels: ranks and margin: 0")
        if self.length_head:
            raise ValueError("length_head works on one score; take length_penalty with attributes")
        if self.baits_per_ranking and "overall" not in self.attributes:
            raise ValueError("baits have no ratings, so baits_per_ranking needs overall among the attributes")
