"""The sweep at scale, its owners, and a pass that does not end: on both databases."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import structlog
from sqlalchemy import event, text
from support.world import HOST, Workplace, digest_of_everything, rows, workplace
from temporalio.client import WorkflowExecutionStatus
from temporalio.service import RPCError, RPCStatusCode
from test_loop import Scene

from onceborn.activities.attempt import Attempt
from onceborn.runtime.completion import Completion
from onceborn.runtime.ledger import steps
from onceborn.runtime.ledger import tables as t
from onceborn.runtime.ledger.database import Database
from onceborn.runtime.ledger.operations import Limits
from onceborn.runtime.protocol import rules
from onceborn.runtime.protocol.errors import FenceLost
from onceborn.runtime.protocol.evidence import RepoAttached
from onceborn.runtime.protocol.states import StepState
from onceborn.runtime.recovery import Owned, Recovery
from onceborn.runtime.settings import Settings
from onceborn.workflows.engine import Engine, Started, creation_id
from onceborn.workflows.sweep import Sweep


@pytest.fixture
def scene(database: Database, tmp_path: Path) -> Scene:
    return Scene(database, tmp_path)


_FILL = """
    INSERT INTO operations (
        id, workspace_id, task_id, host_id, actor, actor_hash, token_hash, manifest, manifest_hash,
        plan, plan_hash, state, lease_until, created_at
    )
    WITH RECURSIVE numbers(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM numbers WHERE n < :count)
    SELECT 'op_' || :state || n, :workspace, 'tsk_' || :state || n, :host, '{}', '', '', '{}', '',
           '{}', '', :state, n, n
    FROM numbers
"""


def fill(place: Workplace, state: str, count: int) -> None:
    """So many operations in a state, made in bulk; their leases ended long ago."""
    values = {"state": state, "count": count, "workspace": place.workspace_id, "host": HOST}
    with place.database.transaction("test.fill") as connection:
        connection.execute(text(_FILL), values)


# -- many ------------------------------------------------------------------------------------------

SWEEPER = """
import sys
from pathlib import Path
from onceborn.runtime.ledger.database import Database
from onceborn.runtime.ledger.operations import Limits
from onceborn.runtime.recovery import Recovery
url, host, name = sys.argv[1:]
database = Database(url)
recovery = Recovery(database, Limits(lease_ms=3_600_000), name)
print("ready", flush=True)
sys.stdin.readline()
while recovery.any_due(host):
    for owned in recovery.claim(host, 64):
        print(owned.operation_id, owned.fence)
"""


@pytest.mark.proves("X09")
def test_ten_thousand_expired_operations_are_claimed_once_each_by_two_processes(
    database: Database, database_url: str, tmp_path: Path
) -> None:
    fill(workplace(database, tmp_path), "preparing", 10_000)
    sweepers = [
        subprocess.Popen(
            [sys.executable, "-c", SWEEPER, database_url, HOST, name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for name in ("one", "two")
    ]
    for sweeper in sweepers:
        assert sweeper.stdout is not None
        assert sweeper.stdout.readline() == "ready\n"
    for sweeper in sweepers:
        assert sweeper.stdin is not None
        sweeper.stdin.write("\n")
        sweeper.stdin.flush()
    outputs = [sweeper.communicate()[0] for sweeper in sweepers]
    assert [sweeper.returncode for sweeper in sweepers] == [0, 0]
    taken = [tuple(line.split()) for output in outputs for line in output.splitlines()]
    assert all(output for output in outputs), "one of them had nothing to do"
    assert len(taken) == len({operation for operation, _ in taken}) == 10_000
    assert {fence for _, fence in taken} == {"1"}
    assert {(r["fence"], r["state"]) for r in rows(database, t.operations)} == {(1, "preparing")}
    owners = {row["owner"] for row in rows(database, t.operations)}
    assert owners == {"one", "two"}


@contextmanager
def statements(database: Database) -> Iterator[list[tuple[str, Any]]]:
    """What is sent to the database meanwhile, with its parameters."""
    seen: list[tuple[str, Any]] = []

    def note(_c: Any, _cursor: Any, statement: str, parameters: Any, *_: Any) -> None:
        seen.append((statement, parameters))

    event.listen(database.engine, "before_cursor_execute", note)
    try:
        yield seen
    finally:
        event.remove(database.engine, "before_cursor_execute", note)


def scans(database: Database) -> list[tuple[str, Any]]:
    """The statements by which a sweep finds what it may claim."""
    recovery = Recovery(database, Limits(lease_ms=-1), "test")  # what it claims is due again
    with statements(database) as seen:
        assert recovery.any_due(HOST)
        assert len(recovery.claim(HOST, 32)) == 32
    found = [(s, p) for s, p in seen if s.lstrip().upper().startswith("SELECT")]
    assert len(found) == 2
    return found


def cost(database: Database, statement: str, parameters: Any) -> tuple[list[str], int]:
    """The plan, and how much the database looked at: pages (PostgreSQL), instructions (SQLite)."""
    if database.is_sqlite:
        return _sqlite_cost(database, statement, parameters)
    explain = f"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) {statement}"
    with database.transaction("test.explain") as connection:
        for _ in range(2):  # once to set the hint bits of rows that are new
            answer = connection.exec_driver_sql(explain, parameters).scalar_one()
    nodes = list(_nodes(answer[0]["Plan"]))
    plan = [" ".join(filter(None, (n["Node Type"], n.get("Index Name")))) for n in nodes]
    return plan, nodes[0]["Shared Hit Blocks"] + nodes[0]["Shared Read Blocks"]


def _nodes(node: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield node
    for child in node.get("Plans", ()):
        yield from _nodes(child)


def _sqlite_cost(database: Database, statement: str, parameters: Any) -> tuple[list[str], int]:
    instructions = 0

    def count() -> int:
        nonlocal instructions
        instructions += 1
        return 0

    with database.reading() as connection:
        explained = connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {statement}", parameters)
        plan = [row.detail for row in explained]
        raw = connection.connection.driver_connection
        assert raw is not None
        raw.set_progress_handler(count, 1)
        connection.exec_driver_sql(statement, parameters).all()
        raw.set_progress_handler(None, 0)
    return plan, instructions


@pytest.mark.proves("X09")
def test_the_scan_does_not_grow_with_what_is_completed(database: Database, tmp_path: Path) -> None:
    place = workplace(database, tmp_path)
    fill(place, "preparing", 200)
    seen = []
    for state, more in (("aborted", 2_000), ("completed", 200_000)):
        fill(place, state, more)
        with database.reading() as connection:
            connection.exec_driver_sql("ANALYZE operations")
        seen.append([cost(database, *scan) for scan in scans(database)])
    few, many = seen
    assert many == few
    # A backlog that lies behind them all, so large that the first due row seems to be near.
    fill(place, "completing", 20_000)
    with database.reading() as connection:
        connection.exec_driver_sql("ANALYZE operations")
    backlog = [cost(database, *scan) for scan in scans(database)]
    for plan, _ in [*many, *backlog]:
        assert any("ix_operations_open" in part for part in plan), plan
        assert not {"Seq Scan", "SCAN operations"}.intersection(plan), plan


# -- owners ----------------------------------------------------------------------------------------


def claimed(scene: Scene, owned: Owned) -> Attempt:
    """The owner's attempt at the first step, as its driver makes it, and then nothing more."""
    bench = scene.bench
    view = bench.driver.look(owned.operation_id, owned.fence).snapshot.steps[0]
    expected = steps.Expected(
        owned.operation_id,
        view.key,
        owned.fence,
        view.state,
        view.attempt,
        view.compensation,
        view.undo_attempt,
    )
    with scene.database.transaction("test.claim") as connection:
        claim = steps.claim(connection, scene.database, expected, 1000, undo=False)
    return Attempt(scene.database, Limits(lease_ms=0), bench.host, claim, lambda: None)


EVIDENCE = RepoAttached(
    repository="0",
    clone="/late",
    base_ref="refs/heads/late",
    base_commit="0" * 40,
    resolved_by="branch",
    attachment_id="att_late",
)


@pytest.mark.proves("SH01", "X03")
def test_each_takeover_has_a_new_fence_and_what_its_former_owners_write_late_is_refused(
    scene: Scene,
) -> None:
    """An owner pauses; the same name, restarted, takes over and pauses too; a third one works."""
    first = scene.begin()
    early = claimed(scene, first)
    second = scene.next_owner()
    later = claimed(scene, second)
    third = scene.next_owner()
    assert (first.fence, second.fence, third.fence) == (1, 2, 3)
    before = digest_of_everything(scene.database)
    completion = Completion(scene.database, scene.bench.limits)
    for attempt, owned in ((early, first), (later, second)):
        late: list[Callable[[], None]] = [
            attempt.guard,
            attempt.heartbeat,  # renews the lease
            lambda a=attempt: a.succeed(EVIDENCE),
            lambda a=attempt: a.fail({"code": "late", "reason": "late"}),
            lambda a=attempt: a.wait(StepState.RETRY_WAIT, None, 0),  # gives the step back
            lambda a=attempt: a.undone({}),
            lambda a=attempt: a.quarantine("repo_attach", {}),
            lambda o=owned: completion.enter(o.operation_id, o.fence),
            lambda o=owned: completion.commit(o.operation_id, o.fence),
            lambda o=owned: completion.abort(o.operation_id, o.fence),
        ]
        for write in late:
            with pytest.raises(FenceLost):
                write()
            assert digest_of_everything(scene.database) == before
        scene.bench.recovery.park(owned.operation_id, owned.fence, "late")
        assert digest_of_everything(scene.database) == before
    assert scene.bench.run(third) is rules.StopReason.COMPLETED
    settled = digest_of_everything(scene.database)
    for attempt in (early, later):
        with pytest.raises(FenceLost):
            attempt.succeed(EVIDENCE)
    assert digest_of_everything(scene.database) == settled
    assert scene.operation()["fence"] == 4
    assert scene.events() == [("task.created", 1)]


# -- a pass ----------------------------------------------------------------------------------------


class Stuck(Engine):
    """The real engine, but that one creation's start never comes back, or a pass's first call."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self.bad = ""
        self.passes_to_hang = 0

    async def check(self) -> None:
        if self.passes_to_hang > 0:
            self.passes_to_hang -= 1
            await asyncio.Event().wait()
        await super().check()

    async def start_creation(
        self, operation_id: str, fence: int, task_queue: str, **search: str
    ) -> Started:
        if operation_id == self.bad:
            await asyncio.Event().wait()
        return await super().start_creation(operation_id, fence, task_queue, **search)


@pytest.mark.proves("SC11")
def test_a_creation_that_hangs_a_pass_holds_nobody_up_and_is_seen(
    database: Database, tmp_path: Path, temporal_address: str, temporal_namespace: str
) -> None:
    settings = Settings(
        data=tmp_path, temporal_address=temporal_address, temporal_namespace=temporal_namespace
    )
    place = workplace(database, tmp_path)
    made = [place.create(f"E{n}").operation_id for n in range(6)]
    database.clock.advance(60_000)

    async def scene() -> None:
        engine = Stuck(settings)
        engine.bad, engine.passes_to_hang = made[0], 1
        recovery = Recovery(database, settings.limits, "test")
        sweep = Sweep(database, recovery, engine, HOST, "test", lambda: 99, 0.05, pass_limit_s=3)
        client = await engine.client()

        async def running(operation_id: str, fence: int) -> bool:
            handle = client.get_workflow_handle(creation_id(operation_id, fence))
            try:
                return (await handle.describe()).status is WorkflowExecutionStatus.RUNNING
            except RPCError as error:
                if error.status is not RPCStatusCode.NOT_FOUND:
                    raise
                return False

        async def all_running(operations: list[str], fence: int) -> None:
            while not all([await running(operation, fence) for operation in operations]):
                assert not passes.done()
                await asyncio.sleep(0.02)

        passes = asyncio.create_task(sweep.run())
        try:
            async with asyncio.timeout(60):
                await all_running(made[1:], 1)
                while not sweep.counts.not_started:
                    await asyncio.sleep(0.02)
                assert not await running(made[0], 1)
                assert sweep.counts.cut_off >= 1
                assert sweep.counts.taken == len(made)
                engine.bad = ""
                database.clock.advance(60_000)
                await all_running(made, 2)
        finally:
            passes.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await passes

    with structlog.testing.capture_logs() as logs:
        asyncio.run(scene())
    told = [entry for entry in logs if entry["event"] == "sweep.pass_too_long"]
    assert [entry["cut_off"] for entry in told] == list(range(1, len(told) + 1))
    assert made[0] in {entry["which"] for entry in logs if entry["event"] == "sweep.not_started"}


def test_an_error_that_nobody_foresaw_ends_a_pass_and_not_the_sweep(
    database: Database, tmp_path: Path, temporal_address: str, temporal_namespace: str
) -> None:
    settings = Settings(
        data=tmp_path, temporal_address=temporal_address, temporal_namespace=temporal_namespace
    )
    workplace(database, tmp_path)

    class Faulty(Engine):
        checks = 0

        async def check(self) -> None:
            self.checks += 1
            if self.checks == 1:
                raise LookupError("nobody foresaw this")

    async def scene() -> Sweep:
        engine = Faulty(settings)
        recovery = Recovery(database, settings.limits, "test")
        sweep = Sweep(database, recovery, engine, HOST, "test", lambda: 9, 0.01)
        passes = asyncio.create_task(sweep.run())
        async with asyncio.timeout(30):
            while engine.checks < 3:
                await asyncio.sleep(0.01)
        passes.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await passes
        return sweep

    assert asyncio.run(scene()).counts.failed == 1
