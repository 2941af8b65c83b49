"""Convert a data file: to the preference formats of other trainers, to our master file, to messages or prompts."""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from heedful.data.files import BadRow, write_jsonl
from heedful.data.formats.instructions import llama_factory_entry, write_llama_factory
from heedful.data.formats.lists import write_master, write_nemo_rl
from heedful.data.formats.preferences import write_implicit, write_messages, write_strings
from heedful.data.formats.transcripts import write_hh
from heedful.data.load import Loaded, load
from heedful.data.pairs import to_pairs
from heedful.data.writing import refuse_to_replace, write_json, write_parquet
from heedful.errors import DataError
from heedful.records import PreferencePair, Ranking, Record

PAIR_EXPORTS: dict[str, tuple[str, Callable[[PreferencePair], dict[str, Any]]]] = {
    "trl": ("TRL, prompt and answers as text; several turns become a transcript", write_strings),
    "trl_messages": ("TRL, prompt and answers as messages", write_messages),
    "openrlhf": ("OpenRLHF's default keys, to use with a chat template", write_implicit),
    "llama_factory": ("LLaMA-Factory ShareGPT ranking, with its dataset_info.json entry", write_llama_factory),
    "hh": ("HH-RLHF transcripts", write_hh),
    "verl": ("verl reward-model rows as text, in Parquet", write_strings),
    "nemo_rl": ("NeMo-RL, two ranked completions a row", write_nemo_rl),
    "pairs": ("heedful's preference pairs with votes and agreement", lambda item: item.to_json()),
}
RECORD_EXPORTS = {
    "master": ("rankings", "heedful's own rankings, nothing lost"),
    "messages": ("demonstrations", "conversations to imitate, as messages"),
    "prompts": ("prompts", "the prompts alone, as messages"),
}
EXPORTS = {name: about for name, (about, _) in PAIR_EXPORTS.items()} | {
    name: about for name, (_, about) in RECORD_EXPORTS.items()
}


@dataclass(frozen=True)
class Converted:
    """What a conversion did."""

    loaded: Loaded
    to: str
    path: str
    num_rows: int


def convert(
    source: str | Path,
    out: str | Path,
    to: str,
    *,
    format: str = "auto",
    on_bad_row: str = "error",
    split: str | None = None,
    min_agree_fraction: float = 0.0,
) -> Converted:
    """Write the records of ``source`` in the format ``to`` (a name of ``EXPORTS``).

    The pair formats get all pairs that the consensus does not tie. Rows are JSONL, or a JSON list or Parquet when
    ``out`` ends so; verl takes Parquet only.

    Raises:
        DataError: naming file, line and what to do; nothing is written then.
    """
    if to not in EXPORTS:
        near = difflib.get_close_matches(to, EXPORTS, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise DataError(f"cannot export to {to!r}; {hint}Known are {', '.join(EXPORTS)}")
    if to == "verl" and Path(out).suffix != ".parquet":
        raise DataError(f"{out}: verl reads Parquet; name the output …{Path(out).stem}.parquet")
    refuse_to_replace(source, out)
    kind = RECORD_EXPORTS[to][0] if to in RECORD_EXPORTS else "rankings"
    loaded = load(source, kind=kind, format=format, on_bad_row=on_bad_row, split=split)
    if to in RECORD_EXPORTS:
        rows = [record_row(record) for record in loaded.records]
    else:
        rankings = cast(list[Ranking], loaded.records)
        rows = list(_pair_rows(rankings, to, min_agree_fraction, on_bad_row == "skip", loaded))
    if not rows:
        raise DataError(f"{source}: no pair is left to write ({loaded.summary()})")
    num_rows = write_pairs(out, rows, to)
    return Converted(loaded, to, str(out), num_rows)


def record_row(record: Record) -> dict[str, Any]:
    """A record as a row that :func:`~heedful.data.load.load` reads back without loss."""
    return write_master(record) if isinstance(record, Ranking) else record.to_json()


def _pair_rows(
    rankings: list[Ranking], to: str, min_agree_fraction: float, skip: bool, loaded: Loaded
) -> Iterator[dict[str, Any]]:
    def refuse(ranking: Ranking, bad: BadRow) -> None:
        if not skip:
            raise DataError(
                f"{loaded.path}: the ranking {ranking.group_id} cannot be written as {to} ({bad}); "
                "use trl_messages, or leave such rows out with on_bad_row=skip"
            )
        loaded.dropped[bad.reason] = loaded.dropped.get(bad.reason, 0) + 1

    return pair_rows(rankings, to, min_agree_fraction=min_agree_fraction, on_bad=refuse)


def pair_rows(
    rankings: Iterable[Ranking], to: str, *, min_agree_fraction: float, on_bad: Callable[[Ranking, BadRow], None]
) -> Iterator[dict[str, Any]]:
    """Rows of a format of ``PAIR_EXPORTS``: all pairs that the consensus does not tie.

    Args:
        on_bad: called for a pair that cannot be said in that format, which is then left out.
    """
    write = PAIR_EXPORTS[to][1]
    for ranking in rankings:
        for pair in to_pairs(ranking, min_agree_fraction=min_agree_fraction):
            if to != "pairs":  # a margin column changes other trainers' loss: only where the source itself has one
                pair = replace(pair, margin=ranking.info.get("margin"))
            try:
                yield write(pair)
            except BadRow as bad:
                on_bad(ranking, bad)


def write_pairs(out: str | Path, rows: list[dict[str, Any]], to: str) -> int:
    """Write rows of a format of ``PAIR_EXPORTS``, for LLaMA-Factory with the file's entry in dataset_info.json."""
    num_rows = write_rows(out, rows)
    if to == "llama_factory":
        _add_dataset_info(Path(out))
    return num_rows


def write_rows(out: str | Path, rows: list[dict[str, Any]]) -> int:
    """Rows as JSONL, or as a JSON list or Parquet when the name ends so. Every row gets the same keys."""
    keys = list(dict.fromkeys(key for row in rows for key in row))
    if any(len(row) != len(keys) for row in rows):
        keys = [key for key in keys if all(key in row for row in rows)]
        rows = [{key: row[key] for key in keys} for row in rows]
    suffix = Path(out).suffix
    if suffix == ".parquet":
        return write_parquet(out, rows)
    if suffix == ".json":
        write_json(out, rows)
        return len(rows)
    if suffix in (".jsonl", ".gz"):
        return write_jsonl(out, rows)
    raise DataError(f"{out}: name the output .jsonl, .json or .parquet")


def _add_dataset_info(out: Path) -> None:
    """Add (or renew) the file's entry in ``dataset_info.json`` and leave all other entries alone."""
    path = out.with_name("dataset_info.json")
    entries = {}
    if path.exists():
        try:
            entries = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise DataError(f"{path}: not valid JSON ({error}), so the entry for {out.name} was not added") from None
    write_json(path, {**entries, out.stem: llama_factory_entry(out.name)})
