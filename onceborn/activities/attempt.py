"""One attempt at a step: its claim, its guard, its leases and what it records."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

from sqlalchemy import Connection, Row

from ..runtime.failpoints import failpoint
from ..runtime.ledger import cleanup, steps
from ..runtime.ledger.database import Database
from ..runtime.ledger.operations import Limits
from ..runtime.ledger.steps import Claim
from ..runtime.protocol.errors import DatabaseUnavailable, FenceLost
from ..runtime.protocol.evidence import Evidence
from ..runtime.protocol.plan import STEP_REQUEST
from ..runtime.protocol.states import CompensationState, StepState
from .kind import Disposition, Host, Step, World

RENEW_EVERY_S: Final = 10.0


class Attempt:
    """What one claim may do. Every write names it; every effect asks it first."""

    def __init__(
        self,
        database: Database,
        limits: Limits,
        host: Host,
        claim: Claim,
        beat: Callable[[], None],
    ) -> None:
        self._database = database
        self._limits = limits
        self._host = host
        self._claim = claim
        self._beat = beat
        self._renewed = time.monotonic()

    def world(self, lock_fds: tuple[int, ...]) -> World:
        """The world as this attempt may touch it."""
        return World(
            host=self._host,
            database=self._database,
            guard=self.guard,
            heartbeat=self.heartbeat,
            transaction=self.transaction,
            lock_fds=lock_fds,
        )

    def guard(self) -> None:
        """Read fence, state and token again.

        Raises:
            FenceLost: any of them has changed; nothing may be touched.
        """
        failpoint("step.guard")
        with self._database.reading() as connection:
            if not steps.still_held(connection, self._claim):
                raise FenceLost(operation_id=self._claim.operation_id, fence=self._claim.fence)

    def heartbeat(self) -> None:
        """Tell Temporal that we live, and every 10 s the ledger."""
        self._beat()
        lease_s = self._limits.lease_ms / 1000
        unrenewed_s = time.monotonic() - self._renewed
        if unrenewed_s < min(RENEW_EVERY_S, lease_s / 3):
            return
        try:
            with self._database.transaction("step.renew") as connection:
                steps.renew(connection, self._database, self._claim, self._limits.lease_ms)
            self._renewed = time.monotonic()
        except DatabaseUnavailable:
            # A failover of a second is no reason to throw a clone away; the host lock protects the
            # effect meanwhile.
            if unrenewed_s >= lease_s * 0.8:
                raise

    @contextmanager
    def transaction(self) -> Iterator[Connection]:
        """A ledger transaction that holds the step; for a kind's own rows."""
        with self._database.transaction("step.rows") as connection:
            steps.renew(connection, self._database, self._claim, self._limits.lease_ms)
            yield connection

    # -- what it records ----------------------------------------------------------------------

    def succeed(self, evidence: Evidence) -> None:
        with self._database.transaction("step.record") as connection:
            steps.succeed(connection, self._database, self._claim, evidence, self._limits.lease_ms)

    def wait(self, state: StepState, failure: dict[str, Any] | None, delay_ms: int) -> None:
        with self._database.transaction("step.record") as connection:
            steps.wait(
                connection,
                self._database,
                self._claim,
                state,
                failure,
                delay_ms,
                self._limits.lease_ms,
            )

    def fail(self, failure: dict[str, Any]) -> None:
        with self._database.transaction("step.record") as connection:
            steps.fail(connection, self._database, self._claim, failure, self._limits.lease_ms)

    def undone(self, proof: dict[str, Any]) -> None:
        with self._database.transaction("undo.record") as connection:
            self._undone(connection, CompensationState.COMPENSATED, proof)

    def transferred(
        self, kind: str, proof: dict[str, Any], disposition: Disposition = "quarantined"
    ) -> None:
        """What stays, and that it is handed over, in one transaction."""
        with self._database.transaction("undo.record") as connection:
            self._undone(connection, CompensationState.TRANSFERRED, proof)
            self._hand_over(connection, kind, proof, disposition)

    def _undone(
        self, connection: Connection, state: CompensationState, proof: dict[str, Any]
    ) -> None:
        steps.undone(connection, self._database, self._claim, state, proof, self._limits.lease_ms)

    def undo_later(self, state: CompensationState, reason: dict[str, Any], delay_ms: int) -> None:
        with self._database.transaction("undo.record") as connection:
            steps.undo_later(
                connection,
                self._database,
                self._claim,
                state,
                reason,
                delay_ms,
                self._limits.lease_ms,
            )

    def quarantine(self, kind: str, proof: dict[str, Any]) -> None:
        """Record what stays, in a transaction that still holds the step."""
        with self.transaction() as connection:
            self._hand_over(connection, kind, proof, "quarantined")

    def _hand_over(
        self, connection: Connection, kind: str, proof: dict[str, Any], disposition: Disposition
    ) -> None:
        cleanup.hand_over(
            connection,
            self._database,
            operation_id=self._claim.operation_id,
            step_key=self._claim.step_key,
            host_id=self._host.host_id,
            kind=kind,
            proof=proof,
            disposition=disposition,
        )


def step_of(row: Row[Any]) -> Step[Any]:
    """The step as its kind sees it, from its row."""
    return Step(
        operation_id=row.operation_id,
        task_id=row.task_id,
        workspace_id=row.workspace_id,
        key=row.step_key,
        request=STEP_REQUEST.validate_json(row.request),
        idempotency_key=row.idempotency_key,
    )
