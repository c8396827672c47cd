"""Cleanup jobs: what an undoing left, and who works on it.

    quarantined -> purged                 by an operator who names the entry
    pending -> done | quarantined         by the sweep of its host

Work on a job is fenced like a step's: a claim draws a token and takes a lease, every later write
names both state and token, and its row count decides.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from sqlalchemy import Connection, Row, Select, case, func, insert, or_, select, text, update

from ..ids import new_id
from ..protocol.canonical import canonical_text
from ..protocol.errors import FenceLost
from . import tables as t
from .database import Database
from .statements import changed

Kept = Literal["quarantined", "pending"]

OPEN: Final = ("quarantined", "pending")
"""States of what still lies on a host."""

_c = t.cleanup_jobs.c


@dataclass(frozen=True, slots=True)
class JobClaim:
    """One attempt at a job: what every write and effect of it names."""

    job_id: str
    token: str
    state: Kept

    def matches(self) -> tuple[Any, ...]:
        return (_c.id == self.job_id, _c.state == self.state, _c.claim_token == self.token)


def hand_over(
    connection: Connection,
    database: Database,
    *,
    operation_id: str,
    step_key: str,
    host_id: str,
    kind: str,
    proof: Mapping[str, Any],
    disposition: Kept = "quarantined",
) -> str:
    """Record that something of ours stays: the job's ID. The caller holds the operation.

    The same proof again is the same entry: an attempt that died between keeping a thing and
    recording it is followed by one that finds it kept.
    """
    document = canonical_text(dict(proof))
    held = connection.execute(
        select(_c.id).where(
            _c.operation_id == operation_id,
            _c.step_key == step_key,
            _c.proof == document,
            _c.state == disposition,
        )
    ).scalar_one_or_none()
    if held is not None:
        return str(held)
    job_id = new_id("cln")
    connection.execute(
        insert(t.cleanup_jobs).values(
            id=job_id,
            operation_id=operation_id,
            step_key=step_key,
            host_id=host_id,
            kind=kind,
            state=disposition,
            proof=document,
            due_at=database.clock.now() if disposition == "pending" else None,
            created_at=database.clock.now(),
        )
    )
    return job_id


# -- claims ---------------------------------------------------------------------------------------


def any_due(connection: Connection, database: Database, host_id: str) -> bool:
    """Whether ``claim_due`` would find a job: asked first, an idle sweep writes nothing."""
    return connection.execute(_due(database, host_id).limit(1)).first() is not None


def claim_due(
    connection: Connection, database: Database, host_id: str, lease_ms: int
) -> JobClaim | None:
    """Take the pending job of this host that has been due for longest; ``None``: there is none."""
    found = connection.execute(
        _due(database, host_id).order_by(_c.due_at).limit(1).with_for_update(skip_locked=True)
    ).scalar_one_or_none()
    if found is None:
        return None
    return _claim(connection, database, str(found), "pending", lease_ms)


def claim_entry(
    connection: Connection, database: Database, job_id: str, lease_ms: int
) -> JobClaim | None:
    """Take a quarantined entry for its purge; ``None``: it is none, or somebody is at it."""
    return _claim(connection, database, job_id, "quarantined", lease_ms)


def _due(database: Database, host_id: str) -> Select[tuple[Any]]:
    # The partial index's predicate, word for word.
    return select(_c.id).where(
        text(t.PENDING_CLEANUP),
        _c.host_id == host_id,
        _c.due_at <= database.clock.now(),
        or_(_c.lease_until.is_(None), _c.lease_until <= database.clock.now()),
    )


def _claim(
    connection: Connection, database: Database, job_id: str, state: Kept, lease_ms: int
) -> JobClaim | None:
    claim = JobClaim(job_id, secrets.token_hex(16), state)
    statement = (
        update(t.cleanup_jobs)
        .where(_c.id == job_id, _c.state == state)
        .where(or_(_c.lease_until.is_(None), _c.lease_until <= database.clock.now()))
        .values(
            claim_token=claim.token,
            lease_until=database.clock.in_ms(lease_ms),
            attempts=_c.attempts + 1,
        )
    )
    return claim if changed(connection, statement) == 1 else None


def still_claimed(connection: Connection, claim: JobClaim) -> bool:
    """Whether state and token are as claimed. Asked before every effect."""
    return connection.execute(select(_c.id).where(*claim.matches())).first() is not None


def renew(connection: Connection, database: Database, claim: JobClaim, lease_ms: int) -> None:
    """Renew the claim's lease.

    Raises:
        FenceLost: the claim no longer holds the job.
    """
    _write(connection, claim, lease_until=database.clock.in_ms(lease_ms))


# -- ends of an attempt ---------------------------------------------------------------------------


def finish(
    connection: Connection,
    database: Database,
    claim: JobClaim,
    state: Literal["done", "purged"],
    result: Mapping[str, Any],
) -> None:
    """Nothing of it is left; ``result`` is what was removed and what a look afterwards showed."""
    _release(
        connection,
        claim,
        state=state,
        result=canonical_text(dict(result)),
        last_error=None,
        due_at=None,
        finished_at=database.clock.now(),
    )


def keep(connection: Connection, claim: JobClaim, proof: Mapping[str, Any]) -> None:
    """A pending job turned out to hold somebody's work: the runtime lets it alone from now on."""
    _release(
        connection,
        claim,
        state="quarantined",
        proof=canonical_text(dict(proof)),
        last_error=None,
        due_at=None,
        attempts=0,
    )


def later(
    connection: Connection, database: Database, claim: JobClaim, error: str, delay_ms: int
) -> None:
    """The attempt did not succeed: why, and when the next one is due."""
    _release(connection, claim, last_error=error, due_at=database.clock.in_ms(delay_ms))


def let_go(connection: Connection, claim: JobClaim) -> None:
    """Give a claim back without having changed anything."""
    _release(connection, claim)


def _release(connection: Connection, claim: JobClaim, **values: Any) -> None:
    _write(connection, claim, claim_token=None, lease_until=None, **values)


def _write(connection: Connection, claim: JobClaim, **values: Any) -> None:
    statement = update(t.cleanup_jobs).where(*claim.matches()).values(**values)
    if changed(connection, statement) != 1:
        raise FenceLost("Another attempt has taken this cleanup job over.", job_id=claim.job_id)


# -- reading --------------------------------------------------------------------------------------


def load(connection: Connection, job_id: str) -> Row[Any]:
    """One job's row."""
    return connection.execute(select(t.cleanup_jobs).where(_c.id == job_id)).one()


def find(
    connection: Connection,
    database: Database,
    workspace_id: str,
    *,
    job_id: str | None = None,
    operation_id: str | None = None,
    states: Sequence[str] | None = None,
) -> list[Row[Any]]:
    """Jobs of a workspace, oldest first, with ``wait_ms`` until a pending one is due."""
    o = t.operations.c
    now = database.clock.now()
    wait = func.coalesce(case((_c.due_at > now, _c.due_at - now), else_=0), 0)
    statement = (
        select(t.cleanup_jobs, o.task_id, wait.label("wait_ms"))
        .join_from(t.cleanup_jobs, t.operations, _c.operation_id == o.id)
        .where(o.workspace_id == workspace_id)
        .order_by(_c.created_at, _c.id)
    )
    if job_id is not None:
        statement = statement.where(_c.id == job_id)
    if operation_id is not None:
        statement = statement.where(_c.operation_id == operation_id)
    if states is not None:
        statement = statement.where(_c.state.in_(states))
    return list(connection.execute(statement))
