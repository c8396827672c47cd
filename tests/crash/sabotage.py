"""Laws of the runtime, broken on purpose: what the matrix must catch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from sqlalchemy import Connection, select

from onceborn.activities.attempt import Attempt
from onceborn.runtime.ledger import operations
from onceborn.runtime.ledger import tables as t
from onceborn.runtime.ledger.database import Database


def _no_guard() -> None:
    """Nobody looks again before an effect."""
    Attempt.guard = lambda _self: None  # type: ignore[method-assign]


def _no_fence() -> None:
    """An operation is held whatever its fence."""
    hold = operations.hold

    def hold_any(
        connection: Connection, database: Database, operation_id: str, _fence: int, **more: Any
    ) -> None:
        o = t.operations.c
        now = connection.execute(select(o.fence).where(o.id == operation_id)).scalar_one()
        hold(connection, database, operation_id, now, **more)

    operations.hold = hold_any


SABOTAGES: Final[dict[str, Callable[[], None]]] = {"guard": _no_guard, "fence": _no_fence}
