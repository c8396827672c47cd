"""Reading tasks, and how their creation stands.

A preparing task is a real one: it is read by its ID, and its creation shows the steps. Lists hold
complete tasks only, the latest first.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from sqlalchemy import Row

from .ledger import tasks as ledger
from .ledger.database import Database
from .protocol.errors import InvalidField, NotFound

MAX_PAGE: Final = 200
DEFAULT_PAGE: Final = 50
_FIRST: Final = 2**63 - 1
# What an ID of ours can look like. Anything else names nothing, and never reaches a database (a
# NUL in a text parameter is an error to PostgreSQL).
_ID: Final = re.compile(r"[A-Za-z0-9_-]{1,64}")
_CURSOR_VERSION: Final = "t1"


@dataclass(frozen=True, slots=True)
class RepositoryView:
    """A repository of a task, as its steps have proven it so far."""

    repository: str
    source: str
    base_commit: str
    branch: str | None = None
    path: str | None = None
    """Absolute path of the worktree on the host."""


@dataclass(frozen=True, slots=True)
class RunView:
    """The run that the creation started."""

    id: str
    state: str


@dataclass(frozen=True, slots=True)
class TaskView:
    """A task as callers see it. Times are milliseconds since the epoch."""

    id: str
    workspace_id: str
    number: int
    title: str
    description: str
    metadata: Mapping[str, Any]
    revision: int
    created_at: int
    archived_at: int | None
    external_id: str | None
    complete: bool
    repositories: tuple[RepositoryView, ...]
    session_id: str | None
    run: RunView | None


@dataclass(frozen=True, slots=True)
class Page:
    """Some tasks, and the cursor of what follows, if anything does."""

    tasks: tuple[TaskView, ...]
    next_cursor: str | None


@dataclass(frozen=True, slots=True)
class StepProgress:
    """One step. Documents are as the ledger holds them; times are milliseconds."""

    key: str
    kind: str
    state: str
    attempt: int
    due_at: int | None
    evidence: Mapping[str, Any] | None
    evidence_hash: str | None
    failure: Mapping[str, Any] | None
    compensation: str
    compensation_proof: Mapping[str, Any] | None


@dataclass(frozen=True, slots=True)
class Progress:
    """How a creation stands. It stays readable when it was aborted and the task is gone."""

    task_id: str
    operation_id: str
    host_id: str
    state: str
    fence: int
    parked_reason: str | None
    outcome: str | None
    failure: Mapping[str, Any] | None
    created_at: int
    finished_at: int | None
    run_id: str | None
    steps: tuple[StepProgress, ...]


def get(database: Database, workspace_id: str, task_id: str) -> TaskView:
    """One task of the workspace, preparing or complete.

    Raises:
        NotFound: no such task in this workspace.
    """
    row = None
    if _ID.fullmatch(task_id):
        with database.reading() as connection:
            row = ledger.task(connection, workspace_id, task_id)
    if row is None:
        raise NotFound
    return _task(row)


def page(
    database: Database, workspace_id: str, *, limit: int = DEFAULT_PAGE, cursor: str | None = None
) -> Page:
    """Complete tasks of the workspace, the latest first. Pages don't shift under new tasks.

    Raises:
        InvalidField: ``limit`` is not 1 to 200, or ``cursor`` is none that was given out.
    """
    if not 1 <= limit <= MAX_PAGE:
        raise InvalidField("limit", f"limit must be a whole number from 1 to {MAX_PAGE}")
    before = _FIRST if cursor is None else _position(cursor)
    with database.reading() as connection:
        rows = ledger.page(connection, workspace_id, before=before, limit=limit + 1)
    shown = rows[:limit]
    more = len(rows) > limit
    return Page(
        tasks=tuple(_task(row) for row in shown),
        next_cursor=_cursor(shown[-1].list_position) if more else None,
    )


def progress(database: Database, workspace_id: str, task_id: str) -> Progress:
    """How the creation of a task stands, all of it as of one instant.

    Raises:
        NotFound: no such creation in this workspace.
    """
    operation = None
    if _ID.fullmatch(task_id):
        with database.snapshot() as connection:
            operation = ledger.operation(connection, workspace_id, task_id)
            if operation is not None:
                steps = ledger.steps_of(connection, operation.id)
                run_id = ledger.run_of(connection, workspace_id, task_id)
    if operation is None:
        raise NotFound
    return Progress(
        task_id=operation.task_id,
        operation_id=operation.id,
        host_id=operation.host_id,
        state=operation.state,
        fence=operation.fence,
        parked_reason=operation.parked_reason,
        outcome=operation.outcome,
        failure=_document(operation.failure),
        created_at=operation.created_at,
        finished_at=operation.finished_at,
        run_id=run_id,
        steps=tuple(_step(row) for row in steps),
    )


# -- from rows ------------------------------------------------------------------------------------


def _task(row: Row[*tuple[Any, ...]]) -> TaskView:
    repositories, session_id = _proven(row.proven, row.attach_requests)
    run_id, _, run_state = (row.run or "").partition(" ")
    return TaskView(
        id=row.id,
        workspace_id=row.workspace_id,
        number=row.number,
        title=row.title,
        description=row.description,
        metadata=json.loads(row.metadata),
        revision=row.revision,
        created_at=row.created_at,
        archived_at=row.archived_at,
        external_id=row.external_id,
        complete=row.complete,
        repositories=repositories,
        session_id=session_id,
        run=RunView(run_id, run_state) if run_id else None,
    )


def _proven(
    proven: str | None, requests: str | None
) -> tuple[tuple[RepositoryView, ...], str | None]:
    """The repositories in the plan's order and the session, from the steps' evidence."""
    if proven is None:
        return (), None
    elements = sorted(json.loads(f"[{proven}]"), key=lambda element: int(element["p"]))
    sources = {r["repository"]: r["source"] for r in json.loads(f"[{requests or ''}]")}
    evidence = [element["e"] for element in elements]
    worktrees = {e["repository"]: e for e in evidence if e["kind"] == "worktree"}
    repositories = tuple(
        RepositoryView(
            repository=e["repository"],
            source=sources[e["repository"]],
            base_commit=e["base_commit"],
            branch=worktrees.get(e["repository"], {}).get("branch"),
            path=worktrees.get(e["repository"], {}).get("path"),
        )
        for e in evidence
        if e["kind"] == "repo_attach"
    )
    session = next((e["session_id"] for e in evidence if e["kind"] == "session_prepare"), None)
    return repositories, session


def _step(row: Row[*tuple[Any, ...]]) -> StepProgress:
    return StepProgress(
        key=row.step_key,
        kind=row.kind,
        state=row.state,
        attempt=row.attempt,
        due_at=row.due_at,
        evidence=_document(row.evidence),
        evidence_hash=row.evidence_hash,
        failure=_document(row.failure),
        compensation=row.compensation,
        compensation_proof=_document(row.undo_proof),
    )


def _document(text: str | None) -> Mapping[str, Any] | None:
    if text is None:
        return None
    document: Mapping[str, Any] = json.loads(text)
    return document


# -- cursors --------------------------------------------------------------------------------------


def _cursor(position: int) -> str:
    return base64.urlsafe_b64encode(f"{_CURSOR_VERSION}.{position}".encode()).decode().rstrip("=")


def _position(cursor: str) -> int:
    try:
        text = base64.b64decode(cursor + "=" * (-len(cursor) % 4), altchars=b"-_", validate=True)
        version, _, digits = text.decode("ascii").partition(".")
    except (ValueError, binascii.Error):
        version = digits = ""
    if version != _CURSOR_VERSION or not re.fullmatch(r"[0-9]{1,18}", digits, re.ASCII):
        raise InvalidField("cursor", "cursor is not one that this server gave out")
    return int(digits)
