"""Complete, in two transactions, and Abort: the two ends of a creation, with their predicates.

Lock order: workspace, operation, step, run, outbox feed. Source: design 1-protocol, 'Operation
states'.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, Row, select, update

from .ledger import creations, operations, outbox
from .ledger import steps as ledger_steps
from .ledger import tables as t
from .ledger.database import Database
from .ledger.operations import Limits
from .protocol import rules
from .protocol.canonical import Domain, canonical_text, digest, digest_bytes
from .protocol.errors import AbortRefused, CompletionRefused, FenceLost
from .protocol.evidence import EVIDENCE, LaunchArmed
from .protocol.plan import Plan
from .protocol.snapshot import Snapshot
from .protocol.states import (
    CompensationState,
    OperationState,
    Outcome,
    StepState,
)
from .runs import admit_run


@dataclass(frozen=True, slots=True)
class _Creation:
    """One operation as Complete and Abort look at it: locked, with its steps."""

    operation: Row[Any]
    steps: list[Row[Any]]
    snapshot: Snapshot


class Completion:
    """Ends creations. Each method is one transaction and decides by its row counts."""

    def __init__(self, database: Database, limits: Limits) -> None:
        self._database = database
        self._limits = limits

    def enter(self, operation_id: str, fence: int) -> None:
        """Phase A: prove the Complete predicate, then ``completing``.

        Raises:
            FenceLost: another owner has the operation, or it has moved on (a lost answer): read.
            CompletionRefused: something that the ledger holds is not what was proven; names it.
        """
        with self._database.transaction("complete.enter") as connection:
            creation = self._locked(connection, operation_id, fence, OperationState.PREPARING)
            prove(creation.operation, creation.steps, creation.snapshot)
            operations.move(
                connection,
                operation_id,
                fence,
                OperationState.PREPARING,
                OperationState.COMPLETING,
                lease_until=self._database.clock.in_ms(self._limits.lease_ms),
            )

    def commit(self, operation_id: str, fence: int) -> None:
        """Phase B: the task is complete, the run is admitted, one ``task.created`` is written.

        Raises:
            FenceLost, CompletionRefused: as in phase A; nothing was written.
        """
        with self._database.transaction("complete.commit") as connection:
            workspace_id = self._lock_workspace(connection, operation_id, fence)
            creation = self._locked(connection, operation_id, fence, OperationState.COMPLETING)
            prove(creation.operation, creation.steps, creation.snapshot)
            plan = Plan.model_validate_json(creation.operation.plan)
            if plan.run is not None:
                self._admit_run(connection, creation.operation, plan)
            operations.move(
                connection,
                operation_id,
                fence,
                OperationState.COMPLETING,
                OperationState.COMPLETED,
                fence=fence + 1,
                outcome=_outcome(creation.operation),
                finished_at=self._database.clock.now(),
            )
            self._publish(connection, workspace_id, creation.operation)

    def abort(self, operation_id: str, fence: int) -> None:
        """Remove the live task: everything that was made is proven absent, undone or transferred.

        Raises:
            FenceLost: as above.
            AbortRefused: the Abort predicate does not hold; nothing was written.
        """
        with self._database.transaction("abort") as connection:
            self._lock_workspace(connection, operation_id, fence)
            creation = self._locked(connection, operation_id, fence, OperationState.PREPARING)
            if not rules.may_abort(creation.snapshot):
                raise AbortRefused(operation_id=operation_id)
            operations.move(
                connection,
                operation_id,
                fence,
                OperationState.PREPARING,
                OperationState.ABORTED,
                fence=fence + 1,
                failure=canonical_text(_account(creation.steps)),
                finished_at=self._database.clock.now(),
            )
            gone = creations.delete_live_task(connection, creation.operation.task_id, operation_id)
            if gone != 1 and not creation.operation.deleted:
                raise AbortRefused("the live task is not there", operation_id=operation_id)

    # -- parts --------------------------------------------------------------------------------

    def _lock_workspace(self, connection: Connection, operation_id: str, fence: int) -> str:
        # Which workspace is immutable, so it may be read before its lock is taken. Giving the
        # place back is that lock; it is rolled back where the fence turns out to be lost.
        o = t.operations.c
        workspace_id = connection.execute(
            select(o.workspace_id).where(o.id == operation_id)
        ).scalar_one_or_none()
        if workspace_id is None:
            raise FenceLost(operation_id=operation_id, fence=fence)
        if not creations.give_place_back(connection, workspace_id):
            # Whatever is open is counted: this operation has ended.
            raise FenceLost(operation_id=operation_id, fence=fence)
        return str(workspace_id)

    def _locked(
        self, connection: Connection, operation_id: str, fence: int, state: OperationState
    ) -> _Creation:
        row = operations.locked(connection, operation_id)
        if row is None or row.fence != fence or row.state != state or row.parked_reason:
            raise FenceLost(operation_id=operation_id, fence=fence)
        s = t.steps.c
        steps = list(
            connection.execute(
                select(t.steps)
                .where(s.operation_id == operation_id)
                .order_by(s.position)
                .with_for_update()
            )
        )
        return _Creation(
            operation=row,
            steps=steps,
            snapshot=operations.snapshot(
                connection, self._database, operation_id, fence, self._limits
            ),
        )

    def _admit_run(self, connection: Connection, operation: Row[Any], plan: Plan) -> None:
        run = plan.run
        assert run is not None
        run_id, _ = admit_run(
            connection,
            self._database,
            workspace_id=operation.workspace_id,
            workflow_ref=run.workflow_ref,
            workflow_version=run.workflow_version,
            input={"session_id": run.session_id, "task_id": operation.task_id},
            host_id=operation.host_id,
            dispatch_key=run.dispatch_key,
            task_id=operation.task_id,
            session_id=run.session_id,
        )
        evidence = LaunchArmed(
            session_id=run.session_id, dispatch_key=run.dispatch_key, run_id=run_id
        )
        s = t.steps.c
        moved = connection.execute(
            update(t.steps)
            .where(s.operation_id == operation.id, s.kind == "agent_launch")
            .where(s.state == StepState.ARMED)
            .values(state=StepState.SUCCEEDED, **ledger_steps.evidence_values(evidence))
        ).rowcount
        if moved != 1:
            raise CompletionRefused("the launch is not armed", field="steps.agent_launch.state")

    def _publish(self, connection: Connection, workspace_id: str, operation: Row[Any]) -> None:
        place = outbox.lock_feed(connection, workspace_id)
        c = t.tasks.c
        task = connection.execute(
            update(t.tasks)
            .where(c.id == operation.task_id, c.operation_id == operation.id)
            .where(c.complete.is_(False))
            .values(complete=True, revision=1, list_position=place.list_position)
            .returning(c.id, c.number, c.title, c.external_id)
        ).one()
        payload: dict[str, Any] = {"task_id": task.id, "number": task.number, "title": task.title}
        if task.external_id is not None:
            payload["external_id"] = task.external_id
        outbox.append(
            connection,
            self._database,
            place,
            workspace_id=workspace_id,
            aggregate="task",
            aggregate_id=task.id,
            revision=1,
            type="task.created",
            payload=payload,
        )


def _outcome(operation: Row[Any]) -> Outcome:
    return Outcome.CREATED_IDENTITY_LOST if operation.identity_released else Outcome.CREATED


def prove(operation: Row[Any], steps: list[Row[Any]], snapshot: Snapshot) -> None:
    """The Complete predicate: states, and every hash against the document that it is of.

    Raises:
        CompletionRefused: ``field`` names what does not hold.
    """
    _hashed("plan_hash", Domain.PLAN, operation.plan, operation.plan_hash)
    _hashed("manifest_hash", Domain.MANIFEST, operation.manifest, operation.manifest_hash)
    _same("actor_hash", digest(Domain.ACTOR, operation.actor), operation.actor_hash)
    planned = Plan.model_validate_json(operation.plan).steps
    _same("steps", [p.key for p in planned], [s.step_key for s in steps])
    for plan_step, step in zip(planned, steps, strict=True):
        name = f"steps.{step.step_key}"
        _hashed(f"{name}.request", Domain.REQUEST, step.request, step.request_hash)
        _same(f"{name}.request_hash", step.request_hash, plan_step.request_hash())
        if step.evidence is None:
            raise CompletionRefused(f"{name} has no evidence", field=f"{name}.evidence")
        _hashed(f"{name}.evidence", Domain.EVIDENCE, step.evidence, step.evidence_hash)
        evidence = EVIDENCE.validate_json(step.evidence)
        _same(f"{name}.evidence.kind", evidence.kind, plan_step.kind)
    if not rules.may_complete(snapshot):
        raise CompletionRefused("a step is not in the state that Complete needs", field="steps")


def _hashed(field: str, domain: Domain, document: str, expected: str) -> None:
    # The bytes as stored: they are canonical, or they are not what was proven.
    _same(field, digest_bytes(domain, document.encode()), expected)


def _same(field: str, one: object, other: object) -> None:
    if one != other:
        raise CompletionRefused(f"{field} does not match the ledger", field=field)


def _account(steps: list[Row[Any]]) -> dict[str, Any]:
    """Why it was aborted and what was undone: the answer to the caller."""
    failed = next((s for s in steps if s.state == StepState.FAILED), None)
    failure = json.loads(failed.failure) if failed is not None and failed.failure else {}
    undone = [
        {
            "step": step.step_key,
            "how": step.compensation,
            "proof": json.loads(step.undo_proof) if step.undo_proof else {},
        }
        for step in reversed(steps)
        if step.compensation != CompensationState.NONE
    ]
    return {
        "step": failed.step_key if failed is not None else None,
        "code": failure.get("code", "workspace_deleted" if failed is None else "failed"),
        "reason": failure.get("reason", "the task was deleted before it was complete"),
        "undone": undone,
    }
