"""From the runtime's views to documents. Nothing is null: what is absent is left out."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any, Final, cast

from ...runtime.protocol.states import Outcome
from ...runtime.tasks import Page, Progress, RepositoryView, StepProgress, TaskView
from .schemas import Creation, CreationResult, Repository, Step, Task, TaskList

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


def rfc3339(milliseconds: int) -> str:
    """An instant in UTC to the millisecond."""
    moment = _EPOCH + timedelta(milliseconds=milliseconds)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def task_document(view: TaskView) -> Task:
    document: Task = {
        "id": view.id,
        "workspace_id": view.workspace_id,
        "number": view.number,
        "title": view.title,
        "description": view.description,
        "metadata": cast("dict[str, Any]", view.metadata),
        "revision": view.revision,
        "created_at": rfc3339(view.created_at),
        "repositories": [_repository(repository) for repository in view.repositories],
    }
    if view.archived_at is not None:
        document["archived_at"] = rfc3339(view.archived_at)
    if view.external_id is not None:
        document["external_id"] = view.external_id
    if view.session_id is not None:
        document["session_id"] = view.session_id
    if view.run is not None:
        document["run"] = {"id": view.run.id, "state": cast("Any", view.run.state)}
    return document


def result_document(view: TaskView, outcome: Outcome, external_id: str | None) -> CreationResult:
    """The answer to a create or lookup, as of the commit or the read that decided it.

    ``external_id`` is the identity that was held then; a release that landed since is a later fact.
    """
    document = cast(
        "CreationResult",
        {
            **task_document(view),
            "deduplicated": outcome.deduplicated,
            "creation_complete": outcome.creation_complete,
        },
    )
    document.pop("external_id", None)
    if external_id is not None and outcome is not Outcome.CREATED_IDENTITY_LOST:
        document["external_id"] = external_id
    return document


def list_document(page: Page) -> TaskList:
    document: TaskList = {"tasks": [task_document(view) for view in page.tasks]}
    if page.next_cursor is not None:
        document["next_cursor"] = page.next_cursor
    return document


def creation_document(progress: Progress) -> Creation:
    document = {
        "task_id": progress.task_id,
        "operation_id": progress.operation_id,
        "host_id": progress.host_id,
        "state": progress.state,
        "fence": progress.fence,
        "parked_reason": progress.parked_reason,
        "outcome": progress.outcome,
        "failure": progress.failure,
        "created_at": rfc3339(progress.created_at),
        "finished_at": _time(progress.finished_at),
        "run_id": progress.run_id,
        "steps": [_step(step) for step in progress.steps],
    }
    return cast("Creation", _present(document))


def _repository(view: RepositoryView) -> Repository:
    document: Repository = {
        "repository": view.repository,
        "source": view.source,
        "base_commit": view.base_commit,
    }
    if view.branch is not None:
        document["branch"] = view.branch
    if view.path is not None:
        document["path"] = view.path
    return document


def _step(step: StepProgress) -> Step:
    document = {
        "key": step.key,
        "kind": step.kind,
        "state": step.state,
        "attempt": step.attempt,
        "due_at": _time(step.due_at),
        "evidence": step.evidence,
        "evidence_hash": step.evidence_hash,
        "failure": step.failure,
        "compensation": step.compensation,
        "compensation_proof": step.compensation_proof,
    }
    return cast("Step", _present(document))


def _time(milliseconds: int | None) -> str | None:
    return None if milliseconds is None else rfc3339(milliseconds)


def _present(document: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in document.items() if value is not None}
