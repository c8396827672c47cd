"""Operations: who owns one, and where it stands."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, Row, case, func, select, update

from ..protocol.errors import FenceLost
from ..protocol.snapshot import Snapshot, StepView
from ..protocol.states import OPEN_OPERATION_STATES, CompensationState, OperationState, StepState
from . import tables as t
from .database import Database
from .statements import changed

DRIVABLE = (OperationState.PREPARING, OperationState.PREPARING_RELEASE)
"""States in which step writes go on: a release under way holds up Complete and Abort only."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What the ledger measures an operation by. Milliseconds and counts."""

    lease_ms: int = 30_000
    progress_budget: int = 5
    step_attempts: int = 8
    busy_ms: int = 1_020_000
    """Longer than anybody may hold a host lock: git's time limit and what ends it."""


def hold(
    connection: Connection,
    database: Database,
    operation_id: str,
    fence: int,
    *,
    lease_ms: int,
    states: Sequence[OperationState] = DRIVABLE,
    progress: bool = False,
    busy_with: str | None = None,
) -> None:
    """Lock the operation, prove that ``fence`` still owns it, and renew its lease.

    ``busy_with``: it does nothing but wait for this; how long it has is counted.

    Raises:
        FenceLost: another owner has it, it is parked, or it is in none of ``states``.
    """
    o = t.operations.c
    since = None if busy_with is None else func.coalesce(o.busy_since, database.clock.now())
    values: dict[str, Any] = {
        "lease_until": database.clock.in_ms(lease_ms),
        "busy_since": since,
        "busy_with": busy_with,
    }
    if progress:
        values["claims_without_progress"] = 0
    statement = (
        update(t.operations)
        .where(o.id == operation_id, o.fence == fence, o.state.in_(states))
        .where(o.parked_reason.is_(None))
        .values(values)
    )
    if changed(connection, statement) != 1:
        raise FenceLost(operation_id=operation_id, fence=fence)


def locked(connection: Connection, operation_id: str) -> Row[Any] | None:
    """The whole row, locked until the transaction ends."""
    return connection.execute(
        select(t.operations).where(t.operations.c.id == operation_id).with_for_update()
    ).one_or_none()


def move(
    connection: Connection,
    operation_id: str,
    fence: int,
    before: OperationState,
    after: OperationState,
    /,
    **values: Any,
) -> None:
    """One transition of the state.

    Raises:
        FenceLost: fence or state no longer hold.
    """
    o = t.operations.c
    statement = (
        update(t.operations)
        .where(o.id == operation_id, o.fence == fence, o.state == before)
        .values(state=after, claims_without_progress=0, **values)
    )
    if changed(connection, statement) != 1:
        raise FenceLost(operation_id=operation_id, fence=fence)


def park(
    connection: Connection, database: Database, operation_id: str, fence: int, why: str
) -> int:
    """Leave the operation to an operator. Returns the number of rows: 0 where the fence is lost."""
    o = t.operations.c
    return changed(
        connection,
        update(t.operations)
        .where(o.id == operation_id, o.fence == fence, o.parked_reason.is_(None))
        .where(o.state.in_(OPEN_OPERATION_STATES))
        .values(parked_reason=why, parked_at=database.clock.now()),
    )


def count_driver(connection: Connection, operation_id: str, fence: int) -> None:
    """Note once for each fence that its driver ran: only such claims spend the budget."""
    o = t.operations.c
    connection.execute(
        update(t.operations)
        .where(o.id == operation_id, o.fence == fence, o.driven_fence < fence)
        .values(driven_fence=fence, claims_without_progress=o.claims_without_progress + 1)
    )


def snapshot(
    connection: Connection, database: Database, operation_id: str, fence: int, limits: Limits
) -> Snapshot:
    """The operation and its steps as ``next_action`` wants them.

    Run it in one transaction (``Database.snapshot``): two statements must see one state.

    Raises:
        FenceLost: there is no such operation.
    """
    o = t.operations.c
    overdue = o.busy_since + limits.busy_ms <= database.clock.now()
    row = connection.execute(
        select(t.operations, overdue.label("overdue")).where(o.id == operation_id)
    ).one_or_none()
    if row is None:
        raise FenceLost(operation_id=operation_id, fence=fence)
    return Snapshot(
        operation_id=operation_id,
        state=OperationState(row.state),
        fence=row.fence,
        mine=row.fence == fence,
        steps=step_views(connection, database, operation_id, limits),
        parked=row.parked_reason,
        budget_spent=row.claims_without_progress > limits.progress_budget,
        blocked=row.busy_with if row.overdue else None,
        deleted=row.deleted,
        run_id=_admitted_run(connection, row),
    )


def step_views(
    connection: Connection, database: Database, operation_id: str, limits: Limits
) -> tuple[StepView, ...]:
    """The steps in the plan's order."""
    s = t.steps.c
    now = database.clock.now()
    wait = case((s.due_at > now, s.due_at - now), else_=0)
    rows = connection.execute(
        select(
            s.step_key, s.kind, s.state, s.attempt, s.compensation, s.undo_attempt, s.doubts, wait
        )
        .where(s.operation_id == operation_id)
        .order_by(s.position)
    )
    return tuple(
        StepView(
            key=key,
            kind=kind,
            state=StepState(state),
            attempt=attempt,
            compensation=CompensationState(compensation),
            undo_attempt=undo_attempt,
            due=wait_ms == 0,
            wait_ms=int(wait_ms),
            exhausted=doubts >= limits.step_attempts,
        )
        for key, kind, state, attempt, compensation, undo_attempt, doubts, wait_ms in rows
    )


def _admitted_run(connection: Connection, operation: Row[Any]) -> str | None:
    if operation.state != OperationState.COMPLETED:
        return None
    r = t.runs.c
    return connection.execute(
        select(r.id).where(r.task_id == operation.task_id, r.state == "admitted").limit(1)
    ).scalar_one_or_none()
