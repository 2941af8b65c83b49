"""The tables of the first version, and the triggers that keep the audit log as it was written."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None

JSON = sa.JSON(none_as_null=True)
REFUSAL = "the trail is never changed"

SQLITE = [
    f"create trigger trail_no_{verb} before {verb} on trail begin select raise(abort, '{REFUSAL}'); end"
    for verb in ("update", "delete")
]
POSTGRESQL = [
    "create function refuse_trail_change() returns trigger language plpgsql as "
    f"$$ begin raise exception '{REFUSAL}'; end $$",
    "create trigger trail_no_change before update or delete on trail "
    "for each row execute function refuse_trail_change()",
    "create trigger trail_no_truncate before truncate on trail "
    "for each statement execute function refuse_trail_change()",
]


def upgrade() -> None:
    """From an empty database."""
    _people()
    _items()
    _work()
    _log()
    for statement in SQLITE if op.get_bind().dialect.name == "sqlite" else POSTGRESQL:
        op.execute(statement)


def _people() -> None:
    op.create_table(
        "person",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("name", sa.String(length=64), nullable=True),
        sa.Column("pseudonym", sa.String(length=32), nullable=False),
        sa.Column("role", sa.String(length=16), nullable=False),
        sa.Column("password_hash", sa.String(length=200), nullable=True),
        sa.Column("language", sa.String(length=10), nullable=True),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("disabled_at", sa.Double(), nullable=True),
        sa.Column("deleted_at", sa.Double(), nullable=True),
        sa.CheckConstraint("role in ('annotator', 'reviewer', 'admin')", name="role_known"),
        sa.PrimaryKeyConstraint("id"),
        sa.UniqueConstraint("name"),
        sa.UniqueConstraint("pseudonym"),
    )
    op.create_table(
        "invitation",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("token_hash", sa.String(length=64), nullable=False),
        sa.Column("role", sa.String(length=16), nullable=False),
        sa.Column("created_by_id", sa.Integer(), nullable=True),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("expires_at", sa.Double(), nullable=False),
        sa.Column("used_at", sa.Double(), nullable=True),
        sa.Column("used_by_id", sa.Integer(), nullable=True),
        sa.ForeignKeyConstraint(["created_by_id"], ["person.id"]),
        sa.ForeignKeyConstraint(["used_by_id"], ["person.id"]),
        sa.PrimaryKeyConstraint("id"),
        sa.UniqueConstraint("token_hash"),
    )
    op.create_table(
        "login",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("token_hash", sa.String(length=64), nullable=False),
        sa.Column("person_id", sa.Integer(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("seen_at", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(["person_id"], ["person.id"]),
        sa.PrimaryKeyConstraint("id"),
        sa.UniqueConstraint("token_hash"),
    )
    op.create_index(op.f("ix_login_person_id"), "login", ["person_id"], unique=False)
    op.create_table(
        "api_token",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("prefix", sa.String(length=16), nullable=False),
        sa.Column("token_hash", sa.String(length=64), nullable=False),
        sa.Column("person_id", sa.Integer(), nullable=False),
        sa.Column("scope", sa.String(length=16), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("expires_at", sa.Double(), nullable=False),
        sa.Column("revoked_at", sa.Double(), nullable=True),
        sa.CheckConstraint("scope in ('annotate', 'export')", name="scope_known"),
        sa.ForeignKeyConstraint(["person_id"], ["person.id"]),
        sa.PrimaryKeyConstraint("id"),
        sa.UniqueConstraint("token_hash"),
    )
    op.create_index(op.f("ix_api_token_person_id"), "api_token", ["person_id"], unique=False)
    op.create_table(
        "exclusion",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("person_id", sa.Integer(), nullable=False),
        sa.Column("by_id", sa.Integer(), nullable=True),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("lifted_at", sa.Double(), nullable=True),
        sa.Column("lifted_by_id", sa.Integer(), nullable=True),
        sa.ForeignKeyConstraint(["by_id"], ["person.id"]),
        sa.ForeignKeyConstraint(["lifted_by_id"], ["person.id"]),
        sa.ForeignKeyConstraint(["person_id"], ["person.id"]),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_index(op.f("ix_exclusion_person_id"), "exclusion", ["person_id"], unique=False)


def _items() -> None:
    op.create_table(
        "guideline",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.Column("text", sa.Text(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("created_by", sa.String(length=64), nullable=False),
        sa.PrimaryKeyConstraint("id"),
        sa.UniqueConstraint("version"),
    )
    op.create_table(
        "item",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("group_id", sa.String(length=200), nullable=False),
        sa.Column("prompt", JSON, nullable=False),
        sa.Column("category", sa.String(length=100), nullable=False),
        sa.Column("lang", sa.String(length=20), nullable=False),
        sa.Column("round", sa.Integer(), nullable=False),
        sa.Column("source", sa.String(length=200), nullable=False),
        sa.Column("info", JSON, nullable=False),
        sa.Column("is_gold", sa.Boolean(), nullable=False),
        sa.Column("overlap", sa.Integer(), nullable=False),
        sa.Column("place", sa.Integer(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("brought", JSON, nullable=False),
        sa.PrimaryKeyConstraint("id"),
        sa.UniqueConstraint("group_id"),
    )
    op.create_index(op.f("ix_item_category"), "item", ["category"], unique=False)
    op.create_index(op.f("ix_item_is_gold"), "item", ["is_gold"], unique=False)
    op.create_index(op.f("ix_item_place"), "item", ["place"], unique=False)
    op.create_table(
        "answer",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("item_id", sa.Integer(), nullable=False),
        sa.Column("position", sa.Integer(), nullable=False),
        sa.Column("answer_id", sa.String(length=200), nullable=False),
        sa.Column("text", sa.Text(), nullable=False),
        sa.Column("policy", sa.String(length=200), nullable=False),
        sa.Column("kind", sa.String(length=20), nullable=False),
        sa.Column("flags", JSON, nullable=False),
        sa.Column("score", sa.Double(), nullable=True),
        sa.ForeignKeyConstraint(["item_id"], ["item.id"]),
        sa.PrimaryKeyConstraint("id"),
        sa.UniqueConstraint("item_id", "answer_id"),
        sa.UniqueConstraint("item_id", "position"),
    )
    op.create_index(op.f("ix_answer_item_id"), "answer", ["item_id"], unique=False)
    op.create_table(
        "gold_pair",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("item_id", sa.Integer(), nullable=False),
        sa.Column("better_id", sa.Integer(), nullable=False),
        sa.Column("worse_id", sa.Integer(), nullable=False),
        sa.ForeignKeyConstraint(["better_id"], ["answer.id"]),
        sa.ForeignKeyConstraint(["item_id"], ["item.id"]),
        sa.ForeignKeyConstraint(["worse_id"], ["answer.id"]),
        sa.PrimaryKeyConstraint("id"),
        sa.UniqueConstraint("item_id", "better_id", "worse_id"),
    )
    op.create_index(op.f("ix_gold_pair_item_id"), "gold_pair", ["item_id"], unique=False)


def _work() -> None:
    op.create_table(
        "assignment",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("public_id", sa.String(length=32), nullable=False),
        sa.Column("item_id", sa.Integer(), nullable=False),
        sa.Column("person_id", sa.Integer(), nullable=False),
        sa.Column("repetition", sa.Integer(), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("leased_at", sa.Double(), nullable=False),
        sa.Column("lease_until", sa.Double(), nullable=False),
        sa.Column("opened_at", sa.Double(), nullable=True),
        sa.Column("nonce", sa.String(length=32), nullable=False),
        sa.Column("draft", JSON, nullable=True),
        sa.Column("skip_reason", sa.String(length=32), nullable=True),
        sa.Column("skip_note", sa.Text(), nullable=False),
        sa.Column("ended_at", sa.Double(), nullable=True),
        sa.CheckConstraint("state in ('leased', 'submitted', 'skipped', 'expired')", name="state_known"),
        sa.ForeignKeyConstraint(["item_id"], ["item.id"]),
        sa.ForeignKeyConstraint(["person_id"], ["person.id"]),
        sa.PrimaryKeyConstraint("id"),
        sa.UniqueConstraint("item_id", "person_id", "repetition"),
        sa.UniqueConstraint("public_id"),
    )
    op.create_index("assignment_by_item_state", "assignment", ["item_id", "state"], unique=False)
    op.create_index("assignment_by_lease", "assignment", ["state", "lease_until"], unique=False)
    op.create_index(op.f("ix_assignment_person_id"), "assignment", ["person_id"], unique=False)
    op.create_table(
        "shown",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("assignment_id", sa.Integer(), nullable=False),
        sa.Column("slot", sa.Integer(), nullable=False),
        sa.Column("answer_row_id", sa.Integer(), nullable=False),
        sa.Column("public_id", sa.String(length=32), nullable=False),
        sa.ForeignKeyConstraint(["answer_row_id"], ["answer.id"]),
        sa.ForeignKeyConstraint(["assignment_id"], ["assignment.id"]),
        sa.PrimaryKeyConstraint("id"),
        sa.UniqueConstraint("assignment_id", "answer_row_id"),
        sa.UniqueConstraint("assignment_id", "slot"),
        sa.UniqueConstraint("public_id"),
    )
    op.create_index(op.f("ix_shown_assignment_id"), "shown", ["assignment_id"], unique=False)
    op.create_table(
        "submission",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("assignment_id", sa.Integer(), nullable=False),
        sa.Column("revision", sa.Integer(), nullable=False),
        sa.Column("nonce", sa.String(length=32), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("seconds", sa.Double(), nullable=True),
        sa.Column("guideline_version", sa.Integer(), nullable=False),
        sa.Column("all_bad", sa.Boolean(), nullable=False),
        sa.Column("strength", sa.Integer(), nullable=True),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("said", JSON, nullable=False),
        sa.ForeignKeyConstraint(["assignment_id"], ["assignment.id"]),
        sa.PrimaryKeyConstraint("id"),
        sa.UniqueConstraint("assignment_id", "revision"),
        sa.UniqueConstraint("nonce"),
    )
    op.create_index(op.f("ix_submission_assignment_id"), "submission", ["assignment_id"], unique=False)


def _log() -> None:
    op.create_table(
        "trail",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("at", sa.Double(), nullable=False),
        sa.Column("who", sa.String(length=64), nullable=False),
        sa.Column("action", sa.String(length=64), nullable=False),
        sa.Column("object", sa.String(length=200), nullable=False),
        sa.Column("before", JSON, nullable=True),
        sa.Column("after", JSON, nullable=True),
        sa.Column("request_id", sa.String(length=32), nullable=False),
        sa.PrimaryKeyConstraint("id"),
    )
