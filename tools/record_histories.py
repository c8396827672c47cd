"""Record the histories that tests/replay replays: real runs of each workflow on the real server.

    python tools/record_histories.py [NAME ...]

A recorded history stands for workflows that a release has left in flight. Record anew only what no
release has; what a release has, the code must go on to replay (tests/replay/test_replay.py).
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog
from sqlalchemy import update

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "tests" / "replay" / "histories"
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from support.runs import admitted_run, run_row  # noqa: E402
from support.world import Workplace, rows, workplace  # noqa: E402

from onceborn.activities.host import open_host  # noqa: E402
from onceborn.activities.kind import Host  # noqa: E402
from onceborn.activities.locks import HostLocks  # noqa: E402
from onceborn.runtime import failpoints  # noqa: E402
from onceborn.runtime.ledger import runs, schema  # noqa: E402
from onceborn.runtime.ledger import tables as t  # noqa: E402
from onceborn.runtime.ledger.database import Database  # noqa: E402
from onceborn.runtime.recovery import Recovery  # noqa: E402
from onceborn.runtime.settings import Settings  # noqa: E402
from onceborn.temporal_dev import EmbeddedTemporal  # noqa: E402
from onceborn.workflows.dispatch import start  # noqa: E402
from onceborn.workflows.engine import (  # noqa: E402
    Engine,
    agents_queue,
    creation_id,
    run_workflow_id,
)
from onceborn.workflows.handoff import Handoff  # noqa: E402
from onceborn.workflows.worker import run_worker  # noqa: E402


@dataclass
class Studio:
    """One host, one repository, and a worker in this process."""

    folder: Path
    settings: Settings
    database: Database
    place: Workplace
    engine: Engine
    host: Host
    source: Path
    _gate: Path = Path()

    async def begin(self, *sources: Path, **body: Any) -> str:
        """A creation, admitted and handed off; its operation's ID."""
        body.setdefault("repositories", [{"source": str(s)} for s in sources or (self.source,)])
        admitted = self.place.create(None, **body)
        assert admitted.handle is not None
        recovery = Recovery(self.database, self.settings.limits, "api")
        await Handoff(self.database, recovery, self.engine).begin(admitted.handle)
        return admitted.operation_id

    def operation(self, operation_id: str) -> dict[str, Any]:
        return next(r for r in rows(self.database, t.operations) if r["id"] == operation_id)

    def change(self, table: Any, column: str, value: str, **values: Any) -> None:
        with self.database.transaction("record.change") as connection:
            connection.execute(update(table).where(table.c[column] == value).values(**values))

    async def until(self, condition: Callable[[], Any]) -> None:
        async with asyncio.timeout(60):
            while not await asyncio.to_thread(condition):
                await asyncio.sleep(0.02)

    @asynccontextmanager
    async def held_at(self, point: str) -> AsyncIterator[None]:
        """The worker stands still at a failpoint while the body runs."""
        self._gate = self.folder / f"gate-{secrets.token_hex(4)}"
        failpoints.configure(f"{point}=wait:{self._gate}@1")
        yield
        self._gate.touch()
        failpoints.configure("")

    async def at_gate(self) -> None:
        await self.until(self._gate.with_name(f"{self._gate.name}.reached").exists)

    async def ended(self, workflow_id: str) -> str:
        assert await self.engine.wait_for(workflow_id, 60), f"{workflow_id} has not ended"
        return workflow_id


# -- creations -------------------------------------------------------------------------------------


async def creation_straight(studio: Studio) -> str:
    """A repository and an agent: every kind of step, Complete, and the dispatch."""
    operation = await studio.begin(profile="marker", start_agent=True)
    return await studio.ended(creation_id(operation, 1))


async def creation_of_nothing(studio: Studio) -> str:
    """A plan without steps."""
    return await studio.ended(creation_id(await studio.begin(repositories=[]), 1))


async def creation_with_retry(studio: Studio) -> str:
    """A step fails for a passing reason, and is tried again when it is due."""
    failpoints.configure("clone.begun=raise@1")
    operation = await studio.begin(_repository(studio.folder / "retried"))
    return await studio.ended(creation_id(operation, 1))


async def creation_with_failed_activities(studio: Studio) -> str:
    """Activities fail, a long and a short one: what they did is found out."""
    failpoints.configure("repo_attach.performed=raise@1;worktree.performed=raise@1")
    return await studio.ended(creation_id(await studio.begin(), 1))


async def creation_aborted(studio: Studio) -> str:
    """A step fails for good; what was made is undone in reverse."""
    taken = _repository(studio.folder / "taken")
    _git(taken, "branch", "mine")
    repositories = [
        {"source": str(studio.source)},
        {"source": str(taken), "branch": "mine"},
    ]
    operation = await studio.begin(repositories=repositories)
    workflow_id = await studio.ended(creation_id(operation, 1))
    assert studio.operation(operation)["state"] == "aborted"
    return workflow_id


async def _taken_over(studio: Studio) -> str:
    """A creation whose owner stands still in a step, while another takes it over and ends it."""
    recovery = Recovery(studio.database, studio.settings.limits, "another")
    async with studio.held_at("worktree.claimed"):
        operation = await studio.begin()
        await studio.at_gate()
        studio.change(t.operations, "id", operation, lease_until=0)
        (owned,) = recovery.claim(studio.host.host_id, 9)
        await start(studio.engine, owned)
    await studio.until(lambda: studio.operation(operation)["state"] == "completed")
    assert studio.operation(operation)["fence"] == 3
    return operation


async def creation_recovered(studio: Studio) -> str:
    """The second owner finds out what became of the first one's attempt, and goes on."""
    return await studio.ended(creation_id(await _taken_over(studio), 2))


async def creation_fence_lost(studio: Studio) -> str:
    """The first owner meets that it is none any more."""
    return await studio.ended(creation_id(await _taken_over(studio), 1))


async def creation_busy(studio: Studio) -> str:
    """Somebody works on the same clone for a while."""
    locks = HostLocks(studio.host.data / "locks")
    (clone,) = {
        json.loads(row["request"])["clone"]
        for row in rows(studio.database, t.steps)
        if json.loads(row["request"]).get("source") == str(studio.source)
        and row["kind"] == "repo_attach"
    }
    with locks.try_lock(f"clone/{clone}") as lock:
        assert lock is not None
        operation = await studio.begin()
        await studio.until(lambda: studio.operation(operation)["busy_with"])
    return await studio.ended(creation_id(operation, 1))


async def creation_released(studio: Studio) -> str:
    """Its identity is released while it is prepared."""
    async with studio.held_at("worktree.claimed"):
        operation = await studio.begin()
        await studio.at_gate()
        studio.change(t.operations, "id", operation, state="preparing_release")
    return await studio.ended(creation_id(operation, 1))


async def creation_parked(studio: Studio) -> str:
    """Complete meets something else than was proven."""
    async with studio.held_at("worktree.recorded"):
        operation = await studio.begin()
        await studio.at_gate()
        studio.change(t.operations, "id", operation, manifest="{}")
    workflow_id = await studio.ended(creation_id(operation, 1))
    assert studio.operation(operation)["parked_reason"]
    return workflow_id


# -- runs ------------------------------------------------------------------------------------------


async def _run(studio: Studio, *argv: str) -> str:
    return admitted_run(studio.database, studio.host, *argv)


async def _started(studio: Studio, run_id: str) -> str:
    await studio.engine.start_run(run_id, agents_queue(studio.host.host_id))
    return run_workflow_id(run_id)


async def run_straight(studio: Studio) -> str:
    """Launched, supervised, recorded."""
    return await studio.ended(await _started(studio, await _run(studio, "sh", "-c", "sleep 1")))


async def run_not_launched(studio: Studio) -> str:
    """Nothing can be launched, however often it is tried."""
    run_id = await _run(studio, "true")
    session = run_row(studio.database, run_id).session_id
    studio.change(t.sessions, "id", str(session), launch_hash="0" * 64)
    return await studio.ended(await _started(studio, run_id))


async def run_unwanted(studio: Studio) -> str:
    """The ledger closes it while its agent runs: it is stopped."""
    run_id = await _run(studio, "sleep", "1000")
    workflow_id = await _started(studio, run_id)
    await studio.until(lambda: run_row(studio.database, run_id).state == "running")
    with studio.database.transaction("record.cancel") as connection:
        assert runs.finish(
            connection,
            studio.database,
            run_id,
            expected=("running",),
            ending="cancelled",
            result="{}",
        )
    return await studio.ended(workflow_id)


async def run_cancelled(studio: Studio) -> str:
    """The workflow is cancelled from outside while it supervises."""
    run_id = await _run(studio, "sleep", "1")
    workflow_id = await _started(studio, run_id)
    await studio.until(lambda: run_row(studio.database, run_id).state == "running")
    client = await studio.engine.client()
    await client.get_workflow_handle(workflow_id).cancel()
    return await studio.ended(workflow_id)


SCENES: dict[str, Callable[[Studio], Awaitable[str]]] = {
    scene.__name__: scene
    for scene in (
        creation_straight,
        creation_of_nothing,
        creation_with_retry,
        creation_with_failed_activities,
        creation_aborted,
        creation_recovered,
        creation_fence_lost,
        creation_busy,
        creation_released,
        creation_parked,
        run_straight,
        run_not_launched,
        run_unwanted,
        run_cancelled,
    )
}


# -- recording -------------------------------------------------------------------------------------


def _git(folder: Path, *arguments: str) -> None:
    identity = ["-c", "user.name=recorder", "-c", "user.email=recorder@localhost"]
    subprocess.run(["git", *identity, *arguments], cwd=folder, check=True)


def _repository(folder: Path) -> Path:
    folder.mkdir(parents=True)
    _git(folder, "init", "-q", "-b", "trunk")
    _git(folder, "commit", "-q", "--allow-empty", "-m", "first")
    return folder


def _document(workflow_id: str, history: str, folder: Path) -> str:
    """A history as a file: one event a line, without what tells of the machine it ran on."""
    events = json.loads(history)["events"]
    lines = ",\n".join(json.dumps(_clean(event, folder)) for event in events)
    return f'{{"workflow_id": {json.dumps(workflow_id)}, "events": [\n{lines}\n]}}\n'


def _clean(value: Any, folder: Path) -> Any:
    if isinstance(value, dict):
        left_out = {"identity": "recorder", "stackTrace": ""}
        if value.get("kind") == "TASK_QUEUE_KIND_STICKY":
            left_out["name"] = "sticky"
        return {k: left_out[k] if k in left_out else _clean(v, folder) for k, v in value.items()}
    if isinstance(value, list):
        return [_clean(item, folder) for item in value]
    if isinstance(value, str):
        return value.replace(str(folder), "/folder").replace(str(ROOT), "/source")
    return value


async def _record(names: list[str], folder: Path) -> None:
    with EmbeddedTemporal(folder / "temporal") as server:
        settings = Settings(
            data=folder / "data",
            temporal_address=server.address,
            repository_roots=(folder,),
            lease_s=2,
            sweep_interval_s=0.3,
            retry_base_s=0.3,
        )
        (folder / "data" / "worktrees" / "one").mkdir(parents=True)
        database = Database(settings.resolved_database_url)
        schema.upgrade(database)
        host = open_host(settings)
        place = workplace(database, settings.data, host_id=host.host_id, roots=(folder,))
        source = _repository(folder / "source")
        engine = Engine(settings)
        studio = Studio(folder, settings, database, place, engine, host, source)
        stop = asyncio.Event()
        worker = asyncio.create_task(run_worker(settings, stop))
        await studio.begin()  # the clone that others find
        client = await engine.client()
        try:
            for name in names:
                workflow_id = await SCENES[name](studio)
                failpoints.configure("")
                history = await client.get_workflow_handle(workflow_id).fetch_history()
                text = _document(workflow_id, history.to_json(), folder)
                (FOLDER / f"{name}.json").write_text(text)
                print(f"{name}: {len(history.events)} events")
        finally:
            stop.set()
            await worker
            database.dispose()


def main() -> None:
    logging.getLogger("temporalio").setLevel(logging.CRITICAL)
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    names = sys.argv[1:] or list(SCENES)
    FOLDER.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="onceborn-record-") as folder:
        asyncio.run(_record(names, Path(folder).resolve()))


if __name__ == "__main__":
    main()
