"""Starting an admitted run in Temporal: by the creation that admitted it, or by the sweep."""

from __future__ import annotations

import asyncio

from ..runtime.ledger import runs
from ..runtime.ledger.database import Database
from .engine import Engine, host_queue


async def dispatch(engine: Engine, database: Database, run_id: str, host_id: str) -> None:
    """Start ``run/<run_id>`` and note it. Idempotent: an existing workflow is used.

    Raises:
        EngineUnavailable: nothing is noted; the sweep tries again.
    """
    await engine.start_run(run_id, host_queue(host_id))
    await asyncio.to_thread(_note, database, run_id)


def _note(database: Database, run_id: str) -> None:
    with database.transaction("run.started") as connection:
        runs.mark_started(connection, database, run_id)
