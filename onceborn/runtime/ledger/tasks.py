"""Reading tasks and their creations. Writing them is admission's and completion's business."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import Connection, Row, Text, bindparam, cast, func, literal, select

from .tables import operations, runs, steps, tasks

# What the steps of the task have proven so far, as the elements of a JSON array: one statement and
# one row a task, where a join would repeat the whole task for each step. The order of aggregation
# is the database's own, so each element carries its position.
_PROVEN = (
    select(
        func.aggregate_strings(
            literal('{"p":') + cast(steps.c.position, Text) + ',"e":' + steps.c.evidence + "}", ","
        )
    )
    .where(steps.c.operation_id == tasks.c.operation_id, steps.c.evidence.is_not(None))
    .correlate(tasks)
    .scalar_subquery()
    .label("proven")
)

# The sources of its repositories, which the plan's requests name and the evidence does not.
_REQUESTS = (
    select(func.aggregate_strings(steps.c.request, ","))
    .where(steps.c.operation_id == tasks.c.operation_id, steps.c.kind == "repo_attach")
    .correlate(tasks)
    .scalar_subquery()
    .label("attach_requests")
)

# The run that the creation started is the task's first: nothing else can start one before.
_RUN = (
    select(runs.c.id + " " + runs.c.state)
    .where(runs.c.task_id == tasks.c.id, runs.c.workspace_id == tasks.c.workspace_id)
    .order_by(runs.c.created_at, runs.c.id)
    .limit(1)
    .correlate(tasks)
    .scalar_subquery()
    .label("run")
)

_TASK = select(
    tasks.c.id,
    tasks.c.workspace_id,
    tasks.c.number,
    tasks.c.external_id,
    tasks.c.title,
    tasks.c.description,
    tasks.c.metadata,
    tasks.c.revision,
    tasks.c.complete,
    tasks.c.list_position,
    tasks.c.created_at,
    tasks.c.archived_at,
    _PROVEN,
    _REQUESTS,
    _RUN,
).where(tasks.c.workspace_id == bindparam("workspace_id"))

_ONE = _TASK.where(tasks.c.id == bindparam("task_id"))
# list_position is given at Complete, so a task that is still being prepared is in no list.
_PAGE = (
    _TASK.where(tasks.c.list_position.is_not(None), tasks.c.list_position < bindparam("before"))
    .order_by(tasks.c.list_position.desc())
    .limit(bindparam("limit"))
)

_OPERATION = select(
    operations.c.id,
    operations.c.task_id,
    operations.c.host_id,
    operations.c.state,
    operations.c.fence,
    operations.c.parked_reason,
    operations.c.outcome,
    operations.c.failure,
    operations.c.created_at,
    operations.c.finished_at,
).where(
    operations.c.task_id == bindparam("task_id"),
    operations.c.workspace_id == bindparam("workspace_id"),
)

_STEPS = (
    select(
        steps.c.step_key,
        steps.c.kind,
        steps.c.state,
        steps.c.attempt,
        steps.c.due_at,
        steps.c.evidence,
        steps.c.evidence_hash,
        steps.c.failure,
        steps.c.compensation,
        steps.c.undo_proof,
    )
    .where(steps.c.operation_id == bindparam("operation_id"))
    .order_by(steps.c.position)
)

_RUN_OF_TASK = (
    select(runs.c.id)
    .where(runs.c.task_id == bindparam("task_id"), runs.c.workspace_id == bindparam("workspace_id"))
    .order_by(runs.c.created_at, runs.c.id)
    .limit(1)
)


def task(connection: Connection, workspace_id: str, task_id: str) -> Row[*tuple[Any, ...]] | None:
    """One task with what was proven for it, preparing ones too."""
    return connection.execute(
        _ONE, {"workspace_id": workspace_id, "task_id": task_id}
    ).one_or_none()


def page(
    connection: Connection, workspace_id: str, *, before: int, limit: int
) -> Sequence[Row[*tuple[Any, ...]]]:
    """Complete tasks whose list position is below ``before``, the latest first."""
    return connection.execute(
        _PAGE, {"workspace_id": workspace_id, "before": before, "limit": limit}
    ).all()


def operation(
    connection: Connection, workspace_id: str, task_id: str
) -> Row[*tuple[Any, ...]] | None:
    """The creation of a task; it stays when the creation was aborted and the task is gone."""
    return connection.execute(
        _OPERATION, {"workspace_id": workspace_id, "task_id": task_id}
    ).one_or_none()


def steps_of(connection: Connection, operation_id: str) -> Sequence[Row[*tuple[Any, ...]]]:
    """The steps in the plan's order."""
    return connection.execute(_STEPS, {"operation_id": operation_id}).all()


def run_of(connection: Connection, workspace_id: str, task_id: str) -> str | None:
    """The ID of the run that the creation started."""
    found: str | None = connection.execute(
        _RUN_OF_TASK, {"workspace_id": workspace_id, "task_id": task_id}
    ).scalar_one_or_none()
    return found
