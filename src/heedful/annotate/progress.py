"""How far a project is: counts by category and by person, for the pages and the command line."""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import Subquery, case, func, select
from sqlalchemy.orm import Session

from heedful.annotate.queue import excluded_people
from heedful.annotate.tables import Assignment, Exclusion, Item, Person


@dataclass(frozen=True, slots=True)
class CategoryProgress:
    """Of one category."""

    category: str
    num_items: int
    """Control items left out"""
    num_gold: int
    num_wanted: int
    """Rankings, by the items' overlaps"""
    num_submitted: int
    """Of those wanted; work of excluded people, control items and repetitions left out"""
    num_leased: int
    num_skipped: int


@dataclass(frozen=True, slots=True)
class PersonProgress:
    """Of one account, forgotten ones included."""

    name: str | None
    pseudonym: str
    role: str
    num_submitted: int
    num_skipped: int
    last_at: float | None
    """When something was last submitted or skipped"""
    disabled_at: float | None
    deleted_at: float | None
    excluded_because: str | None
    """Why the work is left out at present"""


def by_category(session: Session) -> list[CategoryProgress]:
    """One row a category, in alphabetical order."""
    items = session.execute(
        select(
            Item.category,
            func.count(case((Item.is_gold.is_(False), 1))),
            func.count(case((Item.is_gold.is_(True), 1))),
            func.coalesce(func.sum(case((Item.is_gold.is_(False), Item.overlap), else_=0)), 0),
        ).group_by(Item.category)
    ).all()
    counts = (Item.is_gold.is_(False), Assignment.repetition == 0, Assignment.person_id.not_in(excluded_people()))
    states = [func.count(case((Assignment.state == state, 1))) for state in ("leased", "skipped")]
    found = select(Item.category, *states).join(Assignment, Assignment.item_id == Item.id).where(*counts)
    others = {row[0]: row[1:] for row in session.execute(found.group_by(Item.category))}
    there = _there()
    sums = select(Item.category, func.sum(there.c.num)).join(there, there.c.id == Item.id).group_by(Item.category)
    submitted = {category: int(num) for category, num in session.execute(sums)}
    done = {row[0]: (submitted.get(row[0], 0), *others.get(row[0], (0, 0))) for row in items}
    return [CategoryProgress(*row, *done[row[0]]) for row in sorted(items, key=lambda row: row[0])]


def _there() -> Subquery:
    """Item → rankings that count, ``num``, up to its overlap: an item that has too many, since somebody's work was
    taken in again, makes up for none that lacks some."""
    return (
        select(Item.id, case((func.count() > Item.overlap, Item.overlap), else_=func.count()).label("num"))
        .join(Assignment, Assignment.item_id == Item.id)
        .where(
            Item.is_gold.is_(False),
            Assignment.state == "submitted",
            Assignment.repetition == 0,
            Assignment.person_id.not_in(excluded_people()),
        )
        .group_by(Item.id, Item.overlap)
        .subquery()
    )


def by_person(session: Session) -> list[PersonProgress]:
    """One row an account, in the order in which they were made."""
    rows = session.execute(
        select(
            Person,
            func.count(case((Assignment.state == "submitted", 1))),
            func.count(case((Assignment.state == "skipped", 1))),
            func.max(case((Assignment.state.in_(("submitted", "skipped")), Assignment.ended_at))),
        )
        .outerjoin(Assignment, Assignment.person_id == Person.id)
        .group_by(Person.id)
        .order_by(Person.id)
    ).all()
    live = select(Exclusion.person_id, Exclusion.reason).where(Exclusion.lifted_at.is_(None))
    excluded = dict(session.execute(live).tuples().all())
    return [
        PersonProgress(
            person.name, person.pseudonym, person.role, submitted, skipped, last, person.disabled_at,
            person.deleted_at, excluded.get(person.id),
        )  # fmt: skip
        for person, submitted, skipped, last in rows
    ]


def of_round(session: Session, number: int) -> tuple[int, int]:
    """Rankings of a round's items that are there and that are wanted; counted as :func:`by_category` counts."""
    items = (Item.is_gold.is_(False), Item.round == number)
    wanted = session.scalar(select(func.coalesce(func.sum(Item.overlap), 0)).where(*items)) or 0
    there = _there()
    done = select(func.sum(there.c.num)).join(Item, Item.id == there.c.id).where(*items)
    return int(session.scalar(done) or 0), wanted
