"""Hosts: where effects are made."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Connection, select, update
from sqlalchemy.dialects import postgresql, sqlite

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
    dialect: Any = sqlite if database.is_sqlite else postgresql
    first = dialect.insert(t.hosts).values(id=host_id, registered_at=now, **values)
    if changed(connection, first.on_conflict_do_nothing(index_elements=[c.id])) == 1:
        return True
    # Another worker of the host was first, or it is barred: a second statement tells.
    evicted = select(c.evicted_at).where(c.id == host_id)
    return connection.execute(evicted).scalar_one_or_none() is None


def place(connection: Connection) -> str | None:
    """The host for a new creation: the one that was seen last, of those not evicted."""
    c = t.hosts.c
    return connection.execute(
        select(c.id).where(c.evicted_at.is_(None)).order_by(c.seen_at.desc()).limit(1)
    ).scalar_one_or_none()
