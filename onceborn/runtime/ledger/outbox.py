"""The outbox: an event is written in the transaction that makes it true."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, insert, update

from ..ids import new_id
from ..protocol.canonical import canonical_text
from . import tables as t
from .database import Database


@dataclass(frozen=True, slots=True)
class FeedPlace:
    """The next numbers of a workspace; its feed row stays locked until the transaction ends."""

    event_number: int
    list_position: int


def lock_feed(connection: Connection, workspace_id: str) -> FeedPlace:
    """Lock the feed, as the last lock of the transaction, and draw the next numbers.

    Numbers drawn under the lock become visible in their order: a reader that has seen one has
    seen every lower one.
    """
    c = t.event_feeds.c
    row = connection.execute(
        update(t.event_feeds)
        .where(c.workspace_id == workspace_id)
        .values(last_number=c.last_number + 1, last_list_position=c.last_list_position + 1)
        .returning(c.last_number, c.last_list_position)
    ).one()
    return FeedPlace(*row)


def append(
    connection: Connection,
    database: Database,
    place: FeedPlace,
    *,
    workspace_id: str,
    aggregate: str,
    aggregate_id: str,
    revision: int,
    type: str,  # noqa: A002
    payload: dict[str, Any],
) -> str:
    """Write one immutable event; returns its ID. Unique per aggregate, ID and revision."""
    event_id = new_id("evt")
    connection.execute(
        insert(t.outbox).values(
            id=event_id,
            workspace_id=workspace_id,
            feed_number=place.event_number,
            aggregate=aggregate,
            aggregate_id=aggregate_id,
            revision=revision,
            type=type,
            payload=canonical_text(payload),
            created_at=database.clock.now(),
        )
    )
    return event_id
