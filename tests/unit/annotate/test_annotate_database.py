"""The database of a project: transactions, migrations, and an audit log that nobody changes; on both kinds."""

import shutil
import sqlite3
import threading

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import inspect, select, text
from sqlalchemy.exc import DBAPIError, IntegrityError

from heedful.annotate import database as module
from heedful.annotate import trail
from heedful.annotate.database import Database, _prepare_sqlite
from heedful.annotate.tables import Person, Table, Trail
from heedful.errors import DataError
from toy_project import NOW, make_people, make_project, new_postgresql

KINDS = ("sqlite", "postgresql")


@pytest.fixture(params=KINDS)
def database(request, tmp_path):
    """An empty database."""
    if request.param == "sqlite":
        url = f"sqlite:///{tmp_path / 'x.sqlite'}"
    else:
        url = new_postgresql(request.getfixturevalue("postgresql_folder"))
    database = Database(url)
    yield database
    database.dispose()


def somebody(name: str) -> Person:
    return Person(name=name, pseudonym=name, role="annotator", created_at=NOW)


def test_migrations_add_up_to_the_tables(database):
    def checks(connection):
        inspector = inspect(connection)
        found = {table: inspector.get_check_constraints(table) for table in Table.metadata.tables}
        return {table: sorted(check["sqltext"] for check in checks) for table, checks in found.items()}

    database.migrate()
    with database._engine.begin() as connection:
        assert compare_metadata(MigrationContext.configure(connection), Table.metadata) == []
        migrated = checks(connection)  # which Alembic does not compare
        Table.metadata.drop_all(connection)
        Table.metadata.create_all(connection)
        assert migrated == checks(connection)
    assert len(migrated["assignment"]) == 1


def test_migrating_again_changes_nothing_and_two_at_once_are_one(database):
    failed = []

    def migrate():
        try:
            other = Database(database.url.render_as_string(hide_password=False))
            other.migrate()
            other.dispose()
        except Exception as error:
            failed.append(error)

    threads = [threading.Thread(target=migrate) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    database.migrate()
    with database.reading() as session:
        assert session.execute(text("select count(*) from alembic_version")).scalar() == 1


@pytest.mark.parametrize("code", [sqlite3.SQLITE_BUSY, 261, sqlite3.SQLITE_CANTOPEN], ids=["busy", "recovery", "other"])
def test_a_new_file_that_others_turn_into_wal_is_asked_again(code):
    """SQLite says "database is locked" there at once, whatever time-out was given."""

    class Connection:
        def __init__(self):
            self.said = []

        def execute(self, statement):
            self.said.append(statement)
            if len(self.said) < 3:
                error = sqlite3.OperationalError("database is locked")
                error.sqlite_errorcode = code
                raise error

    connection = Connection()
    if code == sqlite3.SQLITE_CANTOPEN:
        with pytest.raises(sqlite3.OperationalError):
            _prepare_sqlite(connection, None)
        assert len(connection.said) == 1
    else:
        _prepare_sqlite(connection, None)
        assert connection.said[:3] == ["PRAGMA journal_mode=WAL"] * 3
        assert connection.said[3:] == ["PRAGMA synchronous=FULL", "PRAGMA foreign_keys=ON"]


SECOND = """
import sqlalchemy as sa
from alembic import op
revision = "0002"
down_revision = "0001"
def upgrade():
    op.add_column("person", sa.Column("nickname", sa.String(20), nullable=True))
"""


def test_an_older_database_is_brought_up_with_all_that_is_in_it(database, tmp_path, monkeypatch):
    database.migrate()
    with database.writing() as session:
        session.add(somebody("kept"))
    later = tmp_path / "migrations"
    shutil.copytree(module._MIGRATIONS, later)
    (later / "versions" / "second_0002.py").write_text(SECOND)
    with monkeypatch.context() as patched:
        patched.setattr(module, "_MIGRATIONS", later)
        database.migrate()
    with database.reading() as session:
        assert session.execute(text("select name, nickname from person")).all() == [("kept", None)]
    with pytest.raises(DataError, match=r"made by a newer heedful \(schema 0002\)"):
        database.migrate()


def test_a_migration_that_fails_leaves_the_database_as_it_was(database, tmp_path, monkeypatch):
    database.migrate()
    later = tmp_path / "migrations"
    shutil.copytree(module._MIGRATIONS, later)
    (later / "versions" / "second_0002.py").write_text(SECOND + "    op.execute('select nonsense from nowhere')\n")
    with monkeypatch.context() as patched:
        patched.setattr(module, "_MIGRATIONS", later)
        with pytest.raises(DataError, match="the database cannot be used"):
            database.migrate()
    database.migrate()
    with database.reading() as session:
        assert "nickname" not in {c["name"] for c in inspect(session.connection()).get_columns("person")}


def test_a_newer_database_is_refused_in_one_sentence(database):
    database.migrate()
    with database.writing() as session:
        session.execute(text("update alembic_version set version_num = '9999'"))
    with pytest.raises(DataError, match=r"made by a newer heedful \(schema 9999\); update heedful"):
        database.migrate()


def test_a_database_with_other_tables_is_refused(database):
    with database.writing() as session:
        session.execute(text("create table mine (id integer)"))
    with pytest.raises(DataError, match="a database of its own"):
        database.migrate()


@pytest.mark.parametrize("url", ["mysql://x@y/z", "sqlite://", "nonsense", "postgresql://u:secret@h/d", "oracle://a/b"])
def test_other_urls_are_refused(url):
    with pytest.raises(DataError, match="the database must be") as caught:
        Database(url)
    assert "secret" not in str(caught.value)


def test_a_server_that_does_not_answer_is_told_without_the_password():
    database = Database("postgresql+psycopg://me:secret-word@127.0.0.1:1/none")
    with pytest.raises(DataError, match="the database cannot be used") as caught:
        database.migrate()
    assert "secret-word" not in f"{caught.value} {database!r}"


def test_writing_rolls_back_on_an_exception_and_reading_refuses_to_write(database):
    database.migrate()
    with pytest.raises(RuntimeError), database.writing() as session:
        session.add(somebody("lost"))
        session.flush()
        raise RuntimeError
    with pytest.raises(DBAPIError), database.reading() as session:
        session.add(somebody("refused"))
        session.flush()
    with database.writing() as session:
        session.add(somebody("kept"))
    with database.reading() as session:
        assert list(session.scalars(select(Person.name))) == ["kept"]


def test_unique_names_and_foreign_keys_are_kept(database):
    database.migrate()
    with pytest.raises(IntegrityError), database.writing() as session:
        session.add_all([somebody("a"), Person(name="a", pseudonym="b", role="annotator", created_at=NOW)])
    with pytest.raises(IntegrityError), database.writing() as session:
        session.execute(text("insert into login (token_hash, person_id, created_at, seen_at) values ('x', 77, 0, 0)"))
    with pytest.raises(IntegrityError), database.writing() as session:
        session.add(Person(name="c", pseudonym="c", role="king", created_at=NOW))


def test_SEC_11_the_trail_cannot_be_changed_or_deleted(database):
    database.migrate()
    with database.writing() as session:
        trail.record(session, who="rater-1", action="exclude person", object="rater-2", now=NOW, after={"reason": "x"})
    statements = ["update trail set who = 'nobody'", "delete from trail"]
    for statement in statements + ([] if database.is_sqlite else ["truncate trail"]):
        with pytest.raises(DBAPIError, match="the trail is never changed"), database.writing() as session:
            session.execute(text(statement))
    with database.reading() as session:
        row = session.scalars(select(Trail)).one()
    assert (row.who, row.action, row.object, row.before, row.after) == (
        "rater-1", "exclude person", "rater-2", None, {"reason": "x"},
    )  # fmt: skip


def test_the_trail_is_read_newest_first_page_by_page(database):
    database.migrate()
    with database.writing() as session:
        for i in range(5):
            trail.record(session, who="x", action="do", object=f"o{i}", now=NOW)
            session.flush()
    with database.reading() as session:
        first = trail.newest(session, limit=2)
        second = trail.newest(session, before_id=first[-1].id, limit=9)
    assert [row.object for row in first + second] == ["o4", "o3", "o2", "o1", "o0"]


def test_SEC_07_several_servers_that_read_and_then_write_never_meet_a_locked_database(tmp_path):
    """Plain BEGIN fails here: a read snapshot cannot become a writer's when another wrote meanwhile."""
    project = make_project(tmp_path)
    (person,) = make_people(project, 1)
    databases = [Database(str(project.database.url)) for _ in range(8)]  # each with a lock of its own, as a process has
    failed = []

    def count_up(database):
        try:
            for _ in range(10):
                with database.writing() as session:
                    session.get_one(Person, person.id).created_at += 1
        except Exception as error:
            failed.append(error)

    threads = [threading.Thread(target=count_up, args=(database,)) for database in databases * 2]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with project.database.reading() as session:
        assert session.get_one(Person, person.id).created_at == NOW + 160
    assert not failed
