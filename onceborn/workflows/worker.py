"""The worker process: one host's hands. Drives creations, runs agents, and sweeps."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import warnings
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from datetime import timedelta
from typing import Any, Final

import structlog
from temporalio import workflow
from temporalio.client import Client
from temporalio.worker import Worker
from temporalio.worker.workflow_sandbox import SandboxedWorkflowRunner

from ..activities.cleanup import CleanupDriver
from ..activities.drive import Driver
from ..activities.host import join_host, open_host
from ..activities.kind import Host
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
from ..runtime.protocol.orders import LONG_STEPS_QUEUE
from ..runtime.recovery import Recovery
from ..runtime.settings import Settings
from .agent_run import AgentRunWorkflow
from .creation import CreationWorkflow
from .creation_activities import CreationActivities
from .engine import Engine, agents_queue, host_queue
from .run_activities import RunActivities
from .sweep import Sweep

log = structlog.get_logger(__name__)

STICKY_LIMIT: Final = timedelta(seconds=2)
"""After this, work for a dead worker's cached workflow goes to another (design 7-performance)."""
GRACE: Final = timedelta(seconds=10)
AGENT_THREADS: Final = 8
LOOP_CONNECTIONS: Final = 32
"""For what the event loop's own threads ask: as many as there can be of them."""
MOST_AGENTS: Final = 5_000
"""Supervising is asynchronous and costs no thread; this only bounds the bookkeeping."""
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
    threads = settings.slots + settings.long_slots + AGENT_THREADS
    database = Database(settings.resolved_database_url, pool_size=threads + LOOP_CONNECTIONS)
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
    joined = await asyncio.to_thread(join_host, host)
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
        lambda: settings.slots - activities.in_flight(),
        settings.sweep_interval_s,
        activities.active,
        CleanupDriver(database, host, locks, Cleanup(database, settings)),
    )
    # The first pass comes before the first poll: what a dead owner left is taken over under a new
    # fence rather than picked up half-way by a redelivery.
    await _with_retries(stopping, sweep.once)
    if stopping.is_set():
        return
    async with AsyncExitStack() as stack:
        for worker in _workers(settings, await engine.client(), host, activities, database, stack):
            await stack.enter_async_context(worker)
        log.info("worker.started", host=host.host_id, data=str(host.data))
        sweeping = asyncio.create_task(sweep.run())
        waiting = asyncio.create_task(stopping.wait())
        try:
            done, _ = await asyncio.wait({sweeping, waiting}, return_when=asyncio.FIRST_COMPLETED)
            if sweeping in done:
                sweeping.result()
        finally:
            # Ordinary work may end; what takes longer is cut off, and another goes on with it.
            asyncio.get_running_loop().call_later(GRACE.total_seconds(), activities.stopping.set)
            for task in (sweeping, waiting):
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError, OncebornError):
                    await task
    os.close(joined)
    log.info("worker.stopped", host=host.host_id)


def _workers(
    settings: Settings,
    client: Client,
    host: Host,
    activities: CreationActivities,
    database: Database,
    stack: AsyncExitStack,
) -> Iterator[Worker]:
    """Three queues, so that none of them starves another: creations with their short steps, long
    steps, and the supervising of agents."""

    def threads(count: int, name: str) -> ThreadPoolExecutor:
        executor = ThreadPoolExecutor(count, thread_name_prefix=name)
        stack.callback(executor.shutdown, wait=True)
        return executor

    queue = host_queue(host.host_id)
    yield Worker(
        client,
        task_queue=queue,
        workflows=[CreationWorkflow],
        activities=activities.short(),
        activity_executor=threads(settings.slots, "short"),
        max_concurrent_local_activities=settings.slots,
        sticky_queue_schedule_to_start_timeout=STICKY_LIMIT,
        graceful_shutdown_timeout=GRACE,
        identity=owner_name(),
    )
    yield Worker(
        client,
        task_queue=queue + LONG_STEPS_QUEUE,
        activities=activities.long(),
        activity_executor=threads(settings.long_slots, "long"),
        max_concurrent_activities=settings.long_slots,
        graceful_shutdown_timeout=GRACE,
        identity=owner_name(),
    )
    with warnings.catch_warnings():
        # That there are fewer threads than activities: supervising needs none, launching is short.
        warnings.filterwarnings("ignore", message="Worker max_concurrent_activities is")
        agents = Worker(
            client,
            task_queue=agents_queue(host.host_id),
            workflows=[AgentRunWorkflow],
            activities=RunActivities(database, host).all(),
            activity_executor=threads(AGENT_THREADS, "agents"),
            max_concurrent_activities=MOST_AGENTS,
            sticky_queue_schedule_to_start_timeout=STICKY_LIMIT,
            graceful_shutdown_timeout=GRACE,
            identity=owner_name(),
        )
    yield agents


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
