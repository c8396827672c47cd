"""The worker process: one host's hands. Drives creations, runs agents, and sweeps."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any, Final

import structlog
from temporalio import workflow
from temporalio.worker import Worker
from temporalio.worker.workflow_sandbox import SandboxedWorkflowRunner

from ..activities.cleanup import CleanupDriver
from ..activities.drive import Driver
from ..activities.host import open_host
from ..activities.locks import HostLocks
from ..runtime.cleanup import Cleanup
from ..runtime.ledger.database import Database
from ..runtime.ledger.schema import require_head
from ..runtime.protocol.errors import (
    ConfigurationError,
    DatabaseUnavailable,
    EngineUnavailable,
    OncebornError,
)
from ..runtime.recovery import Recovery
from ..runtime.settings import Settings
from .agent_run import AgentRunWorkflow
from .creation import CreationWorkflow
from .creation_activities import CreationActivities
from .engine import Engine, host_queue
from .run_activities import RunActivities
from .sweep import Sweep

log = structlog.get_logger(__name__)

STICKY_LIMIT: Final = timedelta(seconds=2)
"""After this, work for a dead worker's cached workflow goes to another (design 7-performance)."""
GRACE: Final = timedelta(seconds=10)
RETRY_START_S: Final = 2.0
WORKFLOWS: Final = (CreationWorkflow, AgentRunWorkflow)


def owner_name() -> str:
    """Who this process is, for people who read the ledger."""
    return f"{socket.gethostname()}/{os.getpid()}"


async def run_worker(settings: Settings, stop: asyncio.Event | None = None) -> None:
    """Work until SIGTERM or SIGINT (or ``stop``).

    While the database or Temporal cannot be reached it says so and tries again: what was admitted
    is finished when they are back.

    Raises:
        ConfigurationError: the settings, the schema or the host do not allow a worker.
    """
    stopping = stop or _on_signals()
    await check_workflows()
    database = Database(settings.resolved_database_url, pool_size=settings.slots + 8)
    try:
        await _with_retries(stopping, lambda: asyncio.to_thread(require_head, database))
        if not stopping.is_set():
            await _work(settings, database, stopping)
    finally:
        database.dispose()


async def check_workflows() -> None:
    """Load every workflow in Temporal's sandbox, before anything is claimed or polled for.

    Raises:
        ConfigurationError: one does not load there; says which and why.
    """
    for each in WORKFLOWS:
        definition = workflow._Definition.must_from_class(each)
        try:
            SandboxedWorkflowRunner().prepare_workflow(definition)
        except Exception as error:
            raise ConfigurationError(
                f"workflow {definition.name} does not load in Temporal's sandbox:"
                f" {type(error).__name__}: {error}; this installation is damaged or was changed,"
                " install it again"
            ) from error


async def _work(settings: Settings, database: Database, stopping: asyncio.Event) -> None:
    host = await asyncio.to_thread(open_host, settings)
    limits = settings.limits
    engine = Engine(settings)
    recovery = Recovery(database, limits, owner_name())
    locks = HostLocks(host.data / "locks")
    driver = Driver(database, host, locks, limits, settings)
    activities = CreationActivities(database, driver, recovery, engine, limits, host.host_id)
    sweep = Sweep(
        database,
        recovery,
        engine,
        host.host_id,
        socket.gethostname(),
        lambda: settings.slots - activities.active(),
        settings.sweep_interval_s,
        CleanupDriver(database, host, locks, Cleanup(database, settings)),
    )
    # The first pass comes before the first poll: what a dead owner left is taken over under a new
    # fence rather than picked up half-way by a redelivery.
    await _with_retries(stopping, sweep.once)
    if stopping.is_set():
        return
    executor = ThreadPoolExecutor(settings.slots, thread_name_prefix="activity")
    worker = Worker(
        await engine.client(),
        task_queue=host_queue(host.host_id),
        workflows=WORKFLOWS,
        activities=[*activities.all(), *RunActivities(database, host).all()],
        activity_executor=executor,
        max_concurrent_local_activities=settings.slots,
        sticky_queue_schedule_to_start_timeout=STICKY_LIMIT,
        graceful_shutdown_timeout=GRACE,
        identity=owner_name(),
    )
    log.info("worker.started", host=host.host_id, data=str(host.data))
    async with worker:
        sweeping = asyncio.create_task(sweep.run())
        waiting = asyncio.create_task(stopping.wait())
        try:
            done, _ = await asyncio.wait({sweeping, waiting}, return_when=asyncio.FIRST_COMPLETED)
            if sweeping in done:
                sweeping.result()
        finally:
            for task in (sweeping, waiting):
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError, OncebornError):
                    await task
    executor.shutdown(wait=True)
    log.info("worker.stopped", host=host.host_id)


async def _with_retries(stopping: asyncio.Event, attempt: Callable[[], Awaitable[Any]]) -> None:
    while not stopping.is_set():
        try:
            await attempt()
        except (DatabaseUnavailable, EngineUnavailable) as error:
            log.warning("worker.waiting", code=error.code, reason=error.message)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stopping.wait(), RETRY_START_S)
        else:
            return


def _on_signals() -> asyncio.Event:
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for name in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(name, stopping.set)
    return stopping
