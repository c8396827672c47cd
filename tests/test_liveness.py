"""Nothing waits or repeats for ever: starved, stuck, stolen and half-lost creations."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection
from support.world import rows, workplace
from temporalio.exceptions import ApplicationError
from test_loop import Scene

from onceborn.activities.attempt import Attempt
from onceborn.activities.kind import StepRetry
from onceborn.activities.registry import ROW_KINDS
from onceborn.runtime import failpoints
from onceborn.runtime.ledger import creations, hosts, steps
from onceborn.runtime.ledger import tables as t
from onceborn.runtime.ledger.database import Database
from onceborn.runtime.protocol import rules
from onceborn.runtime.protocol.errors import DatabaseUnavailable
from onceborn.runtime.protocol.orders import OperationRef, order_of
from onceborn.runtime.protocol.rules import StopReason


@pytest.fixture
def scene(database: Database, tmp_path: Path) -> Iterator[Scene]:
    yield Scene(database, tmp_path)
    failpoints.configure("")


def test_attempts_that_never_come_back_are_bounded(scene: Scene) -> None:
    """The same fence, redelivered: each attempt dies with its process."""
    owned = scene.begin()
    ref = OperationRef(owned.operation_id, owned.fence)
    failpoints.configure("repo_attach.performed=raise")
    for _ in range(100):
        action = rules.next_action(scene.bench.call("look", ref).snapshot)
        if isinstance(action, rules.Stop):
            break
        if isinstance(action, rules.Wait):
            scene.database.clock.advance(action.wait_ms)
            continue
        named = order_of(action, ref)
        assert named is not None
        with suppress(failpoints.FailpointError):
            scene.bench.call(*named)
    assert scene.operation()["state"] in ("aborted", "completed")
    assert scene.steps()["repo_attach:0"]["attempt"] <= 2 * scene.bench.settings.step_attempts


def test_a_lock_that_is_never_let_go_parks_and_says_who_holds_it(scene: Scene) -> None:
    owned = scene.begin()
    ref = OperationRef(owned.operation_id, owned.fence)
    order = order_of(rules.next_action(scene.bench.call("begin", ref).snapshot), ref)
    assert order is not None
    clone = json.loads(scene.steps()["repo_attach:0"]["request"])["clone"]
    with scene.bench.locks.try_lock(f"clone/{clone}") as held:
        assert held is not None
        assert scene.bench.call(*order).busy
        scene.database.clock.advance(scene.bench.limits.busy_ms)
        action = rules.next_action(scene.bench.call(*order).snapshot)
        assert isinstance(action, rules.Park)
        assert f"clone/{clone}" in action.reason
        assert scene.bench.run(owned) is StopReason.PARKED
    assert rows(scene.database, t.tasks)[0]["external_id"] == "E"


def test_waiting_for_a_lock_that_is_let_go_is_forgotten(scene: Scene) -> None:
    owned = scene.begin()
    ref = OperationRef(owned.operation_id, owned.fence)
    order = order_of(rules.next_action(scene.bench.call("begin", ref).snapshot), ref)
    assert order is not None
    clone = json.loads(scene.steps()["repo_attach:0"]["request"])["clone"]
    with scene.bench.locks.try_lock(f"clone/{clone}"):
        assert scene.bench.call(*order).busy
    assert scene.bench.run(owned) is StopReason.COMPLETED
    assert scene.operation()["busy_since"] is None


def test_a_moment_without_the_database_does_not_end_long_work(scene: Scene) -> None:
    owned = scene.begin()
    ref = OperationRef(owned.operation_id, owned.fence)
    step = scene.bench.call("begin", ref).snapshot.steps[0]
    expected = steps.Expected(
        owned.operation_id, step.key, owned.fence, step.state, 0, step.compensation, 0
    )
    with scene.database.transaction("test") as connection:
        claim = steps.claim(connection, scene.database, expected, 30_000, undo=False)
    attempt = Attempt(
        scene.database, scene.bench.limits, scene.bench.host, claim, beat=lambda: None
    )
    attempt._renewed -= 11  # a renewal is due, and most of the lease is left
    failpoints.configure("step.renew.begin=raise")
    scene.database.transaction = _unavailable  # type: ignore[method-assign]
    attempt.heartbeat()
    attempt._renewed -= 20
    with pytest.raises(DatabaseUnavailable):
        attempt.heartbeat()


def _unavailable(name: str) -> Any:
    raise DatabaseUnavailable


@pytest.mark.proves("SA14")
def test_an_attach_that_fails_for_good_leaves_no_unfinished_clone(scene: Scene) -> None:
    blob = next((scene.repository / ".git" / "objects").glob("[0-9a-f][0-9a-f]/*"))
    for file in (scene.repository / ".git" / "objects").glob("[0-9a-f][0-9a-f]/*"):
        if file.stat().st_size < blob.stat().st_size:
            blob = file
    blob.unlink()
    owned = scene.begin()
    assert scene.bench.run(owned) is StopReason.ABORTED
    assert list((scene.folder / "data" / "repositories").iterdir()) == []


def test_ones_own_create_is_created_though_its_commit_was_in_doubt(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = workplace(database, tmp_path)
    asked: list[str] = []

    def flaky(connection: Connection, operation_id: str) -> bool:
        asked.append(operation_id)
        if len(asked) == 1:
            raise DatabaseUnavailable
        return real(connection, operation_id)

    real = creations.operation_exists
    monkeypatch.setattr(creations, "operation_exists", flaky)
    failpoints.configure("admission.committed=raise@1")
    admitted = place.create("E")
    failpoints.configure("")
    assert admitted.handle is not None
    assert len(asked) == 2


def test_rows_in_use_are_undone_later_and_the_reason_is_told(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    owned = scene.begin(
        profile="marker",
        repositories=[{"source": str(scene.repository)}, {"source": str(scene.folder / "none")}],
    )

    def in_use(*_: Any) -> Any:
        raise StepRetry("session.in_use", "a run uses the session")

    # The plan's order puts the session last, so it is marked as made by hand.
    with scene.database.transaction("test") as connection:
        connection.execute(
            t.steps.update()
            .where(t.steps.c.kind == "session_prepare")
            .values(state="succeeded", attempt=1)
        )
    with monkeypatch.context() as patched:
        patched.setattr(ROW_KINDS["session_prepare"], "retract", in_use, raising=True)
        assert scene.bench.run(owned) is StopReason.PARKED
    session = scene.steps()["session_prepare"]
    assert session["compensation"] == "retry_wait"
    assert "a run uses the session" in session["undo_proof"]


def test_an_operation_that_the_ledger_does_not_have_ends_its_workflow(scene: Scene) -> None:
    with pytest.raises(ApplicationError) as refusal:
        scene.bench.call("begin", OperationRef("op_" + "0" * 32, 1))
    assert refusal.value.non_retryable


def test_many_workers_of_a_new_host_register_it_at_once(database: Database) -> None:
    def seen(number: int) -> bool:
        with database.transaction("test") as connection:
            return hosts.seen(connection, database, "hst_new", f"w{number}", "queue")

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(seen, range(40)))
    assert len(rows(database, t.hosts)) == 1


def test_the_sweep_leaves_alone_what_its_worker_drives(scene: Scene) -> None:
    owned = scene.begin()
    scene.database.clock.advance(3_600_000)
    host = scene.bench.host.host_id
    assert scene.bench.recovery.claim(host, 9, leave=frozenset({owned.operation_id})) == []
    assert [o.operation_id for o in scene.bench.recovery.claim(host, 9)] == [owned.operation_id]
