"""From the API's side: hand a new creation to its owner, and wait for what becomes of it.

The answer is read from the ledger; the workflow's end only wakes the waiter. So it does not matter
which owner, under which fence, brings the creation to its end.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import structlog
from sqlalchemy import Row, select

from ..runtime.ledger import tables as t
from ..runtime.ledger.database import Database
from ..runtime.protocol.errors import EngineUnavailable, FenceLost
from ..runtime.protocol.handle import CreationHandle
from ..runtime.protocol.states import OperationState, Outcome
from ..runtime.recovery import Recovery
from .dispatch import start
from .engine import Engine, creation_id

log = structlog.get_logger(__name__)

_LONG_POLL_S: Final = 20.0
_FIRST_PAUSE_S: Final = 0.05
_LONGEST_PAUSE_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class Settled:
    """How a creation ended. ``outcome`` is None where it was aborted; then ``failure`` says why:
    ``{"step", "code", "reason", "undone": [{"step", "how", "proof"}]}``."""

    outcome: Outcome | None
    failure: Mapping[str, Any] | None = None


class Handoff:
    """Hands creations off and waits for them. One per API process."""

    def __init__(self, database: Database, recovery: Recovery, engine: Engine) -> None:
        self._database = database
        self._recovery = recovery
        self._engine = engine

    async def begin(self, handle: CreationHandle) -> None:
        """Take fence 1 with the handle and start the workflow.

        Raises:
            HandleRejected: the handle does not match the ledger.
            EngineUnavailable: Temporal did not take it; the sweep starts it when it is back.
            DatabaseUnavailable: the hand-off is in doubt; the sweep settles it.
        """
        try:
            owned = await asyncio.to_thread(self._recovery.take, handle)
        except FenceLost:
            log.info("handoff.sweep_was_first", operation=handle.operation_id)
            return
        await start(self._engine, owned)

    async def settled(self, operation_id: str) -> Settled:
        """Wait, however long, until the creation is completed or aborted.

        Raises:
            DatabaseUnavailable: it cannot be read; the creation goes on.
        """
        pause = _FIRST_PAUSE_S
        while True:
            row = await asyncio.to_thread(self._read, operation_id)
            if row.state == OperationState.COMPLETED:
                return Settled(Outcome(row.outcome))
            if row.state == OperationState.ABORTED:
                return Settled(None, json.loads(row.failure or "{}"))
            await self._woken(operation_id, row.fence, pause)
            pause = min(pause * 1.5, _LONGEST_PAUSE_S)

    async def _woken(self, operation_id: str, fence: int, pause: float) -> None:
        # Wait for the present owner's workflow to end. It may end without a result that counts
        # (lost fence, terminated, not started yet): then the pause bounds how often we read.
        loop = asyncio.get_running_loop()
        began = loop.time()
        if fence > 0:
            try:
                await self._engine.wait_for(creation_id(operation_id, fence), _LONG_POLL_S)
            except EngineUnavailable:
                log.info("handoff.engine_unavailable", operation=operation_id)
        left = pause - (loop.time() - began)
        if left > 0:
            await asyncio.sleep(left)

    def _read(self, operation_id: str) -> Row[*tuple[Any, ...]]:
        o = t.operations.c
        with self._database.reading() as connection:
            return connection.execute(
                select(o.state, o.outcome, o.failure, o.fence).where(o.id == operation_id)
            ).one()
