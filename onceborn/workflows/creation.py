"""The creation loop: read the snapshot, ask what is legal, do it, until there is nothing to do.

One workflow drives one operation under one fence; its ID is ``creation/<operation>/<fence>``. It
decides nothing by itself and remembers nothing that matters: the ledger does. If Temporal loses it,
the sweep starts another under the next fence.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Final

from temporalio import workflow
from temporalio.common import RetryPolicy
from temporalio.exceptions import FailureError, TimeoutType, is_cancelled_exception
from temporalio.exceptions import TimeoutError as ActivityTimeout

with workflow.unsafe.imports_passed_through():
    from ..runtime.protocol import rules
    from ..runtime.protocol.orders import (
        LONG_STEPS_QUEUE,
        Looked,
        OperationRef,
        SettleOrder,
        StepOrder,
        is_long,
        order_of,
    )

    # Not used here, but the converter resolves the annotations of what it reads by the modules
    # that the sandbox has seen imported.
    from ..runtime.protocol.snapshot import Snapshot as _Snapshot  # noqa: F401
    from ..runtime.protocol.states import StepState as _StepState  # noqa: F401

ONCE: Final = RetryPolicy(maximum_attempts=1)
"""Temporal repeats nothing that has an effect: the ledger decides whether to."""

READING: Final = RetryPolicy(
    initial_interval=timedelta(milliseconds=250), maximum_interval=timedelta(seconds=2)
)
"""Reading the ledger is repeated for as long as the database cannot be reached."""

STEP_LIMIT: Final = timedelta(minutes=30)
HEARTBEAT_LIMIT: Final = timedelta(seconds=6)
SCHEDULE_LIMIT: Final = timedelta(seconds=10)
"""Well below a lease: a creation that waits for a place says so to the ledger in time."""
FAILURES_IN_A_ROW: Final = 5
SHORTEST_WAIT_MS: Final = 50
SHORTEST_BUSY_WAIT_MS: Final = 50
LONGEST_BUSY_WAIT_MS: Final = 500


@workflow.defn(name="creation", failure_exception_types=[Exception])
class CreationWorkflow:
    """Drives one operation under one fence to its end, or until the fence is lost."""

    def __init__(self) -> None:
        self._failures = 0
        self._busy = 0

    @workflow.run
    async def run(self, ref: OperationRef) -> str:
        """Returns why it stopped: a ``StopReason``. Nobody but a waiter's wake-up relies on it."""
        try:
            return await self._loop(ref)
        except Exception as error:
            if not is_cancelled_exception(error):
                # The sweep claims the operation again; this says why there was a need to.
                workflow.logger.exception("creation workflow failed")
            raise

    async def _loop(self, ref: OperationRef) -> str:
        looked = await self._read("begin", ref)
        while True:
            action = rules.next_action(looked.snapshot)
            if isinstance(action, rules.Stop):
                return action.reason.value
            if workflow.info().is_continue_as_new_suggested():
                workflow.continue_as_new(ref)
            looked = await self._act(ref, action)

    async def _act(self, ref: OperationRef, action: rules.Action) -> Looked:
        try:
            looked = await self._do(ref, action)
        except FailureError as error:
            # Of a regular activity it is an ActivityError around the cause, of a local one the
            # cause itself (seen).
            if is_cancelled_exception(error):
                raise
            return await self._after_failure(ref, error)
        self._failures = 0
        if looked.busy:
            # Somebody works on the same clone. Waiting here takes no slot; the jitter lets many who
            # wait for one lock come back one after the other.
            longest = min(SHORTEST_BUSY_WAIT_MS * 1.5**self._busy, LONGEST_BUSY_WAIT_MS)
            self._busy += 1
            wait_ms = workflow.random().uniform(longest / 2, longest)
            await workflow.sleep(timedelta(milliseconds=wait_ms))
            return await self._read("look", ref)
        self._busy = 0
        return looked

    async def _do(self, ref: OperationRef, action: rules.Action) -> Looked:
        if isinstance(action, rules.Wait):
            await workflow.sleep(timedelta(milliseconds=max(action.wait_ms, SHORTEST_WAIT_MS)))
            return await self._read("look", ref)
        named = order_of(action, ref)
        assert named is not None
        name, order = named
        if isinstance(order, StepOrder) and is_long(order):
            # May outlast a workflow task: a regular activity, whose death its heartbeat shows.
            looked: Looked = await workflow.execute_activity(
                name,
                order,
                task_queue=workflow.info().task_queue + LONG_STEPS_QUEUE,
                result_type=Looked,
                start_to_close_timeout=STEP_LIMIT,
                schedule_to_start_timeout=SCHEDULE_LIMIT,
                heartbeat_timeout=HEARTBEAT_LIMIT,
                retry_policy=ONCE,
            )
            return looked
        return await self._local(name, order, ONCE)

    async def _read(self, name: str, ref: OperationRef) -> Looked:
        return await self._local(name, ref, READING)

    async def _local(self, name: str, argument: Any, retries: RetryPolicy) -> Looked:
        looked: Looked = await workflow.execute_local_activity(
            name,
            argument,
            result_type=Looked,
            start_to_close_timeout=STEP_LIMIT,
            retry_policy=retries,
        )
        return looked

    async def _after_failure(self, ref: OperationRef, error: FailureError) -> Looked:
        # What the attempt did is not known; the ledger and the world say. Bounded, so that a fault
        # that nobody foresaw ends here, is claimed again, and parks in time.
        cause = error.cause
        queued = isinstance(cause, ActivityTimeout) and cause.type is TimeoutType.SCHEDULE_TO_START
        if queued:  # every place was taken, and nothing was tried: still here, still ours
            return await self._local("stay", SettleOrder(ref.operation_id, ref.fence), READING)
        self._failures += 1
        if self._failures > FAILURES_IN_A_ROW:
            raise error
        await workflow.sleep(timedelta(milliseconds=200 * 2**self._failures))
        return await self._read("look", ref)
