"""Work on cleanup jobs on this host: the sweep's attempts at pending ones, an operator's purges.

An attempt at a pending job is the kind's own ``compensate`` once more, under the step's host lock:
it judges anew what is ours and clean, so a thing that came to hold somebody's work is kept.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

import structlog
from sqlalchemy import Connection

from ..runtime.cleanup import Cleanup, Job
from ..runtime.failpoints import failpoint
from ..runtime.ledger.cleanup import JobClaim
from ..runtime.ledger.database import Database
from ..runtime.protocol.errors import (
    DatabaseUnavailable,
    EntryRefused,
    FenceLost,
    OncebornError,
)
from .attempt import RENEW_EVERY_S, step_of
from .kind import (
    Compensated,
    Contents,
    Host,
    HostKind,
    KeptKind,
    Step,
    StepFailed,
    StepRetry,
    Transferred,
    Undetermined,
    Undone,
    World,
)
from .locks import HostLocks
from .registry import HOST_KINDS, KEPT_KINDS

log = structlog.get_logger(__name__)

JOBS_A_PASS: Final = 20


class CleanupDriver:
    """This host's hands for cleanup jobs. Safe to share between threads."""

    def __init__(
        self,
        database: Database,
        host: Host,
        locks: HostLocks,
        cleanup: Cleanup,
        host_kinds: Mapping[str, HostKind[Any]] = HOST_KINDS,
    ) -> None:
        self._database = database
        self._host = host
        self._locks = locks
        self._cleanup = cleanup
        self._host_kinds = host_kinds
        self._stopping = threading.Event()

    def stop(self) -> None:
        """Let the attempt under way end at its next heartbeat; another sweep goes on with it."""
        self._stopping.set()

    def drive_due(self, most: int = JOBS_A_PASS) -> int:
        """Try what is due, oldest first; how many jobs were tried.

        Raises:
            DatabaseUnavailable: what happened is not known; the lease runs out, and it is tried
                again.
        """
        for tried in range(most):
            job = None if self._stopping.is_set() else self._cleanup.take(self._host.host_id)
            if job is None:
                return tried
            failpoint("cleanup.claimed")
            try:
                self._drive(job)
            except FenceLost:
                log.info("cleanup.lost", job=job.claim.job_id)
        return most

    def _drive(self, job: Job) -> None:
        kind, step = self._host_kinds[job.row.kind], step_of(job.step)
        with self._locks.try_lock(kind.resource(step)) as lock:
            if lock is None:
                self._cleanup.later(job, "somebody works on it now")
                return
            undone = self._undo(kind, step, self._world(job.claim, (lock.fd,)))
            failpoint("cleanup.undone")
            self._record(job, undone)

    def _record(self, job: Job, undone: Undone) -> None:
        match undone:
            case Compensated(proof):
                self._cleanup.done(job.claim, proof)
                log.info("cleanup.done", job=job.claim.job_id)
            case Transferred(proof, "quarantined"):
                self._cleanup.keep(job.claim, proof)
                log.warning("cleanup.kept", job=job.claim.job_id)
            case Transferred(proof):
                self._cleanup.later(job, json.dumps(proof.get("not_removed", "not removable now")))
            case Undetermined(reason):
                self._cleanup.later(job, reason)

    def _undo(self, kind: HostKind[Any], step: Step[Any], world: World) -> Undone:
        try:
            return kind.compensate(step, world)
        except (StepFailed, StepRetry) as error:
            return Undetermined(f"{error.reason_code}: {error.message}")
        except (FenceLost, DatabaseUnavailable):
            raise
        except Exception as error:
            log.exception("cleanup.failed", operation=step.operation_id, step=step.key)
            return Undetermined(f"{type(error).__name__}: {error}")

    def _world(self, claim: JobClaim, lock_fds: tuple[int, ...]) -> World:
        renewed = time.monotonic()

        def guard() -> None:
            failpoint("cleanup.guard")
            if not self._cleanup.check(claim):
                raise FenceLost(job_id=claim.job_id)

        def heartbeat() -> None:
            nonlocal renewed
            if self._stopping.is_set():
                raise FenceLost("This worker stops; the job is tried again.", job_id=claim.job_id)
            if time.monotonic() - renewed >= RENEW_EVERY_S:
                self._cleanup.renew(claim)
                renewed = time.monotonic()

        @contextmanager
        def transaction() -> Iterator[Connection]:
            with self._cleanup.holding(claim) as connection:
                yield connection

        return World(
            host=self._host,
            database=self._database,
            guard=guard,
            heartbeat=heartbeat,
            transaction=transaction,
            lock_fds=lock_fds,
        )

    # -- quarantine -------------------------------------------------------------------------------

    def look(self, job_id: str) -> Contents:
        """What a quarantined entry of this host holds now.

        Raises:
            EntryRefused: no kind of ours knows such an entry.
        """
        row, step = self._cleanup.read(job_id)
        return _kept(row.kind).contents(row.id, step_of(step), json.loads(row.proof), self._host)

    def purge(self, job: Job, digest: str) -> Mapping[str, Any]:
        """Remove a claimed entry if it still is what ``digest`` was of; what was removed.

        Raises:
            EntryChanged, EntryRefused: nothing was removed.
            FenceLost: another purge has taken it over.
        """
        kept, step = _kept(job.row.kind), step_of(job.step)
        with self._locks.try_lock(self._host_kinds[job.row.kind].resource(step)) as lock:
            if lock is None:
                raise EntryRefused("Somebody works on it now; try again.", entry=job.row.id)
            world = self._world(job.claim, (lock.fd,))
            try:
                return kept.purge(job.row.id, step, json.loads(job.row.proof), world, digest)
            except OncebornError:
                raise
            except OSError as error:
                raise EntryRefused(
                    f"It could not be removed: {error.strerror}: {error.filename}", entry=job.row.id
                ) from error


def _kept(kind: str) -> KeptKind:
    if kind not in KEPT_KINDS:
        raise EntryRefused(f"There is no purge for what a step of kind {kind} left.")
    return KEPT_KINDS[kind]
