"""Session rows: an agent session's launch configuration, byte for byte."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, delete, exists, select
from sqlalchemy.dialects import postgresql, sqlite

from ..protocol.canonical import Domain, canonical_text, digest_bytes
from ..protocol.plan import LaunchConfiguration
from .database import Database
from .statements import changed
from .tables import runs, sessions


@dataclass(frozen=True, slots=True)
class SessionRow:
    """One session. ``launch`` is canonical JSON, ``launch_hash`` the hash of exactly its bytes."""

    id: str
    operation_id: str
    task_id: str
    workspace_id: str
    profile: str
    launch: str
    launch_hash: str

    @classmethod
    def of(
        cls,
        session_id: str,
        launch: LaunchConfiguration,
        *,
        operation_id: str,
        task_id: str,
        workspace_id: str,
    ) -> SessionRow:
        text = canonical_text(launch.model_dump(mode="json"))
        return cls(
            id=session_id,
            operation_id=operation_id,
            task_id=task_id,
            workspace_id=workspace_id,
            profile=launch.profile,
            launch=text,
            launch_hash=launch_hash(text),
        )


def launch_hash(launch: str) -> str:
    """Hash of a launch configuration as stored."""
    return digest_bytes(Domain.LAUNCH, launch.encode("utf-8"))


def insert(connection: Connection, database: Database, row: SessionRow) -> bool:
    """Write the row unless one with its ID exists; whether it was written."""
    dialect: Any = sqlite if database.is_sqlite else postgresql
    statement = (
        dialect.insert(sessions)
        .values(
            id=row.id,
            operation_id=row.operation_id,
            task_id=row.task_id,
            workspace_id=row.workspace_id,
            profile=row.profile,
            launch=row.launch,
            launch_hash=row.launch_hash,
            created_at=database.clock.now(),
        )
        .on_conflict_do_nothing(index_elements=[sessions.c.id])
    )
    return changed(connection, statement) == 1


def get(connection: Connection, session_id: str) -> SessionRow | None:
    """The row, or None."""
    row = connection.execute(
        select(
            sessions.c.id,
            sessions.c.operation_id,
            sessions.c.task_id,
            sessions.c.workspace_id,
            sessions.c.profile,
            sessions.c.launch,
            sessions.c.launch_hash,
        ).where(sessions.c.id == session_id)
    ).one_or_none()
    return None if row is None else SessionRow(*row)


def delete_unused(connection: Connection, row: SessionRow) -> bool:
    """Delete the row if it is byte for byte as given and no run uses it; whether it was."""
    statement = delete(sessions).where(
        sessions.c.id == row.id,
        sessions.c.operation_id == row.operation_id,
        sessions.c.launch == row.launch,
        sessions.c.launch_hash == row.launch_hash,
        ~exists().where(runs.c.session_id == sessions.c.id),
    )
    return changed(connection, statement) == 1


def used(connection: Connection, session_id: str) -> bool:
    """Whether a run uses the session."""
    return bool(connection.scalar(select(exists().where(runs.c.session_id == session_id))))
