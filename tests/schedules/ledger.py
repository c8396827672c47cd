"""The ledger in memory, with a witness: triggers that write down who changed what, and when.

The witness is independent of the code under test: it sees the rows as they are before and after,
the owner's fence at that instant, and which task held the baton. It lives in the same transactions,
so what was rolled back was never witnessed.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any, Final

from sqlalchemy import BigInteger, ColumnElement, event, func, literal
from sqlalchemy.pool import ConnectionPoolEntry
from support.world import Workplace, workplace

from onceborn.runtime.ledger import schema
from onceborn.runtime.ledger import tables as t
from onceborn.runtime.ledger.database import Clock, Database

from .baton import current

START_MS: Final = 1_700_000_000_000
LEASE_MS: Final = 30_000

_WITNESS = """
CREATE TEMP TABLE witness (
  seq INTEGER PRIMARY KEY, actor TEXT, actor_fence INTEGER, now INTEGER,
  tbl TEXT, operation TEXT, key TEXT,
  state0 TEXT, state1 TEXT, undo0 TEXT, undo1 TEXT, token0 TEXT, token1 TEXT,
  fence0 INTEGER, fence1 INTEGER, lease0 INTEGER, owned_by INTEGER);
CREATE TEMP TRIGGER witness_step AFTER UPDATE ON steps BEGIN
  INSERT INTO witness VALUES (NULL, actor(), actor_fence(), clock_now(), 'step',
    NEW.operation_id, NEW.step_key, OLD.state, NEW.state, OLD.compensation, NEW.compensation,
    OLD.attempt_token, NEW.attempt_token, OLD.attempt_fence, NEW.attempt_fence, OLD.lease_until,
    (SELECT fence FROM operations WHERE id = NEW.operation_id)); END;
CREATE TEMP TRIGGER witness_operation AFTER UPDATE ON operations BEGIN
  INSERT INTO witness VALUES (NULL, actor(), actor_fence(), clock_now(), 'operation',
    NEW.id, NULL, OLD.state, NEW.state, NULL, NULL, NULL, NEW.parked_reason,
    OLD.fence, NEW.fence, OLD.lease_until, OLD.fence); END;
CREATE TEMP TRIGGER witness_attached AFTER INSERT ON repository_attachments BEGIN
  INSERT INTO witness VALUES (NULL, actor(), actor_fence(), clock_now(), 'row',
    NEW.operation_id, 'attached', NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL,
    (SELECT fence FROM operations WHERE id = NEW.operation_id)); END;
CREATE TEMP TRIGGER witness_detached AFTER DELETE ON repository_attachments BEGIN
  INSERT INTO witness VALUES (NULL, actor(), actor_fence(), clock_now(), 'row',
    OLD.operation_id, 'detached', NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL,
    (SELECT fence FROM operations WHERE id = OLD.operation_id)); END;
CREATE TEMP TRIGGER witness_session AFTER INSERT ON sessions BEGIN
  INSERT INTO witness VALUES (NULL, actor(), actor_fence(), clock_now(), 'row',
    NEW.operation_id, 'session', NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL,
    (SELECT fence FROM operations WHERE id = NEW.operation_id)); END;
CREATE TEMP TRIGGER witness_no_session AFTER DELETE ON sessions BEGIN
  INSERT INTO witness VALUES (NULL, actor(), actor_fence(), clock_now(), 'row',
    OLD.operation_id, 'no_session', NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL,
    (SELECT fence FROM operations WHERE id = OLD.operation_id)); END;
"""

_KEPT = {t.workspaces, t.tokens, t.hosts, t.workspace_counters, t.event_feeds}
_CLEAR = ";\n".join(
    [
        "BEGIN",
        *(f"DELETE FROM {e.name}" for e in reversed(t.metadata.sorted_tables) if e not in _KEPT),
        "DELETE FROM witness",
        "UPDATE workspace_counters SET preparing = 0, last_number = 0",
        "UPDATE event_feeds SET last_number = 0, last_list_position = 0",
        "COMMIT",
    ]
)


class ScheduleClock(Clock):
    """The database's clock, read as the statement runs, that only the schedule moves."""

    def now(self) -> ColumnElement[int]:
        return func.clock_now(type_=BigInteger)

    def in_ms(self, milliseconds: int) -> ColumnElement[int]:
        return func.clock_now(type_=BigInteger) + literal(milliseconds, BigInteger)


class Ledger:
    """One in-memory database, used by one schedule after the other."""

    def __init__(self) -> None:
        self.clock = ScheduleClock()
        self.database = Database("sqlite://", clock=self.clock)
        event.listen(self.database.engine, "connect", self._functions)
        schema.upgrade(self.database)
        data = Path(tempfile.gettempdir())
        self.place: Workplace = workplace(self.database, data, lease_s=LEASE_MS / 1000)
        self.place.admission._attestor.require()
        raw = self.database.engine.raw_connection()
        raw.driver_connection.executescript(_WITNESS)  # type: ignore[union-attr]
        raw.close()

    def _functions(self, connection: Any, _record: ConnectionPoolEntry) -> None:
        connection.create_function("actor", 0, _actor)
        connection.create_function("actor_fence", 0, _actor_fence)
        connection.create_function("clock_now", 0, lambda: START_MS + self.clock.offset_ms)

    def busy(self) -> bool:
        """Whether somebody is in a transaction, or reading."""
        return bool(self.database.engine.pool.checkedout())  # type: ignore[attr-defined]

    def clear(self) -> None:
        """Empty everything but the workspace and its host."""
        self.clock.offset_ms = 0
        raw = self.database.engine.raw_connection()
        raw.driver_connection.executescript(_CLEAR)  # type: ignore[union-attr]
        raw.close()

    def ask(self, sql: str, **values: Any) -> list[dict[str, Any]]:
        """Rows by plain SQL."""
        raw = self.database.engine.raw_connection()
        cursor = raw.cursor()
        cursor.execute(sql, values)
        names = [column[0] for column in cursor.description]
        rows = [dict(zip(names, row, strict=True)) for row in cursor.fetchall()]
        cursor.close()
        raw.close()
        return rows

    def peek(self, sql: str, *values: Any) -> tuple[Any, ...] | None:
        """One row by plain SQL, from within a task that holds no connection."""
        raw = self.database.engine.raw_connection()
        cursor = raw.cursor()
        cursor.execute(sql, values)
        row: tuple[Any, ...] | None = cursor.fetchone()
        cursor.close()
        raw.close()
        return row

    def outside(self, sql: str) -> int:
        """A write from outside of the engine: an operator, or a part of the product to come."""
        raw = self.database.engine.raw_connection()
        cursor = raw.cursor()
        cursor.execute("BEGIN IMMEDIATE")
        cursor.execute(sql)
        count = int(cursor.rowcount)
        cursor.execute("COMMIT")
        cursor.close()
        raw.close()
        return count

    def everything(self) -> list[Any]:
        """Every row of every table of the schema."""
        raw = self.database.engine.raw_connection()
        cursor = raw.cursor()
        found = [
            (table.name, cursor.execute(f"SELECT * FROM {table.name}").fetchall())
            for table in t.metadata.sorted_tables
        ]
        cursor.close()
        raw.close()
        return found


def _actor() -> str:
    task = current()
    return task.name if task is not None else "outside"


def _actor_fence() -> int:
    task = current()
    return task.fence if task is not None else -1
