"""What operators may see and do: look, un-park, and purge a quarantined entry that they name.

Nothing here resumes, completes, aborts or expires a creation: the loop alone does. What an operator
changes is recorded (who, when, what) in the transaction that makes it true. Source: design
1-protocol, 'Owners, leases, recovery'.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sqlalchemy import Connection, Row

from . import cleanup
from . import operator_views as views
from .access import Principal
from .cleanup import Job
from .ledger import cleanup as jobs
from .ledger import operations, stuck
from .ledger.database import Database
from .protocol.errors import EntryRefused, Forbidden, NotFound, NotParked
from .protocol.snapshot import Snapshot
from .settings import Settings


def require_operator(principal: Principal) -> Principal:
    """Let operators through; of a deleted workspace too, whose effects are still to be undone.

    Raises:
        Forbidden: the token's role is another.
    """
    if principal.role != "operator":
        raise Forbidden
    return principal


class Operators:
    """One workspace as an operator of it sees it.

    Raises, from the start:
        Forbidden: the caller is none.
    """

    def __init__(self, database: Database, settings: Settings, principal: Principal) -> None:
        self._database = database
        self._settings = settings
        self._principal = require_operator(principal)
        self._workspace_id = principal.workspace_id

    # -- seeing -----------------------------------------------------------------------------------

    def open_operations(self, *, parked: bool = False) -> list[dict[str, Any]]:
        """The open operations; ``parked``: only those that wait for an operator. JSON."""
        with self._database.snapshot() as connection:
            rows = stuck.open_operations(
                connection, self._database, self._workspace_id, parked=parked
            )
            return [self._line(connection, row) for row in rows]

    def jobs(self, *, only_stuck: bool = False) -> list[dict[str, Any]]:
        """What undoing left on hosts: quarantined entries and pending jobs. JSON."""
        with self._database.reading() as connection:
            rows = jobs.find(connection, self._database, self._workspace_id, states=jobs.OPEN)
        shown = [views.job(row, self._settings) for row in rows]
        return [job for job in shown if job["stuck"]] if only_stuck else shown

    def show(self, reference: str) -> dict[str, Any]:
        """Everything of one operation, by its ID or its task's. JSON.

        Raises:
            NotFound: the workspace has no such operation.
        """
        with self._database.snapshot() as connection:
            row = self._find(connection, reference)
            steps = stuck.steps_of(connection, row.id)
            snapshot = self._snapshot(connection, row)
            kept = jobs.find(connection, self._database, self._workspace_id, operation_id=row.id)
            actions = stuck.actions_on(connection, row.id)
            events = stuck.events_of(connection, row.task_id)
        return {
            "operation": views.operation(row),
            "next": views.told(snapshot),
            "after_unpark": views.told(views.unparked(snapshot))
            if snapshot.parked is not None
            else None,
            "steps": [
                views.step(step, view) for step, view in zip(steps, snapshot.steps, strict=True)
            ],
            "cleanup": [views.job(job, self._settings) for job in kept],
            "actions": [views.action(action) for action in actions],
            "timeline": views.timeline(row, kept, actions, events),
        }

    def operation(self, reference: str) -> Row[Any]:
        """The row of an operation, by its ID or its task's.

        Raises:
            NotFound: the workspace has no such operation.
        """
        with self._database.reading() as connection:
            return self._find(connection, reference)

    def entry(self, entry_id: str) -> Row[Any]:
        """The row of a quarantined entry.

        Raises:
            NotFound: the workspace has no such job.
            EntryRefused: it is not in quarantine: purged, done, or still the runtime's to remove.
        """
        with self._database.reading() as connection:
            return self._entry(connection, entry_id)

    # -- doing ------------------------------------------------------------------------------------

    def unpark(self, reference: str) -> dict[str, Any]:
        """Clear the parking; the loop does the rest. Returns what it will do next. JSON.

        Raises:
            NotFound: the workspace has no such operation.
            NotParked: it is not parked; nothing was written.
        """
        with self._database.transaction("operators.unpark") as connection:
            row = self._find(connection, reference)
            if stuck.unpark(connection, self._database, row.id) != 1:
                state = f"it is {row.state}" + ("" if row.parked_reason is None else ", just moved")
                raise NotParked(
                    f"Operation {row.id} is not parked ({state}); there is nothing to clear.",
                    operation_id=row.id,
                    state=row.state,
                )
            self._record(connection, "unpark", row.id, {"was_parked_for": row.parked_reason})
            snapshot = self._snapshot(connection, self._find(connection, row.id))
        return {
            "operation_id": row.id,
            "was_parked_for": row.parked_reason,
            "next": views.told(snapshot),
        }

    def begin_purge(self, entry_id: str, digest: str) -> Job:
        """Claim a quarantined entry for its purge, on record.

        Raises:
            NotFound, EntryRefused: as for ``entry``; or another purge is at it.
        """
        with self._database.transaction("operators.purge_claim") as connection:
            row = self._entry(connection, entry_id)
            claim = jobs.claim_entry(
                connection, self._database, row.id, self._settings.limits.lease_ms
            )
            if claim is None:
                raise EntryRefused("Another purge is at work on this entry.", entry=row.id)
            self._record(
                connection, "purge_begun", row.operation_id, {"digest": digest}, entry_id=row.id
            )
            return cleanup.load(connection, claim)

    def end_purge(self, job: Job, removed: Mapping[str, Any] | None, refusal: str = "") -> None:
        """Record what a purge came to. ``removed`` None: it was refused, the entry stays.

        Raises:
            FenceLost: another purge has taken the entry over.
        """
        with self._database.transaction("operators.purge_record") as connection:
            if removed is None:
                jobs.let_go(connection, job.claim)
                action, detail = "purge_refused", {"reason": refusal}
            else:
                jobs.finish(connection, self._database, job.claim, "purged", removed)
                action, detail = "purge", dict(removed)
            self._record(connection, action, job.row.operation_id, detail, entry_id=job.row.id)

    # -- parts ------------------------------------------------------------------------------------

    def _find(self, connection: Connection, reference: str) -> Row[Any]:
        row = stuck.find(connection, self._database, self._workspace_id, reference)
        if row is None:
            raise NotFound(f"There is no operation or task {reference} in this workspace.")
        return row

    def _entry(self, connection: Connection, entry_id: str) -> Row[Any]:
        rows = jobs.find(connection, self._database, self._workspace_id, job_id=entry_id)
        if not rows:
            raise NotFound(f"There is no quarantine entry {entry_id} in this workspace.")
        if rows[0].state != "quarantined":
            raise EntryRefused(f"Entry {entry_id} is not in quarantine: it is {rows[0].state}.")
        return rows[0]

    def _snapshot(self, connection: Connection, row: Row[Any]) -> Snapshot:
        return operations.snapshot(
            connection, self._database, row.id, row.fence, self._settings.limits
        )

    def _record(
        self,
        connection: Connection,
        action: str,
        operation_id: str,
        detail: Mapping[str, Any],
        entry_id: str | None = None,
    ) -> None:
        stuck.record(
            connection,
            self._database,
            workspace_id=self._workspace_id,
            actor=self._principal.actor,
            action=action,
            operation_id=operation_id,
            detail=detail,
            entry_id=entry_id,
        )

    def _line(self, connection: Connection, row: Row[Any]) -> dict[str, Any]:
        snapshot = self._snapshot(connection, row)
        return {
            "operation_id": row.id,
            "task_id": row.task_id,
            "state": row.state,
            "fence": row.fence,
            "owner": row.owner,
            "host_id": row.host_id,
            "lease_ms": row.lease_ms,
            "parked_reason": row.parked_reason,
            "parked_at": row.parked_at,
            "claims_without_progress": row.claims_without_progress,
            "created_at": row.created_at,
            "next": views.told(snapshot),
        }
