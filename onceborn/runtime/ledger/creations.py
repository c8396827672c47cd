"""The rows that one admission writes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, delete, func, insert, select, update

from ..protocol.canonical import canonical_text
from ..protocol.plan import Manifest, Plan, idempotency_key
from ..protocol.states import CompensationState, OperationState, StepState
from . import tables as t
from .database import Database
from .statements import changed, insert_unless_held


@dataclass(frozen=True, slots=True)
class NewCreation:
    """Everything that is decided before the transaction begins. Hashes are hex."""

    workspace_id: str
    external_id: str | None
    manifest: Manifest
    manifest_hash: str
    plan: Plan
    plan_hash: str
    actor: str
    actor_hash: str
    token_hash: str
    lease_ms: int


def take_place(connection: Connection, workspace_id: str) -> int | None:
    """Lock the workspace, count one more preparing creation and draw its number.

    Returns the number, or ``None`` where the workspace is full.
    """
    c = t.workspace_counters.c
    return connection.execute(
        update(t.workspace_counters)
        .where(c.workspace_id == workspace_id)
        .where((c.capacity.is_(None)) | (c.preparing < c.capacity))
        .values(preparing=c.preparing + 1, last_number=c.last_number + 1)
        .returning(c.last_number)
    ).scalar_one_or_none()


def give_place_back(connection: Connection, workspace_id: str) -> bool:
    """Lock the workspace and count one preparing creation less. ``False``: none is preparing."""
    c = t.workspace_counters.c
    statement = (
        update(t.workspace_counters)
        .where(c.workspace_id == workspace_id, c.preparing > 0)
        .values(preparing=c.preparing - 1)
    )
    return changed(connection, statement) == 1


def insert_task(connection: Connection, database: Database, new: NewCreation, number: int) -> bool:
    """The live task. ``False``: another task holds the identity, and nothing was inserted."""
    statement = insert_unless_held(database, t.tasks, t.EXTERNAL_ID_INDEX)
    manifest = new.manifest
    return (
        changed(
            connection,
            statement.values(created_at=database.clock.now()),
            {
                "id": new.plan.task_id,
                "workspace_id": new.workspace_id,
                "operation_id": new.plan.operation_id,
                "number": number,
                "external_id": new.external_id,
                "title": manifest.title,
                "description": manifest.description,
                "metadata": canonical_text(manifest.metadata),
            },
        )
        == 1
    )


def insert_operation(connection: Connection, database: Database, new: NewCreation) -> None:
    """The operation and all of its steps."""
    connection.execute(
        insert(t.operations).values(
            id=new.plan.operation_id,
            workspace_id=new.workspace_id,
            task_id=new.plan.task_id,
            host_id=new.plan.host_id,
            actor=new.actor,
            actor_hash=new.actor_hash,
            token_hash=new.token_hash,
            manifest=canonical_text(new.manifest.model_dump(mode="json")),
            manifest_hash=new.manifest_hash,
            plan=canonical_text(new.plan.model_dump(mode="json")),
            plan_hash=new.plan_hash,
            state=OperationState.PREPARING,
            lease_until=database.clock.in_ms(new.lease_ms),
            created_at=database.clock.now(),
        )
    )
    rows = _step_rows(new.plan)
    if rows:
        connection.execute(insert(t.steps), rows)


def _step_rows(plan: Plan) -> list[dict[str, Any]]:
    rows = []
    for position, step in enumerate(plan.steps):
        digest = step.request_hash()
        rows.append(
            {
                "operation_id": plan.operation_id,
                "position": position,
                "step_key": step.key,
                "kind": step.kind,
                "request": canonical_text(step.request.model_dump(mode="json")),
                "request_hash": digest,
                "idempotency_key": idempotency_key(plan.operation_id, step.kind, step.key, digest),
                "state": StepState.PLANNED,
                "compensation": CompensationState.NONE,
            }
        )
    return rows


def operation_exists(connection: Connection, operation_id: str) -> bool:
    """Whether an admission whose commit was in doubt did happen."""
    found = select(func.count()).where(t.operations.c.id == operation_id)
    return bool(connection.execute(found).scalar_one())


def delete_live_task(connection: Connection, task_id: str, operation_id: str) -> int:
    """Remove the row of a task that never became complete; its identity is free with it."""
    c = t.tasks.c
    return changed(
        connection,
        delete(t.tasks).where(
            c.id == task_id, c.operation_id == operation_id, c.complete.is_(False)
        ),
    )
