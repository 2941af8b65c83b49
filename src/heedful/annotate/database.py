"""The database of a project: SQLite in one file, or PostgreSQL by URL; one writer at a time where there must be one."""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from alembic import command
from alembic.config import Config
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, create_engine, event, inspect, text
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, NoSuchModuleError
from sqlalchemy.orm import Session

from heedful.errors import DataError

BUSY_SECONDS = 30
"""How long a writer waits for another process; threads of one process queue before that, see ``writing``."""
_MIGRATIONS = Path(__file__).with_name("migrations")
_MIGRATION_LOCK = 0x68656564
"""Key of the advisory lock under which PostgreSQL migrates."""


class Database:
    """Sessions on the database of one project.

    Args:
        url: ``sqlite:///FILE`` or ``postgresql+psycopg://USER@HOST/NAME`` (the password may stand in PGPASSWORD or
            ~/.pgpass instead).

    Raises:
        DataError: the URL is none of these.
    """

    def __init__(self, url: str) -> None:
        try:
            self.url = make_url(url)
            self.is_sqlite = self.url.get_backend_name() == "sqlite"
            if self.url.drivername not in ("sqlite", "postgresql+psycopg") or not self.url.database:
                raise ArgumentError("other")
            self._engine = create_engine(self.url, **_engine_options(self.is_sqlite))
        except (ArgumentError, NoSuchModuleError):
            raise DataError("the database must be sqlite:///FILE or postgresql+psycopg://USER@HOST/NAME") from None
        except ModuleNotFoundError:
            raise DataError("a PostgreSQL database needs psycopg: pip install 'heedful[postgresql]'") from None
        whole = {} if self.is_sqlite else {"isolation_level": "REPEATABLE READ", "postgresql_readonly": True}
        self._reader = self._engine.execution_options(writing=False, **whole)
        self._writer = self._engine.execution_options(writing=True)
        self._turn = threading.RLock() if self.is_sqlite else nullcontext()
        if self.is_sqlite:
            event.listen(self._engine, "connect", _prepare_sqlite)
            for engine in (self._reader, self._writer):
                event.listen(engine, "begin", _begin_sqlite)

    def __repr__(self) -> str:
        return f"Database({self.url.render_as_string(hide_password=True)})"

    @contextmanager
    def reading(self) -> Iterator[Session]:
        """A session on one consistent state of the database, which refuses to write. Its objects stay usable after."""
        with Session(self._reader, expire_on_commit=False) as session, session.begin():
            yield session

    @contextmanager
    def writing(self) -> Iterator[Session]:
        """A session that commits at the end and rolls back on an exception. Its objects stay usable after.

        On SQLite the write lock is taken at once (BEGIN IMMEDIATE): a transaction that reads first and writes later
        would fail with "database is locked" whenever another one wrote in between. Threads wait for their turn in line
        rather than in SQLite's busy handler, which sleeps up to 100 ms at a time.
        """
        with self._turn, Session(self._writer, expire_on_commit=False) as session, session.begin():
            yield session

    def migrate(self) -> None:
        """Bring an empty or older database to the schema of this version.

        Raises:
            DataError: the database cannot be reached, holds something else, or was made by a newer heedful.
        """
        name = self.url.render_as_string(hide_password=True)
        try:
            with self._turn, self._writer.begin() as connection:
                self._migrate(connection, name)
        except DBAPIError as error:
            raise DataError(f"{name}: the database cannot be used: {str(error.orig).splitlines()[0]}") from None

    def _migrate(self, connection: Connection, name: str) -> None:
        if not self.is_sqlite:
            connection.execute(text("select pg_advisory_xact_lock(:key)"), {"key": _MIGRATION_LOCK})
        config = Config()
        config.set_main_option("script_location", str(_MIGRATIONS).replace("%", "%%"))
        config.attributes["connection"] = connection
        scripts = ScriptDirectory.from_config(config)
        tables = set(inspect(connection).get_table_names())
        if "alembic_version" not in tables:
            if tables:
                raise DataError(f"{name}: the database holds other tables; give every project a database of its own")
        else:
            at = connection.execute(text("select version_num from alembic_version")).scalar()
            if at == scripts.get_current_head():
                return
            if at not in {script.revision for script in scripts.walk_revisions()}:
                raise DataError(f"{name}: the database was made by a newer heedful (schema {at}); update heedful")
        command.upgrade(config, "head")

    def dispose(self) -> None:
        """Close all connections."""
        self._engine.dispose()


def _engine_options(is_sqlite: bool) -> dict[str, Any]:
    """No thread of a web server shall wait for a connection: SQLite's cost next to nothing, PostgreSQL's are shared."""
    if is_sqlite:
        return {"pool_size": 8, "max_overflow": 64, "connect_args": {"timeout": BUSY_SECONDS, "isolation_level": None}}
    return {"pool_size": 8, "max_overflow": 24, "pool_pre_ping": True}


def _prepare_sqlite(connection: Any, _record: Any) -> None:
    """FULL: a submission that was acknowledged survives a power cut.

    A new file becomes a WAL file once. Connections that want it at the same time are told that it is locked, however
    long they said that they would wait, so they ask again.
    """
    last = time.monotonic() + BUSY_SECONDS
    while True:
        try:
            connection.execute("PRAGMA journal_mode=WAL")
            break
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or time.monotonic() > last:
                raise
            time.sleep(0.01)
    for setting in ("synchronous=FULL", "foreign_keys=ON"):
        connection.execute(f"PRAGMA {setting}")


def _begin_sqlite(connection: Connection) -> None:
    writing = connection.get_execution_options()["writing"]
    connection.exec_driver_sql(f"PRAGMA query_only={'OFF' if writing else 'ON'}")
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writing else "BEGIN")
