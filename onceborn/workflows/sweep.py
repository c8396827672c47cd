"""The sweep: finds creations whose owner is gone and makes this worker their owner.

It looks at the ledger alone, so nothing that Temporal forgets is lost. It runs in every worker
process, never claims more than the worker has free slots, and one hanging creation cannot hold it:
it only claims and starts workflows.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Final

import structlog

from ..activities.cleanup import CleanupDriver
from ..runtime.ledger import hosts, runs
from ..runtime.ledger.database import Database
from ..runtime.protocol.errors import ConfigurationError, OncebornError
from ..runtime.recovery import Owned, Recovery
from .dispatch import dispatch, start
from .engine import Engine, host_queue

log = structlog.get_logger(__name__)

PASS_LIMIT_S: Final = 30.0
HOST_SEEN_EVERY_S: Final = 5.0
RUNS_EVERY_S: Final = 30.0
RUNS_A_PASS: Final = 100


class Sweep:
    """One worker process's sweep. ``free_slots`` says how many creations it may take now."""

    def __init__(
        self,
        database: Database,
        recovery: Recovery,
        engine: Engine,
        host_id: str,
        host_name: str,
        free_slots: Callable[[], int],
        interval_s: float,
        cleanup: CleanupDriver | None = None,
    ) -> None:
        self._database = database
        self._recovery = recovery
        self._engine = engine
        self._host_id = host_id
        self._host_name = host_name
        self._free_slots = free_slots
        self._interval_s = interval_s
        self._cleanup = cleanup
        self._cleaning: asyncio.Task[None] | None = None
        self._done_at: dict[str, float] = {}

    async def run(self) -> None:
        """Pass after pass until cancelled; a pass that fails is logged and tried again.

        Raises:
            ConfigurationError: this host was evicted; its worker must stop.
        """
        try:
            await self._passes()
        finally:
            await self._stop_cleaning()

    async def _passes(self) -> None:
        while True:
            await asyncio.sleep(self._interval_s * random.uniform(0.75, 1.25))  # noqa: S311
            try:
                async with asyncio.timeout(PASS_LIMIT_S):
                    await self.once()
            except ConfigurationError:
                raise
            except TimeoutError:
                log.warning("sweep.pass_too_long", limit_s=PASS_LIMIT_S)
            except OncebornError as error:
                log.warning("sweep.pass_failed", code=error.code, reason=error.message)

    async def once(self) -> int:
        """One pass; returns how many creations were taken over.

        Raises:
            ConfigurationError: the host was evicted.
            DatabaseUnavailable, EngineUnavailable: what was claimed is claimed again later.
        """
        await self._note_host()
        self._start_cleaning()
        # Without an engine a claim would only raise the fence: ask it first.
        await self._engine.check()
        taken = await asyncio.to_thread(self._claim)
        for owned in taken:
            log.info("sweep.taken", operation=owned.operation_id, fence=owned.fence)
            await start(self._engine, owned)
        for run_id in await asyncio.to_thread(self._undispatched):
            await dispatch(self._engine, self._database, run_id, self._host_id)
        await self._restart_runs()
        return len(taken)

    def _start_cleaning(self) -> None:
        # Beside the pass, one at a time: removing a folder may take long, and needs no engine.
        if self._cleanup is not None and (self._cleaning is None or self._cleaning.done()):
            self._cleaning = asyncio.create_task(self._clean(self._cleanup))

    async def _clean(self, cleanup: CleanupDriver) -> None:
        try:
            await asyncio.to_thread(cleanup.drive_due)
        except OncebornError as error:
            log.warning("sweep.cleanup_failed", code=error.code, reason=error.message)
        except Exception:
            log.exception("sweep.cleanup_failed")  # the lease runs out; it is tried again

    async def _stop_cleaning(self) -> None:
        if self._cleanup is not None and self._cleaning is not None:
            self._cleanup.stop()
            await self._cleaning

    async def _restart_runs(self) -> None:
        # A run whose workflow Temporal has lost is supervised on: starting it again adopts the
        # agent that lives, and is nothing where the workflow is there.
        if not self._due("runs", RUNS_EVERY_S):
            return
        after = ""
        while batch := await asyncio.to_thread(self._open_runs, after):
            for run_id in batch:
                await self._engine.start_run(run_id, host_queue(self._host_id))
            after = batch[-1]
        self._done_at["runs"] = asyncio.get_running_loop().time()

    def _due(self, what: str, every_s: float) -> bool:
        done_at = self._done_at.get(what)
        return done_at is None or asyncio.get_running_loop().time() - done_at >= every_s

    async def _note_host(self) -> None:
        if not self._due("host", HOST_SEEN_EVERY_S):
            return
        if not await asyncio.to_thread(self._seen):
            raise ConfigurationError(
                f"host {self._host_id} was evicted; its worker may not run again."
                " Start a new host with an empty data folder.",
                host=self._host_id,
            )
        self._done_at["host"] = asyncio.get_running_loop().time()

    def _seen(self) -> bool:
        with self._database.transaction("host.seen") as connection:
            return hosts.seen(
                connection,
                self._database,
                self._host_id,
                self._host_name,
                host_queue(self._host_id),
            )

    def _claim(self) -> list[Owned]:
        free = self._free_slots()
        if free <= 0 or not self._recovery.any_due(self._host_id):
            return []
        return self._recovery.claim(self._host_id, free)

    def _open_runs(self, after: str) -> list[str]:
        with self._database.reading() as connection:
            return runs.open_runs(connection, self._host_id, RUNS_A_PASS, after=after)

    def _undispatched(self) -> list[str]:
        with self._database.reading() as connection:
            return runs.undispatched(connection, self._host_id, RUNS_A_PASS)
