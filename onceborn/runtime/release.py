"""Release: an identity is freed without deleting its task.

Here is the part that the engine's loop carries out: finishing a release that was claimed while the
task was being prepared.
"""

from __future__ import annotations

from sqlalchemy import update

from .ledger import operations
from .ledger import tables as t
from .ledger.database import Database
from .ledger.operations import Limits
from .ledger.statements import changed
from .protocol.errors import FenceLost
from .protocol.states import OperationState


def finish_claimed(database: Database, limits: Limits, operation_id: str, fence: int) -> None:
    """Clear the identity and go back to preparing with the release recorded; no event.

    Raises:
        FenceLost: another owner has the operation, or the release is finished already.
    """
    with database.transaction("release.finish") as connection:
        row = operations.locked(connection, operation_id)
        if row is None:
            raise FenceLost(operation_id=operation_id, fence=fence)
        operations.move(
            connection,
            operation_id,
            fence,
            OperationState.PREPARING_RELEASE,
            OperationState.PREPARING,
            identity_released=True,
            lease_until=database.clock.in_ms(limits.lease_ms),
        )
        c = t.tasks.c
        cleared = changed(
            connection,
            update(t.tasks)
            .where(c.id == row.task_id, c.operation_id == operation_id)
            .values(external_id=None),
        )
        if cleared != 1:
            raise FenceLost(operation_id=operation_id, fence=fence)
