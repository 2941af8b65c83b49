"""Scoring a file: every answer in it gets a score, in the order of the file, and what is done is never done again."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from heedful.data.export import write_rows
from heedful.data.load import load
from heedful.data.pairs import consensus
from heedful.data.prompts import prompt_of
from heedful.data.shipped import data_path
from heedful.data.writing import refuse_to_replace
from heedful.errors import DataError, HeedfulError
from heedful.evaluate.spread import Spread, by_group, spread
from heedful.pipeline.fits import explained
from heedful.pipeline.scorer import Outputs, heads_of, kind_of, open_outputs
from heedful.records import Demonstration, Prompt, Ranking, Record
from heedful.runs.journal import alone, append_entry, read_entries
from heedful.runs.progress import Progress, tell

if TYPE_CHECKING:
    from heedful.rollout.cache import ScoreCache

ANSWERS_PER_PART = 128
"""Scored and written down together; within a part answers of like length share a batch."""


@dataclass(frozen=True)
class Scored:
    """What scoring a file came to."""

    out: str
    num_answers: int
    num_resumed: int
    """of these scored by an earlier attempt"""
    all: Spread
    categories: dict[str, Spread] = field(default_factory=dict)
    sources: dict[str, Spread] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        groups = {
            name: {group: s.to_json() for group, s in getattr(self, name).items()} for name in ("categories", "sources")
        }
        counts = {"out": self.out, "num_answers": self.num_answers, "num_resumed": self.num_resumed}
        return {**counts, "all": self.all.to_json(), **groups}


def score_file(
    model: str,
    source: str,
    out: str | Path,
    *,
    format: str = "auto",
    split: str | None = None,
    on_bad_row: str = "error",
    cache: ScoreCache | None = None,
    say: Callable[[str], None] = tell,
    **options: Any,
) -> Scored:
    """Score every answer of ``source`` and write one row per answer to ``out``, in the order of the file.

    A row has id, answer_id, prompt (messages), answer, score, rank (null where the file gives none), policy, category
    and source; of a model with several heads also ``heads`` (what each says, by name) and of an ensemble
    ``disagreement`` (in the units of the score). ``out`` appears when all is done; until then scores lie in
    ``OUT.partial``, from which the same call goes on, provided model, file and options are the same.

    Args:
        model: as :func:`open_scorer` takes it, ``options`` too.
        source: a file of rankings, pairs, or prompts with answers, in any format that :func:`load` knows.
        out: ends in .jsonl, .jsonl.gz, .json or .parquet.
        cache: as of :func:`open_scorer`.

    Raises:
        DataError: a file without answers, ``out`` is ``source`` itself, or as :func:`load`.
        CheckpointError: another process writes ``out``.
        HeedfulError: as the scorer, with the answers that it was asked about.
    """
    if not str(out).endswith((".jsonl", ".jsonl.gz", ".json", ".parquet")):
        raise DataError(f"{out}: name the output .jsonl, .jsonl.gz, .json or .parquet")
    path = data_path(source)
    refuse_to_replace(path, out)
    loaded = load(path, format=format, on_bad_row=on_bad_row, split=split, keep_ties=True, keep_unranked=True)
    prompts, rows = [], []
    for record in loaded.records:
        for row in _rows(record):
            prompts.append(_prompt(record))
            rows.append(row)
    if not rows:
        raise DataError(f"{source}: the file holds {loaded.kind} without answers, so there is nothing to score")
    say(loaded.summary())
    key, partial = _key(model, [prompts, rows], options), Path(f"{out}.partial")
    with alone(partial):
        outputs = _known(partial, key)
        num_resumed = len(outputs)
        if num_resumed:
            say(f"{num_resumed:,} of {len(rows):,} answers were scored before; going on")
        if num_resumed < len(rows):
            ask = open_outputs(model, cache=cache, say=say, **options)
            _score(ask, model, prompts, rows, outputs, source, partial, key)
        scores = [found[0] for found in outputs]
        for row, found, more in zip(rows, outputs, _heads(model, outputs), strict=True):
            row |= {"score": found[0], **more}
        write_rows(out, rows)
    return Scored(
        str(out), len(rows), num_resumed, spread(scores), by_group(scores, [r["category"] for r in rows]),
        by_group(scores, [r["source"] for r in rows]),
    )  # fmt: skip


def _prompt(record: Any) -> Prompt:
    """What a scorer is told: the messages, and the columns that a function may look at."""
    if isinstance(record, Ranking):
        return Prompt(record.group_id, record.prompt, record.category, record.source, record.info)
    return Prompt(record.id, prompt_of(record), record.category, record.source)


def _rows(record: Any) -> Iterator[dict[str, Any]]:
    """The answers of a record, without scores yet."""

    def row(answer_id: str, text: str, rank: int | None, policy: str) -> dict[str, Any]:
        return {
            "id": record.group_id if isinstance(record, Ranking) else record.id, "answer_id": answer_id,
            "prompt": [m.to_json() for m in prompt], "answer": text, "score": None, "rank": rank, "policy": policy,
            "category": record.category, "source": record.source,
        }  # fmt: skip

    prompt = prompt_of(record)
    if isinstance(record, Ranking):
        ranks = consensus(record)
        for answer in record.answers:
            yield row(answer.id, answer.text, ranks.get(answer.id), answer.policy)
    elif isinstance(record, Demonstration):
        if record.messages[-1].role != "assistant":
            raise DataError(f"{record.id!r} does not end with an assistant's turn, so there is no answer to score")
        yield row("", record.messages[-1].content, None, "")


def _key(model: str, asked: Any, options: dict[str, Any]) -> str:
    """What scores belong to; they are not mixed with those of another model or file."""
    name = model
    if kind_of(model) == "folder":
        from heedful.models.folders import folder_digest
        from heedful.models.load import resolve

        name = folder_digest(resolve(model))
    precision = {key: options[key] for key in ("template", "dtype") if options.get(key)}
    return hashlib.sha256(json.dumps(["outputs", name, asked, precision], default=_plain).encode()).hexdigest()


def _plain(value: Any) -> Any:
    return value.to_json() if isinstance(value, Record) else str(value)


def _heads(model: str, outputs: Sequence[list[float]]) -> list[dict[str, Any]]:
    """What a row says of the model's heads; nothing where it has none."""
    heads = heads_of(model)
    if heads is None:
        return [{}] * len(outputs)
    found: list[dict[str, Any]] = [{"heads": dict(zip(heads.names, row[1:], strict=True))} for row in outputs]
    if heads.kind == "ensemble":
        for more, row in zip(found, outputs, strict=True):
            more["disagreement"] = heads.disagreement(row[1:])
    return found


def _score(
    ask: Outputs,
    model: str,
    prompts: Sequence[Prompt],
    rows: Sequence[dict[str, Any]],
    outputs: list[list[float]],
    source: str,
    journal: Path,
    key: str,
) -> None:
    """Score what is missing, part by part; each is on disk before the next begins."""
    num_parts = -(-len(rows) // ANSWERS_PER_PART)
    first = len(outputs) // ANSWERS_PER_PART
    with Progress("Scoring", num_parts, first_step=first) as progress:
        while len(outputs) < len(rows):
            start = len(outputs)
            part = rows[start : start + ANSWERS_PER_PART]
            try:
                found = ask(prompts[start : start + len(part)], [r["answer"] for r in part])
            except HeedfulError as error:
                kept = f"; the {start:,} scores before them are kept, and the same command goes on" if start else ""
                ids = f"{part[0]['id']} to {part[-1]['id']}"
                where = f"{source}, answers {start + 1:,} to {start + len(part):,} ({ids})"
                asked = prompts[start : start + len(part)]
                raise explained(error, where, model, asked, [r["answer"] for r in part], kept) from error
            append_entry(journal, {"key": key, "start": start, "outputs": found})
            outputs += found
            progress.step()


def _known(path: Path, key: str) -> list[list[float]]:
    """What is known of the first answers, as far as the journal has them without a gap."""
    outputs: list[list[float]] = []
    for entry in read_entries(path):
        if entry["key"] == key and entry["start"] == len(outputs):
            outputs += entry["outputs"]
    return outputs
