"""The ledger by plain SQL, and a history of it that the database itself writes.

The history is two tables that triggers fill: every update of an operation or a step, with the fence
that the operation had at that instant. The product knows nothing of them.
"""

from __future__ import annotations

import hashlib
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any
from urllib.parse import urlsplit

import psycopg
from psycopg.rows import dict_row

_OPERATION = ("fence", "state", "parked_reason")
_STEP = (
    "state",
    "attempt",
    "attempt_token",
    "attempt_fence",
    "compensation",
    "undo_attempt",
)
_NOT_DIGESTED = {"hosts"}
"""The workers' own sign of life."""


class Ledger:
    """One database, looked at without any code of the product."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.is_sqlite = url.startswith("sqlite")

    @contextmanager
    def connected(self) -> Iterator[Any]:
        if self.is_sqlite:
            with closing(sqlite3.connect(urlsplit(self.url).path, timeout=20)) as connection:
                connection.row_factory = sqlite3.Row
                connection.isolation_level = None
                yield connection
        else:
            with psycopg.connect(self.url, autocommit=True, row_factory=dict_row) as connection:
                yield connection

    def rows(self, statement: str, *values: Any) -> list[dict[str, Any]]:
        """What a query finds; ``?`` stands for a value."""
        with self.connected() as connection:
            return [dict(row) for row in connection.execute(self._own(statement), values)]

    def execute(self, statement: str, *values: Any) -> None:
        with self.connected() as connection:
            # psycopg reads a '%' as a place for a value only where there are values.
            connection.execute(self._own(statement), values if self.is_sqlite else values or None)

    def _own(self, statement: str) -> str:
        return statement if self.is_sqlite else statement.replace("?", "%s")

    def tables(self) -> list[str]:
        statement = (
            "SELECT name FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite_%'"
            if self.is_sqlite
            else "SELECT tablename AS name FROM pg_tables WHERE schemaname = 'public'"
        )
        return sorted(row["name"] for row in self.rows(statement))

    def digest(self) -> str:
        """A digest of every row of every table, the history included."""
        whole = hashlib.sha256()
        for table in self.tables():
            if table not in _NOT_DIGESTED:
                found = self.rows(f"SELECT * FROM {table}")
                whole.update(repr((table, sorted(repr(row) for row in found))).encode())
        return whole.hexdigest()

    # -- the history --------------------------------------------------------------------------

    def install_history(self) -> None:
        """Have the database write down every update of an operation or a step."""
        self._install("operations", "id", None, _OPERATION)
        self._install("steps", "operation_id", "step_key", _STEP)

    def _install(self, table: str, key: str, second: str | None, columns: tuple[str, ...]) -> None:
        number = (
            "INTEGER PRIMARY KEY AUTOINCREMENT"
            if self.is_sqlite
            else "BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY"
        )
        named = [f"{age}_{column}" for column in columns for age in ("old", "new")]
        self.execute(
            f"CREATE TABLE history_{table} (number {number}, operation_id TEXT, step_key TEXT,"
            f" fence BIGINT, {', '.join(f'{name} TEXT' for name in named)})"
        )
        fence = (
            "NEW.fence"
            if table == "operations"
            else "(SELECT o.fence FROM operations o WHERE o.id = NEW.operation_id)"
        )
        values = [f"NEW.{key}", f"NEW.{second}" if second else "NULL", fence]
        values += [f"CAST({age}.{column} AS TEXT)" for column in columns for age in ("OLD", "NEW")]
        insert = (
            f"INSERT INTO history_{table} (operation_id, step_key, fence, {', '.join(named)})"
            f" VALUES ({', '.join(values)})"
        )
        if self.is_sqlite:
            self.execute(
                f"CREATE TRIGGER history_{table} AFTER UPDATE ON {table} BEGIN {insert}; END"
            )
            return
        self.execute(
            f"CREATE FUNCTION history_{table}() RETURNS trigger LANGUAGE plpgsql AS"
            f" $$ BEGIN {insert}; RETURN NULL; END $$"
        )
        self.execute(
            f"CREATE TRIGGER history_{table} AFTER UPDATE ON {table}"
            f" FOR EACH ROW EXECUTE FUNCTION history_{table}()"
        )
