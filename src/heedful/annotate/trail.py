"""The audit log: who did what, when, and what it was before. Rows are added, never changed."""

from __future__ import annotations

from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from heedful.annotate.tables import Trail


def record(
    session: Session,
    *,
    who: str,
    action: str,
    object: str,
    before: dict[str, Any] | None = None,
    after: dict[str, Any] | None = None,
    request_id: str = "",
    now: float,
) -> Trail:
    """Add a row; it becomes lasting with the transaction of ``session``, so together with what it tells.

    Args:
        who: a pseudonym, or "command line".
        action: a verb with its noun: "exclude person", "add guideline".
        object: which one: a pseudonym, "guideline 3", a group id.
        before, after: plain data; never a password, a token or a cookie.
    """
    row = Trail(
        at=now, who=who, action=action, object=object, before=before, after=after, request_id=request_id
    )  # fmt: skip
    session.add(row)
    return row


def newest(session: Session, *, before_id: int | None = None, limit: int = 100) -> list[Trail]:
    """A page of the log, newest first; ``before_id`` is the last id of the page before."""
    rows = select(Trail).order_by(Trail.id.desc()).limit(limit)
    return list(session.scalars(rows if before_id is None else rows.where(Trail.id < before_id)))
