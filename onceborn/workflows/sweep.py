"""The sweep: finds creations whose owner is gone and makes this worker their owner.

It looks at the ledger alone, so nothing that Temporal forgets is lost. It runs in every worker
process, never claims more than the worker has free slots, and one creation that hangs or cannot be
started does not hold the others up: each has its own share of the pass, and the pass its limit.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import asdict, dataclass
from typing import Any, Final

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
SHARE: Final = 1 / 3
"""What one creation or run may take of a pass. They are started side by side."""
HOST_SEEN_EVERY_S: Final = 5.0
RUNS_EVERY_S: Final = 30.0
RUNS_A_PASS: Final = 100


@dataclass(slots=True)
class Counts:
    """What the passes of one worker process have come to since it started."""

    passes: int = 0
    cut_off: int = 0
    """Passes that were ended at their limit; what they left is done by a later one."""
    failed: int = 0
    taken: int = 0
    not_started: int = 0
    """Creations and runs that the engine did not take in a pass; they come up again."""


class Sweep:
    """One worker process's sweep. ``free_slots`` says how many creations it may take now.

    ``driven_here``: the creations that this worker drives already, which are left alone however
    long they wait for a place.
    ``pass_limit_s``: after so many seconds a pass is ended, and the next one begins anew.
    """

    def __init__(
        self,
        database: Database,
        recovery: Recovery,
        engine: Engine,
        host_id: str,
        host_name: str,
        free_slots: Callable[[], int],
        interval_s: float,
        driven_here: Callable[[], frozenset[str]] = frozenset,
        cleanup: CleanupDriver | None = None,
        pass_limit_s: float = PASS_LIMIT_S,
    ) -> None:
        self._database = database
        self._recovery = recovery
        self._engine = engine
        self._host_id = host_id
        self._host_name = host_name
        self._free_slots = free_slots
        self._driven_here = driven_here
        self._interval_s = interval_s
        self._cleanup = cleanup
        self._cleaning: asyncio.Task[None] | None = None
        self._pass_limit_s = pass_limit_s
        self._done_at: dict[str, float] = {}
        self.counts = Counts()

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
            self.counts.passes += 1
            try:
                async with asyncio.timeout(self._pass_limit_s):
                    await self.once()
            except ConfigurationError:
                raise
            except TimeoutError:
                self.counts.cut_off += 1
                log.warning(
                    "sweep.pass_too_long", limit_s=self._pass_limit_s, **asdict(self.counts)
                )
            except OncebornError as error:
                self.counts.failed += 1
                log.warning("sweep.pass_failed", code=error.code, reason=error.message)
            except Exception:
                self.counts.failed += 1
                log.exception("sweep.pass_failed", **asdict(self.counts))

    async def once(self) -> int:
        """One pass; returns how many creations were taken over.

        Raises:
            ConfigurationError: the host was evicted, or Temporal is not set up for us.
            DatabaseUnavailable, EngineUnavailable: what was claimed is claimed again later.
        """
        await self._note_host()
        self._start_cleaning()
        # Without an engine a claim would only raise the fence: ask it first.
        await self._engine.check()
        taken = await asyncio.to_thread(self._claim)
        self.counts.taken += len(taken)
        for owned in taken:
            log.info("sweep.taken", operation=owned.operation_id, fence=owned.fence)
        await self._start_each((o.operation_id, start(self._engine, o)) for o in taken)
        waiting = await asyncio.to_thread(self._undispatched)
        await self._start_each(
            (run, dispatch(self._engine, self._database, run, self._host_id)) for run in waiting
        )
        await self._restart_runs()
        return len(taken)

    async def _start_each(self, starts: Iterable[tuple[str, Coroutine[Any, Any, object]]]) -> None:
        """Side by side: what becomes of one is nothing to the others."""
        errors = await asyncio.gather(*(self._start_one(name, work) for name, work in starts))
        for error in errors:
            if isinstance(error, ConfigurationError):
                raise error

    async def _start_one(self, name: str, work: Coroutine[Any, Any, object]) -> Exception | None:
        try:
            async with asyncio.timeout(self._pass_limit_s * SHARE):
                await work
        except Exception as error:
            self.counts.not_started += 1
            told = error.message if isinstance(error, OncebornError) else repr(error)
            log.warning("sweep.not_started", which=name, reason=told, **asdict(self.counts))
            return error
        return None

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
            queue = host_queue(self._host_id)
            await self._start_each((run, self._engine.start_run(run, queue)) for run in batch)
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
        return self._recovery.claim(self._host_id, free, leave=self._driven_here())

    def _open_runs(self, after: str) -> list[str]:
        with self._database.reading() as connection:
            return runs.open_runs(connection, self._host_id, RUNS_A_PASS, after=after)

    def _undispatched(self) -> list[str]:
        with self._database.reading() as connection:
            return runs.undispatched(connection, self._host_id, RUNS_A_PASS)
