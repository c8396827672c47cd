"""The database: an engine, its transactions and its clock. Every statement of ours runs in one of
the three contexts here, which also hold the failpoints.

Reads run in AUTOCOMMIT. Writes run in ``transaction()``: ``BEGIN IMMEDIATE`` on SQLite, READ
COMMITTED on PostgreSQL, where the first statement takes the row lock that the lock order names
(workspace, operation, step, run, outbox feed).
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from sqlalchemy import (
    BigInteger,
    ColumnElement,
    Connection,
    Engine,
    create_engine,
    event,
    exc,
    literal,
    make_url,
)
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.pool import QueuePool

from ..failpoints import failpoint
from ..protocol.errors import ConfigurationError, DatabaseUnavailable

BUSY_TIMEOUT_MS: Final = 10_000
LOCK_TIMEOUT_MS: Final = 20_000
"""Longer than a paused process may keep a row: what waits longer is told so."""
IDLE_IN_TRANSACTION_MS: Final = 10_000
"""PostgreSQL ends the session of a process that is paused inside a transaction, or it would hold
the rows of its operation and its workspace for as long as it sleeps. Ours take milliseconds."""

_SQLITE_OUT_OF_REACH: Final = frozenset(
    {
        sqlite3.SQLITE_BUSY,
        sqlite3.SQLITE_LOCKED,
        sqlite3.SQLITE_IOERR,
        sqlite3.SQLITE_FULL,
        sqlite3.SQLITE_CANTOPEN,
        sqlite3.SQLITE_PROTOCOL,
        sqlite3.SQLITE_READONLY,
    }
)


class _DatabaseNow(ColumnElement[int]):
    """Milliseconds since the epoch, by the database's clock at the statement's own instant."""

    inherit_cache = True
    type = BigInteger()


@compiles(_DatabaseNow, "sqlite")
def _now_sqlite(_element: _DatabaseNow, _compiler: Any, **_options: Any) -> str:
    return "CAST(round((julianday('now') - 2440587.5) * 86400000.0) AS INTEGER)"


@compiles(_DatabaseNow, "postgresql")
def _now_postgresql(_element: _DatabaseNow, _compiler: Any, **_options: Any) -> str:
    # clock_timestamp(), not now(): a transaction that waited for a lock must not use its start.
    return "CAST(floor(extract(epoch FROM clock_timestamp()) * 1000) AS BIGINT)"


class Clock:
    """The database's clock, which a test can move: ``advance`` adds an offset in this process."""

    def __init__(self, offset_ms: int = 0) -> None:
        self.offset_ms = offset_ms

    def advance(self, milliseconds: int) -> None:
        self.offset_ms += milliseconds

    def now(self) -> ColumnElement[int]:
        """Milliseconds since the epoch as an SQL expression."""
        return _DatabaseNow() + literal(self.offset_ms, BigInteger)

    def in_ms(self, milliseconds: int) -> ColumnElement[int]:
        """The instant so many milliseconds from now."""
        return _DatabaseNow() + literal(self.offset_ms + milliseconds, BigInteger)


class Database:
    """One database, SQLite or PostgreSQL.

    Raises:
        ConfigurationError: the URL names another kind of database.
    """

    def __init__(self, url: str, *, pool_size: int = 16, clock: Clock | None = None) -> None:
        try:
            parsed = make_url(url)
        except exc.ArgumentError:
            raise ConfigurationError("DATABASE_URL is not a database URL") from None
        backend = parsed.get_backend_name()
        if backend == "postgresql":
            parsed = parsed.set(drivername="postgresql+psycopg")
        elif backend == "sqlite":
            parsed = parsed.set(drivername="sqlite+pysqlite")
        else:
            raise ConfigurationError(f"DATABASE_URL must be SQLite or PostgreSQL, not {backend}")
        self.url = parsed
        self.clock = clock or Clock()
        self.is_sqlite = backend == "sqlite"
        self.engine = (
            _sqlite(parsed, pool_size) if self.is_sqlite else _postgresql(parsed, pool_size)
        )

    @contextmanager
    def transaction(self, name: str) -> Iterator[Connection]:
        """One write transaction, committed at the end and rolled back on any error.

        ``name`` names its failpoints: ``<name>.begin``, ``<name>.commit``, ``<name>.committed``.
        An error raised at ``.committed`` is a lost answer: the commit did happen.

        Raises:
            DatabaseUnavailable: no connection, or it broke; what happened is not known.
        """
        failpoint(f"{name}.begin")
        try:
            with self.engine.begin() as connection:
                yield connection
                failpoint(f"{name}.commit")
        except (exc.DBAPIError, exc.TimeoutError) as error:
            raise _translate(error) from error
        failpoint(f"{name}.committed")

    @contextmanager
    def reading(self) -> Iterator[Connection]:
        """A connection in which each statement sees what is committed by then.

        Raises:
            DatabaseUnavailable: as above.
        """
        try:
            with self.engine.connect().execution_options(
                isolation_level="AUTOCOMMIT"
            ) as connection:
                yield connection
        except (exc.DBAPIError, exc.TimeoutError) as error:
            raise _translate(error) from error

    @contextmanager
    def snapshot(self) -> Iterator[Connection]:
        """A read-only transaction: several statements that see one state.

        Raises:
            DatabaseUnavailable: as above.
        """
        level = "SERIALIZABLE" if self.is_sqlite else "REPEATABLE READ"
        try:
            with self.engine.connect().execution_options(
                isolation_level=level, onceborn_read_only=True
            ) as connection:
                yield connection
                connection.rollback()
        except (exc.DBAPIError, exc.TimeoutError) as error:
            raise _translate(error) from error

    def dispose(self) -> None:
        """Close every pooled connection."""
        self.engine.dispose()


def _translate(error: exc.DBAPIError | exc.TimeoutError) -> Exception:
    # Only "not reachable" and "busy beyond its bound" become ours; a constraint error is a fact
    # that the caller decides by the constraint's name.
    if isinstance(error, exc.TimeoutError):  # every pooled connection is in use
        return DatabaseUnavailable()
    if error.connection_invalidated or isinstance(error, exc.InterfaceError):
        return DatabaseUnavailable()
    if not isinstance(error, exc.OperationalError):
        return error
    # SQLite calls a missing table operational too; only these are the file's or the lock's state.
    code = getattr(error.orig, "sqlite_errorcode", None)
    return DatabaseUnavailable() if code is None or code & 0xFF in _SQLITE_OUT_OF_REACH else error


def _postgresql(url: Any, pool_size: int) -> Engine:
    return create_engine(
        url,
        pool_size=pool_size,
        max_overflow=0,
        pool_pre_ping=True,
        pool_timeout=10,
        hide_parameters=True,
        connect_args={
            "connect_timeout": 5,
            # A server that has gone silent is given up in seconds, not in the two hours that the
            # system would wait.
            "keepalives_idle": 5,
            "keepalives_interval": 3,
            "keepalives_count": 3,
            "tcp_user_timeout": 15_000,
            # A process that is paused in the middle of a transaction must not hold its row locks
            # beyond its lease: the server ends the transaction, and with it the session.
            "options": "-c timezone=UTC"
            f" -c idle_in_transaction_session_timeout={IDLE_IN_TRANSACTION_MS}"
            f" -c lock_timeout={LOCK_TIMEOUT_MS}",
        },
    )


def _use_wal(cursor: Any) -> None:
    # Going over to WAL does not wait for the busy timeout: of processes that meet on a new file
    # all but one are told at once that it is locked.
    until = time.monotonic() + BUSY_TIMEOUT_MS / 1000
    while True:
        try:
            cursor.execute("PRAGMA journal_mode = WAL")
        except sqlite3.OperationalError:
            if time.monotonic() >= until:
                raise
            time.sleep(0.02)
        else:
            return


def _sqlite(url: Any, pool_size: int) -> Engine:
    in_memory = url.database in (None, "", ":memory:")
    engine = create_engine(
        url,
        poolclass=QueuePool,
        pool_size=1 if in_memory else pool_size,
        max_overflow=0,
        hide_parameters=True,
        connect_args={"check_same_thread": False, "timeout": BUSY_TIMEOUT_MS / 1000},
    )

    @event.listens_for(engine, "connect")
    def _connect(connection: Any, _record: Any) -> None:
        # The driver must not open transactions by itself: it would defer the write lock.
        connection.isolation_level = None
        cursor = connection.cursor()
        _use_wal(cursor)
        cursor.execute("PRAGMA synchronous = FULL")
        cursor.execute("PRAGMA foreign_keys = ON")
        cursor.execute(f"PRAGMA busy_timeout = {BUSY_TIMEOUT_MS}")
        cursor.close()

    @event.listens_for(engine, "begin")
    def _begin(connection: Connection) -> None:
        options = connection.get_execution_options()
        if options.get("isolation_level") == "AUTOCOMMIT":
            return
        read_only = options.get("onceborn_read_only", False)
        connection.exec_driver_sql("BEGIN" if read_only else "BEGIN IMMEDIATE")

    return engine
