"""The product as processes, on the demo's stage: what end-to-end tests play on."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
from temporalio.client import Client

from demo.stage import Stage, until
from onceborn.activities.host import open_host
from onceborn.runtime import access, workspaces
from onceborn.runtime.ledger import hosts
from onceborn.runtime.ledger.database import Database
from onceborn.runtime.settings import Settings
from onceborn.workflows.engine import host_queue

__all__ = ["Play", "until"]


class Play(Stage):
    """A stage with what tests ask for beside what the demo does."""

    def __init__(self, folder: Path, **settings: str) -> None:
        super().__init__(folder, **settings)
        self._threads = ThreadPoolExecutor(8)

    def up(self) -> None:
        """Repository, workspace and API; the database is migrated. No worker yet."""
        self.prepare()
        database = Database(self.settings["DATABASE_URL"])
        self.workspace_id = workspaces.create_workspace(database, "test")
        self.token = access.create_token(database, self.workspace_id, name="test").token
        host = open_host(Settings(data=self.data))
        with database.transaction("test.host") as connection:
            hosts.seen(connection, database, host.host_id, "test", host_queue(host.host_id))
        database.dispose()
        self.base = self.api("api")

    def down(self) -> None:
        super().down()
        self._threads.shutdown()

    def creating(self, external_id: str | None, **body: Any) -> Future[httpx.Response]:
        """A create whose caller waits in the background."""
        return self._threads.submit(self.create, external_id, **body)

    def operation(self, task_id: str) -> dict[str, Any]:
        """The operation's row."""
        return self.query("SELECT * FROM operations WHERE task_id = :t", t=task_id)[0]

    def holder(self, external_id: str) -> str:
        """The task that holds an identity, once there is one."""
        statement = "SELECT id FROM tasks WHERE external_id = :e"
        rows = until("the identity to be held", lambda: self.query(statement, e=external_id))
        return str(rows[0]["id"])

    def steps(self, task_id: str) -> dict[str, dict[str, Any]]:
        """The steps' rows by key."""
        statement = (
            "SELECT s.* FROM steps s JOIN operations o ON o.id = s.operation_id"
            " WHERE o.task_id = :t"
        )
        return {row["step_key"]: row for row in self.query(statement, t=task_id)}

    def settled(self, task_id: str) -> dict[str, Any]:
        """The operation once it is completed or aborted."""

        def ended() -> dict[str, Any] | None:
            row = self.operation(task_id)
            return row if row["state"] in ("completed", "aborted") else None

        return until("the creation to end", ended)

    def kill(self, process: subprocess.Popen[bytes]) -> None:
        """SIGKILL, and see it gone."""
        process.send_signal(signal.SIGKILL)
        process.wait()

    def workflow(self, how: str, workflow_id: str) -> None:
        """Terminate or cancel a workflow from outside."""

        async def end() -> None:
            client = await Client.connect(
                self.settings["TEMPORAL_ADDRESS"], namespace=self.settings["TEMPORAL_NAMESPACE"]
            )
            await getattr(client.get_workflow_handle(workflow_id), how)()

        asyncio.run(end())

    def workflows(self) -> int:
        """How many workflows Temporal has ever had in this namespace."""

        async def count() -> int:
            client = await Client.connect(
                self.settings["TEMPORAL_ADDRESS"], namespace=self.settings["TEMPORAL_NAMESPACE"]
            )
            return (await client.count_workflows()).count

        return asyncio.run(count())

    def alone(self, task_id: str, *, agents: int = 1) -> None:
        """The invariants of a completed creation: one of each, everywhere one can look."""
        assert self.settled(task_id)["state"] == "completed"
        if agents:
            self.wait_for_agent(task_id)
        evidence = json.loads(self.steps(task_id)["worktree:0"]["evidence"])
        assert self.worktrees(evidence["branch"]) == [Path(evidence["path"])]
        mark = Path(evidence["path"]) / "AGENT-WAS-HERE"
        assert (len(mark.read_text().splitlines()) if mark.exists() else 0) == agents
        runs = self.query("SELECT id FROM runs WHERE task_id = :t", t=task_id)
        assert len(runs) == agents
        events = self.query("SELECT type FROM outbox WHERE aggregate_id = :t", t=task_id)
        assert [row["type"] for row in events] == ["task.created"]


def at_gate(play: Play, gate: Path, what: str) -> None:
    """Wait until a process has arrived at a failpoint that waits for ``gate``."""
    until(what, gate.with_name(gate.name + ".reached").exists)


def alive(pid: int) -> bool:
    """Whether a process is there and not a zombie."""
    try:
        os.kill(pid, 0)
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (OSError, IndexError):
        return False
    return state != "Z"


def at_once(count: int, call: Callable[[int], Any]) -> list[Any]:
    """Call from so many threads at the same instant."""
    barrier = threading.Barrier(count)

    def one(number: int) -> Any:
        barrier.wait()
        return call(number)

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(one, range(count)))
