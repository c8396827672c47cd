"""The run's workflow and the engine: real Temporal, real workers, real agents, both databases."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import update
from support import run_worker as support_worker
from support.runs import admitted_run, new_host, run_row, worktree
from support.temporal import fresh_namespace
from support.waiting import until

from onceborn.activities import agent, agent_look
from onceborn.activities.kind import Host
from onceborn.activities.run_steps import RunSteps
from onceborn.runtime import failpoints
from onceborn.runtime.ledger import runs
from onceborn.runtime.ledger import tables as t
from onceborn.runtime.ledger.database import Database
from onceborn.runtime.protocol.errors import ConfigurationError, EngineUnavailable, StaleExpectation
from onceborn.runtime.settings import Settings
from onceborn.workflows.engine import Engine, Started, creation_id, host_queue, run_workflow_id


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    made = new_host(tmp_path)
    yield made
    for started in made.data.glob("runs/*/started.json"):
        agent_look.stop(started.parent)
        until(lambda folder=started.parent: agent_look.look(folder).over)


@pytest.fixture
def settings(tmp_path: Path, temporal_address: str, temporal_namespace: str) -> Settings:
    return Settings(
        data=tmp_path / "data",
        temporal_address=temporal_address,
        temporal_namespace=temporal_namespace,
    )


@pytest.fixture(autouse=True)
def _no_failpoints() -> Iterator[None]:
    yield
    failpoints.configure("")


@contextmanager
def worker_process(
    host: Host, database_url: str, settings: Settings, points: str = ""
) -> Iterator[subprocess.Popen[bytes]]:
    arguments = [str(host.data), host.host_id, database_url]
    arguments += [str(settings.temporal_address), settings.temporal_namespace]
    process = subprocess.Popen(
        [sys.executable, support_worker.__file__, *arguments],
        env=os.environ | {"ONCEBORN_FAILPOINTS": points},
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def start(settings: Settings, host: Host, run_id: str) -> Started:
    return asyncio.run(Engine(settings).start_run(run_id, host_queue(host.host_id)))


def finished(database: Database, run_id: str) -> dict[str, Any]:
    until(lambda: run_row(database, run_id).ended)
    row = run_row(database, run_id)
    return {"state": row.state} | json.loads(row.result or "{}")


def marks(host: Host) -> list[str]:
    path = worktree(host) / "marks"
    return path.read_text().split() if path.exists() else []


MARK = ("sh", "-c", "echo $$ >> marks")
MARK_AND_WAIT = ("sh", "-c", "echo $$ >> marks; while ! test -e go; do sleep 0.05; done; exit 4")


# -- a run, whole ---------------------------------------------------------------------------------


async def drive(settings: Settings, database: Database, host: Host, run_id: str) -> Engine:
    """Run it to its end with a worker in this process."""
    engine = Engine(settings)
    async with support_worker.run_worker(await engine.client(), database, host):
        await engine.start_run(run_id, host_queue(host.host_id))
        assert await engine.wait_for(run_workflow_id(run_id), 60)
    return engine


def test_a_run_launches_once_and_records_its_result(
    settings: Settings, database: Database, host: Host
) -> None:
    run_id = admitted_run(database, host, "sh", "-c", "echo $$ >> marks; echo said; cat go; exit 0")
    (worktree(host) / "go").write_text("went")

    async def scene() -> None:
        engine = await drive(settings, database, host, run_id)
        # The same start again is told the truth, and nothing is launched.
        assert await engine.start_run(run_id, host_queue(host.host_id)) is Started.CLOSED

    asyncio.run(scene())
    result = finished(database, run_id)
    assert (result["state"], result["exit_code"]) == ("succeeded", 0)
    assert result["evidence"]["log_tail"] == "said\nwent"
    assert marks(host) == [str(result["evidence"]["started"]["pid"])]
    row = run_row(database, run_id)
    assert row.started_at is not None
    assert row.launch_token is not None


@pytest.mark.proves("SE09")
@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (("sh", "-c", "echo broken >&2; exit 1"), ("exited", 1, "broken\n")),
        (("no-such-program",), ("not_executed", None, "")),
    ],
)
def test_an_agent_that_dies_at_once_is_a_failed_run_with_evidence(
    settings: Settings,
    database: Database,
    host: Host,
    argv: tuple[str, ...],
    expected: tuple[Any, ...],
) -> None:
    run_id = admitted_run(database, host, *argv)
    asyncio.run(drive(settings, database, host, run_id))
    result = finished(database, run_id)
    seen = (result["reason"], result["exit_code"], result["evidence"]["log_tail"])
    assert (result["state"], seen) == ("failed", expected)


def test_a_launch_that_cannot_be_made_is_a_failed_run(
    settings: Settings, database: Database, host: Host
) -> None:
    run_id = admitted_run(database, host, *MARK)
    with database.transaction("test") as connection:
        connection.execute(update(t.sessions).values(launch_hash="0" * 64))
    asyncio.run(drive(settings, database, host, run_id))
    result = finished(database, run_id)
    assert (result["state"], result["reason"]) == ("failed", "not_launched")
    assert "altered" in result["detail"]
    assert marks(host) == []


def test_a_run_that_is_no_longer_wanted_is_stopped(
    settings: Settings, database: Database, host: Host
) -> None:
    run_id = admitted_run(database, host, *MARK_AND_WAIT)

    async def scene() -> None:
        engine = Engine(settings)
        async with support_worker.run_worker(await engine.client(), database, host):
            await engine.start_run(run_id, host_queue(host.host_id))
            await asyncio.to_thread(until, lambda: run_row(database, run_id).state == "running")
            with database.transaction("test") as connection:
                assert runs.finish(
                    connection,
                    database,
                    run_id,
                    expected=("running",),
                    ending="cancelled",
                    result="{}",
                )
            assert await engine.wait_for(run_workflow_id(run_id), 60)

    asyncio.run(scene())
    seen = agent_look.look(agent.run_directory(host, run_id))
    assert seen.exit is not None
    assert seen.exit["reason"] == "stopped"
    assert run_row(database, run_id).state == "cancelled"


# -- workers that die -----------------------------------------------------------------------------


@pytest.mark.proves("SE02", "SE04")
@pytest.mark.parametrize(
    "point",
    [
        "run.started.begin",
        "run.claim.commit",
        "run.claim.committed",
        "agent.locked",
        "agent.intended",
        "agent.spawn",
        "agent.spawned",
        "run.running.begin",
        "run.running.committed",
        "run.finish.begin",
        "run.finish.committed",
    ],
)
def test_a_worker_killed_anywhere_leaves_one_agent(
    settings: Settings, database: Database, database_url: str, host: Host, point: str
) -> None:
    run_id = admitted_run(database, host, *MARK)
    start(settings, host, run_id)
    with worker_process(host, database_url, settings, f"{point}=kill") as first:
        assert first.wait(60) == -signal.SIGKILL
    with worker_process(host, database_url, settings):
        result = finished(database, run_id)
    assert (result["state"], result["exit_code"]) == ("succeeded", 0)
    assert len(marks(host)) == 1


@pytest.mark.proves("SE02")
def test_a_paused_launcher_adds_no_second_agent(
    settings: Settings, database: Database, database_url: str, host: Host, tmp_path: Path
) -> None:
    """It stands still before its spawn, beyond the task timeout, while another worker goes on."""
    run_id = admitted_run(database, host, *MARK)
    start(settings, host, run_id)
    points = f"agent.spawn=stop;agent.spawned=wait:{tmp_path / 'never'}"
    with ExitStack() as stack:
        first = stack.enter_context(worker_process(host, database_url, settings, points))
        stat = Path(f"/proc/{first.pid}/stat")
        until(lambda: stat.read_text().rpartition(") ")[2][0] == "T")
        stack.enter_context(worker_process(host, database_url, settings))
        before = finished(database, run_id)
        first.send_signal(signal.SIGCONT)
        first.terminate()
        first.wait(30)  # its launch has ended by then
        assert not (tmp_path / "never.reached").exists()  # it asked once more, and did not spawn
        assert finished(database, run_id) == before
    assert before["state"] == "succeeded"
    assert len(marks(host)) == 1


def test_a_launcher_whose_claim_was_taken_writes_nothing(database: Database, host: Host) -> None:
    """It stands still between its claim and the run's lock."""
    run_id = admitted_run(database, host, *MARK)
    steps = RunSteps(database, host)
    early = steps._claim(steps._started(run_id))
    assert early is not None
    guard = steps._guard(run_id, early)
    assert steps._claim(run_row(database, run_id)) is not None  # another launcher
    what = steps._launch_of(run_row(database, run_id), early)
    with pytest.raises(StaleExpectation):
        agent.launch(host, what, guard)
    directory = agent.run_directory(host, run_id)
    assert agent_look.look(directory).state == "absent"
    assert not (directory / "launch.json").exists()


@pytest.mark.proves("SE10")
def test_supervision_survives_the_worker(
    settings: Settings, database: Database, database_url: str, host: Host
) -> None:
    run_id = admitted_run(database, host, *MARK_AND_WAIT)
    start(settings, host, run_id)
    with worker_process(host, database_url, settings):
        until(lambda: run_row(database, run_id).state == "running")
        until(lambda: marks(host))
    with worker_process(host, database_url, settings):
        (worktree(host) / "go").touch()
        result = finished(database, run_id)
    assert (result["state"], result["exit_code"]) == ("failed", 4)
    assert len(marks(host)) == 1


def test_an_agent_that_ends_while_no_worker_lives_is_still_recorded(
    settings: Settings, database: Database, database_url: str, host: Host
) -> None:
    run_id = admitted_run(database, host, *MARK_AND_WAIT)
    start(settings, host, run_id)
    with worker_process(host, database_url, settings):
        until(lambda: marks(host))
    (worktree(host) / "go").touch()
    until(lambda: agent_look.look(agent.run_directory(host, run_id)).state == "ended")
    with worker_process(host, database_url, settings):
        result = finished(database, run_id)
    assert (result["state"], result["exit_code"]) == ("failed", 4)


def test_a_killed_shim_is_a_lost_run(settings: Settings, database: Database, host: Host) -> None:
    run_id = admitted_run(
        database, host, "sh", "-c", "echo $$ >> marks; setsid sleep 1000 & sleep 1000"
    )

    async def scene() -> None:
        engine = Engine(settings)
        async with support_worker.run_worker(await engine.client(), database, host):
            await engine.start_run(run_id, host_queue(host.host_id))
            await asyncio.to_thread(until, lambda: marks(host))
            seen = agent_look.look(agent.run_directory(host, run_id))
            assert seen.started is not None
            os.kill(seen.started["shim_pid"], signal.SIGKILL)
            assert await engine.wait_for(run_workflow_id(run_id), 60)

    asyncio.run(scene())
    assert finished(database, run_id)["state"] == "lost"
    assert agent_look.clear_strays(run_id) == ([], [])  # nothing of it is left


def test_a_run_whose_folder_is_removed_is_lost_and_its_agent_ended(
    settings: Settings, database: Database, host: Host
) -> None:
    run_id = admitted_run(database, host, *MARK_AND_WAIT)

    async def scene() -> None:
        engine = Engine(settings)
        async with support_worker.run_worker(await engine.client(), database, host):
            await engine.start_run(run_id, host_queue(host.host_id))
            await asyncio.to_thread(until, lambda: run_row(database, run_id).state == "running")
            shutil.rmtree(agent.run_directory(host, run_id))
            assert await engine.wait_for(run_workflow_id(run_id), 60)

    asyncio.run(scene())
    result = finished(database, run_id)
    assert (result["state"], result["reason"]) == ("lost", "folder_gone")
    assert agent_look.clear_strays(run_id) == ([], [])


# -- what Temporal may do -------------------------------------------------------------------------


@pytest.mark.parametrize("loss", ["terminated", "cancelled", "all of it"])
def test_a_run_whose_workflow_is_gone_is_adopted(
    settings: Settings, database: Database, host: Host, loss: str
) -> None:
    run_id = admitted_run(database, host, *MARK_AND_WAIT)
    queue = host_queue(host.host_id)

    async def scene() -> None:
        engine = Engine(settings)
        client = await engine.client()
        async with support_worker.run_worker(client, database, host):
            await engine.start_run(run_id, queue)
            await asyncio.to_thread(until, lambda: marks(host))
            handle = client.get_workflow_handle(run_workflow_id(run_id))
            if loss == "terminated":
                await handle.terminate()
            elif loss == "cancelled":
                await handle.cancel()
                assert await engine.wait_for(run_workflow_id(run_id), 60)
        if loss == "all of it":  # a server with nothing in it
            namespace = await asyncio.to_thread(fresh_namespace, str(settings.temporal_address))
            engine = Engine(settings.model_copy(update={"temporal_namespace": namespace}))
        async with support_worker.run_worker(await engine.client(), database, host):
            assert await engine.start_run(run_id, queue) is Started.NEW
            assert await engine.start_run(run_id, queue) is Started.RUNNING
            (worktree(host) / "go").touch()
            assert await engine.wait_for(run_workflow_id(run_id), 60)

    asyncio.run(scene())
    result = finished(database, run_id)
    assert (result["state"], result["exit_code"]) == ("failed", 4)
    assert len(marks(host)) == 1


# -- the engine -----------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["sqlite"], indirect=True)
@pytest.mark.proves("SC14")
def test_a_lost_answer_is_looked_up_and_starts_nothing_twice(
    settings: Settings, database: Database, host: Host
) -> None:
    run_id = admitted_run(database, host, *MARK)

    async def scene() -> None:
        engine = Engine(settings)
        failpoints.configure("engine.start.after=raise@1")
        # The server has accepted it; who started it cannot be told any more.
        assert await engine.start_run(run_id, host_queue(host.host_id)) is Started.RUNNING
        async with support_worker.run_worker(await engine.client(), database, host):
            assert await engine.wait_for(run_workflow_id(run_id), 60)
        failpoints.configure("engine.start.after=raise@1")
        assert await engine.start_run(run_id, host_queue(host.host_id)) is Started.CLOSED

    asyncio.run(scene())
    assert finished(database, run_id)["state"] == "succeeded"
    assert len(marks(host)) == 1


def test_a_lost_answer_that_cannot_be_looked_up_is_unavailable(settings: Settings) -> None:
    async def scene() -> None:
        engine = Engine(settings)
        await engine.client()
        failpoints.configure("engine.start.after=raise;engine.look_up.before=raise")
        with pytest.raises(EngineUnavailable):
            await engine.start_creation("op_1", 1, "nobody")
        failpoints.configure("")
        assert await engine.start_creation("op_1", 1, "nobody") is Started.RUNNING

    asyncio.run(scene())


@pytest.mark.proves("SC02")
def test_a_closed_creation_workflow_is_never_claimed_as_started(settings: Settings) -> None:
    async def scene() -> None:
        engine = Engine(settings)
        client = await engine.client()
        assert await engine.start_creation("op_1", 1, "nobody") is Started.NEW
        assert await engine.start_creation("op_1", 1, "nobody") is Started.RUNNING
        assert not await engine.wait_for(creation_id("op_1", 1), 0.2)
        await client.get_workflow_handle(creation_id("op_1", 1)).terminate()
        assert await engine.wait_for(creation_id("op_1", 1), 60)
        assert await engine.start_creation("op_1", 1, "nobody") is Started.CLOSED
        assert await engine.start_creation("op_1", 2, "nobody") is Started.NEW

    asyncio.run(scene())


def test_a_workflow_that_is_not_known_has_not_ended(settings: Settings) -> None:
    async def scene() -> bool:
        return await Engine(settings).wait_for("creation/none/1", 5)

    assert asyncio.run(scene()) is False


def test_an_engine_that_cannot_be_reached_says_so(tmp_path: Path) -> None:
    async def scene(settings: Settings) -> None:
        engine = Engine(settings)
        for call in (engine.check, engine.client):
            with pytest.raises(EngineUnavailable):
                await call()
        with pytest.raises(EngineUnavailable):
            await engine.start_run("run_1", "q")

    asyncio.run(scene(Settings(data=tmp_path, temporal_address="127.0.0.1:1")))
    asyncio.run(scene(Settings(data=tmp_path)))  # no embedded server was ever started


def test_tls_files_are_named_when_they_are_wrong(tmp_path: Path) -> None:
    (tmp_path / "cert").write_text("x")
    settings = Settings(
        data=tmp_path, temporal_address="127.0.0.1:1", temporal_tls_cert=tmp_path / "none"
    )
    with pytest.raises(ConfigurationError, match="none cannot be read"):
        asyncio.run(Engine(settings).client())
    settings = settings.model_copy(update={"temporal_tls_cert": tmp_path / "cert"})
    with pytest.raises(ConfigurationError, match="belong together"):
        asyncio.run(Engine(settings).client())
