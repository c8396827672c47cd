"""Steps: claims by attempt token, and what an attempt may record."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, Row, select, update

from ..protocol.canonical import canonical_text
from ..protocol.errors import FenceLost, StaleExpectation
from ..protocol.evidence import Evidence, evidence_hash
from ..protocol.states import CompensationState, StepState
from . import operations
from . import tables as t
from .database import Database
from .statements import changed

_S, _C = StepState, CompensationState


@dataclass(frozen=True, slots=True)
class Claim:
    """One attempt at a step (or at its undoing): what every write and effect of it names."""

    operation_id: str
    step_key: str
    fence: int
    token: str
    undo: bool = False

    def matches(self) -> tuple[Any, ...]:
        """The WHERE of this attempt on the step's row."""
        s = t.steps.c
        running = s.compensation == _C.RUNNING if self.undo else s.state == _S.RUNNING
        return (
            s.operation_id == self.operation_id,
            s.step_key == self.step_key,
            s.attempt_fence == self.fence,
            s.attempt_token == self.token,
            running,
        )


@dataclass(frozen=True, slots=True)
class Expected:
    """What the snapshot showed; a claim holds only if it is still so."""

    operation_id: str
    step_key: str
    fence: int
    state: StepState
    attempt: int
    compensation: CompensationState
    undo_attempt: int

    def matches(self) -> tuple[Any, ...]:
        s = t.steps.c
        return (
            s.operation_id == self.operation_id,
            s.step_key == self.step_key,
            s.state == self.state,
            s.attempt == self.attempt,
            s.compensation == self.compensation,
            s.undo_attempt == self.undo_attempt,
        )


def load(connection: Connection, operation_id: str, step_key: str) -> Row[Any]:
    """The step joined with what it needs of its operation."""
    s, o = t.steps.c, t.operations.c
    return connection.execute(
        select(t.steps, o.task_id, o.workspace_id)
        .join_from(t.steps, t.operations, s.operation_id == o.id)
        .where(s.operation_id == operation_id, s.step_key == step_key)
    ).one()


def claim(
    connection: Connection, database: Database, expected: Expected, lease_ms: int, *, undo: bool
) -> Claim:
    """Take the step for one attempt, with a token of its own.

    Raises:
        FenceLost: the operation has another owner.
        StaleExpectation: the step is no longer as the snapshot showed it.
    """
    operations.hold(connection, database, expected.operation_id, expected.fence, lease_ms=lease_ms)
    made = Claim(
        expected.operation_id, expected.step_key, expected.fence, secrets.token_hex(16), undo
    )
    s = t.steps.c
    moved = (
        {"compensation": _C.RUNNING, "undo_attempt": s.undo_attempt + 1}
        if undo
        else {"state": _S.RUNNING, "attempt": s.attempt + 1}
    )
    statement = (
        update(t.steps)
        .where(*expected.matches())
        .values(
            attempt_token=made.token,
            attempt_fence=made.fence,
            lease_until=database.clock.in_ms(lease_ms),
            due_at=None,
            **moved,
        )
    )
    if changed(connection, statement) != 1:
        raise StaleExpectation(step=expected.step_key)
    return made


def still_held(connection: Connection, claim: Claim) -> bool:
    """Whether fence, state and token are all as claimed. Asked before every effect."""
    o = t.operations.c
    statement = (
        select(t.steps.c.position)
        .join_from(t.steps, t.operations, t.steps.c.operation_id == o.id)
        .where(*claim.matches(), o.fence == claim.fence)
        .where(o.state.in_(operations.DRIVABLE), o.parked_reason.is_(None))
    )
    return connection.execute(statement).first() is not None


def renew(connection: Connection, database: Database, claim: Claim, lease_ms: int) -> None:
    """Renew the leases of operation and attempt.

    Raises:
        FenceLost: the attempt no longer holds the step.
    """
    operations.hold(connection, database, claim.operation_id, claim.fence, lease_ms=lease_ms)
    _write(connection, claim, lease_until=database.clock.in_ms(lease_ms))


def succeed(
    connection: Connection, database: Database, claim: Claim, evidence: Evidence, lease_ms: int
) -> None:
    """Record success with what was observed."""
    operations.hold(
        connection, database, claim.operation_id, claim.fence, lease_ms=lease_ms, progress=True
    )
    _write(
        connection,
        claim,
        state=_S.SUCCEEDED,
        doubts=0,
        failure=None,
        lease_until=None,
        **evidence_values(evidence),
    )


def wait(
    connection: Connection,
    database: Database,
    claim: Claim,
    state: StepState,
    failure: dict[str, Any] | None,
    delay_ms: int,
    lease_ms: int,
) -> None:
    """Record that the step is tried (``retry_wait``) or looked at (``unknown``) again later.

    The operation's lease is set to the due time plus a lease, so that waiting is not absence.
    """
    hold_ms = delay_ms + lease_ms
    operations.hold(connection, database, claim.operation_id, claim.fence, lease_ms=hold_ms)
    _write(
        connection,
        claim,
        state=state,
        doubts=t.steps.c.doubts + 1 if state is _S.UNKNOWN else 0,
        failure=canonical_text(failure) if failure else t.steps.c.failure,
        due_at=database.clock.in_ms(delay_ms),
        lease_until=None,
    )


def fail(
    connection: Connection,
    database: Database,
    claim: Claim,
    failure: dict[str, Any],
    lease_ms: int,
) -> None:
    """Record that the step failed for good; ``failure`` carries the proof of absence."""
    operations.hold(
        connection, database, claim.operation_id, claim.fence, lease_ms=lease_ms, progress=True
    )
    _write(
        connection,
        claim,
        state=_S.FAILED,
        doubts=0,
        failure=canonical_text(failure),
        lease_until=None,
    )


def settle_row(connection: Connection, expected: Expected, state: StepState, **values: Any) -> None:
    """Move a row-only step straight to its end; the caller holds the operation.

    Raises:
        StaleExpectation: the step is no longer as the snapshot showed it.
    """
    statement = update(t.steps).where(*expected.matches()).values(state=state, **values)
    if changed(connection, statement) != 1:
        raise StaleExpectation(step=expected.step_key)


def require_undo(connection: Connection, operation_id: str) -> None:
    """Mark every effect that exists as one to be undone; the caller holds the operation."""
    s = t.steps.c
    connection.execute(
        update(t.steps)
        .where(s.operation_id == operation_id, s.compensation == _C.NONE)
        .where(s.state.in_((_S.SUCCEEDED, _S.ARMED)))
        .values(compensation=_C.REQUIRED, doubts=0)
    )


def undone(
    connection: Connection,
    database: Database,
    claim: Claim,
    state: CompensationState,
    proof: dict[str, Any],
    lease_ms: int,
) -> None:
    """Record that the effect is gone, or handed to a cleanup job."""
    operations.hold(
        connection, database, claim.operation_id, claim.fence, lease_ms=lease_ms, progress=True
    )
    _write(
        connection,
        claim,
        compensation=state,
        undo_proof=canonical_text(proof),
        doubts=0,
        lease_until=None,
    )


def undo_later(
    connection: Connection,
    database: Database,
    claim: Claim,
    state: CompensationState,
    reason: dict[str, Any],
    delay_ms: int,
    lease_ms: int,
) -> None:
    """Record that the undoing is tried or looked at again later."""
    hold_ms = delay_ms + lease_ms
    operations.hold(connection, database, claim.operation_id, claim.fence, lease_ms=hold_ms)
    _write(
        connection,
        claim,
        compensation=state,
        undo_proof=canonical_text(reason),
        doubts=t.steps.c.doubts + 1,
        due_at=database.clock.in_ms(delay_ms),
        lease_until=None,
    )


def evidence_values(evidence: Evidence) -> dict[str, str]:
    """The two columns of an evidence document."""
    document = evidence.model_dump(mode="json")
    return {"evidence": canonical_text(document), "evidence_hash": evidence_hash(document)}


def _write(connection: Connection, claim: Claim, **values: Any) -> None:
    statement = update(t.steps).where(*claim.matches()).values(**values)
    if changed(connection, statement) != 1:
        raise FenceLost(operation_id=claim.operation_id, fence=claim.fence)
