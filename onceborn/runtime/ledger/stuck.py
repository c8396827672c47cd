"""Operations as operators see them: what is open or parked, everything of one, and un-parking."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sqlalchemy import Connection, Row, insert, or_, select, update

from ..ids import new_id
from ..protocol.canonical import canonical_text
from ..protocol.states import OPEN_OPERATION_STATES
from . import tables as t
from .database import Database
from .statements import changed

_o = t.operations.c


def open_operations(
    connection: Connection, database: Database, workspace_id: str, *, parked: bool
) -> list[Row[Any]]:
    """A workspace's operations that have not ended, oldest first; ``parked``: only such.

    Beside the row: ``lease_ms``, what is left of the lease (negative: it has expired).
    """
    statement = (
        select(t.operations, (_o.lease_until - database.clock.now()).label("lease_ms"))
        .where(_o.workspace_id == workspace_id, _o.state.in_(OPEN_OPERATION_STATES))
        .order_by(_o.created_at, _o.id)
    )
    if parked:
        statement = statement.where(_o.parked_reason.is_not(None))
    return list(connection.execute(statement))


def find(
    connection: Connection, database: Database, workspace_id: str, reference: str
) -> Row[Any] | None:
    """The operation with this ID, or whose task has it; with ``lease_ms`` as above."""
    return connection.execute(
        select(t.operations, (_o.lease_until - database.clock.now()).label("lease_ms"))
        .where(_o.workspace_id == workspace_id)
        .where(or_(_o.id == reference, _o.task_id == reference))
    ).one_or_none()


def steps_of(connection: Connection, operation_id: str) -> list[Row[Any]]:
    """All steps in the plan's order."""
    s = t.steps.c
    return list(
        connection.execute(
            select(t.steps).where(s.operation_id == operation_id).order_by(s.position)
        )
    )


def events_of(connection: Connection, task_id: str) -> list[Row[Any]]:
    """The task's events: type, revision, created_at."""
    c = t.outbox.c
    return list(
        connection.execute(
            select(c.type, c.revision, c.created_at)
            .where(c.aggregate == "task", c.aggregate_id == task_id)
            .order_by(c.feed_number)
        )
    )


def unpark(connection: Connection, database: Database, operation_id: str) -> int:
    """Clear the parking, and nothing else: rows changed, 0 where it is not parked.

    Its counters start again, or the next owner would park it at once, and with them the waits
    between looks; its lease ends, so that the next sweep takes it under a new fence.
    """
    done = changed(
        connection,
        update(t.operations)
        .where(_o.id == operation_id, _o.parked_reason.is_not(None))
        .where(_o.state.in_(OPEN_OPERATION_STATES))
        .values(
            parked_reason=None,
            parked_at=None,
            claims_without_progress=0,
            busy_since=None,
            busy_with=None,
            lease_until=database.clock.now(),
        ),
    )
    if done == 1:
        s = t.steps.c
        connection.execute(
            update(t.steps)
            .where(s.operation_id == operation_id, s.doubts > 0)
            .values(doubts=0, due_at=None)
        )
    return done


def record(
    connection: Connection,
    database: Database,
    *,
    workspace_id: str,
    actor: str,
    action: str,
    operation_id: str,
    detail: Mapping[str, Any],
    entry_id: str | None = None,
) -> None:
    """Who did what and when, in the transaction that does it."""
    connection.execute(
        insert(t.operator_actions).values(
            id=new_id("opa"),
            workspace_id=workspace_id,
            actor=actor,
            action=action,
            operation_id=operation_id,
            entry_id=entry_id,
            detail=canonical_text(dict(detail)),
            created_at=database.clock.now(),
        )
    )


def actions_on(connection: Connection, operation_id: str) -> list[Row[Any]]:
    """What operators did to an operation, oldest first."""
    a = t.operator_actions.c
    return list(
        connection.execute(
            select(t.operator_actions)
            .where(a.operation_id == operation_id)
            .order_by(a.created_at, a.id)
        )
    )
