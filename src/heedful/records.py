"""The nouns that are saved: plain text and numbers, JSON in and out, in the order in which a run meets them.

No torch here. Every record is a frozen dataclass; ``to_json`` gives a plain dict, ``from_json`` takes one back and
ignores nothing: an unknown or missing key is a :class:`~heedful.errors.DataError` that names the record and the key.

    Message         Message("user", "Why is the sky blue?")
    Demonstration   Demonstration("d1", (Message("user", "Hi"), Message("assistant", "Hello!")))
    Prompt          Prompt("p1", (Message("user", "Hi"),), category="chat")
    Answer          Answer("a1", "Hello!", policy="sft", kind="sampled")
    Judgement       Judgement("rater-3", {"a1": 1, "a2": 2})
    Ranking         Ranking("g1", (Message("user", "Hi"),), (Answer("a1", "Hello!"), …), (Judgement(…),))
    PreferencePair  PreferencePair("g1", (Message("user", "Hi"),), chosen="Hello!", rejected="What?")
    TokenSample     TokenSample(ids=[1, 5, 6, 2], loss_mask=[False, False, True, True])
    Completion      Completion("p1", 0, ids=[6, 2], logprobs=[-0.1, -0.2], finish_reason="stop", policy_version=3, …)
    Rollout         Rollout(completion, reward_parts={"reward_model": 0.7}, score=0.7, raw_parts={"reward_model": 3.1})
    RewardCard      RewardCard(accuracy=0.74, accuracy_low=0.70, …)
"""

from __future__ import annotations

import dataclasses
import types
import typing
from dataclasses import dataclass, field
from functools import cache
from typing import Any, TypeVar

from heedful.errors import DataError

R = TypeVar("R", bound="Record")

CATEGORIES = ("chat", "writing", "question_answering", "safety")
"""The four categories of the quickstart; any other word is allowed in user data."""


_hints = cache(typing.get_type_hints)


@dataclass(frozen=True, slots=True)
class Record:
    """Base with the JSON round trip."""

    def to_json(self) -> dict[str, Any]:
        """A plain dict of str, numbers, lists and dicts; fields that hold None are kept, so that files are regular."""
        return {f.name: _plain(getattr(self, f.name)) for f in dataclasses.fields(self)}

    @classmethod
    def from_json(cls: type[R], data: dict[str, Any]) -> R:
        """Raises DataError naming the record and the key when a key is unknown or a required one is missing."""
        fields = {f.name: f for f in dataclasses.fields(cls)}
        unknown = sorted(set(data) - set(fields))
        if unknown:
            raise DataError(f"{cls.__name__}: unknown key {unknown[0]!r}; known keys are {', '.join(fields)}")
        given = {n for n, f in fields.items() if f.default is not f.default_factory} | set(data)
        missing = [name for name in fields if name not in given]
        if missing:
            raise DataError(f"{cls.__name__}: missing key {missing[0]!r}")
        hints = _hints(cls)  # type: ignore[arg-type]
        return cls(**{name: _restore(hints[name], value) for name, value in data.items()})


def _plain(value: Any) -> Any:
    if isinstance(value, Record):
        return value.to_json()
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    return value


def _restore(hint: Any, value: Any) -> Any:
    """Turn plain JSON back into the record types named by ``hint``."""
    if value is None:
        return None
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        return _restore(next(a for a in arguments if a is not type(None)), value)
    if isinstance(hint, type) and issubclass(hint, Record):
        if not isinstance(value, dict):
            raise DataError(f"{hint.__name__}: expected an object, got {type(value).__name__}")
        return hint.from_json(value)
    if origin is tuple:
        if not isinstance(value, (list, tuple)):
            raise DataError(f"expected a list, got {type(value).__name__}")
        return tuple(_restore(arguments[0], v) for v in value)
    if origin is list:
        return [_restore(arguments[0], v) for v in value]
    if origin is dict:
        return {k: _restore(arguments[1], v) for k, v in value.items()}
    return value


@dataclass(frozen=True, slots=True)
class Message(Record):
    """One turn of a conversation."""

    role: str
    """"system", "user" or "assistant"."""
    content: str


@dataclass(frozen=True, slots=True)
class Demonstration(Record):
    """A conversation to imitate; every assistant turn is trained."""

    id: str
    messages: tuple[Message, ...]
    category: str = ""
    source: str = ""


@dataclass(frozen=True, slots=True)
class Prompt(Record):
    """A conversation that waits for the assistant's answer (its last message is not the assistant's)."""

    id: str
    messages: tuple[Message, ...]
    category: str = ""
    source: str = ""
    info: dict[str, Any] = field(default_factory=dict)
    """Extra columns for reward functions and gold scorers (a reference answer, keywords, …)."""


@dataclass(frozen=True, slots=True)
class Answer(Record):
    """One candidate answer of a ranking."""

    id: str
    text: str
    policy: str = ""
    """Who wrote it (a model name, "human", …)."""
    kind: str = "sampled"
    """"sampled", "gold" (a control with a known place) or "bait" (fluent and wrong)."""
    flags: tuple[str, ...] = ()
    score: float | None = None
    """A score given by a judge, if the source has one; higher is better."""


@dataclass(frozen=True, slots=True)
class Judgement(Record):
    """One person's ranking: rank 1 is best, equal numbers are ties, an answer that is absent was not ranked."""

    annotator: str
    ranks: dict[str, int]
    seconds: float | None = None
    guideline: str = ""


@dataclass(frozen=True, slots=True)
class Ranking(Record):
    """One line of the master file: a prompt, its N answers and every single judgement on them."""

    group_id: str
    prompt: tuple[Message, ...]
    answers: tuple[Answer, ...]
    rankings: tuple[Judgement, ...] = ()
    consensus: dict[str, int] | None = None
    """Ranks by answer id that training uses; None means: derived from ``rankings`` by majority per pair."""
    category: str = ""
    lang: str = ""
    round: int = 0
    source: str = ""
    gold: tuple[tuple[str, ...], ...] | None = None
    """For a control item: (better, worse) answer-id pairs that a careful rater gets right."""
    info: dict[str, Any] = field(default_factory=dict)
    ratings: dict[str, dict[str, float]] = field(default_factory=dict)
    """Attribute ("helpful", "safe", …) → answer id → number, higher is better; what was not rated is absent."""


@dataclass(frozen=True, slots=True)
class PreferencePair(Record):
    """Two answers to one prompt, the first preferred. Derived from a ranking or read from a file of pairs."""

    group_id: str
    prompt: tuple[Message, ...]
    chosen: str
    rejected: str
    margin: float | None = None
    category: str = ""
    source: str = ""
    round: int = 0
    num_votes: int = 1
    agree_fraction: float = 1.0
    bait: bool = False


@dataclass(frozen=True, slots=True)
class TokenSample(Record):
    """One tokenised sequence. ``loss_mask`` has one value per token of the full sequence; True = this token counts."""

    ids: list[int]
    loss_mask: list[bool]
    id: str = ""


@dataclass(frozen=True, slots=True)
class Completion(Record):
    """What the policy said to one prompt."""

    prompt_id: str
    sample_index: int
    prompt_ids: list[int]
    ids: list[int]
    """The sampled tokens exactly as sampled, the end token included when one was sampled; never edited afterwards."""
    logprobs: list[float]
    """The sampler's own log-probability of each token under the distribution it sampled from (nats)."""
    finish_reason: str
    """"stop": the last id is an end token; "length": cut by the limit."""
    policy_version: int
    text: str
    """The answer as the reward sees it: special tokens removed."""


@dataclass(frozen=True, slots=True)
class Rollout(Record):
    """A completion with its reward, each part apart."""

    completion: Completion
    reward_parts: dict[str, float]
    """Each part as it is summed: scaled, without its weight."""
    score: float
    """The weighted sum of the parts, before any KL."""
    raw_parts: dict[str, float] = field(default_factory=dict)
    """Each part as its source gave it."""


@dataclass(frozen=True, slots=True)
class Accuracy(Record):
    """Share of pairs in the right order, every prompt weighted equally; equal scores count one half."""

    value: float
    low: float
    high: float
    """95 % bootstrap interval, prompts resampled; Wilson's over prompts where all are right or all wrong."""
    num_prompts: int
    num_pairs: int
    over_pairs: float
    """The same with every pair weighted equally, so that a prompt with five answers counts for ten of two."""
    over_pairs_low: float
    over_pairs_high: float


@dataclass(frozen=True, slots=True)
class CalibrationBin(Record):
    """Pairs on which the model is about equally sure, every prompt weighted equally."""

    confidence: float
    """Mean probability that the scores give to the answer they prefer, sigmoid of the difference; ½ to 1."""
    accuracy: float
    low: float
    high: float
    num_pairs: int


@dataclass(frozen=True, slots=True)
class Calibration(Record):
    """Do score differences mean the log odds that they claim to be (Bradley-Terry)?"""

    error: float
    """Expected calibration error: mean of |confidence − accuracy| over the bins."""
    low: float
    high: float
    """95 % bootstrap interval of the true error, prompts resampled, bias taken out; from 0 where chance explains it."""
    by_chance: float
    """What 95 % of perfectly calibrated models with these scores would stay below on so few pairs."""
    overconfidence: float
    """Mean confidence − accuracy: above 0 the scores are too far apart."""
    overconfidence_low: float
    overconfidence_high: float
    bins: tuple[CalibrationBin, ...]


@dataclass(frozen=True, slots=True)
class LengthFit(Record):
    """What length alone can predict: P(i better) = sigmoid(f(i) − f(j)), f quadratic in log characters, fitted to the
    labels and read on prompts left out of the fit (five folds)."""

    accuracy: Accuracy
    share: float | None
    """(accuracy of the fit − ½) / (accuracy of the model − ½), not below 0; None: the model is not clearly above ½."""
    share_low: float | None
    share_high: float | None


@dataclass(frozen=True, slots=True)
class PassRate(Record):
    """Control items in the known order, all pairs of an item strictly."""

    rate: float
    low: float
    high: float
    """Wilson's 95 % interval."""
    num_passed: int
    num_items: int


@dataclass(frozen=True, slots=True)
class ProbeResult(Record):
    """One question of the audit and what the reward model said to it."""

    name: str
    about: str
    """What was changed in the answers."""
    verdict: str
    """"ok", "warn", "fail" or "not run"."""
    says: str
    """The finding in one sentence."""
    sign: str = "0"
    """"+" or "-": the score rises or falls with the change and its interval leaves 0 out; else "0"."""
    effect: float | None = None
    """Of the variant that is judged worst: the mean change of the score over prompts, in ``unit``."""
    low: float | None = None
    high: float | None = None
    """95 % bootstrap interval, prompts resampled; wide enough for all variants together."""
    unit: str = "deviations"
    """"deviations": what one prompt's natural answers deviate by; "correlation"; "" for counts."""
    bound: str = ""
    """What the interval was held against."""
    variant: str = ""
    variants: dict[str, float] = field(default_factory=dict)
    """The effect of every variant."""
    num_prompts: int = 0
    num_pairs: int = 0
    examples: tuple[dict[str, Any], ...] = ()
    """Pairs with the largest changes: prompt, base, changed, difference (in ``unit``)."""


@dataclass(frozen=True, slots=True)
class RewardCard(Record):
    """What is known of a reward model before it is trusted; the PPO gate reads it."""

    model: str
    accuracy: float
    """Held-out pair accuracy, prompts weighted equally; ties in the labels left out, equal scores count one half."""
    accuracy_low: float
    accuracy_high: float
    """95 % bootstrap interval, prompts resampled."""
    num_prompts: int
    num_pairs: int
    accuracy_by_category: dict[str, float] = field(default_factory=dict)
    length_accuracy: float | None = None
    """Accuracy of 'the longer answer wins' on the same pairs: what length alone explains."""
    score_mean: float = 0.0
    score_std: float = 1.0
    """Over the held-out answers; PPO standardises by these."""
    train_accuracy: float | None = None
    loss: float | None = None
    labels_loss: float | None = None
    """Held-out (nats): Bradley–Terry of the score; of the labels as trained, mean over heads (``keep: best``'s)."""
    data: dict[str, Any] = field(default_factory=dict)
    over_pairs: float | None = None
    over_pairs_low: float | None = None
    over_pairs_high: float | None = None
    num_tied_pairs: int = 0
    """Pairs tied in the labels, left out."""
    num_equal_scores: int = 0
    by_category: dict[str, Accuracy] = field(default_factory=dict)
    by_source: dict[str, Accuracy] = field(default_factory=dict)
    longer_wins: Accuracy | None = None
    shorter_wins: Accuracy | None = None
    """On pairs whose better answer is the longer one, the shorter one; love of length costs accuracy on the latter."""
    prefers_longer: float | None = None
    """Share of pairs in which the scores prefer the longer answer; compare ``length_accuracy``, the people's share."""
    length_fit: LengthFit | None = None
    margins: dict[str, float] = field(default_factory=dict)
    """Score of the better answer − score of the worse one: quantiles over the pairs ("0.05", "0.5", …)."""
    score_quantiles: dict[str, float] = field(default_factory=dict)
    """Of the same answers as ``score_mean``, by the quantile ("0.05", "0.5", …)."""
    calibration: Calibration | None = None
    gold_controls: PassRate | None = None
    """Rankings or answers with a known place; they count nowhere else."""
    baits: Accuracy | None = None
    """Pairs of an answer and a bait (fluent and wrong); they count nowhere else."""
    attributes: dict[str, Accuracy] = field(default_factory=dict)
    """Of each attribute's own head on its own ratings."""
    disagreement: float | None = None
    """Of an ensemble: the deviation of its heads' scores of an answer, each in deviations of one prompt's answers."""
    heads_agree: Accuracy | None = None
    heads_disagree: Accuracy | None = None
    """On the pairs that all heads of an ensemble order alike, and on the others."""
    probes: tuple[ProbeResult, ...] = ()
    """What the audit asked; () = not audited."""
    audit_verdict: str | None = None
    """"passed", "warned" or "failed" (which closes the gate); None = not audited."""


@dataclass(frozen=True, slots=True)
class EvaluationRow(Record):
    """One held-out prompt answered before and after."""

    prompt_id: str
    prompt: tuple[Message, ...]
    category: str
    before: str
    after: str
    before_scores: dict[str, float]
    after_scores: dict[str, float]
    before_finish: str = "stop"
    after_finish: str = "stop"
