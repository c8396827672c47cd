"""Starting in Temporal what the ledger holds: a creation under its fence, an admitted run."""

from __future__ import annotations

import asyncio

from ..runtime.ledger import runs
from ..runtime.ledger.database import Database
from ..runtime.recovery import Owned
from .engine import Engine, agents_queue, host_queue


async def start(engine: Engine, owned: Owned) -> None:
    """Start the workflow of an operation that this process has just become the owner of.

    Raises:
        EngineUnavailable: the sweep claims it again when its lease has ended.
    """
    await engine.start_creation(
        owned.operation_id,
        owned.fence,
        host_queue(owned.host_id),
        task_id=owned.task_id,
        workspace_id=owned.workspace_id,
    )


async def dispatch(engine: Engine, database: Database, run_id: str, host_id: str) -> None:
    """Start ``run/<run_id>`` and note it. Idempotent: an existing workflow is used.

    Raises:
        EngineUnavailable: nothing is noted; the sweep tries again.
    """
    await engine.start_run(run_id, agents_queue(host_id))
    await asyncio.to_thread(_note, database, run_id)


def _note(database: Database, run_id: str) -> None:
    with database.transaction("run.started") as connection:
        runs.mark_started(connection, database, run_id)
