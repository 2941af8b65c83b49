"""What is in a data file: format, counts, lengths, ties, duplicates, the length bias of its preferences, leakage."""

from __future__ import annotations

import dataclasses
import re
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from typing import Any, cast

from heedful.data.duplicates import group, normalise
from heedful.data.load import Loaded, load
from heedful.data.pairs import Agreement, agreement, consensus
from heedful.data.prompts import prompt_text
from heedful.records import Demonstration, Ranking

CJK = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af\uf900-\ufaff"
_CJK = re.compile(f"[{CJK}]")
_WORD = re.compile(f"[{CJK}]|[^\\W{CJK}]+")
PERCENTILES = (0, 5, 25, 50, 75, 95, 100)
MOSTLY_CJK = 0.3


@dataclass(frozen=True)
class Lengths:
    """Percentiles (0, 5, 25, 50, 75, 95, 100) by name, and the mean."""

    characters: dict[str, float]
    words: dict[str, float]
    """Each Chinese, Japanese or Korean character counts as a word."""


@dataclass(frozen=True)
class Rated:
    """How much there is of an attribute's ratings."""

    num_rankings: int
    num_answers: int
    num_pairs: int
    """Pairs of answers to one prompt with different ratings."""
    lowest: float
    highest: float


@dataclass(frozen=True)
class Preferences:
    """What the rankings of a file say."""

    num_pairs: int
    """Pairs of answers that the consensus does not tie."""
    num_tied_pairs: int
    num_answers: dict[str, int]
    """Rankings by their number of answers."""
    num_identical_answers: int
    """Answers whose text stands in the same ranking before."""
    longer_wins: float | None
    """How often the answer with more characters is preferred, prompts weighted equally; equal lengths count half."""
    longer_wins_pairs: float | None
    """The same with every pair weighted equally."""
    num_judgements: int
    agreement: Agreement | None
    attributes: dict[str, Rated]
    """What the answers are rated by."""


@dataclass(frozen=True)
class Leakage:
    """Prompts of this file that the other file has too."""

    other: str
    num_same_prompts: int
    num_like_prompts: int
    """Same or near-duplicate."""
    examples: tuple[str, ...]


@dataclass(frozen=True)
class Inspection:
    """The result of :func:`inspect`; ``to_json`` gives plain data."""

    path: str
    format: str
    kind: str
    num_read: int
    num_kept: int
    dropped: dict[str, int]
    examples: dict[str, str]
    """The first message for each reason."""
    num_duplicate_rows: int
    """Records with the same prompt and answers as one before."""
    num_distinct_prompts: int
    num_prompt_groups: int
    """Distinct prompts when near-duplicates count as one."""
    lengths: dict[str, Lengths]
    """By part: prompt, and answer or chosen and rejected."""
    categories: dict[str, int] = field(default_factory=dict)
    languages: dict[str, int] = field(default_factory=dict)
    """The ``lang`` field where there is one; else "cjk" where three tenths of the letters are, else "other"."""
    preferences: Preferences | None = None
    leakage: Leakage | None = None

    def to_json(self) -> dict[str, Any]:
        """Dicts, lists, text and numbers only."""
        return dataclasses.asdict(self)


def inspect(
    path: str | Path, other: str | Path | None = None, *, format: str = "auto", split: str | None = None
) -> Inspection:
    """Look at a file; with ``other``, count the prompts that stand in both.

    Rows that cannot be used are counted with their reason, not raised.

    Raises:
        DataError: the file cannot be read, its format is unknown or mixed, or no row is left.
    """
    loaded = load(path, format=format, on_bad_row="skip", split=split)
    prompts = [prompt_text(record) for record in loaded.records]
    keys = [normalise(prompt) for prompt in prompts]
    rankings = cast(list[Ranking], loaded.records) if loaded.kind == "rankings" else []
    contents = Counter((key, *_answers(record)) for key, record in zip(keys, loaded.records))
    return Inspection(
        path=str(path),
        format=loaded.format,
        kind=loaded.kind,
        num_read=loaded.num_read,
        num_kept=loaded.num_kept,
        dropped=loaded.dropped,
        examples=loaded.examples,
        num_duplicate_rows=sum(count - 1 for count in contents.values()),
        num_distinct_prompts=len(set(keys)),
        num_prompt_groups=len(set(group(prompts))),
        lengths=_lengths(loaded, prompts),
        categories=_counts(getattr(record, "category", "") for record in loaded.records),
        languages=_counts(_language(record, prompt) for record, prompt in zip(loaded.records, prompts)),
        preferences=_preferences(rankings) if rankings else None,
        leakage=_leakage(prompts, other) if other is not None else None,
    )


def _answers(record: object) -> tuple[str, ...]:
    if isinstance(record, Ranking):
        return tuple(answer.text for answer in record.answers)
    return (record.messages[-1].content,) if isinstance(record, Demonstration) else ()


def _counts(names: Iterable[str]) -> dict[str, int]:
    return dict(Counter(name for name in names if name).most_common())


def count_words(text: str) -> int:
    """Words; each Chinese, Japanese or Korean character counts as one."""
    return len(_WORD.findall(text))


def _language(record: object, prompt: str) -> str:
    if named := getattr(record, "lang", ""):
        return str(named)
    text = prompt + "".join(_answers(record))
    letters = sum(character.isalpha() for character in text)
    return "cjk" if letters and len(_CJK.findall(text)) / letters >= MOSTLY_CJK else "other"


def _spread(values: Sequence[int]) -> dict[str, float]:
    """Percentiles (nearest value, so that each is a length that occurs) and the mean."""
    ordered = sorted(values)
    marks = {f"p{p}": float(ordered[round(p / 100 * (len(ordered) - 1))]) for p in PERCENTILES}
    return {**marks, "mean": statistics.fmean(ordered)}


def _lengths(loaded: Loaded, prompts: list[str]) -> dict[str, Lengths]:
    parts: dict[str, list[str]] = {"prompt": prompts}
    for record in loaded.records:
        if isinstance(record, Demonstration):
            parts.setdefault("answer", []).append(record.messages[-1].content)
        elif isinstance(record, Ranking):
            parts.setdefault("answer", []).extend(answer.text for answer in record.answers)
            ranks = consensus(record)
            if not ranks:  # a control item that nobody has judged
                continue
            best, worst = min(ranks.values()), max(ranks.values())
            for answer in record.answers:
                if ranks.get(answer.id) in (best, worst):
                    name = "best answer" if ranks[answer.id] == best else "worst answer"
                    parts.setdefault(name, []).append(answer.text)
    return {
        name: Lengths(_spread([len(t) for t in texts]), _spread([count_words(t) for t in texts]))
        for name, texts in parts.items()
    }


def _preferences(rankings: list[Ranking]) -> Preferences:
    num_pairs = num_tied = num_identical = 0
    shares, wins = [], 0.0
    for ranking in rankings:
        ranks = consensus(ranking)
        num_identical += len(ranking.answers) - len({answer.text for answer in ranking.answers})
        longer = []
        for first, second in combinations([a for a in ranking.answers if a.id in ranks], 2):
            if ranks[first.id] == ranks[second.id]:
                num_tied += 1
                continue
            better, worse = (first, second) if ranks[first.id] < ranks[second.id] else (second, first)
            difference = len(better.text) - len(worse.text)
            longer.append(0.5 if difference == 0 else float(difference > 0))
        if longer:
            num_pairs += len(longer)
            wins += sum(longer)
            shares.append(statistics.fmean(longer))
    sizes = Counter(len(ranking.answers) for ranking in rankings)
    return Preferences(
        num_pairs=num_pairs,
        num_tied_pairs=num_tied,
        num_answers={str(size): count for size, count in sorted(sizes.items())},
        num_identical_answers=num_identical,
        longer_wins=statistics.fmean(shares) if shares else None,
        longer_wins_pairs=wins / num_pairs if num_pairs else None,
        num_judgements=sum(len(ranking.rankings) for ranking in rankings),
        agreement=agreement(rankings),
        attributes={name: _rated(rankings, name) for name in sorted({name for r in rankings for name in r.ratings})},
    )


def _rated(rankings: list[Ranking], name: str) -> Rated:
    given = [list(ranking.ratings[name].values()) for ranking in rankings if ranking.ratings.get(name)]
    num_pairs = sum(a != b for values in given for a, b in combinations(values, 2))
    every = [value for values in given for value in values]
    return Rated(len(given), len(every), num_pairs, min(every, default=0.0), max(every, default=0.0))


def _leakage(prompts: list[str], other: str | Path) -> Leakage:
    theirs = [prompt_text(record) for record in load(other, kind="prompts", on_bad_row="skip").records]
    numbers = group([*prompts, *theirs])
    mine, foreign = numbers[: len(prompts)], set(numbers[len(prompts) :])
    known = {normalise(prompt) for prompt in theirs}
    like = [prompt for prompt, number in zip(prompts, mine) if number in foreign]
    return Leakage(
        other=str(other),
        num_same_prompts=sum(normalise(prompt) in known for prompt in prompts),
        num_like_prompts=len(like),
        examples=tuple(" ".join(prompt.split())[:100] for prompt in like[:3]),
    )
