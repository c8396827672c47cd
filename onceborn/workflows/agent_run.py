"""One run: launch the agent once, supervise it to its end, record the result.

The workflow remembers nothing that matters. What is launched is told by the run's folder on its
host, what is recorded by the ledger, so any number of these workflows, one after another, come to
the same end: the first ones may have been terminated, or lost with all of Temporal's data.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Final

from temporalio import workflow
from temporalio.common import RetryPolicy

LAUNCH: Final = "run_launch"
SUPERVISE: Final = "run_supervise"
FINISH: Final = "run_finish"

SHORT_LIMIT: Final = timedelta(seconds=60)
LONGEST_RUN: Final = timedelta(days=8)
HEARTBEAT_LIMIT: Final = timedelta(seconds=5)
LAUNCH_TRIES: Final = 3
PAUSE: Final = timedelta(seconds=1)

AGAIN: Final = RetryPolicy(
    initial_interval=timedelta(milliseconds=500), maximum_interval=timedelta(seconds=5)
)
"""For supervising, which only reads; and for a ledger that cannot be reached: everything else that
the two short activities raise is marked as not to be retried (run_activities.py)."""


@dataclass(frozen=True)
class RunReport:
    """What an activity saw. ``state``: a look's state, or ``closed`` once the ledger has a result.

    ``reason`` says why nothing was launched, where nothing was.
    """

    state: str
    reason: str = ""


@workflow.defn(name="agent_run", failure_exception_types=[Exception])
class AgentRunWorkflow:
    """Drives one run to a result in the ledger; returns the run's state there."""

    @workflow.run
    async def run(self, run_id: str) -> str:
        seen = await self._launch(run_id)
        while seen.state != "closed":
            if seen.state in ("starting", "running"):
                await self._supervise(run_id)
            seen = await self._finish(run_id, seen.reason)
            if seen.state != "closed":
                await workflow.sleep(PAUSE)
        return seen.reason

    async def _launch(self, run_id: str) -> RunReport:
        seen = RunReport("absent")
        for attempt in range(LAUNCH_TRIES):
            if attempt:
                await workflow.sleep(PAUSE * attempt)
            # A local activity: if the worker dies in it, it is done again as soon as the workflow
            # task times out, and then begins with a look.
            seen = await workflow.execute_local_activity(
                LAUNCH,
                run_id,
                result_type=RunReport,
                start_to_close_timeout=SHORT_LIMIT,
                retry_policy=AGAIN,
            )
            if seen.state != "absent":
                break
        return seen

    async def _supervise(self, run_id: str) -> None:
        await workflow.execute_activity(
            SUPERVISE,
            run_id,
            start_to_close_timeout=LONGEST_RUN,
            heartbeat_timeout=HEARTBEAT_LIMIT,
            retry_policy=AGAIN,
        )

    async def _finish(self, run_id: str, reason: str) -> RunReport:
        seen: RunReport = await workflow.execute_local_activity(
            FINISH,
            args=[run_id, reason],
            result_type=RunReport,
            start_to_close_timeout=SHORT_LIMIT,
            retry_policy=AGAIN,
        )
        return seen
