"""Who takes part: accounts, logins, tokens of programs, exclusions, and how somebody is forgotten.

Everything secret is random or Argon2id; the database holds hashes only. Every change is in the trail, by pseudonym:
a name stands in one place, so that :func:`forget` can remove it.
"""

from __future__ import annotations

import hashlib
import secrets
import sqlite3
import unicodedata
from contextlib import closing

from sqlalchemy import delete, select, update
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from heedful.annotate import passwords, trail
from heedful.annotate.database import BUSY_SECONDS, Database
from heedful.annotate.passwords import Hashed
from heedful.annotate.project import COMMAND_LINE
from heedful.annotate.settings import Settings
from heedful.annotate.tables import ApiToken, Assignment, Exclusion, Login, Person, Submission
from heedful.annotate.wording import Wording
from heedful.errors import DataError

ROLES = ("annotator", "reviewer", "admin")
"""Each may do what the ones before it may: rank; read reports and exports; run the project."""
SCOPES = ("annotate", "export")


def role_allows(role: str, needed: str) -> bool:
    """Whether a person of ``role`` may do what ``needed`` may."""
    return ROLES.index(role) >= ROLES.index(needed)


def digest(token: str) -> str:
    """What the database keeps of a token: its SHA-256. Tokens are 256 random bits, so no salt and no stretching."""
    return hashlib.sha256(token.encode("utf-8", "surrogatepass")).hexdigest()


# --- accounts -------------------------------------------------------------------------------------------------------


def create_person(
    session: Session, name: str, password: str | Hashed, role: str, now: float, *, by: Person | None = None,
    request_id: str = "",
) -> Person:  # fmt: skip
    """A new account; ``by`` None is the command line. A server hashes the password before it takes the write lock.

    Raises:
        DataError: the name is taken or cannot be one, the password is weak, or the role is unknown.
    """
    if role not in ROLES:
        raise DataError(Wording("role {role!r}: give one of {known}", role=role, known=", ".join(ROLES)))
    name = _clean(name)
    known = password if isinstance(password, Hashed) else passwords.hashed(name, password)
    if by_name(session, name) is not None:
        raise DataError("This name is taken.")
    person = Person(
        name=name, pseudonym=f"rater-{secrets.token_hex(5)}", role=role, created_at=now,
        password_hash=known.text,
    )  # fmt: skip
    session.add(person)
    try:
        session.flush()
    except IntegrityError as error:  # the same name at the same moment
        raise DataError("This name is taken.") from error
    _record(session, "create person", person, by, now, request_id, after={"role": role})
    return person


def plain(name: str) -> str:
    """The same for all spellings of one name: written in wide letters it cannot be tried more often."""
    return unicodedata.normalize("NFKC", name).strip().casefold()


def by_name(session: Session, name: str) -> Person | None:
    """The account of that name."""
    try:
        return session.scalar(select(Person).where(Person.name == _clean(name)))
    except DataError:
        return None  # nobody can be called that


def by_pseudonym(session: Session, pseudonym: str) -> Person | None:
    """Whoever has that pseudonym, forgotten or not."""
    return session.scalar(select(Person).where(Person.pseudonym == pseudonym))


def has_admin(session: Session, besides: int | None = None) -> bool:
    """Whether there is an admin who can log in, other than the person of that id."""
    is_open_admin = (Person.role == "admin", Person.disabled_at.is_(None), Person.id != (besides or 0))
    return session.scalar(select(Person.id).where(*is_open_admin).limit(1)) is not None


def set_password(
    session: Session, person: Person, password: str | Hashed, now: float, *, by: Person | None = None,
    request_id: str = "",
) -> None:  # fmt: skip
    """Replace the password and end every login of the person.

    Raises:
        DataError: the password is weak, or the person has been deleted.
    """
    session.add(person)  # whichever session it came from
    if person.name is None:
        raise DataError(Wording("{name} has been deleted", name=person.pseudonym))
    known = password if isinstance(password, Hashed) else passwords.hashed(person.name, password)
    person.password_hash = known.text
    session.execute(delete(Login).where(Login.person_id == person.id))
    _record(session, "change password", person, by, now, request_id)


def set_role(
    session: Session, person: Person, role: str, now: float, *, by: Person | None = None, request_id: str = ""
) -> None:
    """Change what the person may do.

    Raises:
        DataError: the role is unknown, or no admin would be left.
    """
    if role not in ROLES:
        raise DataError(Wording("role {role!r}: give one of {known}", role=role, known=", ".join(ROLES)))
    if role != "admin":
        _keep_an_admin(session, person)
    session.add(person)
    before, person.role = person.role, role
    _record(session, "change role", person, by, now, request_id, before={"role": before}, after={"role": role})


def disable(session: Session, person: Person, now: float, *, by: Person | None = None, request_id: str = "") -> None:
    """No login and no token works from now on; the work stays.

    Raises:
        DataError: no admin would be left.
    """
    _keep_an_admin(session, person)
    session.add(person)
    person.disabled_at = now if person.disabled_at is None else person.disabled_at
    session.execute(delete(Login).where(Login.person_id == person.id))
    _record(session, "disable person", person, by, now, request_id)


def enable(session: Session, person: Person, now: float, *, by: Person | None = None, request_id: str = "") -> None:
    """Undo :func:`disable`.

    Raises:
        DataError: the person has been deleted.
    """
    if person.deleted_at is not None:
        raise DataError(Wording("{name} has been deleted", name=person.pseudonym))
    session.add(person)
    person.disabled_at = None
    _record(session, "enable person", person, by, now, request_id)


def forget(
    session: Session, person: Person, now: float, *, with_reasons: bool = False, by: Person | None = None,
    request_id: str = "",
) -> None:  # fmt: skip
    """Delete a person: name, password, language, logins, tokens, drafts and notes go; rankings stay under the
    pseudonym. ``with_reasons`` also empties the free texts beside the rankings.

    Raises:
        DataError: no admin would be left.
    """
    _keep_an_admin(session, person)
    session.add(person)
    person.name = person.password_hash = person.language = None
    person.deleted_at = now if person.deleted_at is None else person.deleted_at
    person.disabled_at = now if person.disabled_at is None else person.disabled_at
    for table in (Login, ApiToken):
        session.execute(delete(table).where(table.person_id == person.id))
    theirs = Assignment.person_id == person.id
    session.execute(update(Assignment).where(theirs).values(draft=None, skip_note=""))
    session.execute(
        update(Assignment).where(theirs, Assignment.state == "leased").values(state="expired", ended_at=now)
    )
    if with_reasons:
        of_theirs = select(Assignment.id).where(theirs)
        session.execute(update(Submission).where(Submission.assignment_id.in_(of_theirs)).values(reason=""))
    _record(session, "forget person", person, by, now, request_id, after={"with_reasons": with_reasons})


def erase_remains(database: Database) -> None:
    """After :func:`forget`: what SQLite overwrites or deletes stays readable in its files until they are written anew.
    PostgreSQL does that by itself in time (autovacuum).

    Raises:
        DataError: somebody reads the files for so long that they cannot be.
    """
    if database.is_sqlite and database.url.database is not None:
        with closing(sqlite3.connect(database.url.database, timeout=BUSY_SECONDS, isolation_level=None)) as connection:
            connection.execute("VACUUM")
            in_use, *_ = connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
        if in_use:  # SQLite says so in a row, not in an error
            raise DataError(
                "The person is deleted, but the database was in use and its files still hold old pages; "
                "run heedful annotate forget for the same person again."
            )


# --- passwords and logins -------------------------------------------------------------------------------------------


def enter(person: Person | None, password: str) -> Person | None:
    """The person, if the password fits and the account is open. Nobody takes as long as somebody with a wrong password:
    one Argon2 verification either way."""
    known = person.password_hash if person is not None else None
    fits = passwords.fits(password, known or passwords.nobodys())
    return person if person is not None and known and fits and person.disabled_at is None else None


def open_login(
    session: Session, person: Person, now: float, *, old_token: str | None = None, request_id: str = ""
) -> str:
    """A new token for the cookie; the browser's former login, if any, ends."""
    token = secrets.token_urlsafe(32)
    if old_token is not None:
        session.execute(delete(Login).where(Login.token_hash == digest(old_token)))
    session.add(Login(token_hash=digest(token), person_id=person.id, created_at=now, seen_at=now))
    _record(session, "log in", person, person, now, request_id)
    return token


def person_of_login(session: Session, token: str, settings: Settings, now: float) -> tuple[Login, Person] | None:
    """Who the cookie belongs to; None when it is unknown, idle for too long, too old, or the account is closed."""
    login = session.scalar(select(Login).where(Login.token_hash == digest(token)))
    if login is None:
        return None
    idle_seconds = settings.session_hours * 3600
    if now - login.seen_at > idle_seconds or now - login.created_at > 10 * idle_seconds:
        return None
    person = session.get(Person, login.person_id)
    return None if person is None or person.disabled_at is not None else (login, person)


def touch_login(session: Session, login_id: int, settings: Settings, now: float) -> None:
    """Write down that the login was used, and sweep away those that have ended."""
    idle_seconds = settings.session_hours * 3600
    session.execute(update(Login).where(Login.id == login_id).values(seen_at=now))
    session.execute(
        delete(Login).where((Login.seen_at < now - idle_seconds) | (Login.created_at < now - 10 * idle_seconds))
    )


def close_login(session: Session, token: str, now: float, *, request_id: str = "") -> None:
    """End this login; its cookie is worth nothing from now on."""
    login = session.scalar(select(Login).where(Login.token_hash == digest(token)))
    if login is not None:
        _record(session, "log out", login.person, login.person, now, request_id)
        session.delete(login)


def close_logins(session: Session, person: Person, now: float, *, by: Person | None, request_id: str = "") -> None:
    """End every login of the person, on all devices."""
    session.execute(delete(Login).where(Login.person_id == person.id))
    _record(session, "log out everywhere", person, by, now, request_id)


# --- tokens of programs ---------------------------------------------------------------------------------------------


def create_token(
    session: Session, person: Person, scope: str, now: float, *, days: float = 30.0, by: Person | None = None,
    request_id: str = "",
) -> str:  # fmt: skip
    """A token for a program that acts as this person; shown this once.

    Raises:
        DataError: the scope is unknown or not the person's to give, or the days are not between 0 and 366.
    """
    if scope not in SCOPES:
        raise DataError(Wording("scope {scope!r}: give one of {known}", scope=scope, known=", ".join(SCOPES)))
    if scope == "export" and not role_allows(person.role, "reviewer"):
        raise DataError("A token that reads results is for reviewers and admins.")
    if not 0 < days <= 366:
        raise DataError(Wording("{days:g} days: a token lasts up to 366", days=days))
    token = f"heed_{secrets.token_urlsafe(32)}"
    made = ApiToken(
        prefix=token[:12], token_hash=digest(token), person_id=person.id, scope=scope, created_at=now,
        expires_at=now + days * 86400,
    )  # fmt: skip
    session.add(made)
    _record(session, "create token", person, by, now, request_id, after={"prefix": made.prefix, "scope": scope})
    return token


def revoke_token(
    session: Session, person: Person, prefix: str, now: float, *, by: Person | None = None, request_id: str = ""
) -> bool:
    """End the person's tokens that begin so; False when there is none."""
    theirs = (ApiToken.person_id == person.id, ApiToken.prefix == prefix, ApiToken.revoked_at.is_(None))
    done = session.execute(update(ApiToken).where(*theirs).values(revoked_at=now)).rowcount  # type: ignore[attr-defined]
    if done:
        _record(session, "revoke token", person, by, now, request_id, before={"prefix": prefix})
    return bool(done)


def person_of_token(session: Session, token: str, scope: str, now: float) -> Person | None:
    """Whose token it is, if it is good for ``scope`` now."""
    found = session.scalar(select(ApiToken).where(ApiToken.token_hash == digest(token), ApiToken.scope == scope))
    if found is None or found.revoked_at is not None or found.expires_at < now:
        return None
    person = session.get(Person, found.person_id)
    if person is None or person.disabled_at is not None:
        return None
    return person if scope != "export" or role_allows(person.role, "reviewer") else None


# --- exclusion ------------------------------------------------------------------------------------------------------


def live_exclusion(session: Session, person: Person) -> Exclusion | None:
    """The exclusion in force, if the person's work is left out at present."""
    return session.scalar(select(Exclusion).where(Exclusion.person_id == person.id, Exclusion.lifted_at.is_(None)))


def exclude(
    session: Session, person: Person, reason: str, now: float, *, by: Person | None = None, request_id: str = ""
) -> Exclusion:
    """Leave the person's work out of views and exports; nothing is deleted. Until it is lifted the person
    gets no further items.

    Raises:
        DataError: no reason is given, or the work is left out already.
    """
    reason = reason.strip()
    if not 3 <= len(reason) <= 2000:
        raise DataError("Say why, in 3 to 2,000 characters; the data card repeats it.")
    session.execute(select(Person.id).where(Person.id == person.id).with_for_update())
    if live_exclusion(session, person) is not None:
        raise DataError(Wording("The work of {name} is left out already.", name=person.pseudonym))
    made = Exclusion(person_id=person.id, by_id=by.id if by else None, reason=reason, created_at=now)
    session.add(made)
    _record(session, "exclude person", person, by, now, request_id, after={"reason": reason})
    return made


def reinstate(session: Session, person: Person, now: float, *, by: Person | None = None, request_id: str = "") -> None:
    """Lift the exclusion: views and exports have the work again.

    Raises:
        DataError: the person's work is not left out.
    """
    found = live_exclusion(session, person)
    if found is None:
        raise DataError(Wording("The work of {name} is not left out.", name=person.pseudonym))
    found.lifted_at, found.lifted_by_id = now, by.id if by else None
    _record(session, "reinstate person", person, by, now, request_id, before={"reason": found.reason})


def _record(
    session: Session, action: str, person: Person, by: Person | None, now: float, request_id: str, *,
    before: dict[str, object] | None = None, after: dict[str, object] | None = None,
) -> None:  # fmt: skip
    who = by.pseudonym if by else COMMAND_LINE
    trail.record(
        session, who=who, action=action, object=person.pseudonym, before=before, after=after,
        request_id=request_id, now=now,
    )  # fmt: skip


def _keep_an_admin(session: Session, person: Person) -> None:
    # one at a time, or two admins could close each other's account at the same moment
    session.execute(select(Person.id).where(Person.role == "admin").order_by(Person.id).with_for_update())
    if person.role == "admin" and person.disabled_at is None and not has_admin(session, besides=person.id):
        raise DataError("This is the last admin; make another one first.")


def _clean(name: str) -> str:
    name = unicodedata.normalize("NFKC", name).strip()
    if not 1 <= len(name) <= 64 or not name.isprintable():
        raise DataError("A name has 1 to 64 characters, all of them visible.")
    return name
