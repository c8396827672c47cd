"""Runs to work with: a session's row and a run admitted for it, and workers as real processes."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Any

from sqlalchemy import insert

from onceborn.activities.kind import Host
from onceborn.runtime import workspaces
from onceborn.runtime.ledger import runs, sessions
from onceborn.runtime.ledger import tables as t
from onceborn.runtime.ledger.database import Database
from onceborn.runtime.ledger.runs import RunRow
from onceborn.runtime.protocol.plan import LaunchConfiguration
from onceborn.runtime.runs import admit_run


def new_host(folder: Path) -> Host:
    """A host with a worktree folder ``worktrees/one`` and an ID of its own."""
    data = folder.resolve() / "data"
    (data / "worktrees" / "one").mkdir(parents=True)
    return Host(host_id=f"hst_{secrets.token_hex(16)}", data=data)


def worktree(host: Host) -> Path:
    return host.data / "worktrees" / "one"


def new_operation(database: Database, host_id: str = "hst_1") -> tuple[str, str]:
    """A workspace and the bare row of an operation in it: (workspace ID, operation ID)."""
    workspace_id = workspaces.create_workspace(database, "w", capacity=None)
    operation_id = f"op_{secrets.token_hex(8)}"
    with database.transaction("test") as connection:
        connection.execute(
            insert(t.operations).values(
                id=operation_id,
                workspace_id=workspace_id,
                task_id="tsk_1",
                host_id=host_id,
                actor="{}",
                actor_hash="",
                token_hash="",
                manifest="{}",
                manifest_hash="",
                plan="{}",
                plan_hash="",
                state="completed",
                lease_until=0,
                created_at=0,
            )
        )
    return workspace_id, operation_id


def configuration(*argv: str, **changes: Any) -> LaunchConfiguration:
    values: dict[str, Any] = {
        "profile": "p",
        "argv": argv,
        "environment": (),
        "working_directory": "worktrees/one",
        "time_limit_s": 60,
        "prompt": "go",
    }
    return LaunchConfiguration(**(values | changes))


def admitted_run(database: Database, host: Host, *argv: str, **changes: Any) -> str:
    """A run of an agent with this command, as a completed creation leaves it."""
    workspace_id, operation_id = new_operation(database, host.host_id)
    row = sessions.SessionRow.of(
        f"ses_{secrets.token_hex(8)}",
        configuration(*argv, **changes),
        operation_id=operation_id,
        task_id="tsk_1",
        workspace_id=workspace_id,
    )
    with database.transaction("test") as connection:
        assert sessions.insert(connection, database, row)
        run_id, _ = admit_run(
            connection,
            database,
            workspace_id=workspace_id,
            workflow_ref="agent",
            workflow_version="1",
            input={},
            host_id=host.host_id,
            dispatch_key=f"task-launch/{operation_id}/{row.id}",
            task_id="tsk_1",
            session_id=row.id,
        )
    return run_id


def run_row(database: Database, run_id: str) -> RunRow:
    with database.reading() as connection:
        row = runs.get(connection, run_id)
    assert row is not None
    return row


def admit(database: Database, workspace_id: str, **changes: Any) -> tuple[str, bool]:
    """Admit a run in a transaction of its own."""
    values: dict[str, Any] = {
        "workspace_id": workspace_id,
        "workflow_ref": "ref",
        "workflow_version": "1",
        "input": {"a": 1},
        "host_id": "hst_1",
    }
    with database.transaction("runs.admit") as connection:
        return admit_run(connection, database, **(values | changes))
