"""What operators are shown of a creation, as JSON documents. Times are milliseconds."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any, Final

from sqlalchemy import Row

from . import cleanup
from .protocol import rules
from .protocol.canonical import Domain, digest_bytes
from .protocol.snapshot import Snapshot, StepView
from .settings import Settings

_HIDDEN: Final = ("token_hash", "token_spent", "plan", "manifest")
"""Columns of an operation that are not shown: secret, or documents that the steps tell better."""
_STEP: Final = (
    "kind",
    "state",
    "attempt",
    "attempt_fence",
    "doubts",
    "request_hash",
    "evidence_hash",
    "compensation",
    "undo_attempt",
    "lease_until",
    "due_at",
)
"""Columns of a step that are shown as they are. The attempt's token is not."""


def told(snapshot: Snapshot) -> dict[str, Any]:
    """The one legal next action, as the operation's owner has it, and why. JSON."""
    action = rules.next_action(snapshot)
    name, why, step = _explained(action, snapshot)
    return {"action": name, "step": step, "why": why}


def _explained(action: rules.Action, snapshot: Snapshot) -> tuple[str, str, str | None]:
    match action:
        case rules.Perform(view):
            why = "it is due again" if view.attempt else "it is the first that was not tried yet"
            return "perform", why, view.key
        case rules.Resolve(view):
            why = f"it is {view.state}: what its last attempt did is found out by looking"
            return "resolve", why, view.key
        case rules.Compensate(view):
            why = f"the creation is being undone; its undoing is {view.compensation}"
            return "compensate", why, view.key
        case rules.RequireUndo():
            return "require_undo", "a step failed for good, or the workspace was deleted", None
        case rules.FinishRelease():
            return "finish_release", "the release of the identity was claimed", None
        case rules.EnterCompletion():
            return "enter_completion", "every step has succeeded", None
        case rules.CommitCompletion():
            return "commit_completion", "completing: the first phase is done", None
        case rules.Abort():
            return "abort", "everything that was made is proven absent, undone or handed over", None
        case rules.Park(reason):
            return "park", reason, None
        case rules.DispatchRun(run_id):
            return "dispatch_run", f"run {run_id} was admitted and is not started yet", None
        case rules.Wait(wait_ms):
            return "wait", f"nothing may be tried for {wait_ms} ms", None
        case rules.Stop(reason):
            why = f"an operator is asked: {snapshot.parked}" if snapshot.parked else "it has ended"
            return "stop", why, None


def unparked(snapshot: Snapshot) -> Snapshot:
    """The snapshot as it would be once the parking was cleared."""
    steps = tuple(
        replace(step, exhausted=False, due=True, wait_ms=0) if step.exhausted else step
        for step in snapshot.steps
    )
    return replace(snapshot, parked=None, budget_spent=False, steps=steps)


def operation(row: Row[Any]) -> dict[str, Any]:
    """The operation itself."""
    shown = {k: v for k, v in row._mapping.items() if k not in _HIDDEN}
    return {**shown, "failure": json.loads(row.failure) if row.failure else None}


def step(row: Row[Any], view: StepView) -> dict[str, Any]:
    """One step with its documents."""
    matches = None
    if row.evidence is not None:
        matches = digest_bytes(Domain.EVIDENCE, row.evidence.encode()) == row.evidence_hash
    return {
        "key": row.step_key,
        **{name: row._mapping[name] for name in _STEP},
        "due_in_ms": view.wait_ms,
        "evidence_hash_matches": matches,
        "request": json.loads(row.request),
        "evidence": json.loads(row.evidence) if row.evidence else None,
        "failure": json.loads(row.failure) if row.failure else None,
        "undo_proof": json.loads(row.undo_proof) if row.undo_proof else None,
    }


def job(row: Row[Any], settings: Settings) -> dict[str, Any]:
    """One cleanup job."""
    return {
        "id": row.id,
        "state": row.state,
        "stuck": cleanup.is_stuck(row, settings),
        "operation_id": row.operation_id,
        "task_id": row.task_id,
        "step": row.step_key,
        "host_id": row.host_id,
        "attempts": row.attempts,
        "due_in_ms": row.wait_ms if row.state == "pending" else None,
        "last_error": row.last_error,
        "proof": json.loads(row.proof),
        "result": json.loads(row.result) if row.result else None,
        "created_at": row.created_at,
        "finished_at": row.finished_at,
    }


def action(row: Row[Any]) -> dict[str, Any]:
    """One thing that an operator did."""
    return {
        "at": row.created_at,
        "actor": row.actor,
        "action": row.action,
        "entry_id": row.entry_id,
        "detail": json.loads(row.detail),
    }


def timeline(
    row: Row[Any], kept: list[Row[Any]], actions: list[Row[Any]], events: list[Row[Any]]
) -> list[dict[str, Any]]:
    """What has a time, in its order. Milliseconds, by the database's clock."""
    told_of = [(row.created_at, "admitted")]
    if row.parked_at is not None:
        told_of.append((row.parked_at, f"parked: {row.parked_reason}"))
    if row.finished_at is not None:
        told_of.append((row.finished_at, str(row.state)))
    told_of += [(e.created_at, f"event {e.type}, revision {e.revision}") for e in events]
    for job in kept:
        told_of.append((job.created_at, f"{job.step_key} handed to cleanup job {job.id}"))
        if job.finished_at is not None:
            told_of.append((job.finished_at, f"cleanup job {job.id} {job.state}"))
    told_of += [(a.created_at, f"{a.action} by {a.actor}") for a in actions]
    return [{"at": at, "what": what} for at, what in sorted(told_of, key=lambda entry: entry[0])]
