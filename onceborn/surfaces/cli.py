"""The command line.

Exit codes: 0 done; 1 refused (by a rule, or the creation was aborted); 2 wrong usage or
configuration; 3 something that is needed cannot be reached now; 130 interrupted. Results go to
stdout, everything else to stderr.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from .. import __version__
from ..runtime.protocol.errors import OncebornError
from . import cli_access, cli_ops, cli_tasks
from .cli_output import exit_code, explain

if TYPE_CHECKING:
    from ..runtime.settings import Settings

app = typer.Typer(
    name="onceborn",
    help="A durable creation runtime: one identity, one creation.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    add_completion=False,
    epilog="Exit codes: 0 done, 1 refused, 2 usage or configuration, 3 not reachable.",
)
database_commands = typer.Typer(no_args_is_help=True, help="The ledger's schema.")
app.add_typer(cli_tasks.app, name="task")
app.add_typer(cli_access.workspaces, name="workspace")
app.add_typer(cli_access.tokens, name="token")
app.add_typer(cli_ops.app, name="ops")
app.add_typer(database_commands, name="db")
app.command()(cli_ops.verify)


def main() -> None:
    """The entry point."""
    try:
        app()
    except OncebornError as error:
        print(f"onceborn: {explain(error)}", file=sys.stderr)
        raise SystemExit(exit_code(error)) from None
    except BrokenPipeError:
        raise SystemExit(0) from None


def _leave() -> NoReturn:
    # All is closed by now. Temporal's native threads may still call into Python while the
    # interpreter comes down, which aborts a process that has ended well (seen: signal 6).
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _version(asked: bool) -> None:
    if asked:
        print(f"onceborn {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """A durable creation runtime: one identity, one creation."""


def _settings(**given: Any) -> Settings:
    """The settings with what the command line gave put over them; logging is set up by them."""
    from ..runtime.settings import load_settings
    from . import logs

    settings = load_settings().model_copy(
        update={name: value for name, value in given.items() if value is not None}
    )
    logs.configure(settings)
    return settings


@app.command()
def up(
    data: Annotated[
        Path | None, typer.Option(help="The folder that holds everything. [default: .onceborn]")
    ] = None,
    port: Annotated[
        int | None,
        typer.Option(min=0, max=65535, help="The API's port; 0 takes a free one. [default: 8460]"),
    ] = None,
    repository_root: Annotated[
        list[Path] | None,
        typer.Option(help="Repositories on this disk may be attached from below; repeatable."),
    ] = None,
) -> None:
    """Start all of it: Temporal (unless TEMPORAL_ADDRESS is set), migration, API and worker."""
    from .up import run_up

    roots = tuple(root.resolve() for root in repository_root) if repository_root else None
    settings = _settings(data=data, api_port=port, repository_roots=roots)
    raise typer.Exit(asyncio.run(run_up(settings)))


@app.command()
def api(
    host: Annotated[str | None, typer.Option(help="Address to listen on.")] = None,
    port: Annotated[int | None, typer.Option(min=0, max=65535)] = None,
    fd: Annotated[int | None, typer.Option(hidden=True)] = None,
) -> None:
    """Serve the REST API. Starts even while Temporal or the database is down."""
    from .children import end_with_parent
    from .rest.server import run_api

    end_with_parent()
    settings = _settings(api_host=host, api_port=port)
    run_api(settings, None if fd is None else [socket.socket(fileno=fd)])
    _leave()


@app.command()
def worker() -> None:
    """Drive creations and run agents on this host. Start as many as you like."""
    from ..workflows.worker import run_worker
    from .children import end_with_parent

    end_with_parent()
    asyncio.run(run_worker(_settings()))
    _leave()


@database_commands.command("upgrade")
def db_upgrade() -> None:
    """Bring the ledger's schema to the newest revision."""
    from ..runtime.ledger import schema

    database = cli_access.open_database(_settings())
    try:
        print(f"schema {schema.upgrade(database)}")
    finally:
        database.dispose()


if __name__ == "__main__":
    main()
