"""Rankings as annotation tools export them: Label Studio (List and Ranker) and Argilla (RankingQuestion).

Only what a person submitted counts: predictions and suggestions of models, drafts, and cancelled or discarded work are
left aside. Neither tool's export keeps all that people said: Label Studio knows no ties, and version 2 of Argilla's SDK
writes a ranking as a list, best first, in which ties are no longer told apart.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from heedful.data.files import BadRow
from heedful.data.formats.base import (
    Candidate,
    Fields,
    Format,
    listing,
    mapping,
    number,
    objects,
    optional_text,
    ranking,
    text,
)
from heedful.data.formats.lists import read_ranks, whole_ranks
from heedful.data.formats.transcripts import read_prompt
from heedful.records import Judgement, Ranking

PROMPT_KEYS = ("prompt", "instruction", "question", "query", "input", "context", "conversation", "chat", "text")
BODY_KEYS = ("body", "text", "content", "html", "title")
UNSORTED = "_"
"""Label Studio's name for the items that were not moved into a bucket."""


def _parse_label_studio(row: Fields) -> Ranking:
    """``value.ranker`` holds item ids, best first, under the Ranker's own name or that of its only bucket."""
    data = mapping(row, "data")
    where, items = _items(data)
    ids = [str(item["id"]) for item in items]
    if len(set(ids)) != len(ids):
        raise BadRow("duplicate_answer_id", f"two items of 'data.{where}' have the same id")
    candidates = []
    for i, item in enumerate(items):
        body = next((key for key in BODY_KEYS if isinstance(item.get(key), str)), "body")
        policy = optional_text(item, "policy", "model") or (optional_text(item, "title") if body != "title" else "")
        candidates.append(Candidate(f"data.{where}[{i}].{body}", item.get(body), policy, id=ids[i]))
    judgements = [
        Judgement(_person(work), read_ranks(_order(value), set(ids), "value.ranker"), _seconds(work))
        for work, value in _ranker_results(row)
    ]
    return _ranked({**data, "id": row.get("id")}, data, "data", candidates, judgements)


def _items(data: Fields) -> tuple[str, list[Fields]]:
    """The list that the Ranker sorted: the task's only list of objects with ids."""
    lists = {key: value for key, value in data.items() if _is_items(value)}
    if len(lists) != 1:
        raise BadRow("no_items", f"field 'data' holds {len(lists)} lists of items with ids where one is needed")
    return next(iter(lists.items()))


def _is_items(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(v, Mapping) and "id" in v for v in value)


def _ranker_results(row: Fields) -> Iterator[tuple[Fields, Fields]]:
    """(annotation, value.ranker) of what was not cancelled."""
    for i, work in enumerate(objects(row, "annotations")):
        if work.get("was_cancelled"):
            continue
        for result in objects(work, "result", optional=True):
            if result.get("type") == "ranker":
                value = mapping(result, "value").get("ranker")
                if not isinstance(value, Mapping):
                    raise BadRow(
                        "wrong_type", f"field 'annotations[{i}].result.value.ranker' must be an object of lists"
                    )
                yield work, value


def _order(value: Fields) -> list[str]:
    sorted_into = {name: ids for name, ids in value.items() if name != UNSORTED and ids}
    if len(sorted_into) != 1:
        raise BadRow(
            "no_order", f"the items are sorted into {len(sorted_into)} buckets, whose order the file does not say"
        )
    name = next(iter(sorted_into))
    return [str(item) for item in listing(sorted_into, name)]


def _person(work: Fields) -> str:
    """The number of the account rather than its address."""
    by = work.get("completed_by")
    who = (by.get("id") or by.get("email")) if isinstance(by, Mapping) else by
    return f"label-studio-{who}" if who not in (None, "") else "label-studio"


def _seconds(work: Fields) -> float | None:
    return number(work["lead_time"], "annotations.lead_time", low=0) if work.get("lead_time") is not None else None


def _looks_label_studio(row: Fields) -> str | None:
    if not isinstance(row["data"], Mapping) or not isinstance(row["annotations"], list):
        return "'data' is no object or 'annotations' no list"
    listed = [work.get("result") for work in row["annotations"] if isinstance(work, Mapping)]
    results = [result for results in listed if isinstance(results, list) for result in results]
    fits = any(isinstance(result, Mapping) and result.get("type") == "ranker" for result in results)
    fits = fits or (not results and any(map(_is_items, row["data"].values())))
    return None if fits else "'annotations' holds no result of type ranker"


def _parse_argilla(row: Fields) -> Ranking:
    """Each option of the ranking question names the field that holds the answer: "response-1" is field "response-1" or
    "response_1". A rank that is null was not given."""
    fields = mapping(row, "fields")
    said = _argilla_rankings(row, fields)
    names = dict.fromkeys(name for _, value in said for name in _options(value))
    where = {name: field for name in names for field in fields if _same_name(name, field)}
    candidates = [Candidate(f"fields.{where[name]}", fields[where[name]], id=name) for name in names]
    judgements = [Judgement(who, _argilla_ranks(value)) for who, value in said]
    rest = {key: value for key, value in fields.items() if key not in where.values()}
    return _ranked({**mapping(row, "metadata"), "id": row.get("id")}, rest, "fields", candidates, judgements)


def _argilla_rankings(row: Fields, fields: Fields) -> list[tuple[str, list[Any]]]:
    """(annotator, value) of the one question whose options name fields, from people who submitted."""
    found: dict[str, list[tuple[str, list[Any]]]] = {}
    strange = None
    for question, response in _responses(row["responses"]):
        value: Any = response.get("value")
        if response.get("status") in ("draft", "discarded") or not _is_ranking(value):
            continue
        other = next((name for name in _options(value) if not any(_same_name(name, field) for field in fields)), None)
        if other is None:
            who = f"argilla-{response['user_id']}" if response.get("user_id") else "argilla"
            found.setdefault(question, []).append((who, value))
        strange = strange or other
    if not found and strange is not None:
        raise BadRow("unknown_answer_id", f"a response ranks {strange!r:.60}, and 'fields' has no field of that name")
    if len(found) != 1:
        raise BadRow(
            "missing_ranks", f"{len(found)} ranking questions are answered ({', '.join(found) or 'none'}), not one"
        )
    return next(iter(found.values()))


def _responses(responses: Any) -> Iterator[tuple[str, Fields]]:
    """(question, response), from the SDK's form (by question) or the server's (by person)."""
    if isinstance(responses, Mapping):
        for question in responses:
            for response in objects(responses, question, optional=True):
                yield question, response
    else:
        for person in objects({"responses": responses}, "responses", optional=True):
            for question, answer in mapping(person, "values").items():
                yield question, {**person, "value": answer.get("value") if isinstance(answer, Mapping) else None}


def _is_ranking(value: Any) -> bool:
    """A list of two or more options, with ranks or best first; the answer to a multi-label question looks like one."""
    if not isinstance(value, list) or len(value) < 2:
        return False
    return all(isinstance(v, str) for v in value) or all(isinstance(v, Mapping) and "value" in v for v in value)


def _options(value: list[Any]) -> list[str]:
    return [v if isinstance(v, str) else text(v["value"], "value") for v in value]


def _argilla_ranks(value: list[Any]) -> dict[str, int]:
    names = _options(value)
    if len(set(names)) != len(names):
        raise BadRow("duplicate_rank", "a ranking lists an option twice")
    if not any(isinstance(v, Mapping) and v.get("rank") is not None for v in value):
        return {name: place for place, name in enumerate(names, 1)}
    ranked = {name: v["rank"] for name, v in zip(names, value) if v.get("rank") is not None}
    return dict(zip(ranked, whole_ranks(list(ranked.values()), "rank")))


def _same_name(option: str, field: str) -> bool:
    """Field names allow fewer characters than options, so "Response 1" may stand for "response_1"."""
    plain = [name.lower().replace("-", "_").replace(" ", "_") for name in (option, field)]
    return plain[0] == plain[1]


def _looks_argilla(row: Fields) -> str | None:
    if not isinstance(row["fields"], Mapping) or not isinstance(row["responses"], Mapping | list):
        return "'fields' is no object or 'responses' holds no answers by question or person"
    return None


def _ranked(row: Fields, rest: Fields, where: str, candidates: list[Candidate], judgements: list[Judgement]) -> Ranking:
    """The ranking, its prompt from the first known of the remaining fields, or from the only one."""
    texts = [key for key, value in rest.items() if isinstance(value, str) or (isinstance(value, list) and value)]
    key = next((key for key in PROMPT_KEYS if key in texts), texts[0] if len(texts) == 1 else None)
    if key is None:
        raise BadRow(
            "missing_field", f"field '{where}' has no prompt; it should be called {', '.join(PROMPT_KEYS[:4])}"
        )
    prompt = read_prompt(rest[key], f"{where}.{key}")
    return replace(ranking(row, prompt, candidates, {}), rankings=tuple(judgements))


LABEL_STUDIO = Format(
    "label_studio", "rankings", "Label Studio tasks in JSON whose List was sorted by a Ranker", ("data", "annotations"),
    _parse_label_studio, _looks_label_studio,
)  # fmt: skip
ARGILLA = Format(
    "argilla", "rankings", "Argilla records in JSON that answer a RankingQuestion", ("fields", "responses"),
    _parse_argilla, _looks_argilla,
)  # fmt: skip
