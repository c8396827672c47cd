"""Tokens: stored as hashes, found by one indexed statement, revoked by a row count."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import Connection, Row, bindparam, insert, select, update

from .database import Clock
from .tables import tokens, workspaces

_LIVE_TOKEN = (
    # One statement answers who it is and whether the workspace still stands. The join is on a
    # primary key; nothing is written, so a Found answer leaves every table as it was.
    select(
        tokens.c.id,
        tokens.c.workspace_id,
        tokens.c.role,
        workspaces.c.deleted_at,
    )
    .join(workspaces, workspaces.c.id == tokens.c.workspace_id)
    .where(tokens.c.token_hash == bindparam("token_hash"), tokens.c.revoked_at.is_(None))
)


def live_token(connection: Connection, token_hash: str) -> Row[*tuple[Any, ...]] | None:
    """The token that is not revoked: id, workspace_id, role, deleted_at of its workspace."""
    return connection.execute(_LIVE_TOKEN, {"token_hash": token_hash}).one_or_none()


def insert_token(
    connection: Connection,
    clock: Clock,
    *,
    token_id: str,
    workspace_id: str,
    name: str,
    role: str,
    token_hash: str,
) -> bool:
    """Insert a token of a workspace that is not deleted; False where there is none."""
    live = select(workspaces.c.id).where(
        workspaces.c.id == workspace_id, workspaces.c.deleted_at.is_(None)
    )
    # FOR SHARE: a deletion that is under way is waited for (SQLite has one writer anyway).
    if connection.execute(live.with_for_update(read=True)).one_or_none() is None:
        return False
    connection.execute(
        insert(tokens).values(
            id=token_id,
            workspace_id=workspace_id,
            name=name,
            role=role,
            token_hash=token_hash,
            created_at=clock.now(),
        )
    )
    return True


def revoke_token(connection: Connection, clock: Clock, token_id: str) -> bool:
    """Revoke; False where there is no such token that is not revoked."""
    done = connection.execute(
        update(tokens)
        .where(tokens.c.id == token_id, tokens.c.revoked_at.is_(None))
        .values(revoked_at=clock.now())
    )
    return done.rowcount == 1


def token_exists(connection: Connection, token_id: str) -> bool:
    """Whether there is such a token, revoked or not."""
    found = connection.execute(select(tokens.c.id).where(tokens.c.id == token_id))
    return found.one_or_none() is not None


def list_tokens(connection: Connection, workspace_id: str) -> Sequence[Row[*tuple[Any, ...]]]:
    """The tokens of a workspace, oldest first, without anything that could authenticate."""
    columns = (tokens.c.id, tokens.c.name, tokens.c.role, tokens.c.created_at, tokens.c.revoked_at)
    return connection.execute(
        select(*columns)
        .where(tokens.c.workspace_id == workspace_id)
        .order_by(tokens.c.created_at, tokens.c.id)
    ).all()
