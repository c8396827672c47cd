"""Ownership: the hand-off of a new creation, and the taking over of one whose owner is gone.

Only the runtime does this. Every change of owner raises the fence, and from then on no write of the
former owner matches. Source: design 1-protocol, 'Owners, leases, recovery'.
"""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import Connection, TextClause, select, text, update

from .ledger import operations
from .ledger import tables as t
from .ledger.database import Database
from .ledger.operations import Limits
from .protocol.canonical import Domain, digest_bytes
from .protocol.errors import FenceLost, HandleRejected
from .protocol.handle import CreationHandle


@dataclass(frozen=True, slots=True)
class Owned:
    """An operation that this process has just become the owner of."""

    operation_id: str
    fence: int
    host_id: str
    task_id: str
    workspace_id: str


_o = t.operations.c
_OWNED = (_o.id, _o.fence, _o.host_id, _o.task_id, _o.workspace_id)


class Recovery:
    """Hands operations to owners. Safe to share between threads."""

    def __init__(self, database: Database, limits: Limits, owner: str) -> None:
        self._database = database
        self._limits = limits
        self._owner = owner

    def take(self, handle: CreationHandle) -> Owned:
        """Exchange the handle for fence 1, once.

        Raises:
            HandleRejected: token, actor, manifest or plan do not match, or the token is spent.
            FenceLost: the sweep was first; the creation is in good hands.
        """
        o = t.operations.c
        with self._database.transaction("handoff.take") as connection:
            taken = connection.execute(
                update(t.operations)
                .where(o.id == handle.operation_id, o.fence == 0, o.token_spent.is_(False))
                # A release may be under way already: it holds up Complete and Abort, nothing else.
                .where(o.state.in_(operations.DRIVABLE))
                .where(o.token_hash == digest_bytes(Domain.TOKEN, handle.completion_token))
                .where(o.actor_hash == handle.actor_hash)
                .where(o.manifest_hash == handle.manifest_hash)
                .where(o.plan_hash == handle.plan_hash)
                .values(
                    fence=1,
                    token_spent=True,
                    owner=self._owner,
                    lease_until=self._database.clock.in_ms(self._limits.lease_ms),
                )
                .returning(*_OWNED)
            ).one_or_none()
            if taken is None:
                raise self._refusal(connection, handle)
            return Owned(*taken)

    def _refusal(
        self, connection: Connection, handle: CreationHandle
    ) -> FenceLost | HandleRejected:
        o = t.operations.c
        row = connection.execute(
            select(o.fence, o.token_hash, o.token_spent).where(o.id == handle.operation_id)
        ).one_or_none()
        ours = row is not None and row.token_hash == digest_bytes(
            Domain.TOKEN, handle.completion_token
        )
        if row is not None and ours and (row.fence > 0 or row.token_spent):
            return FenceLost(operation_id=handle.operation_id, fence=row.fence)
        return HandleRejected(operation_id=handle.operation_id)

    def claim(
        self, host_id: str, limit: int, *, leave: frozenset[str] = frozenset()
    ) -> list[Owned]:
        """Take over up to ``limit`` operations of this host whose lease has expired, oldest first.

        ``leave``: operations that the caller drives already.

        A lease that ends exactly now has expired. Two sweeps never get the same operation.
        """
        if limit <= 0:
            return []
        o = t.operations.c
        now = self._database.clock.now()
        due = (
            select(o.id)
            .where(o.host_id == host_id, o.lease_until <= now, o.id.not_in(leave))
            .where(operations_open())
            .order_by(o.lease_until)
            .limit(limit)
            .with_for_update(skip_locked=True)
        )
        with self._database.transaction("recovery.claim") as connection:
            ids = list(connection.execute(due).scalars())
            if not ids:
                return []
            rows = connection.execute(
                update(t.operations)
                .where(o.id.in_(ids), o.lease_until <= now)
                .where(operations_open())
                .values(
                    fence=o.fence + 1,
                    token_spent=True,
                    owner=self._owner,
                    lease_until=self._database.clock.in_ms(self._limits.lease_ms),
                    # What the former owner waited for may be free by now: the wait begins anew.
                    busy_since=None,
                    busy_with=None,
                )
                .returning(*_OWNED)
            )
            return [Owned(*row) for row in rows]

    def any_due(self, host_id: str) -> bool:
        """Whether a claim would find something: asked first, an idle sweep writes nothing."""
        o = t.operations.c
        with self._database.reading() as connection:
            return (
                connection.execute(
                    select(o.id)
                    .where(o.host_id == host_id, o.lease_until <= self._database.clock.now())
                    .where(operations_open())
                    # Asked for in the index's order, so that no planner prefers to read the table
                    # from its beginning, where what is completed lies, until it meets a first one.
                    .order_by(o.lease_until)
                    .limit(1)
                ).first()
                is not None
            )

    def park(self, operation_id: str, fence: int, reason: str) -> None:
        """Leave it to an operator. Nothing is released; a lost fence changes nothing."""
        with self._database.transaction("recovery.park") as connection:
            operations.park(connection, self._database, operation_id, fence, reason)


def operations_open() -> TextClause:
    """The predicate of ``ix_operations_open``, word for word, so that the index serves it."""
    return text(t.OPEN_OPERATIONS)
