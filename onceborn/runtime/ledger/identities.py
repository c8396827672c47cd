"""Who holds an identity: the one hot lookup."""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import Connection, bindparam, select

from . import tables as t


@dataclass(frozen=True, slots=True)
class Holder:
    """The task that holds an identity, as of the read."""

    task_id: str
    operation_id: str
    complete: bool
    manifest_hash: str


_HOLDER = (
    select(t.tasks.c.id, t.tasks.c.operation_id, t.tasks.c.complete, t.operations.c.manifest_hash)
    .join_from(t.tasks, t.operations, t.tasks.c.operation_id == t.operations.c.id)
    .where(
        t.tasks.c.workspace_id == bindparam("workspace_id"),
        t.tasks.c.external_id == bindparam("external_id"),
    )
)


def holder(connection: Connection, workspace_id: str, external_id: str) -> Holder | None:
    """The task in the workspace that holds the (normalized) external ID."""
    row = connection.execute(
        _HOLDER, {"workspace_id": workspace_id, "external_id": external_id}
    ).one_or_none()
    return Holder(*row) if row is not None else None
