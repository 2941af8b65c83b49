"""Which item a person ranks next: one atomic claim, with leases, control items, repetitions and quotas.

An item is open as long as fewer people than its overlap hold or have ranked it. Work of people who are excluded at
present does not count, so that their items are handed out again.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Sequence
from typing import Any

from sqlalchemy import ColumnElement, Select, and_, exists, func, or_, select, update
from sqlalchemy.orm import Session, aliased, joinedload, selectinload
from sqlalchemy.orm.attributes import set_committed_value

from heedful.annotate.settings import Settings
from heedful.annotate.tables import Assignment, Exclusion, Item, Person, Shown

HELD = ("leased", "expired")
"""States in which a person may still say something: also when the lease ran out, as long as the item needs it."""
_RANDOM = secrets.SystemRandom()


def claim_next(session: Session, person: Person, settings: Settings, now: float) -> Assignment | None:
    """The item that the person shall rank now, leased to them; None when nothing is left. Inside ``writing()``.

    In this order: what the person holds; what their lease ran out on, as long as it is needed; a control item or an
    item of their own when one is due; else an open item they never had. An excluded person is given nothing.

    Control items and repetitions come at the settings' rates, at places drawn anew for every person and never first,
    so that nobody can tell them by their place.
    """
    if not _may_rank(session, person):
        return None
    until = now + 60 * settings.lease_minutes
    return _held(session, person, now, until) or _claim_new(session, person, settings, now, until)


def _claim_new(session: Session, person: Person, settings: Settings, now: float, until: float) -> Assignment | None:
    kinds = select(Item.is_gold, Assignment.repetition > 0).join_from(Assignment, Item)
    had = session.execute(kinds.where(Assignment.person_id == person.id).order_by(Assignment.id)).all()
    item_id, repetition = None, 0
    if is_due([is_gold for is_gold, _ in had], settings.gold_rate):
        item_id = _unseen_gold(session, person)
    if item_id is None and is_due([is_repetition for _, is_repetition in had], settings.repeat_rate):
        item_id = _own_item(session, person, now - 3600 * settings.repeat_after_hours)
        repetition = int(item_id is not None)
    if item_id is None:
        item_id = _open_item(session, person, settings, now)
    return _hand_out(session, person, item_id, repetition, now, until) if item_id is not None else None


def is_due(had: Sequence[bool], rate: float) -> bool:
    """Whether the next item shall be of a kind of which there is one in every 1/rate items; ``had`` tells of each item
    so far whether it was.

    Every place of the 1/rate is equally likely. It is drawn, not computed from anything that a rater knows, such as the
    own pseudonym. A place is not made up for later: when there is no control item yet, the first ones must not come all
    at once.
    """
    if rate <= 0:
        return False
    block = int(len(had) * rate)
    first, end = max(1, math.ceil(block / rate)), math.ceil((block + 1) / rate)
    return first <= len(had) < end and not any(had[first:]) and _RANDOM.randrange(end - len(had)) == 0


def excluded_people() -> Select[Any]:
    """Ids of people whose work is left out at present."""
    return select(Exclusion.person_id).where(Exclusion.lifted_at.is_(None))


def _may_rank(session: Session, person: Person) -> bool:
    """False for an excluded person and for one who was closed or forgotten a moment ago. Locks the person (PostgreSQL),
    so that a double click cannot claim two items."""
    may = and_(Person.disabled_at.is_(None), Person.id.not_in(excluded_people()))
    row = select(may).where(Person.id == person.id).with_for_update(key_share=True)
    return session.scalar(row) or False


def whole(query: Select[Any]) -> Select[Any]:
    """The query with all that a page or a check needs of its assignments."""
    return query.options(joinedload(Assignment.item), selectinload(Assignment.shown).joinedload(Shown.answer))


def _counts(now: float) -> ColumnElement[bool]:
    """Whether an assignment takes one of its item's places: ranked or held, by a person who is not excluded."""
    return and_(
        or_(Assignment.state == "submitted", and_(Assignment.state == "leased", Assignment.lease_until >= now)),
        Assignment.repetition == 0,
        Assignment.person_id.not_in(excluded_people()),
    )


def num_taken(item_id: Any, now: float, *, other_than: int | None = None) -> ColumnElement[int]:
    """How many people (other than the one of that id) hold or have ranked an item."""
    taken = select(func.count(Assignment.id)).where(Assignment.item_id == item_id, _counts(now))
    if other_than is not None:
        taken = taken.where(Assignment.person_id != other_than)
    return taken.scalar_subquery()


def is_open(session: Session, item_id: int, person_id: int, now: float) -> bool:
    """Whether the item lacks people beside this one. If so, its row is locked and leases that ran out are ended.

    PostgreSQL: whoever changes an item's leases locks the item first, and asks only then; a submission in time is safe
    without, since its row is locked before or after the lease is ended here.
    """
    lacking = select(Item.id).where(Item.id == item_id, num_taken(item_id, now, other_than=person_id) < Item.overlap)
    if session.scalar(lacking) is None:
        return False
    if not _is_alone(session):
        session.execute(select(Item.id).where(Item.id == item_id).with_for_update(key_share=True))
    _end_leases(session, item_id, now, but_of=person_id)
    return _is_alone(session) or session.scalar(lacking) is not None


def _end_leases(session: Session, item_id: int, now: float, *, but_of: int) -> None:
    """A request that was sent in time and comes too late to its turn must find that its lease is over."""
    ran_out = update(Assignment).where(
        Assignment.item_id == item_id,
        Assignment.person_id != but_of,
        Assignment.state == "leased",
        Assignment.lease_until < now,
    )
    session.execute(ran_out.values(state="expired").execution_options(synchronize_session=False))


def _is_alone(session: Session) -> bool:
    """Whether nobody else can write during this transaction (SQLite)."""
    return session.get_bind().dialect.name == "sqlite"


def _held(session: Session, person: Person, now: float, until: float) -> Assignment | None:
    """What the person holds, else what their lease ran out on, with its draft and in the order that was shown."""
    query = whole(select(Assignment)).where(Assignment.person_id == person.id, Assignment.state.in_(HELD))
    found: list[Assignment] = list(session.scalars(query.order_by(Assignment.lease_until.desc())))
    for assignment in found:
        if assignment.state == "leased" and assignment.lease_until >= now:
            return assignment
        again = {"state": "leased", "lease_until": until}
        if is_needed(session, assignment, now) and change(session, assignment, again, Assignment.state.in_(HELD)):
            return assignment
    return None


def is_needed(session: Session, assignment: Assignment, now: float) -> bool:
    """Whether a lease that ran out may be taken up again: nobody else has the last place of its item."""
    if assignment.item.is_gold or assignment.repetition:
        return True
    return is_open(session, assignment.item_id, assignment.person_id, now)


def change(session: Session, assignment: Assignment, new: dict[str, Any], *where: ColumnElement[bool]) -> bool:
    """Change the row in the database, if it is there as ``where`` says, and the object with it; of two at once only one
    succeeds."""
    statement = update(Assignment).where(Assignment.id == assignment.id, *where).values(**new)
    done = session.execute(statement.execution_options(synchronize_session=False))
    if done.rowcount != 1:  # type: ignore[attr-defined]
        return False
    for name, value in new.items():
        set_committed_value(assignment, name, value)
    return True


def _never_had(person: Person) -> ColumnElement[bool]:
    return ~exists().where(Assignment.item_id == Item.id, Assignment.person_id == person.id)


def _unseen_gold(session: Session, person: Person) -> int | None:
    ids = session.scalars(select(Item.id).where(Item.is_gold.is_(True), _never_had(person))).all()
    return _RANDOM.choice(ids) if ids else None


def _own_item(session: Session, person: Person, before: float) -> int | None:
    """An item that the person ranked before that time, and once."""
    again = aliased(Assignment)
    ids = session.scalars(
        select(Assignment.item_id)
        .join(Item)
        .where(
            Assignment.person_id == person.id,
            Assignment.repetition == 0,
            Assignment.state == "submitted",
            Assignment.ended_at <= before,
            Item.is_gold.is_(False),
            ~exists().where(again.item_id == Assignment.item_id, again.person_id == person.id, again.repetition > 0),
        )
    ).all()
    return _RANDOM.choice(ids) if ids else None


def _open_for(person: Person, now: float) -> ColumnElement[bool]:
    return and_(Item.is_gold.is_(False), _never_had(person), num_taken(Item.id, now) < Item.overlap)


def _open_item(session: Session, person: Person, settings: Settings, now: float) -> int | None:
    """Of the category furthest behind its quota, those first that somebody began, then by place; its row is locked."""
    order = (num_taken(Item.id, now) == 0), Item.place, Item.id
    query = select(Item.id).where(_open_for(person, now)).order_by(*order).limit(1)
    for of_category in _categories(session, settings, now):
        some = query.where(of_category) if of_category is not None else query
        while True:
            found = session.scalar(some.with_for_update(skip_locked=True, key_share=True))
            if found is None and not _is_alone(session):
                found = session.scalar(some)  # another claim holds it and may give it up: wait rather than send away
            if found is None:
                break
            if _is_alone(session):
                _end_leases(session, found, now, but_of=person.id)
                return found
            if is_open(session, found, person.id, now):  # it may have filled up between the query and the lock
                return found
    return None


def _categories(session: Session, settings: Settings, now: float) -> list[ColumnElement[bool] | None]:
    """Conditions, one after the other: categories with a quota, the one furthest behind first, then all others."""
    if not settings.quotas:
        return [None]
    given = dict.fromkeys(settings.quotas, 0)
    counts = (
        select(Item.category, func.count(Assignment.id))
        .join(Item)
        .where(_counts(now), Item.is_gold.is_(False))
        .group_by(Item.category)
    )
    given |= {category: count for category, count in session.execute(counts) if category in given}
    order = sorted(given, key=lambda category: given[category] / settings.quotas[category])
    return [*(Item.category == category for category in order), Item.category.not_in(order)]


def _hand_out(session: Session, person: Person, item_id: int, repetition: int, now: float, until: float) -> Assignment:
    """A lease with a new order of the answers; a repetition's differs from the first one's."""
    item = session.get_one(Item, item_id, options=[selectinload(Item.answers)])
    answers = list(item.answers)
    _RANDOM.shuffle(answers)
    if repetition:
        first = select(Shown.answer_row_id).join(Assignment).order_by(Shown.slot)
        before = session.scalars(first.where(Assignment.item_id == item_id, Assignment.person_id == person.id)).all()
        while [answer.id for answer in answers] == before:
            _RANDOM.shuffle(answers)
    assignment = Assignment(
        public_id=new_id(), item=item, person_id=person.id, repetition=repetition, state="leased", leased_at=now,
        lease_until=until, opened_at=now, nonce=new_id(),
        shown=[Shown(slot=slot, answer=answer, public_id=new_id()) for slot, answer in enumerate(answers)],
    )  # fmt: skip
    session.add(assignment)
    session.flush()
    return assignment


def new_id() -> str:
    """128 random bits that can stand in an address."""
    return secrets.token_urlsafe(16)
