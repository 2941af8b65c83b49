"""Invitations: links that make one account each."""

from __future__ import annotations

import secrets

from sqlalchemy import select, update
from sqlalchemy.orm import Session

from heedful.annotate import trail
from heedful.annotate.passwords import Hashed
from heedful.annotate.people import ROLES, create_person, digest
from heedful.annotate.project import COMMAND_LINE
from heedful.annotate.tables import Invitation, Person
from heedful.annotate.wording import Wording
from heedful.errors import DataError

NO_INVITATION = "This invitation has been used or has expired; ask for a new one."


def invite(
    session: Session, role: str, now: float, *, days: float = 7.0, by: Person | None = None, request_id: str = ""
) -> str:
    """The token of a link that makes one account.

    Raises:
        DataError: the role is unknown, or the days are not between 0 and 90.
    """
    if role not in ROLES:
        raise DataError(Wording("role {role!r}: give one of {known}", role=role, known=", ".join(ROLES)))
    if not 0 < days <= 90:
        raise DataError(Wording("{days:g} days: an invitation lasts up to 90", days=days))
    token = secrets.token_urlsafe(32)
    session.add(
        Invitation(
            token_hash=digest(token), role=role, created_by_id=by.id if by else None, created_at=now,
            expires_at=now + days * 86400,
        )
    )  # fmt: skip
    who = by.pseudonym if by else COMMAND_LINE
    trail.record(
        session, who=who, action="invite", object=f"invitation {digest(token)[:8]}",
        after={"role": role, "days": days}, request_id=request_id, now=now,
    )  # fmt: skip
    return token


def open_invitation(session: Session, token: str, now: float) -> Invitation | None:
    """The invitation, if it is neither used nor expired."""
    found = session.scalar(select(Invitation).where(Invitation.token_hash == digest(token)))
    return None if found is None or found.used_at is not None or found.expires_at < now else found


def join(
    session: Session, token: str, name: str, password: str | Hashed, now: float, *, request_id: str = ""
) -> Person:
    """The account that the invitation makes.

    Raises:
        DataError: the invitation is used, expired or unknown, or name or password cannot be taken.
    """
    invitation = open_invitation(session, token, now)
    if invitation is None:
        raise DataError(NO_INVITATION)
    taken = update(Invitation).where(Invitation.id == invitation.id, Invitation.used_at.is_(None)).values(used_at=now)
    if session.execute(taken).rowcount != 1:  # type: ignore[attr-defined]
        raise DataError(NO_INVITATION)
    person = create_person(session, name, password, invitation.role, now, request_id=request_id)
    session.execute(update(Invitation).where(Invitation.id == invitation.id).values(used_by_id=person.id))
    return person
