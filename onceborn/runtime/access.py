"""Who is asking, and for which workspace. Bearer tokens, each bound to one workspace.

A token is ``onb_`` and 32 random bytes in URL-safe base64. It is shown once, when it is made; the
ledger keeps its SHA-256 only.
"""

from __future__ import annotations

import re
import secrets
from dataclasses import dataclass, field
from typing import Final, Literal, cast, get_args

from .ids import new_id
from .ledger import access as ledger
from .ledger.database import Database
from .protocol.canonical import Domain, digest_bytes
from .protocol.errors import InvalidField, NotFound, Unauthenticated
from .text import check_label

Role = Literal["member", "operator"]

TOKEN_PREFIX: Final = "onb_"  # noqa: S105 (a prefix, not a secret)
_TOKEN: Final = re.compile(r"onb_[A-Za-z0-9_-]{43}")


@dataclass(frozen=True, slots=True)
class Principal:
    """An authenticated caller. ``actor`` is what an operation records about who asked for it."""

    token_id: str
    workspace_id: str
    role: Role
    actor: str
    workspace_deleted: bool = False


@dataclass(frozen=True, slots=True)
class NewToken:
    """A token just made. ``token`` is never stored, listed or logged."""

    id: str
    token: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class TokenView:
    """A token as it is listed. Times are milliseconds."""

    id: str
    name: str
    role: Role
    created_at: int
    revoked_at: int | None


def token_hash(token: str) -> str:
    """What the ledger keeps of a token."""
    return digest_bytes(Domain.TOKEN, token.encode("ascii"))


def authenticate(database: Database, header: str | None) -> Principal:
    """The caller behind an ``Authorization`` header. Reads one row and writes nothing.

    Raises:
        Unauthenticated: no header, another scheme, or no token of ours that is not revoked.
        DatabaseUnavailable: it cannot be told now.
    """
    scheme, _, credentials = (header or "").partition(" ")
    credentials = credentials.strip(" ")
    if scheme.lower() != "bearer" or not _TOKEN.fullmatch(credentials):
        raise Unauthenticated
    with database.reading() as connection:
        row = ledger.live_token(connection, token_hash(credentials))
    if row is None:
        raise Unauthenticated
    return Principal(
        token_id=row.id,
        workspace_id=row.workspace_id,
        role=row.role,
        actor=f"token/{row.id}",
        workspace_deleted=row.deleted_at is not None,
    )


def authorize(principal: Principal, workspace_id: str) -> None:
    """Let the caller into a workspace, before anything of the request is looked at.

    Raises:
        NotFound: the workspace is not the token's own, or it was deleted. Always the same answer,
            whatever is there: a stranger learns nothing.
    """
    if principal.workspace_deleted or principal.workspace_id != workspace_id:
        raise NotFound


def create_token(
    database: Database, workspace_id: str, *, role: str = "member", name: str = ""
) -> NewToken:
    """Make a token for a workspace. This is the only time that it can be seen.

    Raises:
        InvalidField: ``role`` or ``name``.
        NotFound: no such workspace, or it was deleted.
    """
    if role not in get_args(Role):
        raise InvalidField("role", "role must be member or operator")
    check_label(name, "name", minimum=0)
    made = NewToken(new_id("tok"), TOKEN_PREFIX + secrets.token_urlsafe(32))
    with database.transaction("access.create_token") as connection:
        written = ledger.insert_token(
            connection,
            database.clock,
            token_id=made.id,
            workspace_id=workspace_id,
            name=name,
            role=role,
            token_hash=token_hash(made.token),
        )
        if not written:
            raise NotFound(f"There is no workspace {workspace_id}.")
    return made


def revoke_token(database: Database, token_id: str) -> bool:
    """Revoke a token for good. False where it was revoked already.

    Raises:
        NotFound: no such token.
    """
    with database.transaction("access.revoke_token") as connection:
        revoked = ledger.revoke_token(connection, database.clock, token_id)
        if not revoked and not ledger.token_exists(connection, token_id):
            raise NotFound(f"There is no token {token_id}.")
    return revoked


def list_tokens(database: Database, workspace_id: str) -> list[TokenView]:
    """The tokens of a workspace, oldest first, revoked ones too; never the secrets."""
    with database.reading() as connection:
        rows = ledger.list_tokens(connection, workspace_id)
    return [TokenView(r.id, r.name, cast("Role", r.role), r.created_at, r.revoked_at) for r in rows]
