"""The API process: services, uvicorn, and a stop that answers whoever waits."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import structlog
import uvicorn
import uvloop

from ...runtime.admission import Admission
from ...runtime.ledger.attestation import Attestor
from ...runtime.ledger.database import Database
from ...runtime.ledger.schema import require_head
from ...runtime.profiles import load_profiles
from ...runtime.protocol.errors import DatabaseUnavailable
from ...runtime.recovery import Recovery
from ...runtime.settings import Settings
from ...workflows.engine import Engine
from ...workflows.handoff import Handoff
from .app import create_app
from .services import THREADS, Services

_log = structlog.get_logger("onceborn.api")
_HANDOFF_CONNECTIONS: Final = 8
_GRACE_S: Final = 10


class _Server(uvicorn.Server):
    """Uvicorn, with the signals left to ``serve``: a stop ends with exit code 0."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start, and say where: with port 0 nobody else knows."""
        await super().startup(sockets)
        for listening in (s for server in self.servers for s in server.sockets):
            host, port = listening.getsockname()[:2]
            _log.info("api.listening", url=f"http://{host}:{port}")


def build_services(settings: Settings) -> Services:
    """The services of one API process. Nothing is connected yet."""
    database = Database(settings.resolved_database_url, pool_size=THREADS + _HANDOFF_CONNECTIONS)
    attestor = Attestor(database)
    engine = Engine(settings)
    owner = f"{socket.gethostname()}/{os.getpid()}"
    return Services(
        settings=settings,
        database=database,
        admission=Admission(
            database, attestor, lambda: load_profiles(settings.profiles_file), settings
        ),
        handoff=Handoff(database, Recovery(database, settings.limits, owner), engine),
        engine=engine,
        attestor=attestor,
    )


def run_api(settings: Settings, sockets: list[socket.socket] | None = None) -> None:
    """Serve until SIGTERM or SIGINT. ``sockets``: bound ones of a supervisor, if any.

    Raises:
        ConfigurationError: the profiles or the schema are not usable.
    """
    load_profiles(settings.profiles_file)
    services = build_services(settings)
    try:
        require_head(services.database)
    except DatabaseUnavailable as error:
        _log.warning("starting without the database", reason=error.message)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        try:
            runner.run(_serve(services, sockets))
        finally:
            services.database.dispose()


async def _serve(services: Services, sockets: list[socket.socket] | None) -> None:
    server = _Server(
        uvicorn.Config(
            create_app(services),
            host=services.settings.api_host,
            port=services.settings.api_port,
            log_config=None,
            access_log=False,
            server_header=False,
            lifespan="on",
            ws="none",
            timeout_graceful_shutdown=_GRACE_S,
        )
    )

    def stop(name: signal.Signals) -> None:
        # Only a second Ctrl-C forces: the kernel repeats the SIGTERM of a parent's death for each
        # thread that the parent had.
        server.force_exit = server.should_exit and name is signal.SIGINT
        server.should_exit = True
        services.stopping.set()

    loop = asyncio.get_running_loop()
    for name in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(name, stop, name)
    await server.serve(sockets=sockets)
