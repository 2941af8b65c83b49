"""The tables of a project: one database holds one project.

Times are seconds since 1970 (``…_at``). Whatever a rater's browser may see is named by a random ``public_id``; numbers
that count up, the answers' own ids, policies, kinds and gold keys never leave the server (see ``web/``).
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import JSON, CheckConstraint, Double, ForeignKey, Index, String, Text, UniqueConstraint
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column, relationship


class Table(DeclarativeBase):
    """Base of all tables."""

    type_annotation_map = {
        dict[str, Any]: JSON(none_as_null=True),
        list[Any]: JSON(none_as_null=True),
        float: Double(),
    }


class Guideline(Table):
    """A version of the written criteria; never changed, only followed by another."""

    __tablename__ = "guideline"
    id: Mapped[int] = mapped_column(primary_key=True)
    version: Mapped[int] = mapped_column(unique=True)
    text: Mapped[str] = mapped_column(Text)
    """Markdown"""
    created_at: Mapped[float]
    created_by: Mapped[str] = mapped_column(String(64))


class Item(Table):
    """A prompt with answers to rank; a control item (gold) has :class:`GoldPair` rows."""

    __tablename__ = "item"
    id: Mapped[int] = mapped_column(primary_key=True)
    group_id: Mapped[str] = mapped_column(String(200), unique=True)
    prompt: Mapped[list[Any]]
    """Messages as plain data"""
    category: Mapped[str] = mapped_column(String(100), default="", index=True)
    lang: Mapped[str] = mapped_column(String(20), default="")
    round: Mapped[int] = mapped_column(default=0)
    source: Mapped[str] = mapped_column(String(200), default="")
    info: Mapped[dict[str, Any]] = mapped_column(default=dict)
    is_gold: Mapped[bool] = mapped_column(default=False, index=True)
    overlap: Mapped[int]
    """How many people shall rank it; of a gold item without meaning (everybody may)"""
    place: Mapped[int] = mapped_column(index=True)
    """In the queue: a hash of the group id, so that the order tells nothing"""
    created_at: Mapped[float]
    brought: Mapped[dict[str, Any]] = mapped_column(default=dict)
    """What the master file said of the item when it came: rankings, consensus, ratings, where not empty"""
    answers: Mapped[list[Answer]] = relationship(back_populates="item", order_by="Answer.position")
    gold_pairs: Mapped[list[GoldPair]] = relationship()

    @property
    def gold(self) -> tuple[tuple[str, ...], ...] | None:
        """(better, worse) answer ids in the master file, sorted; None: no control item."""
        names = {answer.id: answer.answer_id for answer in self.answers}
        pairs = tuple(sorted((names[pair.better_id], names[pair.worse_id]) for pair in self.gold_pairs))
        return pairs if self.is_gold else None


class Answer(Table):
    """One answer of an item."""

    __tablename__ = "answer"
    id: Mapped[int] = mapped_column(primary_key=True)
    item_id: Mapped[int] = mapped_column(ForeignKey("item.id"), index=True)
    position: Mapped[int]
    """In the master file"""
    answer_id: Mapped[str] = mapped_column(String(200))
    """In the master file"""
    text: Mapped[str] = mapped_column(Text)
    policy: Mapped[str] = mapped_column(String(200), default="")
    kind: Mapped[str] = mapped_column(String(20), default="sampled")
    flags: Mapped[list[Any]] = mapped_column(default=list)
    score: Mapped[float | None]
    item: Mapped[Item] = relationship(back_populates="answers")
    __table_args__ = (UniqueConstraint("item_id", "answer_id"), UniqueConstraint("item_id", "position"))


class GoldPair(Table):
    """Of a control item: a careful rater ranks ``better`` strictly above ``worse``."""

    __tablename__ = "gold_pair"
    id: Mapped[int] = mapped_column(primary_key=True)
    item_id: Mapped[int] = mapped_column(ForeignKey("item.id"), index=True)
    better_id: Mapped[int] = mapped_column(ForeignKey("answer.id"))
    worse_id: Mapped[int] = mapped_column(ForeignKey("answer.id"))
    __table_args__ = (UniqueConstraint("item_id", "better_id", "worse_id"),)


class Person(Table):
    """Somebody with an account. A deleted person keeps the row, the pseudonym and the work; name and password go."""

    __tablename__ = "person"
    id: Mapped[int] = mapped_column(primary_key=True)
    name: Mapped[str | None] = mapped_column(String(64), unique=True)
    pseudonym: Mapped[str] = mapped_column(String(32), unique=True)
    """What exports call this person; drawn at random"""
    role: Mapped[str] = mapped_column(String(16))
    password_hash: Mapped[str | None] = mapped_column(String(200))
    language: Mapped[str | None] = mapped_column(String(10))
    created_at: Mapped[float]
    disabled_at: Mapped[float | None]
    """Cannot log in since"""
    deleted_at: Mapped[float | None]
    __table_args__ = (CheckConstraint("role in ('annotator', 'reviewer', 'admin')", name="role_known"),)


class Invitation(Table):
    """A link that makes one account."""

    __tablename__ = "invitation"
    id: Mapped[int] = mapped_column(primary_key=True)
    token_hash: Mapped[str] = mapped_column(String(64), unique=True)
    role: Mapped[str] = mapped_column(String(16))
    created_by_id: Mapped[int | None] = mapped_column(ForeignKey("person.id"))
    created_at: Mapped[float]
    expires_at: Mapped[float]
    used_at: Mapped[float | None]
    used_by_id: Mapped[int | None] = mapped_column(ForeignKey("person.id"))


class Login(Table):
    """A browser session; the cookie holds a random token, here lies its SHA-256."""

    __tablename__ = "login"
    id: Mapped[int] = mapped_column(primary_key=True)
    token_hash: Mapped[str] = mapped_column(String(64), unique=True)
    person_id: Mapped[int] = mapped_column(ForeignKey("person.id"), index=True)
    created_at: Mapped[float]
    seen_at: Mapped[float]
    person: Mapped[Person] = relationship()


class ApiToken(Table):
    """A token for programs: its SHA-256, shown once when made."""

    __tablename__ = "api_token"
    id: Mapped[int] = mapped_column(primary_key=True)
    prefix: Mapped[str] = mapped_column(String(16))
    """The first characters, to tell tokens apart"""
    token_hash: Mapped[str] = mapped_column(String(64), unique=True)
    person_id: Mapped[int] = mapped_column(ForeignKey("person.id"), index=True)
    scope: Mapped[str] = mapped_column(String(16))
    """annotate: rank as this person; export: read results"""
    created_at: Mapped[float]
    expires_at: Mapped[float]
    revoked_at: Mapped[float | None]
    person: Mapped[Person] = relationship()
    __table_args__ = (CheckConstraint("scope in ('annotate', 'export')", name="scope_known"),)


class Assignment(Table):
    """An item in the hands of a person.

    state: leased → submitted | skipped | expired. An expired one may still be submitted as long as its item needs it.
    """

    __tablename__ = "assignment"
    id: Mapped[int] = mapped_column(primary_key=True)
    public_id: Mapped[str] = mapped_column(String(32), unique=True)
    item_id: Mapped[int] = mapped_column(ForeignKey("item.id"))
    person_id: Mapped[int] = mapped_column(ForeignKey("person.id"), index=True)
    repetition: Mapped[int] = mapped_column(default=0)
    """0 = the first time; 1 = the same person again, for self-consistency"""
    state: Mapped[str] = mapped_column(String(16), default="leased")
    leased_at: Mapped[float]
    lease_until: Mapped[float]
    opened_at: Mapped[float | None]
    """When the rater first saw it"""
    nonce: Mapped[str] = mapped_column(String(32))
    """Sent with a submission; the stored result is given back when it comes again"""
    draft: Mapped[dict[str, Any] | None]
    skip_reason: Mapped[str | None] = mapped_column(String(32))
    skip_note: Mapped[str] = mapped_column(Text, default="")
    ended_at: Mapped[float | None]
    item: Mapped[Item] = relationship()
    person: Mapped[Person] = relationship()
    shown: Mapped[list[Shown]] = relationship(order_by="Shown.slot")
    submissions: Mapped[list[Submission]] = relationship(back_populates="assignment", order_by="Submission.revision")
    __table_args__ = (
        UniqueConstraint("item_id", "person_id", "repetition"),
        CheckConstraint("state in ('leased', 'submitted', 'skipped', 'expired')", name="state_known"),
        Index("assignment_by_item_state", "item_id", "state"),
        Index("assignment_by_lease", "state", "lease_until"),
    )


class Shown(Table):
    """Which answer stood where, written when the item is handed out; the browser knows the card's ``public_id``."""

    __tablename__ = "shown"
    id: Mapped[int] = mapped_column(primary_key=True)
    assignment_id: Mapped[int] = mapped_column(ForeignKey("assignment.id"), index=True)
    slot: Mapped[int]
    """From 0, left to right"""
    answer_row_id: Mapped[int] = mapped_column(ForeignKey("answer.id"))
    public_id: Mapped[str] = mapped_column(String(32), unique=True)
    answer: Mapped[Answer] = relationship()
    __table_args__ = (UniqueConstraint("assignment_id", "slot"), UniqueConstraint("assignment_id", "answer_row_id"))


class Submission(Table):
    """What a person said; a correction is a further revision, nothing is overwritten."""

    __tablename__ = "submission"
    id: Mapped[int] = mapped_column(primary_key=True)
    assignment_id: Mapped[int] = mapped_column(ForeignKey("assignment.id"), index=True)
    revision: Mapped[int]
    """From 1"""
    nonce: Mapped[str] = mapped_column(String(32), unique=True)
    created_at: Mapped[float]
    seconds: Mapped[float | None]
    """From first sight to here, of the first revision"""
    guideline_version: Mapped[int]
    all_bad: Mapped[bool] = mapped_column(default=False)
    strength: Mapped[int | None]
    """1, 2 or 3 (settings.STRENGTHS), with two answers"""
    reason: Mapped[str] = mapped_column(Text, default="")
    said: Mapped[dict[str, Any]]
    """{"ranks": {answer id: rank}, "flags": {answer id: [flag]}, "ratings": {attribute: {answer id: number}}}, by the
    answers' ids in the master file"""
    assignment: Mapped[Assignment] = relationship(back_populates="submissions")
    __table_args__ = (UniqueConstraint("assignment_id", "revision"),)


class Exclusion(Table):
    """A person's work is left out of exports from ``created_at`` until it is lifted; nothing is deleted."""

    __tablename__ = "exclusion"
    id: Mapped[int] = mapped_column(primary_key=True)
    person_id: Mapped[int] = mapped_column(ForeignKey("person.id"), index=True)
    by_id: Mapped[int | None] = mapped_column(ForeignKey("person.id"))
    reason: Mapped[str] = mapped_column(Text)
    created_at: Mapped[float]
    lifted_at: Mapped[float | None]
    lifted_by_id: Mapped[int | None] = mapped_column(ForeignKey("person.id"))


class Trail(Table):
    """The audit log; triggers of the migration refuse to change or delete a row."""

    __tablename__ = "trail"
    id: Mapped[int] = mapped_column(primary_key=True)
    at: Mapped[float]
    who: Mapped[str] = mapped_column(String(64))
    """A pseudonym, or "command line" """
    action: Mapped[str] = mapped_column(String(64))
    object: Mapped[str] = mapped_column(String(200))
    before: Mapped[dict[str, Any] | None]
    after: Mapped[dict[str, Any] | None]
    request_id: Mapped[str] = mapped_column(String(32), default="")
