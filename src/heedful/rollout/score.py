"""Rewards: answers become scores, each part of the reward apart."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from numbers import Real
from typing import TYPE_CHECKING, Any, Protocol, final, runtime_checkable

from heedful.errors import CheckpointError, EngineError
from heedful.records import Completion, Message, Prompt, Rollout
from heedful.rollout.cache import CachedReward
from heedful.rollout.scaling import Fixed, Scaler

if TYPE_CHECKING:
    from heedful.models.heads import Heads

MAX_SCORE = 3.4028234663852886e38
"""The largest float32; deviations of larger scores are not finite."""


class RewardSource(Protocol):
    """One named part of the reward."""

    name: str
    weight: float

    def __call__(self, prompts: Sequence[Prompt], completions: Sequence[Completion]) -> Sequence[float]:
        """One raw number per completion, in order; higher is better."""
        ...


@runtime_checkable
class BeginsAhead(RewardSource, Protocol):
    """A source that can be asked about some of the answers while others are decoded: it is elsewhere, and takes nothing
    from the machine that decodes."""

    def begin(self, prompts: Sequence[Prompt], completions: Sequence[Completion]) -> None:
        """Ask in the background; the next call collects the scores, or raises what went wrong."""
        ...

    def drop(self) -> None:
        """Forget what was begun and not collected, and do not wait for it."""
        ...


class RewardModel(Protocol):
    """What reads texts: a scalar model, the reward part of PPO's roles, or what remembers around one of them."""

    def output_texts(
        self, prompts: Sequence[Sequence[Message]], answers: Sequence[str], *, micro_batch_tokens: int
    ) -> list[list[float]]: ...


@final
class LastRead:
    """A frozen reward model that remembers its last batch: several parts that read it need one forward."""

    def __init__(self, model: RewardModel) -> None:
        self.model = model
        self._asked: tuple[list[Sequence[Message]], list[str]] | None = None
        self._outputs: list[list[float]] = []

    def output_texts(
        self, prompts: Sequence[Sequence[Message]], answers: Sequence[str], *, micro_batch_tokens: int
    ) -> list[list[float]]:
        """As :meth:`ScalarModel.output_texts`."""
        asked = (list(prompts), list(answers))
        if asked != self._asked:
            self._outputs = self.model.output_texts(prompts, answers, micro_batch_tokens=micro_batch_tokens)
            self._asked = asked
        return self._outputs


@final
class LearnedReward:
    """One output of a reward model, read on the answer's text as the model's own tokenizer encodes it (REW-09)."""

    def __init__(
        self,
        model: RewardModel,
        *,
        micro_batch_tokens: int,
        head: int = 0,
        name: str = "reward_model",
        weight: float = 1.0,
    ) -> None:
        self.name, self.weight = name, weight
        self._model, self._micro_batch_tokens, self._head = model, micro_batch_tokens, head

    @property
    def model(self) -> RewardModel:
        """The model itself, without what remembers for it."""
        model = self._model
        while isinstance(model, (LastRead, CachedReward)):
            model = model.model
        return model

    def __call__(self, prompts: Sequence[Prompt], completions: Sequence[Completion]) -> list[float]:
        outputs = _outputs(self._model, prompts, completions, self._micro_batch_tokens)
        return [row[self._head] for row in outputs]


@final
class Disagreement:
    """How far the heads of an ensemble disagree on an answer, in the units of the score that they make."""

    def __init__(self, model: RewardModel, heads: Heads, *, micro_batch_tokens: int, name: str, weight: float) -> None:
        self.name, self.weight = name, weight
        self._model, self._heads, self._micro_batch_tokens = model, heads, micro_batch_tokens

    def __call__(self, prompts: Sequence[Prompt], completions: Sequence[Completion]) -> list[float]:
        outputs = _outputs(self._model, prompts, completions, self._micro_batch_tokens)
        return [self._heads.disagreement(row[1:]) for row in outputs]


def _outputs(
    model: RewardModel, prompts: Sequence[Prompt], completions: Sequence[Completion], micro_batch_tokens: int
) -> list[list[float]]:
    messages, answers = [p.messages for p in prompts], [c.text for c in completions]
    return model.output_texts(messages, answers, micro_batch_tokens=micro_batch_tokens)


@final
class Scoring:
    """The whole reward of an answer: Σ weight · scaled part."""

    def __init__(self, sources: Sequence[RewardSource], scalers: Mapping[str, Scaler] | None = None) -> None:
        """``scalers`` by the name of the part; a part without one is taken as it is."""
        self._sources = list(sources)
        given = scalers or {}
        self._scalers = {s.name: given.get(s.name) or Fixed() for s in sources}

    @property
    def models(self) -> dict[str, RewardModel]:
        """The reward models that judge, by the name of the part."""
        return {s.name: s.model for s in self._sources if isinstance(s, LearnedReward)}

    @contextmanager
    def ahead(self, prompts: Sequence[Prompt]) -> Iterator[Callable[[Sequence[int], Sequence[Completion]], None]]:
        """Ask the sources that can begin ahead while the answers to ``prompts`` come in.

            with scoring.ahead(prompts) as begin:
                begin([2, 0], answers_to_these_places)
            rollouts = scoring(prompts, completions)

        What the call scores is what it would be without; the statistics of the scalers move there. A block that ends by
        an exception drops what was begun, and so does the next block with what was never collected.
        """
        sources = [s for s in self._sources if isinstance(s, BeginsAhead)]

        def begin(places: Sequence[int], completions: Sequence[Completion]) -> None:
            for source in sources:
                source.begin([prompts[i] for i in places], completions)

        self._drop()
        try:
            yield begin
        except BaseException:
            self._drop()
            raise

    def _drop(self) -> None:
        for source in self._sources:
            if isinstance(source, BeginsAhead):
                source.drop()

    def __call__(
        self, prompts: Sequence[Prompt], completions: Sequence[Completion], *, update: bool = True
    ) -> list[Rollout]:
        """Every completion with the parts of its reward, raw and scaled, and their weighted sum.

        Args:
            update: False for validation: the statistics of the scalers stay as they are (see :class:`Scaler`).

        Raises:
            EngineError: a source gave another number of scores than it was asked for, or one that is not finite. No
                statistics have moved then.
        """
        found = {}
        try:
            for s in sorted(self._sources, key=lambda s: isinstance(s, BeginsAhead)):  # who is asked already comes last
                found[s.name] = _numbers(s.name, s(prompts, completions), completions)
        finally:
            self._drop()  # where one source has failed, others may not have been asked for theirs
        raw = {s.name: found[s.name] for s in self._sources}
        scaled = {name: self._scalers[name](values, update=update) for name, values in raw.items()}
        rollouts = []
        for i, completion in enumerate(completions):
            parts = {name: values[i] for name, values in scaled.items()}
            total = sum(s.weight * parts[s.name] for s in self._sources)
            rollouts.append(Rollout(completion, parts, total, {name: values[i] for name, values in raw.items()}))
        return rollouts

    def comparable(self, rollouts: Sequence[Rollout]) -> list[float]:
        """The scores in the units of the first training step, so that those of different steps compare: running and
        batch statistics follow the scores and hide that they climb."""
        scaled = {
            name: scaler([r.raw_parts[name] for r in rollouts], update=False) for name, scaler in self._scalers.items()
        }
        return [sum(s.weight * scaled[s.name][i] for s in self._sources) for i in range(len(rollouts))]

    def state_dict(self) -> dict[str, Any]:
        """The statistics of every part, plain numbers by name."""
        return {name: scaler.state_dict() for name, scaler in self._scalers.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raises CheckpointError when the state is that of other parts."""
        if state.keys() != self._scalers.keys():
            raise CheckpointError(
                f"the checkpoint has the reward parts {', '.join(state)}, this run has {', '.join(self._scalers)}"
            )
        for name, scaler in self._scalers.items():
            scaler.load_state_dict(state[name])


def _numbers(name: str, values: Any, completions: Sequence[Completion]) -> list[float]:
    """What a source gave as finite floats, one per completion."""
    numbers = as_numbers(f"reward {name!r}", values, len(completions))
    for value, completion in zip(numbers, completions, strict=True):
        if not math.isfinite(value):
            raise EngineError(
                f"reward {name!r} gave {value} for prompt {completion.prompt_id!r}, sample "
                f"{completion.sample_index}; a reward must be a finite number"
            )
    return numbers


def as_numbers(who: str, values: Any, num_answers: int) -> list[float]:
    """What ``who`` gave, as floats: one plain number per answer, in a list, an array or a tensor.

    Texts, truth values and lists of one number are no numbers. NaN and infinities pass, for callers that count them.

    Raises:
        EngineError: in the name of ``who`` when it is something else, or a number beyond ±MAX_SCORE.
    """
    numbers = []
    try:
        given = [value.tolist() if hasattr(value, "tolist") else value for value in values]
    except TypeError as error:
        raise EngineError(f"{who} must give a list with one number per answer ({error})") from None
    for value in given:
        if isinstance(value, bool) or not isinstance(value, Real):
            raise EngineError(f"{who} must give a list with one number per answer, not {reprlib.repr(value)}")
        size: Any = abs(value)
        if MAX_SCORE < size < math.inf:
            raise EngineError(f"{who} gave a score beyond ±{MAX_SCORE:.3g}, which float32 cannot hold; scale it down")
        numbers.append(float(value))
    if len(numbers) != num_answers:
        raise EngineError(f"{who} gave {len(numbers)} scores for {num_answers} answers")
    return numbers
