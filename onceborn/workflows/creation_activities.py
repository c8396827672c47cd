"""The activities of the creation loop: thin calls into the driver and the ledger.

All that have an effect are sync and run in the worker's threads; none is repeated by Temporal.
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import structlog
from temporalio import activity
from temporalio.exceptions import ApplicationError

from ..activities.drive import Driver
from ..activities.kind import StepRetry
from ..activities.registry import HOST_KINDS, ROW_KINDS
from ..runtime import release
from ..runtime.completion import Completion
from ..runtime.ledger import operations, steps
from ..runtime.ledger.database import Database
from ..runtime.ledger.operations import Limits
from ..runtime.protocol import rules
from ..runtime.protocol.errors import (
    AbortRefused,
    CompletionRefused,
    DatabaseUnavailable,
    FenceLost,
)
from ..runtime.protocol.orders import (
    Looked,
    OperationRef,
    SettleOrder,
    StepOrder,
    Verb,
    step_order_name,
)
from ..runtime.protocol.plan import LONG_KINDS
from ..runtime.protocol.states import OPEN_OPERATION_STATES
from ..runtime.recovery import Recovery
from .dispatch import dispatch
from .engine import Engine

log = structlog.get_logger(__name__)

ACTIVE_FOR_S: Final = 30.0
"""Longer than a step may wait for a place (``SCHEDULE_LIMIT`` in the workflow)."""


class CreationActivities:
    """What the creation workflow may ask of this worker."""

    def __init__(
        self,
        database: Database,
        driver: Driver,
        recovery: Recovery,
        engine: Engine,
        limits: Limits,
        host_id: str,
    ) -> None:
        self._database = database
        self._driver = driver
        self._recovery = recovery
        self._engine = engine
        self._limits = limits
        self._host_id = host_id
        self._completion = Completion(database, limits)
        self._active: dict[str, float] = {}
        self._lock = threading.Lock()
        self._in_flight = 0
        self.stopping = threading.Event()
        """Set when the worker may wait no longer: long work ends at its next beat."""

    def in_flight(self) -> int:
        """Activities that run now: the slots that are taken."""
        with self._lock:
            return self._in_flight

    def active(self) -> frozenset[str]:
        """The creations that this worker is driving, which its sweep leaves alone.

        One that waits for a place or for somebody's lock is driven too. One that was not heard of
        for a while (its workflow was ended from outside, say) is not.
        """
        oldest = time.monotonic() - ACTIVE_FOR_S
        with self._lock:
            self._active = {k: seen for k, seen in self._active.items() if seen >= oldest}
            return frozenset(self._active)

    def long(self) -> list[Callable[..., Any]]:
        """What may take minutes: regular activities on a task queue of their own."""
        return [
            self._step(verb, kind) for kind in LONG_KINDS for verb in (Verb.PERFORM, Verb.RESOLVE)
        ]

    def short(self) -> list[Callable[..., Any]]:
        """Everything else: local activities."""
        moves: dict[str, Callable[[SettleOrder], None]] = {
            "stay": self._stay,
            "require_undo": self._require_undo,
            "finish_release": self._finish_release,
            "enter_completion": self._enter_completion,
            "commit_completion": self._commit_completion,
            "abort": self._abort,
            "park": self._park,
        }
        kinds = [*HOST_KINDS, *ROW_KINDS]
        return [
            self._reader("begin", self._count_driver),
            self._reader("look", None),
            *(
                self._step(verb, kind)
                for kind in kinds
                for verb in Verb
                if kind not in LONG_KINDS or verb is Verb.COMPENSATE
            ),
            *(self._settler(name, move) for name, move in moves.items()),
            self._dispatcher(),
        ]

    # -- what an activity is made of ----------------------------------------------------------

    def _reader(
        self, name: str, first: Callable[[OperationRef], None] | None
    ) -> Callable[[OperationRef], Looked]:
        @activity.defn(name=name, no_thread_cancel_exception=True)
        def read(ref: OperationRef) -> Looked:
            with self._noted(ref.operation_id):
                try:
                    if first is not None:
                        first(ref)
                    return self._settle_activity(self._driver.look(ref.operation_id, ref.fence))
                except DatabaseUnavailable:
                    raise  # repeated, for as long as it takes
                except Exception as error:
                    # Reading it again would say the same: an operation that is not in this ledger.
                    raise ApplicationError(
                        str(error), type=type(error).__name__, non_retryable=True
                    ) from error

        return read

    def _step(self, verb: Verb, kind: str) -> Callable[[StepOrder], Looked]:
        long = kind in LONG_KINDS and verb is not Verb.COMPENSATE
        beat = self._beat if long else self._look_up

        @activity.defn(name=step_order_name(verb, kind), no_thread_cancel_exception=True)
        def drive(order: StepOrder) -> Looked:
            with self._noted(order.operation_id):
                return self._settle_activity(self._driver.drive(order, beat))

        return drive

    def _settler(
        self, name: str, move: Callable[[SettleOrder], None]
    ) -> Callable[[SettleOrder], Looked]:
        @activity.defn(name=name, no_thread_cancel_exception=True)
        def settle(order: SettleOrder) -> Looked:
            with self._noted(order.operation_id):
                try:
                    move(order)
                except (FenceLost, AbortRefused) as refusal:
                    # Somebody else moved it, or a lost answer had: the snapshot says what is true.
                    log.info("move.refused", operation=order.operation_id, code=refusal.code)
                return self._settle_activity(self._driver.look(order.operation_id, order.fence))

        return settle

    def _dispatcher(self) -> Callable[[SettleOrder], Any]:
        @activity.defn(name="dispatch_run")
        async def dispatch_run(order: SettleOrder) -> Looked:
            await dispatch(self._engine, self._database, order.detail, self._host_id)
            return self._settle_activity(
                await asyncio.to_thread(self._driver.look, order.operation_id, order.fence)
            )

        return dispatch_run

    @contextmanager
    def _noted(self, operation_id: str) -> Iterator[None]:
        with self._lock:
            self._active[operation_id] = math.inf  # for as long as it runs
            self._in_flight += 1
        try:
            yield
        finally:
            with self._lock:
                self._in_flight -= 1
                if operation_id in self._active:
                    self._active[operation_id] = time.monotonic()

    def _settle_activity(self, looked: Looked) -> Looked:
        # One that waits for its due time takes no slot either, and its lease covers the wait.
        if isinstance(rules.next_action(looked.snapshot), rules.Stop | rules.Wait):
            with self._lock:
                self._active.pop(looked.snapshot.operation_id, None)
        return looked

    def _beat(self) -> None:
        activity.heartbeat()
        self._look_up()

    def _look_up(self) -> None:
        # A local activity lives by its workflow task and has nobody else to tell.
        if self.stopping.is_set():
            raise StepRetry("worker.stopping", "the worker was stopped; another goes on")

    # -- the moves ----------------------------------------------------------------------------

    def _count_driver(self, ref: OperationRef) -> None:
        with self._database.transaction("creation.begin") as connection:
            operations.count_driver(connection, ref.operation_id, ref.fence)

    def _stay(self, order: SettleOrder) -> None:
        with self._database.transaction("creation.stay") as connection:
            operations.hold(
                connection,
                self._database,
                order.operation_id,
                order.fence,
                lease_ms=self._limits.lease_ms,
                states=OPEN_OPERATION_STATES,
            )

    def _require_undo(self, order: SettleOrder) -> None:
        with self._database.transaction("undo.require") as connection:
            operations.hold(
                connection,
                self._database,
                order.operation_id,
                order.fence,
                lease_ms=self._limits.lease_ms,
            )
            steps.require_undo(connection, order.operation_id)

    def _finish_release(self, order: SettleOrder) -> None:
        release.finish_claimed(self._database, self._limits, order.operation_id, order.fence)

    def _enter_completion(self, order: SettleOrder) -> None:
        self._or_park(self._completion.enter, order)

    def _commit_completion(self, order: SettleOrder) -> None:
        self._or_park(self._completion.commit, order)

    def _abort(self, order: SettleOrder) -> None:
        self._completion.abort(order.operation_id, order.fence)

    def _park(self, order: SettleOrder) -> None:
        self._recovery.park(order.operation_id, order.fence, order.detail)

    def _or_park(self, phase: Callable[[str, int], None], order: SettleOrder) -> None:
        try:
            phase(order.operation_id, order.fence)
        except CompletionRefused as refusal:
            # What is stored is not what was proven: nothing here may be decided by a machine.
            field = refusal.fields.get("field")
            self._recovery.park(
                order.operation_id, order.fence, f"completion refused: {field}: {refusal.message}"
            )
