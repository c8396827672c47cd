"""Cases of the engine, the outbox and the launch: real Temporal, real processes, both databases."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import delete, exc, insert, select, update
from support import run_worker as support_worker
from support.runs import admitted_run, new_host, run_row, worktree
from support.stack import Play
from support.waiting import until as wait_until
from support.world import HOST, rows
from temporalio.api.enums.v1 import EventType
from temporalio.client import Client, WorkflowExecutionStatus
from test_loop import Scene

from demo.__main__ import outcome
from demo.stage import until
from onceborn.activities import agent, agent_look
from onceborn.activities.kind import Host
from onceborn.activities.run_steps import RunSteps
from onceborn.runtime import access, failpoints
from onceborn.runtime.completion import Completion
from onceborn.runtime.ledger import steps
from onceborn.runtime.ledger import tables as t
from onceborn.runtime.ledger.database import Database
from onceborn.runtime.protocol import rules
from onceborn.runtime.protocol.errors import FenceLost, StaleExpectation
from onceborn.runtime.protocol.evidence import RepoAttached
from onceborn.runtime.recovery import Owned
from onceborn.runtime.settings import Settings
from onceborn.workflows.engine import Engine, creation_id, host_queue, run_workflow_id


@pytest.fixture(autouse=True)
def _no_failpoints() -> Iterator[None]:
    yield
    failpoints.configure("")


@pytest.fixture
def scene(database: Database, tmp_path: Path) -> Scene:
    return Scene(database, tmp_path)


# -- a fault in the workflow's own code ------------------------------------------------------------

BROKEN_WORKFLOW = """
from onceborn.runtime.protocol import orders, rules

sound = orders.order_of

def order_of(action, ref):
    if isinstance(action, rules.Perform) and action.step.key == "worktree:1":
        raise KeyError("a result that nobody foresaw")
    return sound(action, ref)

orders.order_of = order_of

# Sooner than as shipped, its worker counts a creation that it hears nothing of as nobody's.
from onceborn.workflows import creation_activities

creation_activities.ACTIVE_FOR_S = 1.0
"""


@pytest.fixture
def play(
    database_url: str, temporal_address: str, temporal_namespace: str, tmp_path: Path
) -> Iterator[Play]:
    stage = Play(
        tmp_path.resolve(),
        DATABASE_URL=database_url,
        TEMPORAL_ADDRESS=temporal_address,
        TEMPORAL_NAMESPACE=temporal_namespace,
        ONCEBORN_LEASE_S="2",
        ONCEBORN_SWEEP_INTERVAL_S="0.3",
        ONCEBORN_PROGRESS_BUDGET="1",
    )
    try:
        stage.up()
        yield stage
    finally:
        stage.down()


async def _told_by_temporal(play: Play, workflow_id: str) -> tuple[str, set[int]]:
    """How a workflow ended, with its error, and the kinds of events in its history."""
    client = await Client.connect(
        play.settings["TEMPORAL_ADDRESS"], namespace=play.settings["TEMPORAL_NAMESPACE"]
    )
    handle = client.get_workflow_handle(workflow_id)
    assert (await handle.describe()).status is WorkflowExecutionStatus.FAILED
    events = (await handle.fetch_history()).events
    failure = events[-1].workflow_execution_failed_event_attributes.failure
    return failure.message, {event.event_type for event in events}


@pytest.mark.proves("SC01", "X10")
def test_a_plain_error_in_workflow_code_ends_that_run_and_parks_in_time(
    play: Play, tmp_path: Path
) -> None:
    site = tmp_path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(BROKEN_WORKFLOW)
    broken = play.start("broken", "worker", PYTHONPATH=str(site))
    until("the worker to start", lambda: play.logged("broken", "worker.started"))
    second = play.folder / "second"
    subprocess.run(["git", "clone", "--quiet", str(play.repository), str(second)], check=True)
    both = [{"source": str(play.repository)}, {"source": str(second)}]
    waiting = play.creating("bad", **play.manifest(repositories=both))
    task_id = play.holder("bad")
    assert outcome(play.create("good", **play.manifest())) == "created"
    until("it to be parked", lambda: play.operation(task_id)["parked_reason"])
    operation = play.operation(task_id)
    assert (operation["state"], operation["claims_without_progress"]) == ("preparing", 2)
    assert "no progress" in operation["parked_reason"]
    states = {key: step["state"] for key, step in play.steps(task_id).items()}
    assert states.pop("worktree:1") == "planned"
    assert {states[key] for key in ("repo_attach:0", "worktree:0", "repo_attach:1")} == {
        "succeeded"
    }
    for before in (2, 1):  # the first that came so far, and the one without progress
        workflow_id = creation_id(operation["id"], operation["fence"] - before)
        message, kinds = asyncio.run(_told_by_temporal(play, workflow_id))
        assert "a result that nobody foresaw" in message
        assert EventType.EVENT_TYPE_WORKFLOW_TASK_FAILED not in kinds
    told = (play.folder / "broken.log").read_text()
    assert "a result that nobody foresaw" in told
    assert outcome(play.create("bad", **play.manifest())) == "found_unsettled"
    play.end(broken)
    play.worker()
    database = Database(play.settings["DATABASE_URL"])
    token = access.create_token(database, play.workspace_id, role="operator", name="o").token
    database.dispose()
    play.settings["ONCEBORN_TOKEN"] = token
    play._onceborn("ops", "unpark", operation["id"])
    assert outcome(waiting.result()) == "created"
    assert play.settled(task_id)["state"] == "completed"
    assert play.wait_for_agent(task_id)["state"] == "succeeded"
    evidence = [json.loads(play.steps(task_id)[f"worktree:{n}"]["evidence"]) for n in (0, 1)]
    made = {Path(each["path"]) for each in evidence}
    assert set(play.worktrees(evidence[0]["branch"])) == made
    events = play.query("SELECT type FROM outbox WHERE aggregate_id = :t", t=task_id)
    assert [row["type"] for row in events] == ["task.created"]


@pytest.mark.parametrize("point", ["worktree.performed", "complete.commit.commit"])
def test_an_activity_that_fails_is_followed_by_a_look_and_not_by_another_owner(
    play: Play, point: str
) -> None:
    """In a short step and in Complete: a passing fault costs no lease."""
    play.worker(f"{point}=raise@1")
    response = play.create("E", **play.manifest())
    assert outcome(response) == "created"
    task_id = response.json()["id"]
    assert play.operation(task_id)["fence"] == 2  # Complete's own raise over the first owner
    play.alone(task_id)


# -- a worker as it is installed -------------------------------------------------------------------


class Installed(Play):
    """The product from a wheel of its own, away from the source tree."""

    site: Path

    def install(self) -> None:
        wheels = self.folder / "wheels"
        pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
        source = Path(__file__).parent.parent
        build = ["wheel", "--no-deps", "--no-build-isolation", "--no-index", "-w", str(wheels)]
        subprocess.run([*pip, *build, str(source)], check=True, capture_output=True)
        (wheel,) = wheels.glob("*.whl")
        self.site = self.folder / "site"
        subprocess.run(
            [*pip, "install", "--no-deps", "--no-index", "--target", str(self.site), str(wheel)],
            check=True,
        )

    def command(self, *arguments: str) -> list[str]:
        return [sys.executable, "-P", "-m", "onceborn", *arguments]

    def environment(self, **extra: str) -> dict[str, str]:
        return self._environment(**{"PYTHONPATH": str(self.site)} | extra)

    def start(self, name: str, *arguments: str, **environment: str) -> subprocess.Popen[bytes]:
        with (self.folder / f"{name}.log").open("wb") as log:
            process = subprocess.Popen(
                self.command(*arguments),
                env=self.environment(**environment),
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        self._processes.append(process)
        return process


@pytest.fixture
def installed(
    database_url: str, temporal_address: str, temporal_namespace: str, tmp_path: Path
) -> Iterator[Installed]:
    stage = Installed(
        tmp_path.resolve(),
        DATABASE_URL=database_url,
        TEMPORAL_ADDRESS=temporal_address,
        TEMPORAL_NAMESPACE=temporal_namespace,
        ONCEBORN_LOG_LEVEL="DEBUG",
        ONCEBORN_LOG_FORMAT="json",
    )
    try:
        stage.install()
        stage.up()
        yield stage
    finally:
        stage.down()


UNLOADABLE = """
import sys

class Broken:
    def find_spec(self, name, path=None, target=None):
        if name == "onceborn.workflows.creation" and IN_SANDBOX:
            raise ImportError("a module that this installation lacks")
        return None

sys.meta_path.insert(0, Broken())
"""
IN_THE_SANDBOX = "sys.modules['temporalio.workflow'].unsafe.in_sandbox()"


@pytest.mark.proves("SC10")
@pytest.mark.parametrize("backend", ["sqlite"], indirect=True)
def test_a_worker_from_a_clean_install_validates_works_and_tells_a_bad_import_at_its_start(
    installed: Installed,
) -> None:
    where = subprocess.run(
        [sys.executable, "-P", "-c", "import onceborn; print(onceborn.__file__)"],
        env=installed.environment(),
        cwd=installed.folder,
        capture_output=True,
        text=True,
        check=True,
    )
    assert Path(where.stdout.strip()).is_relative_to(installed.site)
    for name, sandbox_only in (("everywhere", "True"), ("in-the-sandbox", IN_THE_SANDBOX)):
        site = installed.folder / name
        site.mkdir()
        broken = UNLOADABLE.replace("IN_SANDBOX", sandbox_only)
        (site / "sitecustomize.py").write_text(broken)
        waiting = installed.creating(name, **installed.manifest())
        task_id = installed.holder(name)
        bad = installed.start(name, "worker", PYTHONPATH=f"{site}:{installed.site}")
        assert bad.wait(60) not in (0, None)
        told = (installed.folder / f"{name}.log").read_text()
        assert "a module that this installation lacks" in told
        assert not installed.logged(name, "worker.started")
        if sandbox_only is IN_THE_SANDBOX:
            assert bad.returncode == 2
            (line,) = told.splitlines()
            assert "workflow creation does not load in Temporal's sandbox" in line
        # It claimed nothing and polled for nothing: the API's hand-off is all that happened.
        assert installed.operation(task_id)["driven_fence"] == 0
        installed.worker()
        assert outcome(waiting.result()) == "created"
        installed.alone(task_id)
        installed.end_workers()
    for number in (1, 2):
        lines = (installed.folder / f"worker-{number}.log").read_text().splitlines()
        events = [json.loads(line) for line in lines]  # every one of them
        assert {"level", "timestamp", "event"} <= set(events[0])


# -- a change and its event ------------------------------------------------------------------------

DRIVER = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from support.loop import Bench
from onceborn.runtime.ledger.database import Database
from onceborn.runtime.protocol.orders import OperationRef
url, folder, operation, fence = sys.argv[2:]
bench = Bench(Database(url), Path(folder) / "data", roots=(Path(folder),))
print(bench.run(OperationRef(operation, int(fence))))
"""


def driven_in_a_child(scene: Scene, owned: Owned, url: str, points: str) -> int:
    """The loop in a process of its own, with failpoints; its exit code."""
    arguments = [str(Path(__file__).parent), url, str(scene.folder)]
    done = subprocess.run(
        [sys.executable, "-c", DRIVER, *arguments, owned.operation_id, str(owned.fence)],
        env=os.environ | {"ONCEBORN_FAILPOINTS": points},
        check=False,
    )
    return done.returncode


@pytest.mark.proves("SD03", "S03")
@pytest.mark.parametrize(
    ("point", "events"),
    [("complete.commit.commit", []), ("complete.commit.committed", [("task.created", 1)])],
)
def test_no_event_without_its_change_and_no_change_without_its_event(
    scene: Scene, database_url: str, point: str, events: list[tuple[str, int]]
) -> None:
    """Killed when all is written and nothing committed, and when all is committed."""
    owned = scene.begin(profile="marker", start_agent=True)
    code = driven_in_a_child(scene, owned, database_url, f"{point}=kill")
    assert code == -signal.SIGKILL
    assert scene.events() == events
    assert scene.operation()["state"] == ("completed" if events else "completing")
    (task,) = rows(scene.database, t.tasks)
    assert (task["complete"], task["revision"]) == ((True, 1) if events else (False, 0))
    assert len(rows(scene.database, t.runs)) == len(events)
    if not events:
        assert scene.bench.run(scene.next_owner()) is rules.StopReason.COMPLETED
    assert scene.events() == [("task.created", 1)]
    assert len(rows(scene.database, t.runs)) == 1


@pytest.mark.proves("SD03")
def test_a_change_whose_event_cannot_be_written_does_not_happen(scene: Scene) -> None:
    owned = scene.begin(profile="marker", start_agent=True)
    (task,) = rows(scene.database, t.tasks)
    in_the_way = {
        "id": "evt_other",
        "workspace_id": task["workspace_id"],
        "feed_number": 99,
        "aggregate": "task",
        "aggregate_id": task["id"],
        "revision": 1,
        "type": "other",
        "payload": "{}",
        "created_at": 0,
    }
    with scene.database.transaction("test") as connection:
        connection.execute(insert(t.outbox).values(in_the_way))
    with pytest.raises(exc.IntegrityError):
        scene.bench.run(owned)
    assert scene.operation()["state"] == "completing"
    assert rows(scene.database, t.tasks)[0]["complete"] is False
    assert rows(scene.database, t.runs) == []
    assert scene.steps()["agent_launch"]["state"] == "armed"
    with scene.database.transaction("test") as connection:
        connection.execute(delete(t.outbox))
    assert scene.bench.run(scene.next_owner()) is rules.StopReason.COMPLETED
    assert scene.events() == [("task.created", 1)]


# -- two writers -----------------------------------------------------------------------------------


def both(*calls: Callable[[], Any]) -> list[Any]:
    """Call at the same instant; what each returned or raised."""
    barrier = threading.Barrier(len(calls))
    answers: list[Any] = [None] * len(calls)

    def one(index: int) -> None:
        barrier.wait()
        try:
            answers[index] = calls[index]()
        except (FenceLost, StaleExpectation) as refusal:
            answers[index] = refusal

    threads = [threading.Thread(target=one, args=(index,)) for index in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return answers


def stopped_at(scene: Scene, owned: Owned, kind: type[Any]) -> None:
    """Drive it up to an action, which is not done."""

    class Enough(Exception):
        pass

    def watch(action: rules.Action) -> None:
        if isinstance(action, kind):
            raise Enough

    with contextlib.suppress(Enough):
        scene.bench.run(owned, watch=watch)


@pytest.mark.proves("SD09")
def test_of_two_that_complete_at_once_one_leaves_run_and_event(scene: Scene) -> None:
    for number in range(8):
        owned = scene.begin(f"E{number}", profile="marker", start_agent=True)
        stopped_at(scene, owned, rules.CommitCompletion)
        completion = Completion(scene.database, scene.bench.limits)
        answers = both(*[lambda: completion.commit(owned.operation_id, owned.fence)] * 2)  # noqa: B023
        assert sorted(type(answer).__name__ for answer in answers) == ["FenceLost", "NoneType"]
        assert len(scene.events()) == len(rows(scene.database, t.runs)) == number + 1


@pytest.mark.proves("SD09")
def test_of_two_that_claim_or_record_at_once_one_leaves_evidence(scene: Scene) -> None:
    database = scene.database

    def evidence(name: str) -> RepoAttached:
        return RepoAttached(
            repository="0", clone=f"/{name}", base_ref="refs/heads/x", base_commit="0" * 40,
            resolved_by="branch", attachment_id=name,
        )  # fmt: skip

    for number in range(8):
        owned = scene.begin(f"E{number}")
        snapshot = scene.bench.driver.look(owned.operation_id, owned.fence).snapshot
        view = snapshot.steps[0]
        expected = steps.Expected(
            owned.operation_id, view.key, owned.fence, view.state, view.attempt,
            view.compensation, view.undo_attempt,
        )  # fmt: skip

        def claim(expected: steps.Expected = expected) -> steps.Claim:
            with database.transaction("test.claim") as connection:
                return steps.claim(connection, database, expected, 60_000, undo=False)

        def row(owned: Owned = owned) -> Any:
            with database.reading() as connection:
                return steps.load(connection, owned.operation_id, "repo_attach:0")

        answers = both(claim, claim)
        (won,) = [answer for answer in answers if isinstance(answer, steps.Claim)]
        assert sum(isinstance(answer, StaleExpectation) for answer in answers) == 1
        assert (row().attempt, row().attempt_token) == (1, won.token)

        def record(name: str, won: steps.Claim = won) -> None:
            with database.transaction("test.record") as connection:
                steps.succeed(connection, database, won, evidence(name), 60_000)

        answers = both(lambda: record("one"), lambda: record("two"))
        assert sum(isinstance(answer, FenceLost) for answer in answers) == 1
        winner = ("one", "two")[[answer is None for answer in answers].index(True)]
        assert json.loads(row().evidence)["attachment_id"] == winner


@pytest.mark.proves("SD09")
def test_an_owner_that_records_while_the_sweep_takes_over_leaves_all_or_nothing(
    scene: Scene,
) -> None:
    ended = set()
    for number in range(12):
        owned = scene.begin(f"E{number}")
        stopped_at(scene, owned, rules.EnterCompletion)
        with scene.database.transaction("test") as connection:
            connection.execute(
                update(t.operations)
                .where(t.operations.c.id == owned.operation_id)
                .values(lease_until=0)
            )
        completion = Completion(scene.database, scene.bench.limits)
        recovery = scene.bench.recovery
        entered, taken = both(
            lambda: completion.enter(owned.operation_id, owned.fence),  # noqa: B023
            lambda: recovery.claim(HOST, 9),  # noqa: B023
        )
        with scene.database.reading() as connection:
            row = connection.execute(
                select(t.operations).where(t.operations.c.id == owned.operation_id)
            ).one()
        # Whoever was first: the transition is there with its lease, or the fence is the sweep's.
        assert row.state == ("preparing" if isinstance(entered, FenceLost) else "completing")
        assert row.fence == owned.fence + len(taken)
        assert isinstance(entered, FenceLost) <= bool(taken)
        ended.add((row.state, row.fence))
        latest = taken[0] if taken else owned
        assert scene.bench.run(latest) is rules.StopReason.COMPLETED
        assert len(scene.events()) == number + 1


# -- a launch whose answer is lost -----------------------------------------------------------------

MARK_AND_WAIT = ("sh", "-c", "echo $$ >> marks; while ! test -e go; do sleep 0.05; done")


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    made = new_host(tmp_path)
    yield made
    for started in made.data.glob("runs/*/started.json"):
        agent_look.stop(started.parent)
        wait_until(lambda folder=started.parent: agent_look.look(folder).over)


def marks(host: Host) -> list[str]:
    path = worktree(host) / "marks"
    return path.read_text().split() if path.exists() else []


@pytest.mark.proves("SE03")
def test_a_launch_call_that_times_out_is_looked_into_and_the_agent_adopted(
    database: Database, host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The shim has forked the agent's process and stands still before it has recorded it."""
    gate = tmp_path / "gate"
    monkeypatch.setattr(agent, "SPAWN_PATIENCE_S", 3.0)
    monkeypatch.setattr(agent, "LOCK_PATIENCE_S", 0.3)
    monkeypatch.setenv("ONCEBORN_FAILPOINTS", f"shim.forked=wait:{gate}")
    run_id = admitted_run(database, host, *MARK_AND_WAIT)
    runs = RunSteps(database, host)
    assert runs.launch(run_id).state == "starting"
    assert gate.with_name("gate.reached").exists()
    # Neither the ledger, nor another try, nor giving up calls it failed meanwhile.
    assert runs.finish(run_id, "the launch timed out").state == "starting"
    assert runs.launch(run_id).state == "starting"
    assert not run_row(database, run_id).ended
    gate.touch()
    wait_until(lambda: runs.look(run_id).state == "running")
    assert runs.launch(run_id).state == "running"
    assert run_row(database, run_id).state == "running"
    wait_until(lambda: marks(host))
    (worktree(host) / "go").touch()
    wait_until(lambda: runs.look(run_id).state == "ended")
    runs.finish(run_id, "")
    assert run_row(database, run_id).state == "succeeded"
    assert len(marks(host)) == 1


@pytest.mark.proves("SE03")
def test_a_launch_that_fails_in_itself_after_the_fork_is_adopted(
    database: Database,
    host: Host,
    tmp_path: Path,
    temporal_address: str,
    temporal_namespace: str,
) -> None:
    settings = Settings(
        data=host.data, temporal_address=temporal_address, temporal_namespace=temporal_namespace
    )
    run_id = admitted_run(database, host, *MARK_AND_WAIT)

    async def scene() -> None:
        engine = Engine(settings)
        async with support_worker.run_worker(await engine.client(), database, host):
            failpoints.configure("agent.spawned=raise@1")
            await engine.start_run(run_id, host_queue(host.host_id))
            assert await engine.wait_for(run_workflow_id(run_id), 60)  # that workflow failed
            await asyncio.to_thread(wait_until, lambda: marks(host))
            assert not run_row(database, run_id).ended
            await engine.start_run(run_id, host_queue(host.host_id))  # as the sweep does
            await asyncio.to_thread(
                wait_until, lambda: run_row(database, run_id).state == "running"
            )
            (worktree(host) / "go").touch()
            assert await engine.wait_for(run_workflow_id(run_id), 60)

    asyncio.run(scene())
    assert run_row(database, run_id).state == "succeeded"
    assert len(marks(host)) == 1
