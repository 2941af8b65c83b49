"""Records become token ids, within a length limit; every row that is left out is named with its reason."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, Literal, TypeVar

from heedful.data import chat
from heedful.data.labels import Labels, soft_labels, strengths
from heedful.data.pairs import same_answers
from heedful.errors import DataError
from heedful.records import Demonstration, Prompt, Ranking, TokenSample

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

S = TypeVar("S")
TooLong = Literal["drop", "cut"]


@dataclass(frozen=True, slots=True)
class HeadLabels:
    """One ranking as one head of a reward model sees it."""

    ranks: list[int]
    """1 = best, equal = tie, 0 = says nothing of this answer"""
    weight: float = 1.0
    """Of the prompt in this head's loss"""


@dataclass(frozen=True, slots=True)
class RankingSample:
    """One ranking as token ids: K sequences that all start with the same prompt."""

    group_id: str
    category: str
    sequences: list[list[int]]
    """prompt + answer + end token; a cut answer has no end token"""
    ranks: list[int]
    """1 = best, equal = tie"""
    answer_ids: list[str]
    num_prompt_tokens: int
    num_answer_chars: list[int]
    """Lengths of the answers' texts, for the length baseline of the reward card"""
    source: str = ""
    kinds: tuple[str, ...] = ()
    """Of the answers, as in :class:`~heedful.records.Answer`; () = all sampled"""
    targets: list[list[float]] | None = None
    """P(i better than j), NaN = nobody compared them; None = the ranks say all"""
    strengths: list[list[float]] | None = None
    """By how much i leads j or j leads i; None = the distance of their ranks"""
    gold: tuple[tuple[int, int], ...] = ()
    """Places of the (better, worse) answers of a control item"""
    ratings: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """Attribute → answer id → number, higher is better; what was not rated is absent"""
    heads: tuple[HeadLabels, ...] = ()
    """What each head of a model with several is taught of this ranking; () = the ranking itself"""


@dataclass(frozen=True, slots=True)
class Refused:
    """A row that was left out."""

    id: str
    reason: str
    message: str


@dataclass
class Tokenised(Generic[S]):
    """The rows that can be trained on and what happened to the others."""

    samples: list[S] = field(default_factory=list)
    refused: list[Refused] = field(default_factory=list)
    num_truncated: int = 0
    """Rows that were kept and cut"""
    num_answers_dropped: Counter[str] = field(default_factory=Counter)
    """Rankings only: answers left out, by reason"""

    @property
    def num_read(self) -> int:
        """Rows read."""
        return len(self.samples) + len(self.refused)

    @property
    def num_kept(self) -> int:
        """Rows that can be trained on."""
        return len(self.samples)

    @property
    def dropped(self) -> dict[str, int]:
        """Rows left out: reason → count."""
        return dict(Counter(row.reason for row in self.refused))

    def summary(self) -> str:
        """One line of counts."""
        reasons = ", ".join(f"{reason} {count}" for reason, count in self.dropped.items())
        text = f"read {self.num_read}, kept {self.num_kept}, dropped {len(self.refused)}"
        text += f" ({reasons})" if reasons else ""
        text += f", cut {self.num_truncated}" if self.num_truncated else ""
        answers = ", ".join(f"{reason} {count}" for reason, count in self.num_answers_dropped.items())
        return text + (f"; answers dropped: {answers}" if answers else "")

    def require_some(self, what: str) -> Tokenised[S]:
        """Itself. Raises DataError with the counts when nothing is left."""
        if self.samples:
            return self
        first = f"; {self.refused[0].id!r}: {self.refused[0].message}" if self.refused else ""
        raise DataError(f"no {what} left to work with: {self.summary()}{first}")


def demonstrations(
    records: Iterable[Demonstration],
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_tokens: int,
    too_long: TooLong = "drop",
    train_on: chat.TrainOn = "assistant",
) -> Tokenised[TokenSample]:
    """Demonstrations as samples of at most ``max_tokens`` ids.

    Args:
        too_long: "drop" leaves a longer sample out, because a cut answer teaches to stop nowhere; "cut" keeps its first
            ``max_tokens`` ids and adds no end token.

    Raises:
        DataError: nothing is left.
    """
    result: Tokenised[TokenSample] = Tokenised()
    for record in records:
        try:
            sample = chat.conversation(tokenizer, record.messages, train_on=train_on, sample_id=record.id)
        except chat.RefusedConversation as error:
            result.refused.append(Refused(record.id, error.reason, str(error)))
            continue
        num_tokens = len(sample.ids)
        if num_tokens > max_tokens and too_long == "drop":
            message = f"{num_tokens} tokens, the limit is {max_tokens}"
            result.refused.append(Refused(record.id, "too_long", message))
            continue
        if num_tokens > max_tokens:
            sample = TokenSample(sample.ids[:max_tokens], sample.loss_mask[:max_tokens], sample.id)
        # the first token is predicted from nothing, so it cannot count
        if not any(sample.loss_mask[1:]):
            message = f"none of its first {max_tokens} tokens is the assistant's"
            result.refused.append(Refused(record.id, "no_supervised_token", message))
            continue
        result.num_truncated += num_tokens > max_tokens
        result.samples.append(sample)
    return result.require_some("demonstrations")


def prompts(
    records: Iterable[Prompt], tokenizer: PreTrainedTokenizerBase, *, max_prompt_tokens: int
) -> Tokenised[tuple[Prompt, list[int]]]:
    """Prompts with their ids; a longer one is left out, never cut, because half a question is another question.

    Raises:
        DataError: nothing is left.
    """
    result: Tokenised[tuple[Prompt, list[int]]] = Tokenised()
    for record in records:
        try:
            ids = chat.prompt_ids(tokenizer, record.messages)
        except chat.RefusedConversation as error:
            result.refused.append(Refused(record.id, error.reason, str(error)))
            continue
        if len(ids) > max_prompt_tokens:
            message = f"prompt of {len(ids)} tokens, the limit is {max_prompt_tokens}"
            result.refused.append(Refused(record.id, "prompt_too_long", message))
        else:
            result.samples.append((record, ids))
    return result.require_some("prompts")


def rankings(
    records: Sequence[Ranking],
    ranks: Sequence[Mapping[str, int]],
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_tokens: int,
    max_prompt_tokens: int | None = None,
    too_long: TooLong = "drop",
    labels: Labels = "ranks",
    margins: bool = False,
    keep_all_tied: bool = False,
) -> Tokenised[RankingSample]:
    """Rankings as K sequences of at most ``max_tokens`` ids with one common prompt.

    Args:
        ranks: for each record its answers' ranks by answer id (1 = best, equal = tie); an absent answer is not ranked.
        max_prompt_tokens: limit for the prompt alone; None = only ``max_tokens`` limits it.
        too_long: "drop" leaves out a ranking whose prompt is too long and every answer that does not fit. "cut" cuts
            the prompt once for all its answers, from the left, begin token kept, down to what the longest answer leaves
            (at least half of ``max_tokens``), then the answers from the right, without an end token.
        labels: where the samples' ``targets`` come from.
        margins: give the samples ``strengths``.
        keep_all_tied: keep a ranking without a better and a worse answer too.

    Raises:
        DataError: nothing is left, or the labels are not in the data (see :func:`~heedful.data.labels.soft_labels`).
    """
    if len(records) != len(ranks):
        raise DataError(f"{len(records)} rankings came with the ranks of {len(ranks)}; give one per ranking")
    result: Tokenised[RankingSample] = Tokenised()
    budget = _Budget(max_tokens, max_prompt_tokens, too_long, tokenizer.bos_token_id)
    for record, rank in zip(records, ranks):
        try:
            sample, was_cut = _ranking(record, rank, tokenizer, budget, result.num_answers_dropped, keep_all_tied)
        except chat.RefusedConversation as error:
            result.refused.append(Refused(record.group_id, error.reason, str(error)))
            continue
        result.num_truncated += was_cut
        result.samples.append(_labelled(sample, record, rank, labels, margins))
    return result.require_some("rankings")


@dataclass(frozen=True)
class _Budget:
    max_tokens: int
    max_prompt_tokens: int | None
    too_long: TooLong
    bos_token_id: int | None

    def prompt(self, ids: list[int], longest_answer: int) -> list[int]:
        """The prompt within its limit. Raises RefusedConversation when it may not be cut."""
        limit = self.max_tokens - 1 if self.max_prompt_tokens is None else self.max_prompt_tokens
        if self.too_long == "cut":
            limit = min(limit, max(self.max_tokens - longest_answer, self.max_tokens // 2))
        if len(ids) <= limit:
            return ids
        if self.too_long == "drop":
            message = f"prompt of {len(ids)} tokens, the limit is {limit}"
            raise chat.RefusedConversation("prompt_too_long", message)
        if ids[0] == self.bos_token_id:
            return [ids[0], *ids[len(ids) - limit + 1 :]]
        return ids[len(ids) - limit :]


def _ranking(
    record: Ranking,
    ranks: Mapping[str, int],
    tokenizer: PreTrainedTokenizerBase,
    budget: _Budget,
    num_dropped: Counter[str],
    keep_all_tied: bool,
) -> tuple[RankingSample, bool]:
    """One ranking and whether it was cut. Raises RefusedConversation when no pair of answers is left to learn from."""
    answers = [answer for answer in record.answers if answer.id in ranks]
    reasons: list[str] = []
    spoken: dict[str, list[int]] = {}
    for answer in answers:
        try:
            spoken[answer.id] = chat.answer_ids(tokenizer, answer.text)
        except chat.RefusedConversation as error:
            reasons.append(error.reason)
    full = chat.prompt_ids(tokenizer, record.prompt)
    prompt = budget.prompt(full, max(map(len, spoken.values()), default=0))
    room = budget.max_tokens - len(prompt)
    if budget.too_long == "drop":
        fitting = {answer_id: ids for answer_id, ids in spoken.items() if len(ids) <= room}
        reasons += ["answer_too_long"] * (len(spoken) - len(fitting))
    else:
        fitting = {answer_id: ids[:room] for answer_id, ids in spoken.items()}
    was_cut = len(prompt) < len(full) or any(len(ids) < len(spoken[answer_id]) for answer_id, ids in fitting.items())
    distinct = _distinct(fitting, spoken, ranks, reasons)
    num_dropped.update(reasons)
    kept = [answer for answer in answers if answer.id in distinct]
    if len(kept) < 2 or (len({ranks[answer.id] for answer in kept}) < 2 and not keep_all_tied):
        reason = "all_tied" if len(kept) > 1 else (reasons or ["fewer_than_two_answers"])[-1]
        message = f"{len(kept)} of {len(record.answers)} answers are left, without a better and a worse one"
        raise chat.RefusedConversation(reason, message)
    sample = RankingSample(
        group_id=record.group_id,
        category=record.category,
        sequences=[prompt + distinct[answer.id] for answer in kept],
        ranks=[ranks[answer.id] for answer in kept],
        answer_ids=[answer.id for answer in kept],
        num_prompt_tokens=len(prompt),
        num_answer_chars=[len(answer.text) for answer in kept],
        source=record.source,
        kinds=tuple(answer.kind for answer in kept),
    )
    return sample, was_cut


def _labelled(
    sample: RankingSample, record: Ranking, ranks: Mapping[str, int], labels: Labels, margins: bool
) -> RankingSample:
    """The sample with what its pairs say beyond their order."""
    by_id = {answer.id: answer for answer in record.answers}
    answers = [by_id[answer_id] for answer_id in sample.answer_ids]
    place = {answer_id: k for k, answer_id in enumerate(sample.answer_ids)}
    gold = [(place[a], place[b]) for a, b in record.gold or () if a in place and b in place]
    return dataclasses.replace(
        sample,
        targets=soft_labels(record, answers, labels),
        strengths=strengths(record, answers, ranks) if margins else None,
        gold=tuple(gold),
        ratings=record.ratings,
    )


def _distinct(
    fitting: dict[str, list[int]], spoken: dict[str, list[int]], ranks: Mapping[str, int], reasons: list[str]
) -> dict[str, list[int]]:
    """The answers that differ (see :func:`same_answers`); appends the reason of each other one."""
    distinct: dict[str, list[int]] = {}
    for group, counted in same_answers({answer_id: tuple(ids) for answer_id, ids in fitting.items()}, ranks):
        distinct |= {answer_id: fitting[answer_id] for answer_id in counted}
        was_same = all(spoken[answer_id] == spoken[group[0]] for answer_id in group)
        reason = "identical_answers" if was_same else "identical_after_truncation"
        reasons += [reason] * (len(group) - len(counted))
    return distinct
