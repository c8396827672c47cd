"""Workspaces with their counters and their event feed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import Connection, Row, insert, or_, select

from .database import Clock
from .tables import event_feeds, workspace_counters, workspaces


def insert_workspace(
    connection: Connection, clock: Clock, *, workspace_id: str, name: str, capacity: int | None
) -> None:
    """The workspace and the two rows that others lock, in one transaction of the caller."""
    connection.execute(
        insert(workspaces).values(id=workspace_id, name=name, created_at=clock.now())
    )
    connection.execute(
        insert(workspace_counters).values(workspace_id=workspace_id, capacity=capacity)
    )
    connection.execute(insert(event_feeds).values(workspace_id=workspace_id))


def any_workspace(connection: Connection) -> bool:
    """Whether there ever was a workspace, deleted ones included."""
    return connection.execute(select(workspaces.c.id).limit(1)).first() is not None


def live_workspaces(connection: Connection) -> Sequence[Row[*tuple[Any, ...]]]:
    """id, name, created_at and capacity of every workspace that is not deleted, oldest first."""
    return connection.execute(_live().order_by(workspaces.c.created_at, workspaces.c.id)).all()


def named(connection: Connection, reference: str) -> Sequence[Row[*tuple[Any, ...]]]:
    """The workspaces, not deleted, whose ID or name is ``reference``."""
    return connection.execute(
        _live().where(or_(workspaces.c.id == reference, workspaces.c.name == reference))
    ).all()


def _live() -> Any:
    return (
        select(
            workspaces.c.id,
            workspaces.c.name,
            workspaces.c.created_at,
            workspace_counters.c.capacity,
        )
        .join(workspace_counters, workspace_counters.c.workspace_id == workspaces.c.id)
        .where(workspaces.c.deleted_at.is_(None))
    )
