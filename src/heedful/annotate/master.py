"""Results out: the master file with every single judgement, views of it with a recipe hash, and the data card."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from sqlalchemy.orm import Session

import heedful
from heedful.annotate.card import DataCard
from heedful.annotate.project import Project
from heedful.annotate.results import Judged, LeftOut, exclusions, judged_items, skipped, submitted
from heedful.annotate.tables import Item
from heedful.annotate.wording import Wording
from heedful.data.export import PAIR_EXPORTS, pair_rows, record_row, write_pairs
from heedful.data.files import BadRow, write_jsonl
from heedful.data.formats.lists import SCHEMA
from heedful.data.pairs import consensus, to_pairs, without_controls
from heedful.data.writing import write_json, write_text
from heedful.errors import DataError
from heedful.records import Judgement, Ranking

VIEWS = {
    "master": "every prompt with every single judgement, as heedful reads it",
    "submissions": "one row per submission, with slots, times and control items, for quality control",
    **{name: about for name, (about, _) in PAIR_EXPORTS.items()},
}
"""What can be taken out of a project, by name."""


@dataclass(frozen=True, slots=True)
class View:
    """Which part of the work a view takes."""

    with_gold: bool = False
    """Control items too; never in preference pairs"""
    with_excluded: bool = False
    """The work of excluded people too"""
    rounds: tuple[int, ...] | None = None
    """None = all"""
    min_agree_fraction: float = 0.0
    """Pairs on which a smaller part of the votes agrees with the consensus are left out"""


def rankings(project: Project, view: View = View()) -> list[Ranking]:
    """The items that anybody ranked, with every judgement by pseudonym: the master file's content.

    A person's second ranking of an item (for self-consistency) is left out. Answers left unranked stand together
    behind the others. ``info["said"]`` holds flags, "all bad", strength and reason by pseudonym; with two answers
    ``info["margin"]`` is the mean strength in favour of the consensus. ``ratings`` are means over people. Judgements
    that came along with an item stand first.
    """
    with project.database.reading() as session:
        return _rankings(session, view)


def _rankings(session: Session, view: View) -> list[Ranking]:
    found = []
    for item, work in judged_items(session):
        if (item.is_gold and not view.with_gold) or (view.rounds is not None and item.round not in view.rounds):
            continue
        counted = [j for j in work if not j.assignment.repetition and (view.with_excluded or not j.excluded)]
        if counted or item.brought.get("rankings") or item.brought.get("consensus"):
            found.append(_ranking(item, counted))
    return found


def _ranking(item: Item, work: Sequence[Judged]) -> Ranking:
    judgements = [
        Judgement(j.person.pseudonym, j.ranks(item), j.seconds, guideline=str(j.last.guideline_version)).to_json()
        for j in work
    ]
    data = {
        "group_id": item.group_id,
        "prompt": item.prompt,
        "answers": [
            {"id": a.answer_id, "text": a.text, "policy": a.policy, "kind": a.kind, "flags": a.flags, "score": a.score}
            for a in item.answers
        ],
        "category": item.category,
        "lang": item.lang,
        "round": item.round,
        "source": item.source,
        "gold": item.gold,
        "info": item.info | ({"said": said} if (said := _said(work)) else {}),
    }
    if work:
        data |= {"rankings": [*item.brought.get("rankings", []), *judgements], "ratings": _mean_ratings(work)}
    else:
        data |= item.brought
    ranking = Ranking.from_json(data)
    margin = _margin(ranking, [(judged.ranks(item), judged.last.strength) for judged in work])
    if margin is not None:
        ranking.info["margin"] = margin
    return ranking


def _said(work: Iterable[Judged]) -> dict[str, dict[str, Any]]:
    """What people said beside the ranks; empty things are left out."""
    said = {}
    for judged in work:
        last = judged.last
        parts = {"flags": last.said.get("flags"), "all_bad": last.all_bad, "strength": last.strength,
                 "reason": last.reason}  # fmt: skip
        if any(parts.values()):
            said[judged.person.pseudonym] = {name: part for name, part in parts.items() if part}
    return said


def _mean_ratings(work: Iterable[Judged]) -> dict[str, dict[str, float]]:
    given: dict[str, dict[str, list[float]]] = {}
    for judged in work:
        for attribute, ratings in judged.last.said.get("ratings", {}).items():
            for answer_id, rating in ratings.items():
                given.setdefault(attribute, {}).setdefault(answer_id, []).append(rating)
    return {name: {answer: fmean(values) for answer, values in part.items()} for name, part in given.items()}


def _margin(ranking: Ranking, given: Sequence[tuple[dict[str, int], int | None]]) -> float | None:
    """Of two answers: the mean strength towards the better one; a tie counts 0, who gave no strength does not count."""
    ranks = consensus(ranking)
    if len(ranking.answers) != 2 or len(set(ranks.values())) != 2:
        return None
    better, worse = sorted(ranks, key=lambda answer_id: ranks[answer_id])
    strengths = []
    for said, strength in given:
        sign = (said[better] < said[worse]) - (said[better] > said[worse])
        if strength is not None or not sign:
            strengths.append(sign * (strength or 0))
    if not any(strengths):
        return None
    return max(0.0, fmean(strengths))


def rows(project: Project, name: str, view: View = View()) -> list[dict[str, Any]]:
    """The rows of a view of ``VIEWS``, plain data.

    Raises:
        DataError: no such view, or a pair that the format cannot say (names the group and another format).
    """
    if name not in VIEWS:
        raise DataError(Wording("there is no view {name!r}; there are {known}", name=name[:80], known=", ".join(VIEWS)))
    if name == "submissions":
        wanted = submitted(project)
        if view.rounds is not None:
            wanted = [one for one in wanted if one.round in view.rounds]
        return [one.to_json() for one in wanted if view.with_excluded or not one.excluded]
    return _view_rows(rankings(project, view), name, view)


def _view_rows(found: list[Ranking], name: str, view: View) -> list[dict[str, Any]]:
    if name == "master":
        return [record_row(ranking) for ranking in found]

    def refuse(ranking: Ranking, bad: BadRow) -> None:
        raise DataError(
            Wording(
                "the group {group} cannot be written as {view} ({why}); use trl_messages",
                group=ranking.group_id, view=name, why=bad,
            )
        )  # fmt: skip

    trained_on = without_controls(found)
    return list(pair_rows(trained_on, name, min_agree_fraction=view.min_agree_fraction, on_bad=refuse))


@dataclass(frozen=True, slots=True)
class Exported:
    """What :func:`export` wrote."""

    files: tuple[Path, ...]
    card: DataCard


def export(
    project: Project,
    out: str | Path,
    *,
    to: Sequence[str] = ("trl_messages",),
    view: View = View(),
    agreement: dict[str, Any] | None = None,
) -> Exported:
    """Write into the folder ``out``: rankings.jsonl (the master file), a file per format of ``to``, the data card.

    Args:
        to: names of ``VIEWS``; verl becomes Parquet, LLaMA-Factory gets its dataset_info.json.
        agreement: figures of the quality report, for the card.

    Raises:
        DataError: nothing is ranked yet, no such view, or a pair that a format cannot say; nothing is written then.
    """
    unknown = next((name for name in to if name not in VIEWS), None)
    if unknown is not None:
        raise DataError(Wording("there is no view {name!r}; there are {known}", name=unknown, known=", ".join(VIEWS)))
    folder = Path(out)
    if folder.is_file():
        raise DataError(f"{folder}: is a file; name a folder")
    with project.database.reading() as session:
        found, left_out, returned = _rankings(session, view), exclusions(session), skipped(session)
        every = _rankings(session, View(with_gold=True, with_excluded=True)) if left_out else []
    if not found:
        raise DataError(Wording("{folder}: nothing that this view takes is ranked yet", folder=project.folder))
    card = _card(project, view, found, left_out, every, dict(returned), agreement)
    written = {
        name: rows(project, name, view) if name == "submissions" else _view_rows(found, name, view) for name in to
    }
    empty = next((name for name, some in written.items() if not some), None)
    if empty is not None:
        raise DataError(
            Wording(
                "{folder}: no pair is left to write as {view}: all are tied or too little agreed on",
                folder=project.folder, view=empty,
            )
        )  # fmt: skip
    files = [folder / "rankings.jsonl"]
    write_jsonl(files[0], [record_row(ranking) for ranking in found])
    for name, some in written.items():
        if name == "master":
            continue
        files.append(folder / (f"{name}.parquet" if name == "verl" else f"{name}.jsonl"))
        write_pairs(files[-1], some, name)
    write_json(folder / "card.json", card.to_json())
    write_text(folder / "README.md", card.to_markdown())
    return Exported((*files, folder / "card.json", folder / "README.md"), card)


def _card(
    project: Project,
    view: View,
    found: list[Ranking],
    left_out: list[LeftOut],
    every: list[Ranking],
    returned: dict[str, int],
    agreement: dict[str, Any] | None,
) -> DataCard:
    recipe = asdict(view) | {
        "excluded": [one.annotator for one in left_out], "heedful": heedful.__version__, "schema": SCHEMA,
    }  # fmt: skip
    judged = Counter(judgement.annotator for ranking in every for judgement in ranking.rankings)
    trained_on = without_controls(found)
    pairs = [to_pairs(ranking) for ranking in trained_on]
    agreed = sum(pair.agree_fraction >= view.min_agree_fraction for some in pairs for pair in some)
    possible = sum(n * (n - 1) // 2 for n in (len(consensus(ranking)) for ranking in trained_on))
    return DataCard(
        project=project.settings.name,
        recipe=recipe,
        recipe_hash=_hash(recipe),
        content_hash=_hash([record_row(ranking) for ranking in found]),
        num_items=len(found),
        num_judgements=sum(len(ranking.rankings) for ranking in found),
        num_pairs=agreed,
        num_pairs_tied=possible - sum(map(len, pairs)),
        num_pairs_dropped=sum(map(len, pairs)) - agreed,
        items_by_category=_counts(ranking.category for ranking in found),
        items_by_round=_counts(str(ranking.round) for ranking in found),
        items_by_language=_counts(ranking.lang for ranking in found),
        answers_by_policy=_counts(answer.policy for ranking in found for answer in ranking.answers),
        judgements_by_guideline=_counts(one.guideline for ranking in found for one in ranking.rankings),
        judgements_by_rater=_counts(one.annotator for ranking in found for one in ranking.rankings),
        excluded=tuple(asdict(one) | {"num_judgements": judged[one.annotator]} for one in left_out),
        skipped_by_reason=dict(sorted(returned.items())),
        agreement=agreement,
    )


def _counts(names: Iterable[str]) -> dict[str, int]:
    return dict(sorted(Counter(names).items()))


def _hash(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True, ensure_ascii=False).encode()).hexdigest()[:16]
