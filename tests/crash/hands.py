"""One process's hands: the product's own loop and run steps in line, as API and worker drive them.

No Temporal: its part, calling the next activity and calling again after an error, is played here.
Waiting moves the database's clock, as this process sees it.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeVar

from sqlalchemy import select
from support.loop import Bench
from temporalio.exceptions import ApplicationError

from onceborn.activities.run_steps import RunSteps
from onceborn.runtime import access
from onceborn.runtime.admission import Admission
from onceborn.runtime.failpoints import FailpointError
from onceborn.runtime.ledger import tables as t
from onceborn.runtime.ledger.attestation import Attestor
from onceborn.runtime.ledger.database import Clock, Database
from onceborn.runtime.profiles import Profile
from onceborn.runtime.protocol import rules
from onceborn.runtime.protocol.errors import DatabaseUnavailable, OncebornError
from onceborn.runtime.protocol.orders import OperationRef, order_of
from onceborn.runtime.recovery import Owned
from onceborn.workflows import dispatch

from .completed import MARK

T = TypeVar("T")

AFTER_LEASE_MS: Final = 60_000
"""Longer than every lease, shorter than what parks an operation that waits for a lock."""
FAILURES_IN_A_ROW: Final = 5
LAUNCH_TRIES: Final = 3
HOST: Final = "hst_" + "0" * 32
PROFILES: Final = {
    "marker": Profile(argv=("/bin/sh", "-c", f"echo agent $$ >> {MARK}"), time_limit_s=60)
}


class _Blocked(Exception):
    """Somebody's transaction is in the way."""


@dataclass
class Place:
    """Where a cell plays. ``body`` is the request of the creation that it is about."""

    root: Path
    url: str
    workspace_id: str = ""
    token: str = ""
    body: dict[str, Any] = field(default_factory=dict)

    @property
    def data(self) -> Path:
        return self.root / "data"


class Hands:
    """One process's. ``patience_s``: how long somebody else's lock or transaction is waited for."""

    def __init__(self, place: Place, *, clock_ms: int = 0, patience_s: float = 20.0) -> None:
        self.place = place
        self.patience_s = patience_s
        self.database = Database(place.url, pool_size=4, clock=Clock(clock_ms))
        settings = {"retry_base_s": 0.2, "retry_max_s": 1.0}
        self.bench = Bench(self.database, place.data, roots=(place.root,), host_id=HOST, **settings)
        self._runs = RunSteps(self.database, self.bench.host, grace_s=1.0)
        self._woken = False
        """Paused and awake again: it ends what it was at, and begins nothing."""
        signal.signal(signal.SIGCONT, self._wake)

    def _wake(self, *_: object) -> None:
        self._woken = True

    # -- the API ------------------------------------------------------------------------------

    def create(self) -> Owned | None:
        """Admit and hand off. None: somebody holds the identity already."""
        principal = access.authenticate(self.database, f"Bearer {self.place.token}")
        admission = Admission(
            self.database, Attestor(self.database), lambda: PROFILES, self.bench.settings
        )
        body = {"external_id": "E", **self.place.body}
        admitted = admission.admit(principal, self.place.workspace_id, body)
        return None if admitted.handle is None else self.bench.recovery.take(admitted.handle)

    # -- the workflow -------------------------------------------------------------------------

    def drive(self, owned: Owned | OperationRef, *, until: type[Any] | None = None) -> str:
        """The loop, as workflows/creation.py runs it. Returns why it stopped: a stop's reason,
        ``held`` by somebody's host lock, ``blocked`` by the database, or ``reached`` an action."""
        ref = OperationRef(owned.operation_id, owned.fence)
        name, argument = "begin", ref
        failures = 0
        deadline = time.monotonic() + self.patience_s
        while True:
            try:
                looked = self.bench.call(name, argument)
            except DatabaseUnavailable:
                if time.monotonic() > deadline:
                    return "blocked"
                name, argument = "look", ref
                continue
            except (FailpointError, OncebornError, ApplicationError):
                if name in ("begin", "look"):
                    return "failed"  # and with it the workflow: the sweep takes it again
                failures += 1
                if failures > FAILURES_IN_A_ROW:
                    raise
                name, argument = "look", ref
                continue
            if looked.busy:
                if time.monotonic() > deadline:
                    return "held"
                time.sleep(0.02)
                name, argument = "look", ref
                continue
            action = rules.next_action(looked.snapshot)
            if until is not None and isinstance(action, until):
                return "reached"
            if isinstance(action, rules.Stop):
                return str(action.reason)
            if isinstance(action, rules.DispatchRun):
                return str(rules.StopReason.COMPLETED)
            if isinstance(action, rules.Wait):
                self.database.clock.advance(max(action.wait_ms, 50))
                name, argument = "look", ref
                continue
            named = order_of(action, ref)
            assert named is not None
            name, argument = named  # type: ignore[assignment]

    # -- the run's workflow -------------------------------------------------------------------

    def run(self, run_id: str) -> str:
        """Launch, supervise, finish, as workflows/agent_run.py does. Returns the run's state, or
        ``held`` where its lock stays busy."""
        deadline = time.monotonic() + self.patience_s
        self._again(dispatch._note, self.database, run_id)
        seen = self._again(self._runs.launch, run_id)
        for _ in range(LAUNCH_TRIES - 1):
            # A shim that dies at a failpoint dies once.
            os.environ.pop("ONCEBORN_FAILPOINTS", None)
            if seen.state != "absent" or self._woken:
                break
            seen = self._again(self._runs.launch, run_id)
        while seen.state != "closed" and not self._woken:
            while self._runs.look(run_id).state in ("starting", "running"):
                if time.monotonic() > deadline:
                    return "held"
                time.sleep(0.01)
            seen = self._again(self._runs.finish, run_id, seen.reason)
            if time.monotonic() > deadline:
                return "held"
        return str(seen.reason)

    def _again(self, work: Callable[..., T], *arguments: Any) -> T:
        """Temporal repeats what failed for want of the database, and the workflow the rest."""
        deadline = time.monotonic() + self.patience_s
        failures = 0
        while True:
            try:
                return work(*arguments)
            except DatabaseUnavailable:
                if time.monotonic() > deadline:
                    raise _Blocked() from None
            except FailpointError:
                failures += 1
                if failures > FAILURES_IN_A_ROW:
                    raise

    # -- the worker ---------------------------------------------------------------------------

    def take_over(self) -> list[Owned]:
        """One pass of the sweep, long after every lease."""
        self.database.clock.advance(AFTER_LEASE_MS)
        recovery = self.bench.recovery
        return recovery.claim(HOST, 9) if recovery.any_due(HOST) else []

    def settle(self) -> str:
        """Sweep and drive until nothing is open; then the runs. Returns how the last of it ended;
        ``held`` or ``blocked`` where somebody else must go on first."""
        ended = "nothing"
        deadline = time.monotonic() + self.patience_s
        while not self._woken and self._open():
            try:
                taken = self.take_over()
            except DatabaseUnavailable:
                taken = []
            except FailpointError:
                continue
            if self._woken and not taken:
                break
            for owned in taken:
                ended = self.drive(owned)
                if ended in ("held", "blocked"):
                    return ended
            if not taken and time.monotonic() > deadline:
                return "blocked"
            if not taken:
                time.sleep(0.02)
        for run_id in [] if self._woken else self._open_runs():
            try:
                ended = f"run {self.run(run_id)}"
            except _Blocked:
                return "blocked"
            if ended == "run held":
                return "held"
        return ended

    def redelivered(self) -> list[str]:
        """The engine runs the same workflow's activities once more: nobody's fence is raised."""
        o = t.operations.c
        with self.database.reading() as connection:
            found = connection.execute(
                select(o.id, o.fence).where(
                    o.state.not_in(("completed", "aborted")), o.parked_reason.is_(None), o.fence > 0
                )
            ).all()
        return [self.drive(OperationRef(*row)) for row in found]

    def first(self) -> str:
        """A creation from the request to the agent's end."""
        try:
            owned = self.create()
        except (FailpointError, DatabaseUnavailable):
            owned = None
        if owned is not None:
            ended = self.drive(owned)
            if ended in ("held", "blocked"):
                return ended
        return self.settle()

    def retried(self) -> str:
        """The caller asks again, and a worker settles what there is."""
        try:
            owned = self.create()
        except DatabaseUnavailable:
            owned = None
        if owned is not None:
            self.drive(owned)
        return self.settle()

    def _open(self) -> bool:
        o = t.operations.c
        with self.database.reading() as connection:
            found = connection.execute(
                select(o.id).where(
                    o.state.not_in(("completed", "aborted")), o.parked_reason.is_(None)
                )
            )
            return found.first() is not None

    def _open_runs(self) -> list[str]:
        r = t.runs.c
        with self.database.reading() as connection:
            found = select(r.id).where(r.finished_at.is_(None)).order_by(r.id)
            return list(connection.execute(found).scalars())
