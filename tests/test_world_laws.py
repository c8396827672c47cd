"""What holds even where somebody acts between our look and our act: git's own refusals are kept.

And the order in which things reach the disk: what is meant, durably, before anything is made.
"""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from gitrepos import Repository, Rig, git, new_rig
from sqlalchemy import delete, event, update
from support.loop import Bench
from support.world import rows, workplace

from onceborn.activities import ownership
from onceborn.activities.git import Git
from onceborn.activities.kind import Compensated, StepFailed, StepRetry
from onceborn.activities.worktree import Worktree
from onceborn.runtime import failpoints
from onceborn.runtime.ledger import tables as t
from onceborn.runtime.ledger.database import Database
from onceborn.runtime.protocol.rules import StopReason

KIND = Worktree()


@pytest.fixture
def rig(tmp_path: Path, database: Database) -> Rig:
    return new_rig(tmp_path, database)


@pytest.fixture
def source(tmp_path: Path) -> Repository:
    repository = Repository(tmp_path / "source")
    repository.commit({"README": "one\n"})
    return repository


@pytest.mark.proves("X05")
@pytest.mark.parametrize("backend", ["sqlite"], indirect=True)
def test_work_that_begins_after_the_look_is_never_removed(rig: Rig, source: Repository) -> None:
    """Nothing is in it as it is judged; at the last moment before its removal there is."""
    step = rig.made(source.path, "onceborn/x")
    work = rig.path(step) / "work"
    rig.before_mutation = lambda: work.write_text("mine") if work.parent.is_dir() else None
    undone = KIND.compensate(step, rig.world())
    assert not isinstance(undone, Compensated)
    assert work.read_text() == "mine"


@pytest.mark.proves("X05")
@pytest.mark.parametrize("backend", ["sqlite"], indirect=True)
def test_a_commit_that_lands_after_the_look_keeps_its_branch(rig: Rig, source: Repository) -> None:
    step = rig.made(source.path, "onceborn/x")
    clone = rig.clone(step)
    head = git(clone, "rev-parse", "refs/heads/onceborn/x")
    tree = git(clone, "rev-parse", f"{head}^{{tree}}")
    late = git(clone, "commit-tree", tree, "-p", head, "-m", "late")

    def commit_once_the_folder_is_gone() -> None:
        if not rig.path(step).exists():
            git(clone, "update-ref", "refs/heads/onceborn/x", late)

    rig.before_mutation = commit_once_the_folder_is_gone
    undone = KIND.compensate(step, rig.world())
    assert not isinstance(undone, Compensated)
    assert git(clone, "rev-parse", "refs/heads/onceborn/x") == late


@pytest.mark.proves("SA22")
@pytest.mark.parametrize("backend", ["sqlite"], indirect=True)
def test_a_branch_that_appears_after_the_look_is_not_moved(rig: Rig, source: Repository) -> None:
    step = rig.ready(source.path, "onceborn/x")
    clone = rig.clone(step)
    tree = git(clone, "rev-parse", f"{source.head}^{{tree}}")
    theirs = git(clone, "commit-tree", tree, "-p", source.head, "-m", "theirs")
    rig.before_mutation = lambda: git(clone, "update-ref", "refs/heads/onceborn/x", theirs)
    with pytest.raises((StepFailed, StepRetry)):
        KIND.perform(step, rig.world())
    rig.before_mutation = lambda: None
    assert isinstance(KIND.compensate(step, rig.world()), Compensated)
    assert git(clone, "rev-parse", "refs/heads/onceborn/x") == theirs


@pytest.mark.proves("X04")
@pytest.mark.parametrize("backend", ["sqlite"], indirect=True)
def test_what_is_meant_is_on_the_disk_before_anything_is_made(
    rig: Rig, source: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []
    fsync, replace, run = os.fsync, Path.replace, Git.run

    def noted_fsync(fd: int) -> None:
        order.append(f"sync {Path(f'/proc/self/fd/{fd}').readlink().name}")
        fsync(fd)

    def noted_replace(self: Path, target: Path) -> Path:
        order.append(f"name {target.name}")
        return replace(self, target)

    def noted_run(self: Git, args: Any, **how: Any) -> Any:
        if how.get("mutates"):
            order.append(f"git {args[0]}")
        return run(self, args, **how)

    step = rig.ready(source.path, "onceborn/x")
    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(Path, "replace", noted_replace)
    monkeypatch.setattr(Git, "run", noted_run)
    KIND.perform(step, rig.world())
    intent = ownership.intent_file(rig.host, step.idempotency_key).name
    draft = Path(intent).with_suffix(".tmp").name
    assert order == [
        f"sync {draft}",
        f"name {intent}",
        "sync intents",
        "git update-ref",
        "git worktree",
    ]


@pytest.mark.proves("SB02", "R02")
def test_a_racer_meets_the_winner_as_no_conflict_error(database: Database, tmp_path: Path) -> None:
    """The insert does nothing on this conflict: the database is never made to fail over it."""
    place = workplace(database, tmp_path)
    place.admission._attestor.require()  # it provokes conflicts, to see that they are refused
    errors: list[Any] = []
    event.listen(database.engine, "handle_error", errors.append)
    failpoints.configure("admission.miss_lookup=on")
    barrier = threading.Barrier(8)

    def race(_: int) -> Any:
        barrier.wait()
        return place.create("E")

    try:
        with ThreadPoolExecutor(8) as pool:
            answers = list(pool.map(race, range(8)))
    finally:
        failpoints.configure("")
    assert len({answer.task_id for answer in answers}) == 1
    assert [str(context.original_exception) for context in errors] == []


@pytest.mark.proves("SB02")
def test_a_racer_whose_winner_is_gone_again_creates(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It met the conflict, and when it looks again nobody holds the identity any more."""
    place = workplace(database, tmp_path)
    first = place.create("E")
    find = place.admission._find
    looks: list[str] = []

    def find_late(workspace_id: str, external_id: str, body: Any) -> Any:
        looks.append(external_id)
        with database.transaction("test") as connection:
            connection.execute(delete(t.tasks).where(t.tasks.c.id == first.task_id))
        return find(workspace_id, external_id, body)

    monkeypatch.setattr(place.admission, "_find", find_late)
    failpoints.configure("admission.miss_lookup=on")
    try:
        second = place.create("E")
    finally:
        failpoints.configure("")
    assert second.handle is not None
    assert looks == ["E"]
    assert [row["id"] for row in rows(database, t.tasks)] == [second.task_id]


@pytest.mark.proves("X02", "X04", "X05")
def test_what_a_lost_attempt_put_into_quarantine_is_on_record_before_the_end(
    database: Database, tmp_path: Path, source: Repository
) -> None:
    """It kept somebody's work and was lost before it said so; then the creation is deleted."""
    data = tmp_path / "data"
    place = workplace(database, data, roots=(tmp_path,))
    bench = Bench(database, data, roots=(tmp_path,))
    admitted = place.create("E", repositories=[{"source": str(source.path)}])
    assert admitted.handle is not None
    owned = bench.recovery.take(admitted.handle)

    def lost_at(point: str) -> None:
        failpoints.configure(f"{point}=raise@1")
        with pytest.raises(failpoints.FailpointError):
            bench.run(owned)
        failpoints.configure("")

    lost_at("worktree.performed")
    (made,) = (path for path in (data / "worktrees").glob("*/*") if path.is_dir())
    (made / "README").unlink()
    (made / "work").write_text("mine")
    lost_at("step.rows.begin")
    (kept,) = (data / "quarantine").glob("*/*")
    assert (kept / "work").read_text() == "mine"
    assert rows(database, t.cleanup_jobs) == []
    with database.transaction("test") as connection:
        connection.execute(update(t.operations).values(deleted=True))
    assert bench.run(owned) is StopReason.ABORTED
    (job,) = rows(database, t.cleanup_jobs)
    assert job["state"] == "quarantined"
    assert str(kept) in job["proof"]
    assert (kept / "work").read_text() == "mine"
