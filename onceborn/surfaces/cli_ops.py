"""`onceborn ops ...` and `onceborn verify`: on the server's side, for operators of a workspace.

They open the ledger like `onceborn workspace`, and ask for a token with the role operator in
ONCEBORN_TOKEN: it says which workspace, and who did it. There is deliberately nothing here that
resumes, completes, aborts or expires a creation.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..runtime.protocol.errors import ConfigurationError, OncebornError, WrongHost
from . import cli_ops_shown as shown
from .cli_access import open_database
from .cli_output import REFUSED, UNAVAILABLE, plain, show_fields, show_json

if TYPE_CHECKING:
    from ..activities.cleanup import CleanupDriver
    from ..activities.kind import Host
    from ..runtime.ledger.database import Database
    from ..runtime.operators import Operators
    from ..runtime.settings import Settings

app = typer.Typer(
    no_args_is_help=True,
    help="What is stuck and why, for operators (ONCEBORN_TOKEN of the role operator).",
)
quarantine = typer.Typer(
    no_args_is_help=True, help="What undoing left, because it may hold somebody's work."
)
app.add_typer(quarantine, name="quarantine")

Json = Annotated[bool, typer.Option("--json", help="Print the document, for programs.")]


@dataclass(frozen=True, slots=True)
class _Desk:
    """What an operator works with."""

    settings: Settings
    database: Database
    operators: Operators


@contextmanager
def _desk() -> Iterator[_Desk]:
    """The ledger, for the operator behind ONCEBORN_TOKEN."""
    from ..runtime.access import authenticate
    from ..runtime.ledger.schema import require_head
    from ..runtime.operators import Operators
    from ..runtime.settings import load_settings
    from . import logs

    token = os.environ.get("ONCEBORN_TOKEN", "")
    if not token:
        raise ConfigurationError(
            "ONCEBORN_TOKEN is not set; make an operator's token with"
            " `onceborn token create WORKSPACE --role operator`"
        )
    settings = load_settings()
    logs.configure(settings)
    database = open_database(settings)
    try:
        require_head(database)
        principal = authenticate(database, f"Bearer {token}")
        yield _Desk(settings, database, Operators(database, settings, principal))
    finally:
        database.dispose()


def _host(settings: Settings) -> Host | None:
    """The host whose data folder this is; ``None`` where no worker ever used it."""
    from ..activities.host import open_host

    return open_host(settings) if (settings.resolved_data / "host-id").is_file() else None


def _hands(desk: _Desk, host: Host) -> CleanupDriver:
    from ..activities.cleanup import CleanupDriver
    from ..activities.locks import HostLocks
    from ..runtime.cleanup import Cleanup

    cleanup = Cleanup(desk.database, desk.settings)
    return CleanupDriver(desk.database, host, HostLocks(host.data / "locks"), cleanup)


# -- operations -----------------------------------------------------------------------------------


@app.command("list")
def list_operations(
    stuck: Annotated[
        bool, typer.Option("--stuck", help="Only what is parked, and cleanup jobs that are stuck.")
    ] = False,
    as_json: Json = False,
) -> None:
    """List the creations that have not ended, with the next action of each and why."""
    with _desk() as desk:
        lines = desk.operators.open_operations(parked=stuck)
        jobs = desk.operators.jobs(only_stuck=True)
    if as_json:
        show_json({"operations": lines, "stuck_cleanup_jobs": jobs})
        return
    for line in lines:
        show_fields(
            f"{line['operation_id']} {line['state']}",
            {
                "task": line["task_id"],
                "parked": line["parked_reason"],
                "owner": shown.owner(line),
                "next": shown.next_line(line["next"]),
            },
        )
    for job in jobs:
        show_fields(f"cleanup job {job['id']} is stuck", shown.job_fields(job))
    if not lines and not jobs:
        typer.echo("nothing is stuck" if stuck else "no creation is open", err=True)


@app.command()
def show(
    reference: Annotated[str, typer.Argument(metavar="ID", help="Of an operation or a task.")],
    as_json: Json = False,
) -> None:
    """Show one creation: its steps with evidence and attempts, and the one legal next action."""
    with _desk() as desk:
        document = desk.operators.show(reference)
    if as_json:
        show_json(document)
        return
    shown.show_operation(document)
    for step in document["steps"]:
        shown.show_step(step)
    for job in document["cleanup"]:
        show_fields(f"cleanup job {job['id']}: {job['state']}", shown.job_fields(job))
    typer.echo("timeline (ms)")
    for entry in document["timeline"]:
        typer.echo(plain(f"  {entry['at']}  {entry['what']}"))


@app.command()
def unpark(
    reference: Annotated[str, typer.Argument(metavar="ID", help="Of an operation or a task.")],
    as_json: Json = False,
) -> None:
    """Clear the parking of a creation. The runtime goes on by itself: it completes it, undoes it,
    or parks it again."""
    with _desk() as desk:
        document = desk.operators.unpark(reference)
    if as_json:
        show_json(document)
        return
    show_fields(
        f"{document['operation_id']} is no longer parked",
        {"was parked for": document["was_parked_for"], "next": shown.next_line(document["next"])},
    )


# -- quarantine -----------------------------------------------------------------------------------


@quarantine.command("list")
def list_quarantine(as_json: Json = False) -> None:
    """List what undoing left on hosts, and what is in it now where it is on this one."""
    with _desk() as desk:
        jobs = desk.operators.jobs()
        host = _host(desk.settings)
        for job in jobs:
            job["contents"] = _contents(desk, host, job)
    if as_json:
        show_json({"entries": jobs})
        return
    for job in jobs:
        contents = job["contents"] or {}
        folders = [
            f"{f['path']} ({f['files']} files, {f['bytes']} bytes)"
            for f in contents.get("folders", [])
        ]
        show_fields(
            f"{job['id']} {job['state']}",
            {
                **shown.job_fields(job),
                "folders": ", ".join(folders) or None,
                "branches": ", ".join(contents.get("branches", {})) or None,
                "not purgeable": "; ".join(contents.get("refusals", [])) or None,
                "digest": contents.get("digest"),
            },
        )
    if not jobs:
        typer.echo("nothing is left to clean up", err=True)


@quarantine.command()
def purge(
    entry: Annotated[str, typer.Argument(metavar="ENTRY", help="ID of a quarantined entry.")],
    digest: Annotated[
        str | None,
        typer.Option(help="Of what is in it, as `onceborn ops quarantine list` shows it."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Remove one quarantined entry for good, with the work that is in it.

    Refused unless the entry holds exactly what the digest is of: what somebody did in it since it
    was listed is not removed.
    """
    with _desk() as desk:
        row = desk.operators.entry(entry)
        host = _host(desk.settings)
        if host is None or row.host_id != host.host_id:
            raise WrongHost(
                f"Entry {entry} is on host {row.host_id}; run the command there, with that host's"
                " ONCEBORN_DATA.",
                host=row.host_id,
            )
        removed = _purge(desk, _hands(desk, host), entry, digest or "")
    if as_json:
        show_json({"entry": entry, "state": "purged", **removed})
        return
    what = removed["removed"]
    show_fields(
        f"{entry} purged",
        {
            "folders": ", ".join(f["path"] for f in what["folders"]) or "none were left",
            "branches": ", ".join(what["branches"]) or None,
        },
    )


def _purge(desk: _Desk, hands: CleanupDriver, entry: str, digest: str) -> dict[str, Any]:
    job = desk.operators.begin_purge(entry, digest)
    try:
        removed = hands.purge(job, digest)
    except OncebornError as error:
        desk.operators.end_purge(job, None, refusal=error.message)
        raise
    desk.operators.end_purge(job, removed)
    return dict(removed)


def _contents(desk: _Desk, host: Host | None, job: dict[str, Any]) -> dict[str, Any] | None:
    if host is None or job["host_id"] != host.host_id or job["state"] != "quarantined":
        return None
    contents = _hands(desk, host).look(job["id"])
    return {**contents.facts(), "digest": contents.digest}


# -- verify ---------------------------------------------------------------------------------------


def verify(
    reference: Annotated[str, typer.Argument(metavar="ID", help="Of an operation or a task.")],
    as_json: Json = False,
) -> None:
    """Look at the world again, on this host, and compare it with the evidence. Changes nothing.

    Exit code 1: something differs. 3: somebody is at work on it now; look again.
    """
    from ..activities.locks import HostLocks
    from ..activities.verify import Verifier

    with _desk() as desk:
        operation = desk.operators.operation(reference)
        host = _host(desk.settings)
        if host is None:
            raise WrongHost(f"This is no host; run it on {operation.host_id}.")
        verifier = Verifier(desk.database, host, HostLocks(host.data / "locks"))
        steps = verifier.verify(operation)
    if as_json:
        documents = [step.document() for step in steps]
        show_json({"operation_id": operation.id, "state": operation.state, "steps": documents})
    else:
        for step in steps:
            fields = {d.field: f"{d.evidence!r} -> {d.world!r}" for d in step.differences}
            show_fields(f"{step.step}: {step.verdict}", {"what": step.what, **fields})
    verdicts = {step.verdict for step in steps}
    if "differs" in verdicts:
        raise typer.Exit(REFUSED)
    if "busy" in verdicts:
        raise typer.Exit(UNAVAILABLE)
