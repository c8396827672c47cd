"""Workspaces: the tenants. Every identity, task, run and event belongs to one."""

from __future__ import annotations

from dataclasses import dataclass

from .ids import new_id
from .ledger import workspaces as ledger
from .ledger.database import Database
from .protocol.errors import InvalidField, NotFound
from .text import check_label


@dataclass(frozen=True, slots=True)
class WorkspaceView:
    """A workspace. ``capacity`` is how many creations may be preparing at once; None: any."""

    id: str
    name: str
    created_at: int
    capacity: int | None


def create_workspace(database: Database, name: str, *, capacity: int | None = None) -> str:
    """Make a workspace and return its ID. Names need not be distinct.

    Raises:
        InvalidField: ``name`` or ``capacity``.
    """
    check_label(name, "name")
    if capacity is not None and not 1 <= capacity <= 2**31:
        raise InvalidField("capacity", "capacity must be a whole number from 1 on")
    workspace_id = new_id("wsp")
    with database.transaction("workspaces.create") as connection:
        ledger.insert_workspace(
            connection, database.clock, workspace_id=workspace_id, name=name, capacity=capacity
        )
    return workspace_id


def any_workspace(database: Database) -> bool:
    """Whether there ever was a workspace here."""
    with database.reading() as connection:
        return ledger.any_workspace(connection)


def list_workspaces(database: Database) -> list[WorkspaceView]:
    """Every workspace that is not deleted, oldest first."""
    with database.reading() as connection:
        rows = ledger.live_workspaces(connection)
    return [WorkspaceView(r.id, r.name, r.created_at, r.capacity) for r in rows]


def find_workspace(database: Database, reference: str) -> str:
    """The ID of the one workspace that has this ID or this name.

    Raises:
        NotFound: there is none.
        InvalidField: several have the name.
    """
    with database.reading() as connection:
        rows = ledger.named(connection, check_label(reference, "workspace"))
    exact = [row.id for row in rows if row.id == reference] or [row.id for row in rows]
    if not exact:
        raise NotFound(f"There is no workspace {reference}.")
    if len(exact) > 1:
        raise InvalidField(
            "workspace", f"{len(exact)} workspaces have the name {reference}; give the ID"
        )
    return str(exact[0])
