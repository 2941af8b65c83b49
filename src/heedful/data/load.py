"""A file becomes records, with every row accounted for: read = kept + dropped, and each drop has a named reason."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from pathlib import Path
from typing import cast

from heedful.data.files import BadRow, Row, place, read_rows
from heedful.data.formats import registry
from heedful.data.formats.base import Format, Loadable
from heedful.data.pairs import consensus
from heedful.data.prompts import prompt_of
from heedful.errors import DataError
from heedful.records import Demonstration, Prompt, Ranking

NO_PREFERENCE = ("identical_answers", "all_tied", "duplicate_prompt")
"""Rows that are well-formed and say nothing: always dropped and counted, never an error."""


@dataclass
class Loaded:
    """The records of a file and what became of its rows."""

    path: str
    format: str
    kind: str
    """The kind of ``records``: "rankings", "demonstrations" or "prompts"."""
    records: list[Loadable]
    num_read: int
    """Rows read. Formats that spread a ranking over several rows have fewer records than rows even without drops."""
    dropped: dict[str, int] = field(default_factory=dict)
    """Number of dropped rows by reason."""
    examples: dict[str, str] = field(default_factory=dict)
    """The first message for each reason."""

    @property
    def num_kept(self) -> int:
        """Records."""
        return len(self.records)

    @property
    def num_dropped(self) -> int:
        """Rows dropped for any reason."""
        return sum(self.dropped.values())

    def summary(self) -> str:
        """"1,500 rows read as hh, 1,480 kept, 20 dropped (malformed_transcript 20)"."""
        reasons = ", ".join(f"{name} {count:,}" for name, count in self.dropped.items())
        return f"{self.num_read:,} rows read as {self.format}, {self.num_kept:,} kept, {self.num_dropped:,} dropped" + (
            f" ({reasons})" if reasons else ""
        )


class _Drops:
    """Counts dropped rows, or raises at the first bad one."""

    def __init__(self, path: str | Path, skip: bool) -> None:
        self.path, self.skip = path, skip
        self.counts: Counter[str] = Counter()
        self.examples: dict[str, str] = {}

    def add(self, line: int, bad: BadRow) -> None:
        message = f"{place(self.path, line)}: {bad}"
        if not self.skip and bad.reason not in NO_PREFERENCE:
            raise DataError(f"{message}; correct the row, or drop such rows and count them with on_bad_row=skip")
        self.counts[bad.reason] += 1
        self.examples.setdefault(bad.reason, message)


def load(
    path: str | Path,
    *,
    kind: str | None = None,
    format: str = "auto",
    on_bad_row: str = "error",
    split: str | None = None,
    keep_ties: bool = False,
    keep_unranked: bool = False,
) -> Loaded:
    """Read a file (or hub data set) into records.

    Args:
        kind: "rankings", "demonstrations" or "prompts"; None takes what the file holds. Prompts may be taken from
            files of every kind.
        format: a name of ``registry.FORMATS``; "auto" recognises it.
        on_bad_row: "error" stops at the first row that cannot be used; "skip" drops such rows and counts them by
            reason. Rows without a preference (ties, identical answers) are dropped and counted in both modes.
        split: of a hub data set.
        keep_ties: keep rankings whose answers are all tied.
        keep_unranked: keep rankings that nobody has judged yet: what people are to rank.

    Raises:
        DataError: naming file, line, field and what to do; also when no row is left.
    """
    if on_bad_row not in ("error", "skip"):
        raise DataError(f"on_bad_row must be 'error' or 'skip', not {on_bad_row!r}")
    if kind not in (None, "rankings", "demonstrations", "prompts"):
        raise DataError(f"kind must be 'rankings', 'demonstrations' or 'prompts', not {kind!r}")
    drops = _Drops(path, on_bad_row == "skip")
    num_read = 0

    def counted(rows: Iterable[Row]) -> Iterator[Row]:
        nonlocal num_read
        for row in rows:
            num_read += 1
            yield row

    def refused(line: int, bad: BadRow) -> None:
        nonlocal num_read
        num_read += 1
        drops.add(line, bad)

    rows = counted(read_rows(path, split=split, on_bad=refused))
    sample = list(islice(rows, registry.SAMPLE_ROWS))
    if not sample:
        raise _nothing_left(path, num_read, drops)
    named = registry.find(format) if format != "auto" else None
    try:
        found = named or registry.sniff(sample)
    except DataError as error:
        raise DataError(f"{path}: {error}") from None
    if kind not in (None, "prompts", found.kind):
        raise DataError(f"{path}: the file holds {found.kind} (format {found.name}), but {kind} are needed here")
    keep_unranked = keep_unranked or kind == "prompts"
    refusing = None if named else sample
    records = list(_records(path, found, chain(sample, rows), drops, refusing, keep_ties, keep_unranked))
    if kind == "prompts" and found.kind != "prompts":
        records = list(_as_prompts(records, drops))
    if not records:
        raise _nothing_left(path, num_read, drops)
    return Loaded(
        str(path), found.name, kind or found.kind, records, num_read, dict(sorted(drops.counts.items())), drops.examples
    )


def _nothing_left(path: str | Path, num_read: int, drops: _Drops) -> DataError:
    if not drops.counts and num_read == 0:
        return DataError(f"{path}: 0 rows read, 0 kept: the file holds nothing but blank lines or an empty list")
    reasons = ", ".join(f"{name} {count}" for name, count in sorted(drops.counts.items())) or "no reason to rank"
    first = next(iter(drops.examples.values()), "")
    return DataError(f"{path}: {num_read} rows read, 0 kept, all dropped ({reasons}); the first: {first or 'none'}")


def _records(
    path: str | Path,
    found: Format,
    rows: Iterable[Row],
    drops: _Drops,
    sample: list[Row] | None,
    keep_ties: bool,
    keep_unranked: bool,
) -> Iterator[Loadable]:
    """Records of the rows that can be used; ``sample`` is given when other formats are to be refused by name."""
    keys = registry.usual_keys(sample, found) if sample is not None else frozenset()

    def fitting() -> Iterator[Row]:
        for row in rows:
            bad = found.misfit(row.data)
            if bad is None:
                yield row
                continue
            if sample is not None:
                try:
                    registry.refuse_mixed(row, found, keys)
                except DataError as error:
                    raise DataError(f"{path}: {error}") from None
            drops.add(row.line, bad)

    seen: dict[str, int] = {}
    for row in found.join(fitting()) if found.join else fitting():
        try:
            record = found.parse(row.data)
            if isinstance(record, Ranking) and record.gold is None:
                _check_preference(record, keep_ties, keep_unranked)
            yield _with_own_id(record, row, seen)
        except BadRow as bad:
            drops.add(row.line, bad)


def _check_preference(ranking: Ranking, keep_ties: bool, keep_unranked: bool) -> None:
    """Raises BadRow when a ranking prefers nothing and is not wanted all the same."""
    if not any(len(ranks) > 1 for ranks in (*(j.ranks for j in ranking.rankings), ranking.consensus or {})):
        if not keep_unranked:
            said = "no judgement and no consensus ranks two answers; people can, see heedful annotate"
            raise BadRow("missing_ranks", said)
    elif not keep_ties and len(set(consensus(ranking).values())) < 2:
        raise BadRow("all_tied", "all answers are tied, so the row prefers nothing")


def _with_own_id(record: Loadable, row: Row, seen: dict[str, int]) -> Loadable:
    """The record under an id that no other has: a row that gives a used id is refused, equal content is numbered."""
    name = record.group_id if isinstance(record, Ranking) else record.id
    if name not in seen:
        seen[name] = row.line
        return record
    if name in (str(row.data.get("id")), str(row.data.get("group_id"))):
        raise BadRow("duplicate_id", f"the id {name!r} was used in line {seen[name]} already")
    copy = 2
    while f"{name}-{copy}" in seen:
        copy += 1
    name = f"{name}-{copy}"
    seen[name] = row.line
    return replace(record, group_id=name) if isinstance(record, Ranking) else replace(record, id=name)


def _as_prompts(records: Iterable[Loadable], drops: _Drops) -> Iterator[Prompt]:
    """The prompts of rankings (each once) and of demonstrations (up to the last answer)."""
    seen = set()
    for record in records:
        prompt = prompt_of(record)
        if prompt in seen:
            drops.counts["duplicate_prompt"] += 1
            continue
        seen.add(prompt)
        if isinstance(record, Ranking):
            yield Prompt(record.group_id, prompt, category=record.category, source=record.source)
        elif isinstance(record, Demonstration):
            info = {"reference_answer": record.messages[-1].content}
            yield Prompt(record.id, prompt, category=record.category, source=record.source, info=info)


def load_rankings(
    path: str | Path,
    *,
    format: str = "auto",
    on_bad_row: str = "error",
    keep_ties: bool = False,
    keep_unranked: bool = False,
) -> list[Ranking]:
    """The rankings of a file; see :func:`load`."""
    loaded = load(
        path, kind="rankings", format=format, on_bad_row=on_bad_row, keep_ties=keep_ties, keep_unranked=keep_unranked
    )
    return cast(list[Ranking], loaded.records)


def load_demonstrations(path: str | Path, *, format: str = "auto", on_bad_row: str = "error") -> list[Demonstration]:
    """The demonstrations of a file; see :func:`load`."""
    return cast(list[Demonstration], load(path, kind="demonstrations", format=format, on_bad_row=on_bad_row).records)


def load_prompts(path: str | Path, *, format: str = "auto", on_bad_row: str = "error") -> list[Prompt]:
    """The prompts of a file of any kind; see :func:`load`."""
    return cast(list[Prompt], load(path, kind="prompts", format=format, on_bad_row=on_bad_row).records)
