"""The step that writes an agent session's row with its launch configuration.

Rows only: effect and success are one transaction, so there is no ``unknown`` and no marker.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sqlalchemy import Connection

from ..runtime.ledger import sessions
from ..runtime.ledger.database import Database
from ..runtime.protocol.evidence import SessionPrepared
from ..runtime.protocol.plan import SessionPrepareRequest
from .kind import Step, StepFailed, StepRetry


class SessionPrepare:
    """The kind ``session_prepare``."""

    name = "session_prepare"

    def apply(
        self, step: Step[SessionPrepareRequest], connection: Connection, database: Database
    ) -> SessionPrepared:
        """Write the row; an identical one of ours counts, any other is a permanent failure."""
        row = _row(step)
        if not sessions.insert(connection, database, row):
            found = sessions.get(connection, row.id)
            if found != row:
                raise StepFailed(
                    "session.exists",
                    f"session {row.id} exists and is not this step's",
                    session_id=row.id,
                )
        return SessionPrepared(session_id=row.id, profile=row.profile, launch_hash=row.launch_hash)

    def retract(
        self,
        step: Step[SessionPrepareRequest],
        connection: Connection,
        database: Database,  # noqa: ARG002
    ) -> Mapping[str, Any]:
        """Delete the row if it is untouched and no run uses it."""
        row = _row(step)
        deleted = sessions.delete_unused(connection, row)
        if not deleted:
            found = sessions.get(connection, row.id)
            if found is not None and found.operation_id == step.operation_id:
                reason = "in use by a run" if sessions.used(connection, row.id) else "altered"
                raise StepRetry(
                    "session.in_use", f"session {row.id} is {reason}", session_id=row.id
                )
        return {"session_id": row.id, "session": "absent", "deleted": deleted}


def _row(step: Step[SessionPrepareRequest]) -> sessions.SessionRow:
    return sessions.SessionRow.of(
        step.request.session_id,
        step.request.launch,
        operation_id=step.operation_id,
        task_id=step.task_id,
        workspace_id=step.workspace_id,
    )
