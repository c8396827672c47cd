"""Hosts: where effects are made."""

from __future__ import annotations

from sqlalchemy import Connection, insert, select, update

from . import tables as t
from .database import Database
from .statements import changed


def seen(connection: Connection, database: Database, host_id: str, name: str, queue: str) -> bool:
    """Register the host, or note that it is alive. ``False``: it was evicted and is barred."""
    c = t.hosts.c
    now = database.clock.now()
    values = {"name": name, "task_queue": queue, "seen_at": now}
    alive = update(t.hosts).where(c.id == host_id, c.evicted_at.is_(None)).values(values)
    if changed(connection, alive) == 1:
        return True
    if connection.execute(select(c.id).where(c.id == host_id)).first() is not None:
        return False
    connection.execute(insert(t.hosts).values(id=host_id, registered_at=now, **values))
    return True


def place(connection: Connection) -> str | None:
    """The host for a new creation: the one that was seen last, of those not evicted."""
    c = t.hosts.c
    return connection.execute(
        select(c.id).where(c.evicted_at.is_(None)).order_by(c.seen_at.desc()).limit(1)
    ).scalar_one_or_none()
