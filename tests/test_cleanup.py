"""Cleanup jobs: what undoing left is tried again or kept, and purged only as it was named."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import update
from support.office import Office, git, unremovable
from support.server import closed_port
from support.waiting import until
from support.world import HOST, rows

from onceborn.activities.attempt import step_of
from onceborn.activities.kind import Compensated, Transferred
from onceborn.activities.worktree import Worktree
from onceborn.runtime import failpoints
from onceborn.runtime.cleanup import Cleanup
from onceborn.runtime.ledger import steps
from onceborn.runtime.ledger import tables as t
from onceborn.runtime.ledger.database import Database
from onceborn.runtime.protocol import rules
from onceborn.runtime.protocol.errors import (
    EngineUnavailable,
    EntryChanged,
    EntryRefused,
    FenceLost,
    NotFound,
)
from onceborn.runtime.protocol.rules import StopReason
from onceborn.workflows.engine import Engine
from onceborn.workflows.sweep import Sweep


@pytest.fixture(autouse=True)
def _inert_failpoints() -> Iterator[None]:
    yield
    failpoints.configure("")


@pytest.fixture
def office(database: Database, tmp_path: Path) -> Office:
    return Office(database, tmp_path)


def edit(path: Path) -> None:
    (path / "file.txt").write_text("somebody's\n")
    (path / "new.txt").write_text("somebody's\n")


# -- in quarantine --------------------------------------------------------------------------------


@pytest.mark.proves("X05", "SA05", "X02")
def test_work_is_kept_through_every_sweep_until_its_entry_is_purged(office: Office) -> None:
    operation = office.aborted(edit)
    path, branch = office.worktree(operation["id"]), office.branch(operation["id"])
    job = office.only_job()
    assert (job["state"], job["step_key"], job["host_id"]) == ("quarantined", "worktree:0", HOST)
    proof = json.loads(job["proof"])
    assert {f["path"] for f in proof["findings"]} == {"file.txt", "new.txt"}
    for _ in range(3):
        office.database.clock.advance(3_600_000)
        assert office.cleaner().drive_due() == 0
    assert office.place.create("E").handle is not None  # its identity is free
    assert (path / "new.txt").read_text() == "somebody's\n"
    assert branch in office.branches(operation["id"])
    removed = office.purge(job["id"], office.digest_of(job["id"]))
    assert [f["path"] for f in removed["removed"]["folders"]] == [str(path)]
    assert list(removed["removed"]["branches"]) == [branch]
    assert not path.parent.exists()
    assert office.branches(operation["id"]) == []
    assert list((office.data / "trash").iterdir()) == []
    assert list((office.data / "intents").iterdir()) == []
    assert git(office.clone(operation["id"]), "worktree", "list").count("\n") == 0
    job = office.only_job()
    assert (job["state"], job["claim_token"]) == ("purged", None)
    assert [(a["action"], a["entry_id"]) for a in rows(office.database, t.operator_actions)] == [
        ("purge_begun", job["id"]),
        ("purge", job["id"]),
    ]
    with pytest.raises(EntryRefused, match="purged"):
        office.operators.begin_purge(job["id"], "x")


@pytest.mark.proves("SH04", "X05", "X02")
@pytest.mark.parametrize(
    "point", ["worktree.undone", "undo.record.begin", "undo.record.commit", "undo.record.committed"]
)
def test_that_it_stays_and_its_entry_are_recorded_both_or_neither(
    office: Office, point: str
) -> None:
    """An owner is gone between keeping somebody's work and the end of its record."""
    owned = office.begin(fails=True)
    path = office.worktree(owned.operation_id)

    def watch(action: rules.Action) -> None:
        if isinstance(action, rules.RequireUndo):
            edit(path)
        if isinstance(action, rules.Compensate) and action.step.key == "worktree:0":
            failpoints.configure(f"{point}=raise@1")

    with pytest.raises(failpoints.FailpointError):
        office.bench.run(owned, watch=watch)
    failpoints.configure("")
    state = office.step(owned.operation_id, "worktree:0")["compensation"]
    recorded = point == "undo.record.committed"
    assert (state, len(office.jobs())) == (("transferred", 1) if recorded else ("running", 0))
    assert office.bench.run(office.next_owner()) is StopReason.ABORTED
    assert office.step(owned.operation_id, "worktree:0")["compensation"] == "transferred"
    assert office.only_job()["state"] == "quarantined"
    assert (path / "new.txt").read_text() == "somebody's\n"


@pytest.mark.proves("SA05", "SH05")
@pytest.mark.parametrize("change", ["another file", "a longer file", "a commit", "staged"])
def test_a_purge_is_cancelled_by_what_was_done_since_the_listing(
    office: Office, change: str
) -> None:
    operation = office.aborted(edit)
    path, entry = office.worktree(operation["id"]), office.only_job()["id"]
    listed = office.digest_of(entry)
    if change == "another file":
        (path / "inner" / "more.txt").write_text("more")
    elif change == "a longer file":
        with (path / "new.txt").open("a") as file:
            file.write("more")
    elif change == "a commit":
        git(path, "commit", "-q", "--allow-empty", "-m", "work")
    else:
        git(path, "add", "new.txt")
    before = office.files()
    with pytest.raises(EntryChanged) as caught:
        office.purge(entry, listed)
    assert office.files() == before
    assert office.only_job()["state"] == "quarantined"
    last = rows(office.database, t.operator_actions)[-1]
    assert last["action"] == "purge_refused"
    office.purge(entry, caught.value.fields["digest"])
    assert not path.exists()
    assert office.branches(operation["id"]) == []


@pytest.mark.proves("SH05")
def test_a_purge_is_refused_while_a_process_works_there(office: Office) -> None:
    operation = office.aborted(edit)
    path, entry = office.worktree(operation["id"]), office.only_job()["id"]
    somebody = subprocess.Popen(
        [sys.executable, "-c", "print('here', flush=True); input()"],
        cwd=path / "inner",
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert somebody.stdout is not None
    assert somebody.stdout.readline() == b"here\n"
    try:
        with pytest.raises(EntryRefused) as caught:
            office.purge(entry, office.digest_of(entry))
        assert caught.value.fields["process"] == somebody.pid
        assert (path / "new.txt").exists()
    finally:
        somebody.communicate(b"\n")
    office.purge(entry, office.digest_of(entry))
    assert not path.exists()


@pytest.mark.proves("SH05", "SA05")
def test_work_that_begins_during_a_purge_cancels_it(office: Office) -> None:
    operation = office.aborted(edit)
    path, entry = office.worktree(operation["id"]), office.only_job()["id"]
    gate = office.folder / "gate"
    failpoints.configure(f"purge.moved=wait:{gate}")
    with ThreadPoolExecutor(1) as pool:
        purging = pool.submit(office.purge, entry, office.digest_of(entry))
        until(gate.with_name("gate.reached").exists)
        (moved,) = (office.data / "trash" / entry).iterdir()
        (moved / "late.txt").write_text("late")
        gate.touch()
        with pytest.raises(EntryChanged):
            purging.result()
    assert (path / "late.txt").read_text() == "late"
    assert office.only_job()["state"] == "quarantined"
    assert git(path, "status", "--porcelain").count("\n") == 2
    assert not (office.data / "trash" / entry).exists()


@pytest.mark.proves("SA05")
@pytest.mark.parametrize(
    "point",
    [
        "operators.purge_claim.committed",
        "purge.checked",
        "purge.moved",
        "purge.folder_removed",
        "operators.purge_record.begin",
        "operators.purge_record.committed",
    ],
)
def test_a_purge_that_is_cut_off_is_named_again_and_finishes(office: Office, point: str) -> None:
    operation = office.aborted(edit)
    entry = office.only_job()["id"]
    failpoints.configure(f"{point}=raise@1")
    with pytest.raises(failpoints.FailpointError):
        office.purge(entry, office.digest_of(entry))
    failpoints.configure("")
    if point != "operators.purge_record.committed":
        with pytest.raises(EntryRefused, match="Another purge"):
            office.purge(entry, office.digest_of(entry))
        office.database.clock.advance(31_000)
        office.purge(entry, office.digest_of(entry))
    assert office.only_job()["state"] == "purged"
    assert office.branches(operation["id"]) == []
    assert not office.worktree(operation["id"]).exists()
    assert list((office.data / "trash").iterdir()) == []


@pytest.mark.proves("SA18", "SA05")
@pytest.mark.parametrize("how", ["renamed", "switched"])
def test_another_branch_is_told_and_only_ours_is_ever_deleted(office: Office, how: str) -> None:
    def work(path: Path) -> None:
        if how == "renamed":
            git(path, "branch", "-m", "theirs")
        else:
            git(path, "switch", "-q", "-c", "theirs")
            git(path, "commit", "-q", "--allow-empty", "-m", "work")

    operation = office.aborted(work)
    path, ours = office.worktree(operation["id"]), office.branch(operation["id"])
    job = office.only_job()
    proof = json.loads(job["proof"])
    assert proof["head"] == "refs/heads/theirs"
    assert proof["findings"][0]["path"] == "HEAD"
    before = office.branches(operation["id"])
    assert before == (["theirs"] if how == "renamed" else sorted([ours, "theirs"]))
    assert path.exists()
    contents = office.cleaner().look(job["id"])
    office.purge(job["id"], contents.digest)
    assert not path.exists()
    # A renamed branch still begins with our key, so it is ours; one made by somebody is not.
    assert office.branches(operation["id"]) == ([] if how == "renamed" else ["theirs"])


@pytest.mark.proves("SA20")
@pytest.mark.parametrize("also", ["", "record", "branch"])
def test_a_purge_of_what_was_deleted_by_hand_counts_as_done(office: Office, also: str) -> None:
    operation = office.aborted(edit)
    path, clone = office.worktree(operation["id"]), office.clone(operation["id"])
    shutil.rmtree(path)
    if also:
        git(clone, "worktree", "prune")
    if also == "branch":
        git(clone, "branch", "-q", "-D", office.branch(operation["id"]))
    entry = office.only_job()["id"]
    office.purge(entry, office.digest_of(entry))
    assert office.only_job()["state"] == "purged"
    assert git(clone, "worktree", "list").count("\n") == 0
    assert office.branches(operation["id"]) == []


@pytest.mark.proves("SA05", "SA18")
def test_what_is_not_provably_the_entry_any_more_is_refused(office: Office) -> None:
    operation = office.aborted(edit)
    path, clone = office.worktree(operation["id"]), office.clone(operation["id"])
    shutil.rmtree(path)
    git(clone, "worktree", "prune")
    path.mkdir()
    (path / "else.txt").write_text("somebody else's")
    entry = office.only_job()["id"]
    with pytest.raises(EntryRefused, match="cannot be shown"):
        office.purge(entry, office.digest_of(entry))
    assert (path / "else.txt").exists()
    assert office.branches(operation["id"]) == [office.branch(operation["id"])]


@pytest.mark.proves("SA05", "SH05")
def test_a_branch_that_is_used_elsewhere_and_a_lock_of_somebody_hold_a_purge_up(
    office: Office,
) -> None:
    operation = office.aborted(lambda path: git(path, "commit", "-q", "--allow-empty", "-m", "w"))
    path, clone = office.worktree(operation["id"]), office.clone(operation["id"])
    entry, branch = office.only_job()["id"], office.branch(operation["id"])
    git(clone, "worktree", "lock", "--reason", "on a stick", str(path))
    with pytest.raises(EntryRefused, match="on a stick"):
        office.purge(entry, office.digest_of(entry))
    git(clone, "worktree", "unlock", str(path))
    git(path, "switch", "-q", "--detach")
    git(clone, "worktree", "add", "-q", str(office.folder / "elsewhere"), branch)
    with pytest.raises(EntryRefused, match="elsewhere"):
        office.purge(entry, office.digest_of(entry))
    git(clone, "worktree", "remove", str(office.folder / "elsewhere"))
    office.purge(entry, office.digest_of(entry))
    assert office.branches(operation["id"]) == []


@pytest.mark.proves("SA05")
def test_a_purge_leaves_every_bystander_alone(office: Office) -> None:
    other = office.begin("other")
    assert office.bench.run(other) is StopReason.COMPLETED
    kept = office.aborted(edit, external_id="kept")
    operation = office.aborted(edit)
    by_operation = {job["operation_id"]: job["id"] for job in office.jobs()}
    clone = office.clone(operation["id"])
    git(clone, "branch", "bystander", "refs/remotes/origin/trunk")
    gone, mine = str(office.worktree(operation["id"])), by_operation[operation["id"]]
    before = {k: v for k, v in office.files().items() if not _of(k, gone, clone)}
    office.purge(mine, office.digest_of(mine))
    after = office.files()
    assert {k: after.get(k) for k in before} == before
    assert sorted(office.branches(operation["id"])) == sorted(
        ["bystander", office.branch(other.operation_id), office.branch(kept["id"])]
    )
    assert office.verify(other.operation_id)["worktree:0"].verdict == "same"


def _of(name: str, gone: str, clone: Path) -> bool:
    """Whether a file is the purged worktree's, or git's bookkeeping of branches in the clone."""
    return name.startswith((gone, str(clone))) or "/intents/" in name


@pytest.mark.proves("SA23", "SA05")
@pytest.mark.parametrize("how", ["link", "dots", "slash"])
def test_a_purge_through_another_name_of_the_data_folder(office: Office, how: str) -> None:
    operation = office.aborted(edit)
    data = {
        "link": office.folder / "link",
        "dots": office.folder / "repo" / ".." / "data",
        "slash": Path(f"{office.data}/"),
    }[how]
    if how == "link":
        data.symlink_to(office.data)
    entry = office.only_job()["id"]
    office.purge(entry, office.digest_of(entry), data)
    assert not office.worktree(operation["id"]).exists()
    assert office.branches(operation["id"]) == []
    assert git(office.clone(operation["id"]), "worktree", "list").count("\n") == 0


@pytest.mark.proves("X05")
def test_what_was_moved_to_quarantine_is_purged_and_the_new_worktree_is_not(
    office: Office,
) -> None:
    """A half-made worktree with somebody's file in it is kept aside, and the step made anew."""
    owned = office.begin()
    failpoints.configure("worktree.performed=raise@1")
    with pytest.raises(failpoints.FailpointError):
        office.bench.run(owned)
    failpoints.configure("")
    path = office.worktree(owned.operation_id)
    (path / "precious.txt").write_text("precious")
    admin = next((office.clone(owned.operation_id) / "worktrees").iterdir())
    (admin / "locked").write_text("initializing")
    assert office.bench.run(office.next_owner()) is StopReason.COMPLETED
    job = office.only_job()
    (kept,) = json.loads(job["proof"])["quarantined"]
    assert (Path(kept) / "precious.txt").read_text() == "precious"
    office.purge(job["id"], office.digest_of(job["id"]))
    assert not Path(kept).exists()
    assert office.verify(owned.operation_id)["worktree:0"].verdict == "same"
    assert list((office.data / "quarantine").iterdir()) == []


def test_an_entry_of_another_workspace_is_not_there(office: Office) -> None:
    office.aborted(edit)
    entry = office.only_job()["id"]
    (office.folder / "other").mkdir()
    other = Office(office.database, office.folder / "other")
    with pytest.raises(NotFound):
        other.operators.begin_purge(entry, "x")
    assert other.operators.jobs() == []


# -- pending --------------------------------------------------------------------------------------


def half_made(office: Office, operation_id: str) -> None:
    """As a git that was killed in the middle of making the worktree leaves it."""
    admin = next((office.clone(operation_id) / "worktrees").iterdir())
    (admin / "locked").write_text("initializing")


@pytest.fixture
def pending(office: Office) -> dict[str, Any]:
    """An aborted creation of which a folder could not be removed: its job."""
    owned = office.begin(fails=True)
    inner = office.worktree(owned.operation_id) / "inner"

    with contextlib.ExitStack() as stack:

        def watch(action: Any) -> None:
            if isinstance(action, rules.RequireUndo):
                half_made(office, owned.operation_id)
                stack.enter_context(unremovable(inner))

        assert office.bench.run(owned, watch=watch) is StopReason.ABORTED
    return office.only_job()


def stuck_folder(office: Office) -> Path:
    """The ``inner`` folder of the one that lies in the trash."""
    (inner,) = (office.data / "trash").glob("*/*/inner")
    return inner


@pytest.mark.proves("X02")
def test_what_is_ours_and_clean_but_not_removable_now_is_removed_later(
    office: Office, pending: dict[str, Any]
) -> None:
    assert (pending["state"], pending["attempts"]) == ("pending", 0)
    proof = json.loads(pending["proof"])
    assert not proof["path_exists"]
    assert not proof["branch_ours"]
    (reason,) = proof["not_removed"].values()
    assert "Permission denied" in reason
    operation = office.operation(pending["operation_id"])
    undone = {u["step"]: u["how"] for u in json.loads(operation["failure"])["undone"]}
    assert undone["worktree:0"] == "transferred"
    assert office.place.create("E").handle is not None  # its identity is free
    assert office.cleaner().drive_due() == 1
    job = office.only_job()
    assert (job["state"], job["attempts"], job["last_error"]) == ("done", 1, None)
    assert (job["claim_token"], job["finished_at"] is not None) == (None, True)
    assert list((office.data / "trash").iterdir()) == []
    assert list((office.data / "intents").iterdir()) == []


def test_it_is_tried_with_backoff_shown_as_stuck_and_never_dropped(
    office: Office, pending: dict[str, Any]
) -> None:
    waits: list[int] = []
    with unremovable(stuck_folder(office)):
        for attempt in range(1, 11):
            assert office.cleaner().drive_due() == 1
            assert office.cleaner().drive_due() == 0  # not before it is due
            (shown,) = office.operators.jobs()
            assert (shown["state"], shown["attempts"]) == ("pending", attempt)
            assert "Permission denied" in shown["last_error"]
            assert shown["stuck"] is (attempt >= 8)
            assert bool(office.operators.jobs(only_stuck=True)) is (attempt >= 8)
            waits.append(shown["due_in_ms"])
            office.database.clock.advance(shown["due_in_ms"])
    assert waits[0] < waits[2] < waits[4]
    assert all(wait <= 72_000 for wait in waits[:7])
    assert all(wait > 3_590_000 for wait in waits[7:])
    assert office.cleaner().drive_due() == 1
    assert office.only_job()["state"] == "done"
    assert pending["operation_id"] == office.only_job()["operation_id"]


@pytest.mark.proves("X05", "SA05")
def test_work_that_turns_up_in_a_pending_one_is_kept(
    office: Office, pending: dict[str, Any]
) -> None:
    (stuck_folder(office) / "precious.txt").write_text("precious")
    assert office.cleaner().drive_due() == 1
    job = office.only_job()
    assert (job["id"], job["state"], job["attempts"]) == (pending["id"], "quarantined", 0)
    (content,) = json.loads(job["proof"])["content"]
    assert [f["path"] for f in content["findings"]] == ["inner/precious.txt"]
    kept = Path(content["folder"])
    assert (kept / "inner" / "precious.txt").read_text() == "precious"
    office.database.clock.advance(3_600_000)
    assert office.cleaner().drive_due() == 0
    office.purge(job["id"], office.digest_of(job["id"]))
    assert not kept.exists()


@pytest.mark.parametrize(
    "point", ["cleanup.claimed", "cleanup.undone", "cleanup.record.begin", "cleanup.record.commit"]
)
def test_a_sweep_that_dies_on_a_job_is_followed_by_another(
    office: Office, pending: dict[str, Any], point: str
) -> None:
    failpoints.configure(f"{point}=raise@1")
    with pytest.raises(failpoints.FailpointError):
        office.cleaner().drive_due()
    failpoints.configure("")
    assert office.cleaner().drive_due() == 0  # the lease of the dead one still holds
    office.database.clock.advance(31_000)
    assert office.cleaner().drive_due() == 1
    assert (office.only_job()["id"], office.only_job()["state"]) == (pending["id"], "done")
    assert list((office.data / "trash").iterdir()) == []


def test_a_claim_that_was_taken_over_records_and_removes_nothing(
    office: Office, pending: dict[str, Any]
) -> None:
    cleanup = Cleanup(office.database, office.settings)
    late = cleanup.take(HOST)
    assert late is not None
    office.database.clock.advance(31_000)
    now = cleanup.take(HOST)
    assert now is not None
    assert now.claim.token != late.claim.token
    files, world = office.files(), office.cleaner()._world(late.claim, ())
    with pytest.raises(FenceLost):
        world.guard()
    step = office.step(pending["operation_id"], "worktree:0")
    for write in (
        lambda: cleanup.done(late.claim, {}),
        lambda: cleanup.keep(late.claim, {}),
        lambda: cleanup.later(late, "no"),
        lambda: cleanup.renew(late.claim),
        lambda: Worktree().compensate(_step(office, step), world),
    ):
        with pytest.raises(FenceLost):
            write()
    assert office.files() == files
    assert office.only_job()["claim_token"] == now.claim.token
    cleanup.later(now, "busy")
    assert office.only_job()["last_error"] == "busy"


def _step(office: Office, row: dict[str, Any]) -> Any:
    with office.database.reading() as connection:
        return step_of(steps.load(connection, row["operation_id"], row["step_key"]))


def test_two_sweeps_never_work_on_one_job(
    office: Office, pending: dict[str, Any], database_url: str
) -> None:
    other = Database(database_url)
    sides = [Cleanup(office.database, office.settings), Cleanup(other, office.settings)]
    barrier = threading.Barrier(8)

    def take(number: int) -> bool:
        barrier.wait()
        return sides[number % 2].take(HOST) is not None

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(take, range(8))) == 1
    other.dispose()
    assert office.only_job()["id"] == pending["id"]


def test_a_busy_resource_and_another_host_wait(office: Office, pending: dict[str, Any]) -> None:
    request = json.loads(office.step(pending["operation_id"], "worktree:0")["request"])
    with office.bench.locks.try_lock(f"worktree/{request['path']}") as lock:
        assert lock is not None
        assert office.cleaner().drive_due() == 1
    assert office.only_job()["last_error"] == "somebody works on it now"
    with office.database.transaction("test") as connection:
        connection.execute(update(t.cleanup_jobs).values(host_id="hst_" + "1" * 32))
    office.database.clock.advance(3_600_000)
    assert office.cleaner().drive_due() == 0


def test_the_sweep_drives_jobs_and_needs_no_engine_for_it(
    office: Office, pending: dict[str, Any]
) -> None:
    address = f"127.0.0.1:{closed_port()}"
    settings = office.settings.model_copy(update={"temporal_address": address})
    sweep = Sweep(
        office.database,
        office.bench.recovery,
        Engine(settings),
        host_id=HOST,
        host_name="test",
        free_slots=lambda: 1,
        interval_s=1.0,
        cleanup=office.cleaner(),
    )

    async def one_pass() -> None:
        with pytest.raises(EngineUnavailable):
            await sweep.once()
        await asyncio.to_thread(until, lambda: office.only_job()["state"] == "done")
        await sweep._stop_cleaning()

    asyncio.run(one_pass())
    assert office.only_job()["id"] == pending["id"]


# -- what the kind says ---------------------------------------------------------------------------


def test_a_whole_worktree_that_git_cannot_delete_wholly_is_undone_all_the_same(
    office: Office,
) -> None:
    """Git clears its record where it could not delete a file; the rest is moved out of the way."""
    owned = office.begin(fails=True)
    inner = office.worktree(owned.operation_id) / "inner"
    with contextlib.ExitStack() as stack:

        def watch(action: Any) -> None:
            if isinstance(action, rules.RequireUndo):
                stack.enter_context(unremovable(inner))

        assert office.bench.run(owned, watch=watch) is StopReason.ABORTED
        assert (stuck_folder(office) / "other.txt").exists()
    assert office.only_job()["state"] == "pending"
    assert not inner.parent.exists()
    assert office.branches(owned.operation_id) == []
    assert office.cleaner().drive_due() == 1
    assert office.only_job()["state"] == "done"
    assert list((office.data / "trash").iterdir()) == []


@pytest.mark.proves("X05")
def test_what_cannot_be_shown_to_be_ours_is_handed_over_and_not_forgotten(office: Office) -> None:
    """A worker that was killed right after git had cleared its record leaves no mark of ours."""

    def work(path: Path) -> None:
        (path / ".git").unlink()
        shutil.rmtree(next((office.data / "repositories").glob("*.git/worktrees/*")))

    operation = office.aborted(work)
    job = office.only_job()
    assert job["state"] == "quarantined"
    (finding,) = json.loads(job["proof"])["findings"]
    assert finding["what"] == "it cannot be shown whose this is"
    assert (office.worktree(operation["id"]) / "inner" / "other.txt").exists()
    assert office.branches(operation["id"]) == []


def test_the_two_dispositions_are_told_apart() -> None:
    assert Transferred({}).disposition == "quarantined"
    assert Transferred({}, "pending") != Transferred({})
    assert not isinstance(Transferred({}), Compensated)
