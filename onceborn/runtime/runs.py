"""Idempotent run admission: one dispatch key, one run (design 3-runs-and-decisions)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from sqlalchemy import Connection

from .failpoints import failpoint
from .ids import new_id
from .ledger import runs
from .ledger.database import Database
from .protocol.canonical import canonical_text
from .protocol.dispatch import check_dispatch_key
from .protocol.errors import DispatchContended, InvalidField

_ROUNDS: Final = 5


def admit_run(
    connection: Connection,
    database: Database,
    *,
    workspace_id: str,
    workflow_ref: str,
    workflow_version: str,
    input: Mapping[str, Any],  # noqa: A002 - the protocol's own word
    host_id: str,
    dispatch_key: str | None = None,
    task_id: str | None = None,
    session_id: str | None = None,
) -> tuple[str, bool]:
    """Admit a run inside the caller's write transaction; returns (run ID, deduplicated).

    With a dispatch key that the workspace has used already, it is the first run's ID, nothing is
    written, and the rest of the caller's transaction goes on (the insert is isolated by its
    conflict clause). Without one, two equal calls are two runs.

    Raises:
        InvalidDispatchKey: the key itself is not one.
        InvalidField: ``input`` is not JSON (and the key is new: a known one is never validated).
        DispatchContended: the key's holder kept changing while this call looked at it.
    """
    key = check_dispatch_key(dispatch_key)
    try:
        document = canonical_text(dict(input))
    except (ValueError, RecursionError) as error:
        holder = runs.held_by(connection, workspace_id, key) if key is not None else None
        if holder is not None:
            return holder, True
        raise InvalidField("input", f"input is not JSON: {error}") from None
    for _ in range(_ROUNDS):
        run = runs.NewRun(
            id=new_id("run"),
            workspace_id=workspace_id,
            dispatch_key=key,
            workflow_ref=workflow_ref,
            workflow_version=workflow_version,
            input=document,
            host_id=host_id,
            task_id=task_id,
            session_id=session_id,
        )
        failpoint("runs.insert")
        if runs.insert(connection, database, run):
            return run.id, False
        if key is None:
            raise RuntimeError("a run without a dispatch key cannot conflict")
        # A second statement: the one that met the conflict saw an older state.
        holder = runs.held_by(connection, workspace_id, key)
        if holder is not None:
            return holder, True
    raise DispatchContended()
