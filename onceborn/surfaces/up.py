"""`onceborn up`: everything on one machine, in one folder, under one supervisor."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import httpx
import structlog
import typer

from ..runtime import access, workspaces
from ..runtime.failpoints import failpoint
from ..runtime.ledger import schema
from ..runtime.ledger.database import Database
from ..runtime.protocol.errors import ConfigurationError, OncebornError
from ..runtime.settings import Settings
from ..temporal_dev import EmbeddedTemporal
from .children import Child, ChildFailed
from .cli_output import DONE

DEFAULT_WORKSPACE: Final = "default"
_READY_POLL_S: Final = 0.1
_WATCH_TEMPORAL_S: Final = 1.0
_log = structlog.get_logger("onceborn.up")


async def run_up(settings: Settings) -> int:
    """Run until SIGINT or SIGTERM; returns the exit code.

    Raises:
        ConfigurationError: the folder, the port or the schema is not usable.
        DatabaseUnavailable: the database cannot be reached.
        ChildFailed: a part keeps dying.
    """
    data = settings.resolved_data
    with _folder(data), _listening(settings) as sock:
        stopping = asyncio.Event()
        loop = asyncio.get_running_loop()
        for name in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(name, stopping.set)
        first = await asyncio.to_thread(_prepare, settings)
        temporal = None if settings.temporal_address else EmbeddedTemporal(data)
        try:
            if temporal is not None:
                await asyncio.to_thread(temporal.start)
            address = settings.temporal_address or (temporal and temporal.address) or ""
            await _run_children(settings, address, sock, first, temporal, stopping)
        finally:
            if temporal is not None:
                await asyncio.to_thread(temporal.stop)
    typer.echo("stopped", err=True)
    return DONE


@contextmanager
def _folder(data: Path) -> Iterator[None]:
    """The data folder, for one supervisor at a time."""
    try:
        data.mkdir(mode=0o700, parents=True, exist_ok=True)
        failpoint("up.lock")
        descriptor = os.open(data / "up.lock", os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise ConfigurationError(f"{data} cannot be used: {error.strerror}") from None
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigurationError(f"another `onceborn up` already uses {data}") from None
        failpoint("up.locked")
        yield
    finally:
        os.close(descriptor)


@contextmanager
def _listening(settings: Settings) -> Iterator[socket.socket]:
    """The API's socket, held by the supervisor: callers only wait while an API restarts."""
    sock = socket.socket(socket.AF_INET6 if ":" in settings.api_host else socket.AF_INET)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind((settings.api_host, settings.api_port))
            sock.listen(2048)
        except OSError as error:
            raise ConfigurationError(
                f"cannot listen on {settings.api_host}:{settings.api_port} ({error.strerror});"
                " choose another with --port"
            ) from None
        sock.set_inheritable(True)
        yield sock
    finally:
        sock.close()


def _prepare(settings: Settings) -> tuple[str, str] | None:
    """Migrate; on the very first start make a workspace and a token, and return both."""
    database = Database(settings.resolved_database_url)
    try:
        schema.upgrade(database)
        if workspaces.any_workspace(database):
            return None
        workspace_id = workspaces.create_workspace(database, DEFAULT_WORKSPACE)
        made = access.create_token(database, workspace_id, role="operator", name="first start")
        return workspace_id, made.token
    finally:
        database.dispose()


def _environment(settings: Settings, temporal_address: str) -> dict[str, str]:
    """What the children run with: ours, with what the command line decided put over it."""
    return {
        **os.environ,
        "ONCEBORN_DATA": str(settings.resolved_data),
        "ONCEBORN_REPOSITORY_ROOTS": ":".join(str(root) for root in settings.repository_roots),
        "DATABASE_URL": settings.resolved_database_url,
        "TEMPORAL_ADDRESS": temporal_address,
    }


async def _run_children(
    settings: Settings,
    temporal_address: str,
    sock: socket.socket,
    first: tuple[str, str] | None,
    temporal: EmbeddedTemporal | None,
    stopping: asyncio.Event,
) -> None:
    environment = _environment(settings, temporal_address)
    api = Child("api", ["api", "--fd", str(sock.fileno())], environment, (sock.fileno(),))
    worker = Child("worker", ["worker"], environment, ())
    host, port = sock.getsockname()[:2]
    url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    tasks = [
        asyncio.create_task(stopping.wait(), name="stop"),
        asyncio.create_task(api.supervise()),
        asyncio.create_task(worker.supervise()),
    ]
    if temporal is not None:
        tasks.append(asyncio.create_task(_watch(temporal)))
    announcing = asyncio.create_task(_announce(url, temporal_address, settings, first))
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        announcing.cancel()
        # The API first: it answers whoever waits, and nothing new comes in.
        await api.stop()
        await worker.stop()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, announcing, return_exceptions=True)


async def _watch(temporal: EmbeddedTemporal) -> None:
    """Start Temporal again when it dies; what it forgot is driven on from the ledger."""
    deaths = 0
    while True:
        await asyncio.sleep(_WATCH_TEMPORAL_S)
        if temporal.running:
            continue
        deaths += 1
        _log.warning("died; starting it again", child="temporal", deaths=deaths)
        try:
            await asyncio.to_thread(temporal.start)
        except OncebornError as error:
            raise ChildFailed(f"Temporal died and does not start again: {error.message}") from None


async def _announce(
    url: str, temporal_address: str, settings: Settings, first: tuple[str, str] | None
) -> None:
    """Say where it is once it is ready, and the first token, this once."""
    await _ready(url)
    typer.echo(f"Onceborn is ready at {url}")
    typer.echo(f"  data      {settings.resolved_data}")
    typer.echo(f"  temporal  {temporal_address}")
    if first is not None:
        workspace_id, token = first
        typer.echo(f"  workspace {workspace_id} ({DEFAULT_WORKSPACE!r})")
        typer.echo("This token is shown once; only its hash is kept:")
        typer.echo(f"  export ONCEBORN_URL={url}")
        typer.echo(f"  export ONCEBORN_WORKSPACE={workspace_id}")
        typer.echo(f"  export ONCEBORN_TOKEN={token}")


async def _ready(url: str) -> None:
    async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=5.0) as client:
        while True:
            with contextlib.suppress(httpx.HTTPError):
                if (await client.get("/readyz")).status_code == httpx.codes.OK:
                    return
            await asyncio.sleep(_READY_POLL_S)
