"""Looking at the world again, and comparing it with the evidence field by field. Changes nothing.

Every kind's own ``observe`` says what is there now, under the step's host lock and with a guard
that refuses every mutation. What a step's undoing proved is held against the world as well.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, Final, Literal, NoReturn

from sqlalchemy import Connection, Row

from ..runtime.ledger import runs, sessions, stuck
from ..runtime.ledger import steps as ledger_steps
from ..runtime.ledger.database import Database
from ..runtime.protocol.canonical import Domain, digest_bytes
from ..runtime.protocol.errors import FenceLost, WrongHost
from ..runtime.protocol.evidence import LaunchArmed, SessionPrepared
from ..runtime.protocol.plan import ROW_ONLY_KINDS
from ..runtime.protocol.states import CompensationState, StepState
from .attempt import step_of
from .kind import (
    Absent,
    Conflict,
    Host,
    HostKind,
    Observation,
    OursHalfMade,
    Present,
    Step,
    StepFailed,
    StepRetry,
    Undetermined,
    World,
)
from .locks import HostLocks
from .registry import HOST_KINDS

Verdict = Literal["same", "differs", "busy", "nothing_to_compare"]

LOCK_PATIENCE_S: Final = 5.0
_OF_THE_MAKING: Final = frozenset({"warnings"})
"""Fields of evidence that tell how a thing was made, and not what it is."""


@dataclass(frozen=True, slots=True)
class Difference:
    """One field of the evidence that the world no longer shows."""

    field: str
    evidence: Any
    world: Any


@dataclass(frozen=True, slots=True)
class Verified:
    """One step against the world."""

    step: str
    verdict: Verdict
    what: str
    differences: tuple[Difference, ...] = ()

    def document(self) -> dict[str, Any]:
        return asdict(self)


class Verifier:
    """One host's eyes."""

    def __init__(
        self,
        database: Database,
        host: Host,
        locks: HostLocks,
        host_kinds: Mapping[str, HostKind[Any]] = HOST_KINDS,
    ) -> None:
        self._database = database
        self._host = host
        self._locks = locks
        self._host_kinds = host_kinds

    def verify(self, operation: Row[Any]) -> list[Verified]:
        """Every step of an operation (its row), in the plan's order.

        Raises:
            WrongHost: its effects are on another host.
        """
        with self._database.snapshot() as connection:
            rows = stuck.steps_of(connection, operation.id)
        if operation.host_id != self._host.host_id:
            raise WrongHost(
                f"What operation {operation.id} made is on host {operation.host_id}, this is "
                f"{self._host.host_id}; run the command there, with that host's ONCEBORN_DATA.",
                host=operation.host_id,
            )
        return [self._step(row) for row in rows]

    def _step(self, row: Row[Any]) -> Verified:
        undone = CompensationState(row.compensation)
        if undone is CompensationState.TRANSFERRED:
            what = "handed to a cleanup job, which `onceborn ops show` lists"
            return Verified(row.step_key, "nothing_to_compare", what)
        made = row.state in (StepState.SUCCEEDED, StepState.ARMED, StepState.CANCELLED)
        if not made:
            return Verified(row.step_key, "nothing_to_compare", f"it is {row.state}")
        with self._database.reading() as connection:
            full = ledger_steps.load(connection, row.operation_id, row.step_key)
        seen = self._look(full, step_of(full))
        if seen is None:
            return Verified(row.step_key, "busy", "somebody works on it now; look again")
        if undone is CompensationState.COMPENSATED:
            return _undone(row, seen)
        return _made(row, seen)

    def _look(self, row: Row[Any], step: Step[Any]) -> Observation | None:
        if row.kind in ROW_ONLY_KINDS:
            with self._database.reading() as connection:
                return _rows(row.kind, step, connection)
        kind = self._host_kinds[row.kind]
        deadline = time.monotonic() + LOCK_PATIENCE_S
        while True:
            with self._locks.try_lock(kind.resource(step)) as lock:
                if lock is not None:
                    return _observe(kind, step, self._world((lock.fd,)))
            if time.monotonic() >= deadline:
                return None
            time.sleep(0.1)

    def _world(self, lock_fds: tuple[int, ...]) -> World:
        return World(
            host=self._host,
            database=self._database,
            guard=_refuse,
            heartbeat=lambda: None,
            transaction=_no_transaction,
            lock_fds=lock_fds,
        )


def _refuse() -> NoReturn:
    raise FenceLost("Verifying changes nothing.")


@contextmanager
def _no_transaction() -> Iterator[Connection]:
    _refuse()
    yield


def _observe(kind: HostKind[Any], step: Step[Any], world: World) -> Observation:
    try:
        return kind.observe(step, world)
    except (StepFailed, StepRetry) as error:
        return Undetermined(f"{error.reason_code}: {error.message}")
    except FenceLost as error:
        return Undetermined(f"it could not be looked at without a change: {error.message}")


def _rows(kind: str, step: Step[Any], connection: Connection) -> Observation:
    """What row-only kinds have: their rows, which carry their effect."""
    request = step.request
    if kind == "agent_launch":
        run = runs.held_by(connection, step.workspace_id, request.dispatch_key)
        return Present(
            LaunchArmed(
                session_id=request.session_id, dispatch_key=request.dispatch_key, run_id=run
            )
        )
    row = sessions.get(connection, request.session_id)
    if row is None:
        return Absent({"session_id": request.session_id})
    if row.operation_id != step.operation_id:
        return Conflict("session.exists", f"session {row.id} is of another operation")
    return Present(
        SessionPrepared(
            session_id=row.id, profile=row.profile, launch_hash=sessions.launch_hash(row.launch)
        )
    )


def _made(row: Row[Any], seen: Observation) -> Verified:
    """The evidence of a step that succeeded against what is there."""
    evidence: dict[str, Any] = json.loads(row.evidence) if row.evidence else {}
    found: list[Difference] = []
    stored = digest_bytes(Domain.EVIDENCE, (row.evidence or "").encode())
    if stored != row.evidence_hash:
        found.append(Difference("evidence_hash", row.evidence_hash, stored))
    match seen:
        case Present(now):
            document = now.model_dump(mode="json")
            found += [
                Difference(name, evidence.get(name), document.get(name))
                for name in sorted((evidence.keys() | document.keys()) - _OF_THE_MAKING)
                if evidence.get(name) != document.get(name)
            ]
            what = "the world is as the evidence says" if not found else "some fields differ"
        case Absent(proof):
            what = "it is gone"
            found += _against(evidence, proof)
        case OursHalfMade(proof):
            what = "only a part of it is there"
            found += _against(evidence, proof)
        case Conflict(code, reason):
            what = f"something else is in its place: {reason}"
            found.append(Difference("conflict", None, code))
        case Undetermined(reason):
            what = reason
            found.append(Difference("observation", "present", "undetermined"))
    return Verified(row.step_key, "differs" if found else "same", what, tuple(found))


def _against(evidence: dict[str, Any], proof: Mapping[str, Any]) -> list[Difference]:
    shared = [
        Difference(name, evidence[name], proof[name])
        for name in sorted((evidence.keys() & proof.keys()) - _OF_THE_MAKING)
        if evidence[name] != proof[name]
    ]
    return shared or [Difference("observation", "present", dict(proof))]


def _undone(row: Row[Any], seen: Observation) -> Verified:
    """A step whose undoing was proven: nothing of ours is there."""
    match seen:
        case Absent():
            return Verified(row.step_key, "same", "it is gone, as its undoing proved")
        case Conflict(_, reason):
            what = f"it is gone; what stands there now is not ours: {reason}"
            return Verified(row.step_key, "same", what)
        case Present(evidence) if row.kind == "agent_launch":
            run = evidence.run_id if isinstance(evidence, LaunchArmed) else None
            found = () if run is None else (Difference("run_id", None, run),)
            what = "the launch is cancelled" if run is None else f"run {run} was admitted for it"
            return Verified(row.step_key, "differs" if found else "same", what, found)
        case Undetermined(reason):
            what = f"it cannot be told: {reason}"
        case _:
            what = "something of it is there, though its undoing was proven"
    there = (Difference("observation", "absent", type(seen).__name__.lower()),)
    return Verified(row.step_key, "differs", what, there)
