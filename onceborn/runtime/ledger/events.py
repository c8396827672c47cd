"""Reading a workspace's events. They are written in the transaction that makes them true."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import Connection, Row, bindparam, select

from .tables import outbox

_AFTER = (
    select(
        outbox.c.id,
        outbox.c.feed_number,
        outbox.c.aggregate,
        outbox.c.aggregate_id,
        outbox.c.revision,
        outbox.c.type,
        outbox.c.payload,
        outbox.c.created_at,
    )
    .where(
        outbox.c.workspace_id == bindparam("workspace_id"),
        outbox.c.feed_number > bindparam("after"),
    )
    .order_by(outbox.c.feed_number)
    .limit(bindparam("limit"))
)


def events_after(
    connection: Connection, workspace_id: str, after: int = 0, limit: int = 100
) -> Sequence[Row[*tuple[Any, ...]]]:
    """Events with a feed number above ``after``, in order: at most ``limit`` of them."""
    return connection.execute(
        _AFTER, {"workspace_id": workspace_id, "after": after, "limit": limit}
    ).all()
