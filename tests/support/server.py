"""A real API server in a thread: uvicorn on a free port, over whatever services a test gives it."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

import httpx
import uvicorn
from litestar import Litestar

from onceborn.runtime import access
from onceborn.runtime.admission import Admission
from onceborn.runtime.ledger.attestation import Attestor
from onceborn.runtime.ledger.database import Database
from onceborn.runtime.ledger.operations import Limits
from onceborn.runtime.recovery import Recovery
from onceborn.runtime.settings import Settings
from onceborn.surfaces.rest.app import create_app
from onceborn.surfaces.rest.services import Services
from onceborn.workflows.engine import Engine
from onceborn.workflows.handoff import Handoff

from .world import PROFILES


def closed_port() -> int:
    """A port on which nobody listens."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def services_for(settings: Settings, database: Database) -> Services:
    """The services of an API process, as ``onceborn api`` builds them."""
    attestor = Attestor(database)
    engine = Engine(settings)
    recovery = Recovery(database, Limits(), "test")
    return Services(
        settings=settings,
        database=database,
        admission=Admission(database, attestor, lambda: PROFILES, settings),
        handoff=Handoff(database, recovery, engine),
        engine=engine,
        attestor=attestor,
    )


@contextmanager
def serving(app: Litestar) -> Iterator[str]:
    """Serve the application; yields its address."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        server = uvicorn.Server(
            uvicorn.Config(app, log_config=None, access_log=False, lifespan="on", ws="none")
        )
        started = threading.Event()
        original = server.startup

        async def startup(sockets: list[socket.socket] | None = None) -> None:
            await original(sockets)
            started.set()

        server.startup = startup  # type: ignore[method-assign]
        thread = threading.Thread(target=server.run, args=([sock],))
        thread.start()
        try:
            assert started.wait(30)
            yield f"http://127.0.0.1:{sock.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(30)


@dataclass
class Caller:
    """An HTTP client that authenticates as one token."""

    http: httpx.Client
    workspace_id: str

    def create(self, external_id: Any = None, **body: Any) -> httpx.Response:
        if external_id is not None:
            body["external_id"] = external_id
        body.setdefault("title", "a task")
        return self.http.post("/api/v1/tasks", json=body)

    def raw(self, body: bytes) -> httpx.Response:
        return self.http.post("/api/v1/tasks", content=body)

    def lookup(self, external_id: str, workspace_id: str | None = None) -> httpx.Response:
        workspace = workspace_id or self.workspace_id
        return self.http.get(
            f"/api/v1/workspaces/{quote(workspace, safe='')}/tasks/by-external-id",
            params={"external_id": external_id},
        )

    def get(self, path: str, **parameters: Any) -> httpx.Response:
        return self.http.get(f"/api/v1{path}", params=parameters)


@contextmanager
def calling(url: str, database: Database, workspace_id: str) -> Iterator[Caller]:
    """A caller of the workspace, with a fresh token."""
    token = access.create_token(database, workspace_id).token
    headers = {"Authorization": f"Bearer {token}"}
    with httpx.Client(base_url=url, headers=headers, timeout=60, trust_env=False) as http:
        yield Caller(http, workspace_id)


__all__ = ["Caller", "calling", "closed_port", "create_app", "services_for", "serving"]
