"""The card of any reward model on any file of rankings or pairs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from heedful.data.load import load
from heedful.data.pairs import judged_answers, training_ranks
from heedful.errors import DataError, HeedfulError
from heedful.evaluate.reward_card import ScoredRanking, build_card
from heedful.pipeline.fits import explained
from heedful.pipeline.scorer import Outputs, heads_of, open_outputs
from heedful.records import Answer, Prompt, Ranking, RewardCard
from heedful.runs.progress import Progress, tell

if TYPE_CHECKING:
    from heedful.models.heads import Heads
    from heedful.rollout.cache import ScoreCache

RANKINGS_PER_PART = 64
"""Asked about together; within a part answers of like length share a batch."""


def card_of_file(
    model: str,
    source: str,
    *,
    format: str = "auto",
    split: str | None = None,
    on_bad_row: str = "error",
    seed: int = 0,
    cache: ScoreCache | None = None,
    say: Callable[[str], None] = tell,
    **options: Any,
) -> RewardCard:
    """Score every answer of ``source`` and work out the card.

    As in training, answers that nobody ranked are left out, of equal answers with one rank the first counts, and of
    equal answers with different ranks none does. No answer is cut or left out for its length. Rankings of ties alone
    count for a model of attributes only, whose ratings may tell the answers apart.

    Args:
        model: as :func:`open_scorer` takes it, ``options`` too.
        source: rankings or pairs in any format that :func:`load` knows.
        cache: as of :func:`open_scorer`.

    Raises:
        DataError: a row that cannot be used, naming file and line, or no pair is left.
        EngineError: the scorer failed, gave NaN or did not answer in time.
        DataError, ModelError: a text that the model cannot read, by its prompt's id.
        ConfigError, ModelError: as :func:`open_scorer`.
    """
    heads = heads_of(model)
    rated = heads is not None and heads.kind == "attributes"
    loaded = load(source, kind="rankings", format=format, on_bad_row=on_bad_row, split=split, keep_ties=rated)
    say(loaded.summary())
    records = cast(list[Ranking], loaded.records)
    num_answers_dropped: Counter[str] = Counter()
    kept = [_judged(record, source, num_answers_dropped) for record in records]
    outputs = _outputs(open_outputs(model, cache=cache, say=say, **options), model, records, kept, source)
    scored = [
        _scored(record, answers, [row[0] for row in rows])
        for record, answers, rows in zip(records, kept, outputs, strict=True)
    ]
    try:
        card = build_card(scored, model=model, seed=seed)
    except DataError as error:
        left_out = ", ".join(f"{reason} {count:,}" for reason, count in num_answers_dropped.items())
        raise DataError(f"{source}: {error}{f'; answers left out: {left_out}' if left_out else ''}") from None
    if heads is not None:
        card = _with_heads(card, heads, records, kept, outputs, seed)
    data = {
        "file": source, "format": loaded.format, "num_read": loaded.num_read, "num_rankings": loaded.num_kept,
        "dropped": loaded.dropped, "answers_dropped": dict(num_answers_dropped), "seed": seed,
    }  # fmt: skip
    return replace(card, data=data)


def _judged(record: Ranking, source: str, num_dropped: Counter[str]) -> list[Answer]:
    """The answers that say something: all of a control item, else those that are ranked and tell apart."""
    if record.gold is not None:
        ids = {answer.id for answer in record.answers}
        unknown = next((name for pair in record.gold for name in pair if name not in ids), None)
        if unknown is not None or any(len(pair) != 2 for pair in record.gold):
            what = f"names {unknown!r}, which is no answer's id" if unknown else "must hold pairs (better, worse)"
            raise DataError(f"{source}: ranking {record.group_id!r}: field 'gold' {what}")
        return list(record.answers)
    return judged_answers(record, num_dropped)


def _with_heads(
    card: RewardCard,
    heads: Heads,
    records: Sequence[Ranking],
    kept: Sequence[Sequence[Answer]],
    outputs: Sequence[list[list[float]]],
    seed: int,
) -> RewardCard:
    """The card with what the heads say of the ordinary answers."""
    from heedful.data.heads import OVERALL, rating_ranks
    from heedful.evaluate.heads_card import with_accuracies, with_disagreement

    said: list[list[list[float]]] = []
    ranks: dict[str, list[list[int]]] = {name: [] for name in (OVERALL, *heads.names)}
    for record, answers, rows in zip(records, kept, outputs, strict=True):
        places = [k for k, answer in enumerate(answers) if answer.kind not in ("bait", "gold") and record.gold is None]
        ids = [answers[k].id for k in places]
        said.append([rows[k][1:] for k in places])
        for name, per_record in ranks.items():
            per_record.append(rating_ranks(record.ratings.get(name, {}), ids))
        ranks[OVERALL][-1] = [training_ranks(record)[i] for i in ids]
    if heads.kind == "ensemble":
        return with_disagreement(card, said, ranks[OVERALL], seed=seed)
    return with_accuracies(card, said, {name: ranks[name] for name in heads.names}, seed=seed)


def _outputs(
    ask: Outputs, model: str, records: Sequence[Ranking], kept: Sequence[Sequence[Answer]], source: str
) -> list[list[list[float]]]:
    """What is said of every ranking's answers; asked in parts, so that a failure says how far it came."""
    outputs: list[list[list[float]]] = []
    num_parts = -(-len(records) // RANKINGS_PER_PART)
    with Progress("Scoring", num_parts) as progress:
        for start in range(0, len(records), RANKINGS_PER_PART):
            asked = [
                (Prompt(record.group_id, record.prompt, record.category, record.source, record.info), answer.text)
                for record, answers in zip(records[start : start + RANKINGS_PER_PART], kept[start:])
                for answer in answers
            ]
            prompts, texts = [prompt for prompt, _ in asked], [text for _, text in asked]
            try:
                found = iter(ask(prompts, texts))
            except HeedfulError as error:
                where = f"{source}, after {start:,} of {len(records):,} rankings"
                raise explained(error, where, model, prompts, texts) from error
            outputs += [[next(found) for _ in answers] for answers in kept[start : start + RANKINGS_PER_PART]]
            progress.step()
    return outputs


def _scored(record: Ranking, answers: Sequence[Answer], scores: list[float]) -> ScoredRanking:
    ranks = training_ranks(record)
    place = {answer.id: k for k, answer in enumerate(answers)}
    return ScoredRanking(
        scores=scores,
        ranks=[ranks.get(answer.id, 0) for answer in answers],  # of a control item they are not read
        num_chars=[len(answer.text) for answer in answers],
        category=record.category,
        source=record.source,
        kinds=[answer.kind for answer in answers],
        gold=[(place[better], place[worse]) for better, worse in record.gold or ()],
    )
