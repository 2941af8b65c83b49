"""Rankings of N answers: our master form, the short list form, Nectar, UltraFeedback and NeMo-RL."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from heedful.data.files import BadRow
from heedful.data.formats.base import (
    FILE_ANNOTATOR,
    Candidate,
    Fields,
    Format,
    answer_text,
    check_prompt,
    conversation,
    dense,
    listing,
    mapping,
    number,
    objects,
    optional_text,
    ranking,
    ratings,
    text,
    value,
)
from heedful.data.formats.transcripts import read_prompt
from heedful.errors import DataError
from heedful.records import PreferencePair, Ranking

SCHEMA = "heedful.ranking/1"
"""Stands in every master row we write; a row without it is read as this version, another version is refused."""


def write_master(record: Ranking) -> dict[str, Any]:
    """A ranking as one line of the master file."""
    return {"schema": SCHEMA, **record.to_json()}


def _parse_master(row: Fields) -> Ranking:
    """Documented forms of ranks: {id: rank} from 1 or from 0, or a list of ids, best first (a nested list is a tie)."""
    data = _without_nulls(dict(row))
    for key in ("group_id", "category", "lang", "source"):
        text(data.get(key, ""), key)
    data["info"] = dict(mapping(data, "info"))
    schema = data.pop("schema", SCHEMA)
    if schema != SCHEMA:
        raise BadRow("unknown_schema", f"field 'schema' is {schema!r:.60}; this version reads {SCHEMA!r}")
    prompt = check_prompt(conversation(value(row, "prompt"), "prompt"))
    data["prompt"] = [turn.to_json() for turn in prompt]
    answers, seen = listing(data, "answers"), set()
    for i, answer in enumerate(answers):
        field = f"answers[{i}]"
        name = answer.get("id") if isinstance(answer, Mapping) else None
        if not isinstance(name, str):
            raise BadRow("wrong_type", f"field '{field}' must be an answer with a text id")
        if name in seen:
            raise BadRow("duplicate_answer_id", f"two answers have the id {name!r}")
        seen.add(name)
        answer_text(answer.get("text"), f"{field}.text")
    if len(answers) < 2:
        raise BadRow("single_answer", f"{len(answers)} answer where a ranking needs two or more")
    if len({answer["text"] for answer in answers}) == 1:
        raise BadRow("identical_answers", "all answers are the same text")
    judgements = [dict(judgement) for judgement in objects(data, "rankings", optional=True)]
    for i, judgement in enumerate(judgements):
        judgement["ranks"] = read_ranks(judgement.get("ranks"), seen, f"rankings[{i}].ranks")
        judgement["annotator"] = text(judgement.get("annotator", FILE_ANNOTATOR), f"rankings[{i}].annotator")
    data["rankings"] = judgements
    if data.get("consensus") is not None:
        data["consensus"] = read_ranks(data["consensus"], seen, "consensus")
    data["ratings"] = {
        name: ratings(rated, f"ratings.{name}") for name, rated in mapping(data, "ratings").items() if rated is not None
    }
    unknown = next((i for rated in data["ratings"].values() for i in rated if i not in seen), None)
    if unknown is not None:
        raise BadRow("unknown_answer_id", f"field 'ratings' rates {unknown!r}, which is no answer's id")
    for pair in listing(data, "gold") if data.get("gold") else ():
        if not isinstance(pair, list | tuple) or len(pair) != 2 or len(seen & {*map(str, pair)}) < 2:
            raise BadRow("bad_gold", f"field 'gold' has {pair!r:.60} where a [better, worse] pair of answer ids is due")
    try:
        return Ranking.from_json(data)
    except DataError as error:
        raise BadRow("bad_record", str(error)) from None


def _without_nulls(content: Any) -> Any:
    """The content without null fields: Parquet fills every object with the fields of all others."""
    if isinstance(content, dict):
        return {key: _without_nulls(item) for key, item in content.items() if item is not None}
    return [_without_nulls(item) for item in content] if isinstance(content, list) else content


def read_ranks(ranks: Any, ids: set[str], field: str) -> dict[str, int]:
    """Ranks by answer id, 1 = best and without gaps, from any documented form.

    Raises:
        BadRow: missing_ranks, unknown_answer_id, duplicate_rank (an id listed twice) or bad_ranks.
    """
    if isinstance(ranks, list):
        tiers = [tier if isinstance(tier, list) else [tier] for tier in ranks]
        names = [name for tier in tiers for name in tier]
        if len(set(map(str, names))) != len(names):
            raise BadRow("duplicate_rank", f"field {field!r} lists an answer twice")
        ranks = {name: place for place, tier in enumerate(tiers, 1) for name in tier if isinstance(name, str)}
        if len(ranks) != len(names):
            raise BadRow("bad_ranks", f"field {field!r} must list answer ids")
    if not ranks:
        raise BadRow("missing_ranks", f"field {field!r} is empty")
    if not isinstance(ranks, Mapping):
        raise BadRow("bad_ranks", f"field {field!r} must be {{id: rank}} or a list of ids, best first")
    unknown = next((name for name in ranks if name not in ids), None)
    if unknown is not None:
        raise BadRow("unknown_answer_id", f"field {field!r} ranks {unknown!r}, which is no answer's id")
    return dict(zip(ranks, whole_ranks(list(ranks.values()), field)))


def whole_ranks(ranks: Sequence[Any], field: str) -> list[int]:
    """Ranks as written (whole numbers whose best is 0 or 1) to ranks from 1 without gaps."""
    values = [number(rank, field) for rank in ranks]
    if any(v != int(v) for v in values) or min(values) not in (0, 1):
        raise BadRow("bad_ranks", f"field {field!r} must hold whole numbers that begin with 1 (or 0) for the best")
    return dense(values, best=min)


def _parse_rankings(row: Fields) -> Ranking:
    """Best first; equal scores are a tie, scores that contradict the order are refused; ``rank``, if given, decides.

    ``ratings`` of an answer are {attribute: number}, those of the row {attribute: a number or null per answer}.
    """
    items = [item if isinstance(item, Mapping) else {"text": item} for item in listing(row, "answers")]
    of_row = _ratings_of_row(row, len(items))
    candidates = [
        Candidate(
            f"answers[{i}].text",
            item.get("text"),
            optional_text(item, "source", "policy", "model"),
            number(item["score"], f"answers[{i}].score") if item.get("score") is not None else None,
            str(item.get("id") or ""),
            ratings(item.get("ratings"), f"answers[{i}].ratings") | of_row[i],
        )
        for i, item in enumerate(items)
    ]
    names = [c.id for c in candidates if c.id]
    if len(set(names)) != len(names):
        raise BadRow("duplicate_answer_id", "two answers have the same id")
    ranks, scores = list(range(1, len(items) + 1)), [c.score for c in candidates]
    given = [item.get("rank") for item in items]
    if any(rank is not None for rank in given):
        if any(rank is None for rank in given):
            raise BadRow("missing_ranks", f"field 'answers[{given.index(None)}].rank' is missing, others have one")
        ranks = whole_ranks(given, "answers[].rank")
    elif scores and all(score is not None for score in scores):
        known = [score for score in scores if score is not None]
        if known != sorted(known, reverse=True):
            raise BadRow("score_contradicts", "the scores do not fall, but the answers must stand best first")
        ranks = dense(known)
    return ranking(row, read_prompt(value(row, "prompt"), "prompt"), candidates, ranks)


def _ratings_of_row(row: Fields, num_answers: int) -> list[dict[str, float]]:
    """One {attribute: number} per answer from lists beside the answers."""
    lists = mapping(row, "ratings")
    for name in lists:
        if len(listing(lists, name, optional=True)) not in (0, num_answers):
            raise BadRow("wrong_length", f"field 'ratings.{name}' must hold one number (or null) per answer")
    given = {name: values for name, values in lists.items() if values}
    return [ratings({name: values[i] for name, values in given.items()}, "ratings") for i in range(num_answers)]


def _looks_rankings(row: Fields) -> str | None:
    items = row["answers"]
    if not isinstance(items, list):
        return None  # told by the parser
    fits = all((isinstance(i, dict) and ("text" in i or not i)) or isinstance(i, (str, type(None))) for i in items)
    return None if fits else "'answers' holds no objects with 'text'"


def _parse_nectar(row: Fields) -> Ranking:
    """Each answer carries its rank, 1 = best."""
    items = listing(row, "answers")
    missing = next((i for i, item in enumerate(items) if item.get("rank") is None), None)
    if missing is not None:
        raise BadRow("missing_ranks", f"field 'answers[{missing}].rank' is missing")
    candidates = [
        Candidate(f"answers[{i}].answer", item.get("answer"), optional_text(item, "model"))
        for i, item in enumerate(items)
    ]
    ranks = whole_ranks([item["rank"] for item in items], "answers[].rank")
    return ranking(row, read_prompt(value(row, "prompt"), "prompt"), candidates, ranks)


def _looks_nectar(row: Fields) -> str | None:
    items = row["answers"]
    fits = isinstance(items, list) and items and all(isinstance(i, dict) and "answer" in i for i in items)
    return None if fits else "'answers' holds no objects with 'answer' and 'rank'"


def _parse_ultrafeedback(row: Fields) -> Ranking:
    """Ranked by ``fine-grained_score`` (1 to 5, mean of the aspects), else by ``overall_score`` (1 to 10).

    The overall score of the published set is known to hold 10 where 1 was meant, so it comes second. The ratings of
    the aspects are kept (N/A = not rated).
    """
    items = listing(row, "completions")
    key, high = ("fine-grained_score", 5) if all("fine-grained_score" in i for i in items) else ("overall_score", 10)
    scores = [number(i.get(key), f"completions[{n}].{key}", low=1, high=high) for n, i in enumerate(items)]
    candidates = [
        Candidate(f"completions[{n}].response", item.get("response"), optional_text(item, "model"), score,
                  ratings=_aspects(item, f"completions[{n}].annotations"))
        for n, (item, score) in enumerate(zip(items, scores))
    ]  # fmt: skip
    prompt = conversation(value(row, "instruction"), "instruction")
    return ranking(row, prompt, candidates, dense(scores))


def _aspects(item: Fields, field: str) -> dict[str, float]:
    found = {}
    for name, aspect in mapping(item, "annotations").items():
        rating = aspect.get("Rating") if isinstance(aspect, Mapping) else aspect
        if rating is not None and str(rating).strip().upper() not in ("N/A", ""):
            found[str(name)] = number(rating, f"{field}.{name}")
    return found


def _looks_completions(inner: str, row: Fields) -> str | None:
    items = row["completions"]
    fits = isinstance(items, list) and items and all(isinstance(i, dict) and inner in i for i in items)
    return None if fits else f"'completions' holds no objects with {inner!r}"


def _parse_nemo_rl(row: Fields) -> Ranking:
    """``rank`` 0 is best."""
    items = listing(row, "completions")
    candidates = [Candidate(f"completions[{i}].completion", item.get("completion")) for i, item in enumerate(items)]
    ranks = whole_ranks([value(item, "rank") for item in items], "completions[].rank")
    return ranking(row, conversation(value(row, "context"), "context"), candidates, ranks)


def write_nemo_rl(item: PreferencePair) -> dict[str, Any]:
    """A pair as NeMo-RL's row of two completions (its training takes exactly two)."""
    said = [[{"role": "assistant", "content": answer}] for answer in (item.chosen, item.rejected)]
    completions = [{"rank": rank, "completion": completion} for rank, completion in enumerate(said)]
    return {"context": [turn.to_json() for turn in item.prompt], "completions": completions}


MASTER = Format(
    "master", "rankings", "heedful's own file: a prompt, N answers and every judgement",
    ("group_id", "prompt", "answers"), _parse_master,
)  # fmt: skip
RANKINGS = Format(
    "rankings", "rankings", "a prompt and its answers, best first: {prompt, answers: [{text, source, score}]}",
    ("prompt", "answers"), _parse_rankings, _looks_rankings,
)  # fmt: skip
NECTAR = Format(
    "nectar", "rankings", "Nectar: answers with rank", ("prompt", "answers"), _parse_nectar, _looks_nectar
)
ULTRAFEEDBACK = Format(
    "ultrafeedback", "rankings", "UltraFeedback: completions with scores", ("instruction", "completions"),
    _parse_ultrafeedback, lambda row: _looks_completions("response", row),
)  # fmt: skip
NEMO_RL = Format(
    "nemo_rl", "rankings", "NeMo-RL: context and completions with rank (0 = best)", ("context", "completions"),
    _parse_nemo_rl, lambda row: _looks_completions("rank", row),
)  # fmt: skip
