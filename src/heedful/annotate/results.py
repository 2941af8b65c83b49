"""What the database holds of people's work, read at one moment: the last revision of every submission."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from sqlalchemy import func, select
from sqlalchemy.orm import Session, selectinload

from heedful.annotate.project import Project
from heedful.annotate.queue import excluded_people
from heedful.annotate.submitted import Submitted
from heedful.annotate.tables import Assignment, Exclusion, Item, Person, Shown, Submission


@dataclass(frozen=True, slots=True)
class Judged:
    """A person's work on an item."""

    assignment: Assignment
    person: Person
    last: Submission
    seconds: float | None
    """Of the first revision"""
    excluded: bool

    def ranks(self, item: Item) -> dict[str, int]:
        """Answer id → rank for training, where an absent answer is one that nobody judged: those that were left
        unranked stand together behind all others."""
        given: dict[str, int] = self.last.said["ranks"]
        behind = max(given.values()) + 1
        return {answer.answer_id: given.get(answer.answer_id, behind) for answer in item.answers}


def judged_items(session: Session) -> Iterator[tuple[Item, list[Judged]]]:
    """All items in the order of their numbers, each with the work on it in the order of time."""
    excluded = set(session.scalars(excluded_people()))
    people = {person.id: person for person in session.scalars(select(Person))}
    assignments = {a.id: a for a in session.scalars(select(Assignment).where(Assignment.state == "submitted"))}
    revisions: dict[int, list[Submission]] = defaultdict(list)
    for submission in session.scalars(select(Submission).order_by(Submission.revision)):
        revisions[submission.assignment_id].append(submission)
    by_item: dict[int, list[Judged]] = defaultdict(list)
    for assignment in sorted(assignments.values(), key=lambda a: (a.ended_at or 0.0, a.id)):
        said = revisions[assignment.id]
        by_item[assignment.item_id].append(
            Judged(
                assignment, people[assignment.person_id], said[-1], said[0].seconds, assignment.person_id in excluded
            )
        )
    query = select(Item).order_by(Item.id).options(selectinload(Item.answers), selectinload(Item.gold_pairs))
    for item in session.scalars(query):
        yield item, by_item[item.id]


def submitted(project: Project) -> list[Submitted]:
    """All work as quality control needs it: control items, repetitions and excluded people included and marked."""
    with project.database.reading() as session:
        slots: dict[int, dict[int, int]] = defaultdict(dict)
        for assignment_id, answer_id, slot in session.execute(
            select(Shown.assignment_id, Shown.answer_row_id, Shown.slot)
        ):
            slots[assignment_id][answer_id] = slot
        return [
            _submitted(item, judged, slots[judged.assignment.id])
            for item, work in judged_items(session)
            for judged in work
        ]


def _submitted(item: Item, judged: Judged, slots: dict[int, int]) -> Submitted:
    last = judged.last
    return Submitted(
        annotator=judged.person.pseudonym,
        group_id=item.group_id,
        category=item.category,
        round=item.round,
        lang=item.lang,
        ranks=last.said["ranks"],
        slots={answer.answer_id: slots[answer.id] for answer in item.answers},
        num_characters={answer.answer_id: num_characters(answer.text) for answer in item.answers},
        policies={answer.answer_id: answer.policy for answer in item.answers},
        at=last.created_at,
        seconds=judged.seconds,
        guideline_version=last.guideline_version,
        repetition=judged.assignment.repetition,
        gold=item.gold,
        all_bad=last.all_bad,
        strength=last.strength,
        reason=last.reason,
        flags=last.said.get("flags", {}),
        ratings=last.said.get("ratings", {}),
        num_revisions=last.revision,
        excluded=judged.excluded,
    )


def num_characters(text: str) -> int:
    """Characters that are no white space: the length that means the same in Chinese and in English."""
    return len("".join(text.split()))


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A person whose work is excluded at present."""

    annotator: str
    reason: str
    since: float
    by: str


def exclusions(session: Session) -> list[LeftOut]:
    """Who is left out at present, why, since when and by whose decision."""
    names = dict(session.execute(select(Person.id, Person.pseudonym)).all())
    live = session.scalars(select(Exclusion).where(Exclusion.lifted_at.is_(None)).order_by(Exclusion.id))
    return [LeftOut(names[e.person_id], e.reason, e.created_at, names.get(e.by_id or 0, "command line")) for e in live]


def skipped(session: Session) -> Counter[str]:
    """How often items were given back, by reason."""
    counts = select(Assignment.skip_reason, func.count()).where(Assignment.state == "skipped")
    return Counter({reason or "": count for reason, count in session.execute(counts.group_by(Assignment.skip_reason))})
