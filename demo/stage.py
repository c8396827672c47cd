"""The demo's stage: real processes on embedded parts, and independent looks at what they left."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import httpx
from sqlalchemy import Engine, create_engine, inspect, make_url, text

from onceborn.temporal_dev import EmbeddedTemporal

T = TypeVar("T")
PATIENCE_S = 90.0
LEASE_S = 6.0
"""Shorter than the 30 s as shipped, so that nobody waits long for a dead owner's lease."""


class Unexpected(AssertionError):
    """The demo saw something else than it promises."""


def until(what: str, look: Callable[[], T | None], patience_s: float = PATIENCE_S) -> T:
    """Look again and again until there is something to see."""
    deadline = time.monotonic() + patience_s
    while time.monotonic() < deadline:
        seen = look()
        if seen:
            return seen
        time.sleep(0.05)
    raise Unexpected(f"waited {patience_s:.0f} s in vain: {what}")


def git(*arguments: str, cwd: Path) -> str:
    """Plain git, as a person would use it: the demo's own look at a repository."""
    identity = ["-c", "user.name=demo", "-c", "user.email=demo@localhost"]
    done = subprocess.run(
        ["git", *identity, *arguments], cwd=cwd, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


class Stage:
    """One folder, one repository, one Temporal, one API, and workers that come and go.

    With ``settings`` (environment variables) it plays elsewhere than on embedded parts: the tests
    set ``DATABASE_URL`` and ``TEMPORAL_ADDRESS``.
    """

    def __init__(self, folder: Path, **settings: str) -> None:
        self.folder = folder
        self.settings = settings
        self.data = folder / "data"
        self.repository = folder / "repository"
        self._processes: list[subprocess.Popen[bytes]] = []
        self.temporal = None if "TEMPORAL_ADDRESS" in settings else EmbeddedTemporal(self.data)
        self._workers = 0
        self._alive: list[subprocess.Popen[bytes]] = []
        self.workspace_id = ""
        self.token = ""
        self.base = ""

    # -- setting up and tearing down ----------------------------------------------------------

    def up(self) -> None:
        """Repository, profile, Temporal, schema, workspace, API and a first worker."""
        self.prepare()
        if self.temporal is not None:
            self.temporal.start()
        self._onceborn("db", "upgrade")
        self.workspace_id = json.loads(self._onceborn("workspace", "create", "demo", "--json"))[
            "id"
        ]
        made = self._onceborn("token", "create", self.workspace_id, "--name", "demo", "--json")
        self.token = json.loads(made)["token"]
        self.worker()
        self.base = self.api("api")

    def down(self) -> None:
        """End what was started, by its own process ID, last first."""
        for process in reversed(self._processes):
            if process.poll() is None:
                process.send_signal(signal.SIGCONT)
                process.terminate()
        for process in self._processes:
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        if self.temporal is not None:
            self.temporal.stop()

    def api(self, name: str, failpoints: str = "") -> str:
        """An API process; returns its address."""
        process = self.start(name, "api", "--port", "0", ONCEBORN_FAILPOINTS=failpoints)
        return until(f"the address of {name}", lambda: self._address(process, name))

    def worker(self, failpoints: str = "") -> subprocess.Popen[bytes]:
        """A worker process, ready to work."""
        self._workers += 1
        name = f"worker-{self._workers}"
        process = self.start(name, "worker", ONCEBORN_FAILPOINTS=failpoints)
        self._alive = [p for p in self._alive if p.poll() is None] + [process]
        until(f"{name} to start", lambda: self.logged(name, "worker.started"))
        return process

    def pause(self, process: subprocess.Popen[bytes]) -> None:
        """SIGSTOP, at an instant when none of its threads is in a transaction.

        SQLite has one write lock for the whole file: a process that is stopped while it holds it
        holds up everybody, and nobody could go on to show what this is to show.
        """
        while True:
            process.send_signal(signal.SIGSTOP)
            if self._can_write():
                return
            process.send_signal(signal.SIGCONT)
            time.sleep(0.01)

    def _can_write(self) -> bool:
        engine = self._engine()
        if engine.dialect.name != "sqlite":
            return True
        try:
            with sqlite3.connect(engine.url.database or "", timeout=1) as connection:
                connection.execute("BEGIN IMMEDIATE")
                connection.rollback()
        except sqlite3.OperationalError:
            return False
        return True

    def end_workers(self) -> None:
        """Stop every worker, so that the next one is alone."""
        for process in self._alive:
            self.end(process)
        self._alive = []

    def end(self, process: subprocess.Popen[bytes]) -> None:
        """Stop a worker in the ordinary way."""
        process.terminate()
        process.wait(30)

    def start(self, name: str, *arguments: str, **environment: str) -> subprocess.Popen[bytes]:
        """One of Onceborn's own processes, its log beside the data."""
        with (self.folder / f"{name}.log").open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "onceborn", *arguments],
                env=self._environment(**environment),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        self._processes.append(process)
        return process

    @property
    def workers_started(self) -> int:
        return self._workers

    def logged(self, name: str, event: str) -> bool:
        """Whether a process has logged an event."""
        return event in (self.folder / f"{name}.log").read_text(errors="replace")

    def prepare(self) -> None:
        """The folder, the repository, and the profile of an agent that leaves its mark."""
        self._make_repository()
        self.data.mkdir(parents=True, exist_ok=True)
        (self.data / "profiles.toml").write_text(
            "[profiles.marker]\n"
            'argv = ["/bin/sh", "-c", "echo agent $$ in $PWD >> AGENT-WAS-HERE"]\n'
        )

    def _make_repository(self) -> None:
        self.repository.mkdir(parents=True)
        git("init", "-q", "-b", "trunk", cwd=self.repository)
        (self.repository / "hello.txt").write_text("hello\n")
        git("add", ".", cwd=self.repository)
        git("commit", "-q", "-m", "first", cwd=self.repository)

    def _environment(self, **extra: str) -> dict[str, str]:
        kept = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("ONCEBORN_", "TEMPORAL_")) and name != "DATABASE_URL"
        }
        return {
            **kept,
            "ONCEBORN_DATA": str(self.data),
            "ONCEBORN_REPOSITORY_ROOTS": str(self.folder),
            "ONCEBORN_LEASE_S": str(LEASE_S),
            "ONCEBORN_LOG_FORMAT": "json",
            **self.settings,
            **{name: value for name, value in extra.items() if value},
        }

    def _onceborn(self, *arguments: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "onceborn", *arguments],
            env=self._environment(),
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            raise Unexpected(f"onceborn {' '.join(arguments)}: {done.stderr}")
        return done.stdout

    def _address(self, api: subprocess.Popen[bytes], name: str) -> str | None:
        log = self.folder / f"{name}.log"
        if api.poll() is not None:
            raise Unexpected(f"{name} ended with {api.returncode}; see {log}")
        for line in log.read_text(errors="replace").splitlines():
            if '"api.listening"' in line:
                return str(json.loads(line)["url"])
        return None

    # -- asking -------------------------------------------------------------------------------

    def client(self) -> httpx.Client:
        """A client of the API, patient."""
        headers = {"Authorization": f"Bearer {self.token}"}
        return httpx.Client(base_url=self.base, headers=headers, timeout=PATIENCE_S)

    def create(
        self, external_id: str | None, *, base: str | None = None, **body: Any
    ) -> httpx.Response:
        """POST /api/v1/tasks, to the API at ``base`` if there are several."""
        if external_id is not None:
            body["external_id"] = external_id
        with self.client() as client:
            return client.post(f"{base or self.base}/api/v1/tasks", json=body)

    def progress(self, task_id: str) -> dict[str, Any]:
        """GET /api/v1/tasks/{id}/creation."""
        with self.client() as client:
            return dict(client.get(f"/api/v1/tasks/{task_id}/creation").json())

    def manifest(self, **more: Any) -> dict[str, Any]:
        """An ordinary request: a worktree of the repository and an agent in it."""
        return {
            "title": "Say hello",
            "repositories": [{"source": str(self.repository)}],
            "profile": "marker",
            "start_agent": True,
            **more,
        }

    # -- looking ------------------------------------------------------------------------------

    def query(self, statement: str, **parameters: Any) -> list[dict[str, Any]]:
        """A look of our own into the ledger."""
        engine = self._engine()
        with engine.connect() as connection:
            found = [dict(row._mapping) for row in connection.execute(text(statement), parameters)]
        engine.dispose()
        return found

    def _engine(self) -> Engine:
        url = make_url(self.settings.get("DATABASE_URL", f"sqlite:///{self.data / 'ledger.db'}"))
        if url.get_backend_name() == "postgresql":
            url = url.set(drivername="postgresql+psycopg")
        return create_engine(url)

    def digest(self) -> str:
        """Everything that a create could touch: each table, the clones and the worktrees.

        The workers' own sign of life (table hosts) is left out.
        """
        engine = self._engine()
        names = sorted(inspect(engine).get_table_names())
        engine.dispose()
        sha = hashlib.sha256()
        for name in (name for name in names if name != "hosts"):
            rows = self.query(f"SELECT * FROM {name}")
            sha.update(repr((name, sorted(map(repr, rows)))).encode())
        for root in ("repositories", "worktrees", "runs"):
            for path in sorted((self.data / root).rglob("*")):
                content = path.read_bytes() if path.is_file() else b""
                sha.update(repr((str(path), content)).encode())
        return sha.hexdigest()

    def wait_for_agent(self, task_id: str) -> dict[str, Any]:
        """The task's run, once it has ended."""
        statement = "SELECT * FROM runs WHERE task_id = :t AND finished_at IS NOT NULL"
        return until("the agent to end", lambda: self.query(statement, t=task_id))[0]

    def worktrees(self, branch: str) -> list[Path]:
        """The worktrees on a branch, as git itself lists them."""
        found = []
        for clone in (self.data / "repositories").glob("*.git"):
            path = None
            for line in git("worktree", "list", "--porcelain", cwd=clone).splitlines():
                path = Path(line[9:]) if line.startswith("worktree ") else path
                if line == f"branch refs/heads/{branch}" and path is not None:
                    found.append(path)
        return found
