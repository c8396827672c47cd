"""Row-only kinds: effect and success are one transaction, so they are never in doubt."""

from __future__ import annotations

from typing import Any, Final

from ..runtime.ledger import operations, steps
from ..runtime.ledger import tables as t
from ..runtime.ledger.database import Database
from ..runtime.ledger.operations import Limits
from ..runtime.ledger.steps import Expected
from ..runtime.protocol.canonical import canonical_text
from ..runtime.protocol.orders import Verb
from ..runtime.protocol.states import CompensationState, StepState
from .kind import Step, StepFailed, StepRetry
from .registry import ROW_KINDS

RETRACT_AGAIN_MS: Final = 5_000


class RowDriver:
    """Carries out orders on row-only steps."""

    def __init__(self, database: Database, limits: Limits) -> None:
        self._database = database
        self._limits = limits

    def carry_out(self, step: Step[Any], kind: str, expected: Expected, verb: Verb) -> None:
        """Apply or retract.

        Raises:
            FenceLost, StaleExpectation: nothing was written.
        """
        if verb is Verb.COMPENSATE:
            try:
                self._retract(step, kind, expected)
            except StepRetry as error:
                self._retract_later(expected, error)
            return
        try:
            self._apply(step, kind, expected)
        except StepFailed as error:
            self._fail(expected, {"code": error.reason_code, "reason": error.message})

    def _apply(self, step: Step[Any], kind: str, expected: Expected) -> None:
        done = StepState.ARMED if kind == "agent_launch" else StepState.SUCCEEDED
        with self._database.transaction(f"{kind}.apply") as connection:
            operations.hold(
                connection,
                self._database,
                expected.operation_id,
                expected.fence,
                lease_ms=self._limits.lease_ms,
                progress=True,
            )
            evidence = ROW_KINDS[kind].apply(step, connection, self._database)
            steps.settle_row(
                connection,
                expected,
                done,
                attempt=expected.attempt + 1,
                attempt_fence=expected.fence,
                **steps.evidence_values(evidence),
            )

    def _fail(self, expected: Expected, failure: dict[str, Any]) -> None:
        with self._database.transaction("step.record") as connection:
            operations.hold(
                connection,
                self._database,
                expected.operation_id,
                expected.fence,
                lease_ms=self._limits.lease_ms,
                progress=True,
            )
            steps.settle_row(
                connection,
                expected,
                StepState.FAILED,
                attempt=expected.attempt + 1,
                failure=canonical_text(failure),
            )

    def _retract(self, step: Step[Any], kind: str, expected: Expected) -> None:
        # An armed launch is cancelled; a succeeded step stays so, with its undoing beside it.
        after = StepState.CANCELLED if expected.state is StepState.ARMED else expected.state
        with self._database.transaction(f"{kind}.retract") as connection:
            operations.hold(
                connection,
                self._database,
                expected.operation_id,
                expected.fence,
                lease_ms=self._limits.lease_ms,
                progress=True,
            )
            proof = ROW_KINDS[kind].retract(step, connection, self._database)
            steps.settle_row(
                connection,
                expected,
                after,
                compensation=CompensationState.COMPENSATED,
                undo_attempt=expected.undo_attempt + 1,
                undo_proof=canonical_text(dict(proof)),
            )

    def _retract_later(self, expected: Expected, error: StepRetry) -> None:
        reason = {"code": error.reason_code, "reason": error.message}
        with self._database.transaction("undo.record") as connection:
            operations.hold(
                connection,
                self._database,
                expected.operation_id,
                expected.fence,
                lease_ms=self._limits.lease_ms + RETRACT_AGAIN_MS,
            )
            steps.settle_row(
                connection,
                expected,
                expected.state,
                compensation=CompensationState.RETRY_WAIT,
                undo_attempt=expected.undo_attempt + 1,
                undo_proof=canonical_text(reason),
                doubts=t.steps.c.doubts + 1,
                due_at=self._database.clock.in_ms(RETRACT_AGAIN_MS),
            )
