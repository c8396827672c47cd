"""The driver: one order on one step, as one critical section under the host lock.

Take the host lock, claim (which checks fence, state and attempt), observe, perform if absent,
observe again, record, let go. The lock comes before the claim, so that a busy resource costs no
attempt, and so that ``running`` with a free lock proves that the former attempt is gone. What a
step is worth is always decided by an observation, never by what ``perform`` said of itself.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any, Final

import structlog

from ..runtime.failpoints import failpoint
from ..runtime.ledger import operations, steps
from ..runtime.ledger.database import Database
from ..runtime.ledger.operations import Limits
from ..runtime.ledger.steps import Expected
from ..runtime.protocol.errors import DatabaseUnavailable, FenceLost, StaleExpectation
from ..runtime.protocol.orders import Looked, StepOrder, Verb
from ..runtime.protocol.plan import ROW_ONLY_KINDS
from ..runtime.protocol.states import CompensationState, StepState
from ..runtime.settings import Settings
from .attempt import Attempt, step_of
from .kind import (
    Absent,
    Compensated,
    Conflict,
    Host,
    HostKind,
    Observation,
    OursHalfMade,
    Present,
    Step,
    StepFailed,
    StepRetry,
    Transferred,
    Undetermined,
    World,
)
from .locks import HostLocks
from .registry import HOST_KINDS
from .rows import RowDriver

log = structlog.get_logger(__name__)

ATTEMPTS_WITHOUT_DELAY: Final = 4
"""A worker that is killed now and then is followed at once; one that dies over and over is not."""


class Driver:
    """Carries out orders on one host. Safe to share between threads."""

    def __init__(
        self,
        database: Database,
        host: Host,
        locks: HostLocks,
        limits: Limits,
        settings: Settings,
        host_kinds: Mapping[str, HostKind[Any]] = HOST_KINDS,
    ) -> None:
        self._database = database
        self._host_kinds = host_kinds
        self._host = host
        self._locks = locks
        self._limits = limits
        self._settings = settings
        self._rows = RowDriver(database, limits)

    def look(self, operation_id: str, fence: int) -> Looked:
        """The operation as it stands, for the owner of ``fence``."""
        with self._database.snapshot() as connection:
            return Looked(
                operations.snapshot(connection, self._database, operation_id, fence, self._limits)
            )

    def drive(self, order: StepOrder, beat: Callable[[], None]) -> Looked:
        """Carry out one order and return what stands then.

        A lost fence or an expectation that no longer holds changes nothing: the snapshot that
        comes back says what is true now.

        Raises:
            DatabaseUnavailable: what happened is not known; look again.
        """
        busy = False
        try:
            busy = not self._carry_out(order, beat)
        except (FenceLost, StaleExpectation) as refusal:
            log.info(
                "step.refused",
                operation=order.operation_id,
                step=order.expected.key,
                fence=order.fence,
                code=refusal.code,
            )
        looked = self.look(order.operation_id, order.fence)
        return Looked(looked.snapshot, busy=busy)

    def _carry_out(self, order: StepOrder, beat: Callable[[], None]) -> bool:
        with self._database.reading() as connection:
            row = steps.load(connection, order.operation_id, order.expected.key)
        expected = _expected(order)
        if row.kind in ROW_ONLY_KINDS:
            self._rows.carry_out(step_of(row), row.kind, expected, order.verb)
            return True
        kind, step = self._host_kinds[row.kind], step_of(row)
        failpoint(f"{row.kind}.lock")
        with self._locks.try_lock(kind.resource(step)) as lock:
            if lock is None:
                self._stay_alive(order, self._locks.holder(kind.resource(step)))
                return False
            undo = order.verb is Verb.COMPENSATE
            with self._database.transaction("step.claim") as connection:
                claim = steps.claim(
                    connection, self._database, expected, self._limits.lease_ms, undo=undo
                )
            failpoint(f"{row.kind}.claimed")
            attempt = Attempt(self._database, self._limits, self._host, claim, beat)
            world = attempt.world((lock.fd,))
            if undo:
                self._compensate(kind, step, world, attempt, order)
            else:
                self._forward(kind, step, world, attempt, order)
            failpoint(f"{row.kind}.recorded")
        return True

    def _stay_alive(self, order: StepOrder, holder: str) -> None:
        # Waiting for somebody's lock is being at work: the lease must not run out over it. But
        # not for ever: nobody may hold it longer than git's time limit.
        with self._database.transaction("step.busy") as connection:
            operations.hold(
                connection,
                self._database,
                order.operation_id,
                order.fence,
                lease_ms=self._limits.lease_ms,
                busy_with=holder,
            )

    # -- forward ------------------------------------------------------------------------------

    def _forward(
        self,
        kind: HostKind[Any],
        step: Step[Any],
        world: World,
        attempt: Attempt,
        order: StepOrder,
    ) -> None:
        cause: StepFailed | StepRetry | None = None
        seen = self._observe(kind, step, world)
        if order.verb is Verb.PERFORM and isinstance(seen, Absent | OursHalfMade):
            cause = self._perform(kind, step, world)
            failpoint(f"{kind.name}.performed")
            seen = self._observe(kind, step, world)
        failpoint(f"{kind.name}.observed")
        self._conclude(kind, step, world, attempt, order, seen, cause)

    def _observe(self, kind: HostKind[Any], step: Step[Any], world: World) -> Observation:
        try:
            return kind.observe(step, world)
        except (StepFailed, StepRetry) as error:
            return Undetermined(f"{error.reason_code}: {error.message}")
        except (FenceLost, DatabaseUnavailable):
            raise
        except Exception as error:
            log.exception("step.observe_failed", operation=step.operation_id, step=step.key)
            return Undetermined(f"observing failed: {type(error).__name__}")

    def _perform(
        self, kind: HostKind[Any], step: Step[Any], world: World
    ) -> StepFailed | StepRetry | None:
        try:
            kind.perform(step, world)
        except (StepFailed, StepRetry) as error:
            return error
        except (FenceLost, DatabaseUnavailable):
            raise
        except Exception as error:
            # A fault of ours or the machine's (a full disk, say): what the world shows decides.
            log.exception("step.perform_failed", operation=step.operation_id, step=step.key)
            told = f": {error}" if isinstance(error, OSError) else ""
            return StepRetry("step.error", f"{type(error).__name__}{told}"[:500])
        return None

    def _conclude(
        self,
        kind: HostKind[Any],
        step: Step[Any],
        world: World,
        attempt: Attempt,
        order: StepOrder,
        seen: Observation,
        cause: StepFailed | StepRetry | None,
    ) -> None:
        """Decide what the attempt came to, by what was observed after it."""
        tries = order.expected.attempt + 1
        match seen:
            case Present(evidence):
                attempt.succeed(evidence)
            case Absent(proof):
                if order.verb is Verb.RESOLVE:
                    # It may have put something of ours away and been lost before it said so.
                    self._clean(kind, step, world, attempt, order, cause, tries)
                else:
                    self._not_there(attempt, order, cause, dict(proof), tries)
            case OursHalfMade():
                self._clean(kind, step, world, attempt, order, cause, tries)
            case Conflict(code, reason):
                conflict = _failure(cause, code, reason, {"conflict": reason})
                self._clean(kind, step, world, attempt, order, cause, tries, conflict)
            case Undetermined(reason):
                failure = _failure(cause, "step.undetermined", reason, {})
                attempt.wait(StepState.UNKNOWN, failure, self._delay_ms(tries))

    def _not_there(
        self,
        attempt: Attempt,
        order: StepOrder,
        cause: StepFailed | StepRetry | None,
        proof: dict[str, Any],
        tries: int,
    ) -> None:
        if order.verb is Verb.RESOLVE and cause is None:
            self._lost(attempt, proof, tries)
            return
        failure = _failure(cause, "step.no_effect", "the effect is not there afterwards", proof)
        if isinstance(cause, StepFailed) or tries >= self._settings.step_attempts:
            attempt.fail(failure)
        else:
            attempt.wait(StepState.RETRY_WAIT, failure, self._delay_ms(tries))

    def _lost(self, attempt: Attempt, proof: dict[str, Any], tries: int) -> None:
        # An attempt that vanished with its process counts twice: once to try, once to look.
        if tries >= 2 * self._settings.step_attempts:
            attempt.fail(_failure(None, "step.lost", "every attempt ended without a result", proof))
            return
        delay_ms = self._delay_ms(tries // 2) if tries > ATTEMPTS_WITHOUT_DELAY else 0
        attempt.wait(StepState.RETRY_WAIT, None, delay_ms)

    def _clean(
        self,
        kind: HostKind[Any],
        step: Step[Any],
        world: World,
        attempt: Attempt,
        order: StepOrder,
        cause: StepFailed | StepRetry | None,
        tries: int,
        conflict: dict[str, Any] | None = None,
    ) -> None:
        # Our own half-made effect: cleaned, and then it is absent like any other. ``conflict``:
        # what stands there is not ours, and the step fails once nothing of ours is left.
        undone = self._undo(kind, step, world)
        if isinstance(undone, Transferred) and undone.disposition == "quarantined":
            attempt.quarantine(kind.name, dict(undone.proof))
        match undone:
            case Compensated() | Transferred(disposition="quarantined") if conflict is not None:
                attempt.fail(conflict)
            case Compensated(proof) | Transferred(proof, "quarantined"):
                self._not_there(attempt, order, cause, dict(proof), tries)
            case Transferred():
                # Ours and clean, but not removable now: in the way of another try until it is.
                reason = "what an earlier try left cannot be removed now"
                failure = _failure(cause, "step.leftover", reason, {})
                attempt.wait(StepState.UNKNOWN, failure, self._delay_ms(tries))
            case Undetermined(reason):
                failure = _failure(cause, "step.undetermined", reason, {})
                attempt.wait(StepState.UNKNOWN, failure, self._delay_ms(tries))

    # -- backward -----------------------------------------------------------------------------

    def _compensate(
        self,
        kind: HostKind[Any],
        step: Step[Any],
        world: World,
        attempt: Attempt,
        order: StepOrder,
    ) -> None:
        undone = self._undo(kind, step, world)
        failpoint(f"{kind.name}.undone")
        match undone:
            case Compensated(proof):
                attempt.undone(dict(proof))
            case Transferred(proof, disposition):
                attempt.transferred(kind.name, dict(proof), disposition)
            case Undetermined(reason):
                delay = self._delay_ms(order.expected.undo_attempt + 1)
                attempt.undo_later(CompensationState.UNKNOWN, {"reason": reason}, delay)

    def _undo(
        self, kind: HostKind[Any], step: Step[Any], world: World
    ) -> Compensated | Transferred | Undetermined:
        try:
            return kind.compensate(step, world)
        except (StepFailed, StepRetry) as error:
            return Undetermined(f"{error.reason_code}: {error.message}")
        except (FenceLost, DatabaseUnavailable):
            raise
        except Exception as error:
            log.exception("step.undo_failed", operation=step.operation_id, step=step.key)
            return Undetermined(f"undoing failed: {type(error).__name__}")

    def _delay_ms(self, tries: int) -> int:
        """Exponential backoff with jitter, in milliseconds."""
        base = self._settings.retry_base_s * 2 ** min(tries - 1, 20)
        return int(min(base, self._settings.retry_max_s) * random.uniform(0.8, 1.2) * 1000)  # noqa: S311


def _expected(order: StepOrder) -> Expected:
    view = order.expected
    return Expected(
        operation_id=order.operation_id,
        step_key=view.key,
        fence=order.fence,
        state=view.state,
        attempt=view.attempt,
        compensation=view.compensation,
        undo_attempt=view.undo_attempt,
    )


def _failure(
    cause: StepFailed | StepRetry | None, code: str, reason: str, proof: dict[str, Any]
) -> dict[str, Any]:
    if cause is not None:
        return {
            "code": cause.reason_code,
            "reason": cause.message,
            "fields": {k: str(v) for k, v in cause.fields.items()},
            "proof": proof,
        }
    return {"code": code, "reason": reason, "proof": proof}
