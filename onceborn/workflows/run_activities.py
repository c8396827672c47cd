"""What the agent run's workflow asks of its host: launch, supervise, finish.

The rules are in activities/run_steps.py; here they meet Temporal.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from typing import Any, Final, ParamSpec, TypeVar

import structlog
from temporalio import activity
from temporalio.exceptions import ApplicationError

from ..activities.kind import Host
from ..activities.run_steps import RunSteps, Seen
from ..runtime.ledger.database import Database
from ..runtime.protocol.errors import DatabaseUnavailable, OncebornError
from .agent_run import FINISH, LAUNCH, SUPERVISE, RunReport

log = structlog.get_logger(__name__)

POLL_S: Final = 0.5
LEDGER_EVERY: Final = 8
"""Every so many polls the ledger is asked whether the run is still wanted."""

P = ParamSpec("P")
R = TypeVar("R")


class RunActivities:
    """The activities of one host's runs; ``all()`` is for the worker."""

    def __init__(
        self, database: Database, host: Host, *, grace_s: float = 10.0, poll_s: float = POLL_S
    ) -> None:
        self._steps = RunSteps(database, host, grace_s=grace_s)
        self._poll_s = poll_s

    def all(self) -> list[Callable[..., Any]]:
        """Every activity, to be registered with a worker."""
        return [self.launch, self.supervise, self.finish]

    @activity.defn(name=LAUNCH, no_thread_cancel_exception=True)
    def launch(self, run_id: str) -> RunReport:
        """Launch the run's agent, or adopt the one that lives; never a second one."""
        return _report(_only_the_ledger_is_retried(self._steps.launch)(run_id))

    @activity.defn(name=FINISH, no_thread_cancel_exception=True)
    def finish(self, run_id: str, reason: str) -> RunReport:
        """Record the run's result, unless its agent still runs."""
        return _report(_only_the_ledger_is_retried(self._steps.finish)(run_id, reason))

    @activity.defn(name=SUPERVISE)
    async def supervise(self, run_id: str) -> str:
        """Wait until the agent is gone; reads only, but stops one that is no longer wanted."""
        polls = 0
        while True:
            seen = await asyncio.to_thread(self._steps.look, run_id)
            activity.heartbeat(seen.state)
            if seen.state not in ("starting", "running"):
                return seen.state
            polls += 1
            if polls % LEDGER_EVERY == 0:
                await self._stop_if_unwanted(run_id)
            await asyncio.sleep(self._poll_s)

    async def _stop_if_unwanted(self, run_id: str) -> None:
        try:
            await asyncio.to_thread(self._steps.stop_if_unwanted, run_id)
        except DatabaseUnavailable:
            log.info("run.ledger_unavailable", run=run_id)  # supervising goes on without it


def _report(seen: Seen) -> RunReport:
    return RunReport(seen.state, seen.reason)


def _only_the_ledger_is_retried(work: Callable[P, R]) -> Callable[P, R]:
    """Temporal repeats what failed because the database cannot be reached, and nothing else."""

    @functools.wraps(work)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return work(*args, **kwargs)
        except DatabaseUnavailable:
            raise
        except OncebornError as error:
            raise ApplicationError(error.message, type=error.code, non_retryable=True) from error
        except Exception as error:
            raise ApplicationError(
                repr(error), type="internal_error", non_retryable=True
            ) from error

    return wrapped
