"""Looking at the world again: it is compared with the evidence field by field, and left alone."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import update
from support.loop import Bench
from support.office import Office, git
from support.world import digest_of_everything

from onceborn.activities import verify
from onceborn.activities.locks import HostLocks
from onceborn.activities.verify import Verified, Verifier
from onceborn.runtime.ledger import tables as t
from onceborn.runtime.ledger.database import Database
from onceborn.runtime.protocol import rules
from onceborn.runtime.protocol.errors import WrongHost
from onceborn.runtime.protocol.rules import StopReason


@pytest.fixture
def office(database: Database, tmp_path: Path) -> Office:
    return Office(database, tmp_path)


def completed(office: Office, **body: Any) -> str:
    owned = office.begin(**body)
    assert office.bench.run(owned) is StopReason.COMPLETED
    return owned.operation_id


def fields(verified: Verified) -> dict[str, tuple[Any, Any]]:
    return {d.field: (d.evidence, d.world) for d in verified.differences}


def test_a_creation_as_it_was_made_is_the_same_and_nothing_is_changed(office: Office) -> None:
    operation = completed(office, profile="marker", start_agent=True)
    rows, files = digest_of_everything(office.database), office.files()
    verified = office.verify(operation)
    assert {v.verdict for v in verified.values()} == {"same"}, verified
    assert set(verified) == {"repo_attach:0", "worktree:0", "session_prepare", "agent_launch"}
    assert (digest_of_everything(office.database), office.files()) == (rows, files)


def committed(path: Path) -> None:
    git(path, "commit", "-q", "--allow-empty", "-m", "work")


def switched(path: Path) -> None:
    git(path, "switch", "-q", "-c", "theirs")


def renamed(path: Path) -> None:
    git(path, "branch", "-m", "theirs")


def detached(path: Path) -> None:
    git(path, "switch", "-q", "--detach")


def removed(path: Path) -> None:
    shutil.rmtree(path)


def file_removed(path: Path) -> None:
    (path / "file.txt").unlink()


def unregistered(path: Path) -> None:
    git(path, "worktree", "remove", str(path))


CHANGES: list[tuple[Callable[[Path], None], str]] = [
    (committed, "not at the base"),
    (switched, "is on refs/heads/theirs"),
    (renamed, "is on refs/heads/theirs"),
    (detached, "not on refs/heads/"),
    (removed, "only a part"),
    (file_removed, "only a part"),
    (unregistered, "only a part"),
]


@pytest.mark.proves("SA18", "SA20")
@pytest.mark.parametrize(("change", "told"), CHANGES, ids=[c.__name__ for c, _ in CHANGES])
def test_a_worktree_that_was_changed_differs_and_is_left_alone(
    office: Office, change: Callable[[Path], None], told: str
) -> None:
    operation = completed(office)
    change(office.worktree(operation))
    rows, files = digest_of_everything(office.database), office.files()
    branches = office.branches(operation)
    verified = office.verify(operation)
    assert verified["worktree:0"].verdict == "differs"
    assert told in verified["worktree:0"].what
    assert verified["worktree:0"].differences
    assert verified["repo_attach:0"].verdict == "same"
    assert (digest_of_everything(office.database), office.files()) == (rows, files)
    assert office.branches(operation) == branches


@pytest.mark.parametrize(
    ("table", "column", "value", "step", "field"),
    [
        ("repository_attachments", "base_ref", "refs/heads/x", "repo_attach:0", "base_ref"),
        ("repository_attachments", "base_commit", "0" * 40, "repo_attach:0", None),
        ("repository_attachments", "ownership_key", "k", "repo_attach:0", "conflict"),
        ("sessions", "launch", "{}", "session_prepare", "launch_hash"),
        ("sessions", "profile", "other", "session_prepare", "profile"),
        ("runs", "dispatch_key", "other", "agent_launch", "run_id"),
    ],
)
def test_each_field_that_differs_is_named(
    office: Office, table: str, column: str, value: str, step: str, field: str | None
) -> None:
    operation = completed(office, profile="marker", start_agent=True)
    with office.database.transaction("test") as connection:
        connection.execute(update(t.metadata.tables[table]).values({column: value}))
    verified = office.verify(operation)
    assert verified[step].verdict == "differs"
    if field is not None:
        assert list(fields(verified[step])) == [field]
        assert fields(verified[step])[field][1] != fields(verified[step])[field][0]


@pytest.mark.parametrize("step", ["repo_attach:0", "worktree:0"])
def test_evidence_that_was_changed_is_told_by_field_and_hash(office: Office, step: str) -> None:
    operation = completed(office)
    evidence = json.loads(office.step(operation, step)["evidence"])
    with office.database.transaction("test") as connection:
        changed = json.dumps({**evidence, "base_commit": "0" * 40})
        connection.execute(
            update(t.steps).where(t.steps.c.step_key == step).values(evidence=changed)
        )
    verified = office.verify(operation)[step]
    assert verified.verdict == "differs"
    told = fields(verified)
    assert told["base_commit"] == ("0" * 40, evidence["base_commit"])
    assert "evidence_hash" in told
    assert set(told) == {"base_commit", "evidence_hash"}


@pytest.mark.proves("X02")
def test_an_undone_creation_is_held_against_the_world_too(office: Office) -> None:
    owned = office.begin(fails=True, profile="marker", start_agent=True)
    assert office.bench.run(owned) is StopReason.ABORTED
    verified = office.verify(owned.operation_id)
    assert verified["worktree:0"].verdict == verified["repo_attach:0"].verdict == "same"
    assert verified["worktree:1"].verdict == "nothing_to_compare"
    # Somebody else's thing in its place is no difference; a thing that bears our key is.
    clone, branch = office.clone(owned.operation_id), office.branch(owned.operation_id)
    head = git(office.repository, "rev-parse", "HEAD")
    git(clone, "branch", branch, head)
    assert office.verify(owned.operation_id)["worktree:0"].verdict == "same"
    git(clone, "branch", "-q", "-D", branch)
    key = office.step(owned.operation_id, "worktree:0")["idempotency_key"]
    arguments = ("--create-reflog", "-m", key, f"refs/heads/{branch}", head)
    git(clone, "-c", "core.logAllRefUpdates=true", "update-ref", *arguments)
    assert office.verify(owned.operation_id)["worktree:0"].verdict == "differs"


def test_what_was_handed_over_and_what_is_under_way_are_told_so(office: Office) -> None:
    operation = office.aborted(lambda path: (path / "new.txt").touch())
    handed = office.verify(operation["id"])["worktree:0"]
    assert handed.verdict == "nothing_to_compare"
    assert "cleanup job" in handed.what
    owned = office.begin("F")
    assert {v.what for v in office.verify(owned.operation_id).values()} == {"it is planned"}


def test_a_resource_that_somebody_works_on_is_busy(
    office: Office, monkeypatch: pytest.MonkeyPatch
) -> None:
    operation = completed(office)
    monkeypatch.setattr(verify, "LOCK_PATIENCE_S", 0.0)
    request = json.loads(office.step(operation, "worktree:0")["request"])
    with office.bench.locks.try_lock(f"worktree/{request['path']}") as lock:
        assert lock is not None
        verified = office.verify(operation)
    assert (verified["worktree:0"].verdict, verified["repo_attach:0"].verdict) == ("busy", "same")


def test_another_host_is_refused(office: Office) -> None:
    operation = completed(office)
    bench = Bench(office.database, office.data, host_id="hst_" + "1" * 32)
    verifier = Verifier(office.database, bench.host, bench.locks)
    with pytest.raises(WrongHost):
        verifier.verify(office.operators.operation(operation))


@pytest.mark.proves("SA23")
@pytest.mark.parametrize("how", ["link", "dots", "slash"])
def test_the_data_folder_under_another_name_is_the_same_world(office: Office, how: str) -> None:
    """Made under one name, recovered and verified, or undone, under another."""
    data = {
        "link": office.folder / "link",
        "dots": office.folder / "repo" / ".." / "data",
        "slash": Path(f"{office.data}/"),
    }[how]
    if how == "link":
        data.symlink_to(office.data)
    other = Bench(office.database, data, roots=(office.folder,))
    operation = completed(office)
    verifier = Verifier(office.database, other.host, HostLocks(other.host.data / "locks"))
    verified = verifier.verify(office.operators.operation(operation))
    assert {step.verdict for step in verified} == {"same"}
    # Made half by one, finished by the other.
    begun = office.begin("F")

    class Gone(Exception):
        """The first owner is no more."""

    def leave(action: rules.Action) -> None:
        if isinstance(action, rules.EnterCompletion):
            raise Gone

    with pytest.raises(Gone):
        office.bench.run(begun, watch=leave)
    assert other.run(office.next_owner()) is StopReason.COMPLETED
    # Made by one, undone by the other: folder, registration and branch go.
    undone = office.begin("G", fails=True)

    def hand_over(action: rules.Action) -> None:
        if isinstance(action, rules.RequireUndo):
            raise Gone

    with pytest.raises(Gone):
        office.bench.run(undone, watch=hand_over)
    assert office.worktree(undone.operation_id).exists()
    assert other.run(office.next_owner()) is StopReason.ABORTED
    assert not office.worktree(undone.operation_id).exists()
    assert office.branch(undone.operation_id) not in office.branches(undone.operation_id)
    listed = git(office.clone(undone.operation_id), "worktree", "list")
    assert str(office.worktree(undone.operation_id)) not in listed


@pytest.mark.proves("SA20")
def test_a_worktree_deleted_by_hand_is_made_again_or_undone_without_it(office: Office) -> None:
    """Recovery of a creation whose folder somebody deleted clears the one stale entry."""
    owned = office.begin(fails=True)

    def delete(action: rules.Action) -> None:
        if isinstance(action, rules.RequireUndo):
            shutil.rmtree(office.worktree(owned.operation_id))

    bystander = completed(office, external_id="other")
    assert office.bench.run(owned, watch=delete) is StopReason.ABORTED
    assert office.verify(owned.operation_id)["worktree:0"].verdict == "same"
    assert office.verify(bystander)["worktree:0"].verdict == "same"
    assert office.branches(bystander) == [office.branch(bystander)]
    (record,) = (office.clone(bystander) / "worktrees").iterdir()
    assert str(office.worktree(bystander)) in (record / "gitdir").read_text()
