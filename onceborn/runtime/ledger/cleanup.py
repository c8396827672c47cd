"""Cleanup jobs: what could not be undone safely, kept with its proof."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Connection, insert, select

from ..ids import new_id
from ..protocol.canonical import canonical_text
from . import tables as t
from .database import Database


def quarantine(
    connection: Connection,
    database: Database,
    *,
    operation_id: str,
    step_key: str,
    host_id: str,
    kind: str,
    proof: dict[str, Any],
) -> str:
    """Record that something of ours stays, until an operator purges this entry by its ID.

    The caller holds the operation. The same proof again is the same entry: an attempt that died
    between keeping a thing and recording it is followed by one that finds it kept.
    """
    document = canonical_text(proof)
    c = t.cleanup_jobs.c
    held = connection.execute(
        select(c.id).where(
            c.operation_id == operation_id, c.step_key == step_key, c.proof == document
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
            state="quarantined",
            proof=document,
            created_at=database.clock.now(),
        )
    )
    return job_id
