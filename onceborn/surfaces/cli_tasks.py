"""`onceborn task ...`: over HTTP, as the token in ONCEBORN_TOKEN."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..runtime.protocol.errors import ConfigurationError
from .cli_output import INTERRUPTED, show_fields, show_json

if TYPE_CHECKING:
    from .client import Client

app = typer.Typer(
    no_args_is_help=True, help="Create and read tasks (ONCEBORN_URL, ONCEBORN_TOKEN)."
)

Url = Annotated[
    str, typer.Option(envvar="ONCEBORN_URL", help="Address of the server.", show_default=True)
]
Json = Annotated[bool, typer.Option("--json", help="Print the document, for programs.")]
DEFAULT_URL = "http://127.0.0.1:8460"


@contextmanager
def _client(url: str) -> Iterator[Client]:
    token = os.environ.get("ONCEBORN_TOKEN", "")
    if not token:
        raise ConfigurationError(
            "ONCEBORN_TOKEN is not set; make a token with `onceborn token create WORKSPACE`"
        )
    from .client import Client  # not before it is needed: `--help` answers at once

    client = Client(url, token)
    try:
        yield client
    finally:
        client.close()


@app.command()
def create(
    title: Annotated[str, typer.Option(help="What the task is called.")],
    description: Annotated[str, typer.Option()] = "",
    repository: Annotated[
        list[str] | None,
        typer.Option(help="Path on the server or URL of a git repository; repeatable."),
    ] = None,
    base_ref: Annotated[
        str | None, typer.Option(help="Start from this branch, tag or commit.")
    ] = None,
    branch: Annotated[str | None, typer.Option(help="Name of the fresh branch.")] = None,
    profile: Annotated[str | None, typer.Option(help="Agent profile of the server.")] = None,
    prompt: Annotated[str, typer.Option(help="What the agent is told.")] = "",
    start_agent: Annotated[bool, typer.Option("--start-agent", help="Start the agent.")] = False,
    external_id: Annotated[
        str | None,
        typer.Option(help="Your own name for the entity: the same one never makes a second task."),
    ] = None,
    url: Url = DEFAULT_URL,
    as_json: Json = False,
) -> None:
    """Create a task once, and wait until it is complete.

    Safe to repeat with the same external ID. `deduplicated` with `creation_complete: false` means
    that another create is still at work: proceed with the task or look again; never release the
    identity and create again.
    """
    sources = repository or []
    if (base_ref or branch) and len(sources) != 1:
        raise typer.BadParameter("--base-ref and --branch need exactly one --repository")
    manifest: dict[str, Any] = {
        "title": title,
        "description": description,
        "repositories": [
            {"source": _source(s), "base_ref": base_ref, "branch": branch} for s in sources
        ],
        "profile": profile,
        "prompt": prompt,
        "start_agent": start_agent,
    }
    if external_id is not None:
        manifest["external_id"] = external_id
    with _client(url) as client:
        try:
            created = client.create(manifest)
        except KeyboardInterrupt:
            typer.echo("onceborn: no longer waiting; the creation goes on", err=True)
            raise typer.Exit(INTERRUPTED) from None
    if as_json:
        show_json({**created.document, "request_match": created.request_match})
    else:
        _show_result(created.document, created.request_match)


@app.command()
def show(task_id: str, url: Url = DEFAULT_URL, as_json: Json = False) -> None:
    """Show a task and how its creation stands."""
    with _client(url) as client:
        creation = client.creation(task_id)
        task = None if creation["state"] == "aborted" else client.task(task_id)
    if as_json:
        show_json({"task": task, "creation": creation} if task else {"creation": creation})
        return
    if task is not None:
        show_fields(f"task {task['id']}", _task_fields(task))
    failure = creation.get("failure") or {}
    show_fields(
        f"creation {creation['operation_id']}",
        {
            "state": creation["state"],
            "fence": creation["fence"],
            "outcome": creation.get("outcome"),
            "parked": creation.get("parked_reason"),
            "failure": failure.get("reason"),
        },
    )
    for step in creation["steps"]:
        undone = "" if step["compensation"] == "none" else f", undo {step['compensation']}"
        why = (step.get("failure") or {}).get("reason")
        show_fields(
            f"  step {step['key']}: {step['state']}, attempt {step['attempt']}{undone}",
            {"why": why, "evidence": step.get("evidence_hash")},
        )


@app.command()
def lookup(
    external_id: str,
    workspace: Annotated[
        str, typer.Option(envvar="ONCEBORN_WORKSPACE", help="ID of the token's workspace.")
    ],
    url: Url = DEFAULT_URL,
    as_json: Json = False,
) -> None:
    """Ask which task holds an external ID. Has no effect."""
    with _client(url) as client:
        document = client.lookup(workspace, external_id)
    if as_json:
        show_json(document)
    else:
        _show_result(document, None)


def _source(given: str) -> str:
    """A folder that is here is given to the server as an absolute path."""
    path = Path(given)
    return str(path.resolve()) if "://" not in given and path.is_dir() else given


def _show_result(document: dict[str, Any], request_match: str | None) -> None:
    complete, found = document["creation_complete"], document["deduplicated"]
    headline = "created" if not found else "found" if complete else "found, still being prepared"
    fields = {
        **_task_fields(document),
        "deduplicated": str(found).lower(),
        "creation_complete": str(complete).lower(),
        "request match": request_match,
    }
    show_fields(f"{headline} {document['id']}", fields)


def _task_fields(task: dict[str, Any]) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "number": task["number"],
        "title": task["title"],
        "external_id": task.get("external_id"),
        "revision": task["revision"],
        "created": task["created_at"],
        "archived": task.get("archived_at"),
        "session": task.get("session_id"),
    }
    for repository in task["repositories"]:
        name = repository["repository"]
        fields[f"repository {name}"] = repository["source"]
        fields[f"  base {name}"] = repository["base_commit"]
        fields[f"  branch {name}"] = repository.get("branch")
        fields[f"  path {name}"] = repository.get("path")
    if "run" in task:
        fields["run"] = f"{task['run']['id']} ({task['run']['state']})"
    return fields
