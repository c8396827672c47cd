"""`onceborn workspace ...` and `onceborn token ...`: on the ledger itself, for whoever runs it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from .cli_output import show_fields, show_json

if TYPE_CHECKING:
    from ..runtime.ledger.database import Database
    from ..runtime.settings import Settings

workspaces = typer.Typer(no_args_is_help=True, help="Workspaces: the tenants.")
tokens = typer.Typer(no_args_is_help=True, help="Bearer tokens, each bound to one workspace.")

Json = Annotated[bool, typer.Option("--json", help="Print the document, for programs.")]


def open_database(settings: Settings) -> Database:
    """The ledger; an SQLite file's folder is made where it is missing."""
    from ..runtime.ledger.database import Database

    if settings.database_url is None:
        settings.resolved_data.mkdir(mode=0o700, parents=True, exist_ok=True)
    return Database(settings.resolved_database_url)


@contextmanager
def _ledger() -> Iterator[Database]:
    from ..runtime.ledger.schema import require_head
    from ..runtime.settings import load_settings

    database = open_database(load_settings())
    try:
        require_head(database)
        yield database
    finally:
        database.dispose()


@workspaces.command("create")
def create_workspace(
    name: str,
    capacity: Annotated[
        int | None, typer.Option(help="How many creations may be preparing at once.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Make a workspace and print its ID."""
    from ..runtime import workspaces as spaces

    with _ledger() as database:
        workspace_id = spaces.create_workspace(database, name, capacity=capacity)
    if as_json:
        show_json({"id": workspace_id, "name": name, "capacity": capacity})
    else:
        typer.echo(workspace_id)


@workspaces.command("list")
def list_workspaces(as_json: Json = False) -> None:
    """List the workspaces."""
    from ..runtime import workspaces as spaces

    with _ledger() as database:
        views = spaces.list_workspaces(database)
    if as_json:
        show_json([{"id": v.id, "name": v.name, "capacity": v.capacity} for v in views])
        return
    for view in views:
        show_fields(view.id, {"name": view.name, "capacity": view.capacity})


@tokens.command("create")
def create_token(
    workspace: Annotated[str, typer.Argument(help="ID or name of a workspace.")],
    role: Annotated[str, typer.Option(help="member or operator.")] = "member",
    name: Annotated[str, typer.Option(help="What it is for.")] = "",
    as_json: Json = False,
) -> None:
    """Make a token and print it, this once: only its hash is kept."""
    from ..runtime import access
    from ..runtime import workspaces as spaces

    with _ledger() as database:
        workspace_id = spaces.find_workspace(database, workspace)
        made = access.create_token(database, workspace_id, role=role, name=name)
    if as_json:
        show_json({"id": made.id, "workspace_id": workspace_id, "token": made.token})
    else:
        typer.echo(made.token)
        typer.echo(
            f"token {made.id}, shown this once; revoke: onceborn token revoke {made.id}", err=True
        )


@tokens.command("list")
def list_tokens(
    workspace: Annotated[str, typer.Argument(help="ID or name of a workspace.")],
    as_json: Json = False,
) -> None:
    """List a workspace's tokens, never the secrets."""
    from ..runtime import access
    from ..runtime import workspaces as spaces

    with _ledger() as database:
        views = access.list_tokens(database, spaces.find_workspace(database, workspace))
    if as_json:
        show_json(
            [
                {"id": v.id, "name": v.name, "role": v.role, "revoked": v.revoked_at is not None}
                for v in views
            ]
        )
        return
    for view in views:
        state = "revoked" if view.revoked_at is not None else "valid"
        show_fields(view.id, {"name": view.name or None, "role": view.role, "state": state})


@tokens.command("revoke")
def revoke_token(token_id: str) -> None:
    """Revoke a token for good."""
    from ..runtime import access

    with _ledger() as database:
        revoked = access.revoke_token(database, token_id)
    typer.echo("revoked" if revoked else "was revoked already", err=True)
