"""Undoing a worktree: what is ours goes, what holds anybody's work stays and is handed over."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from gitrepos import Repository, Rig, git, new_rig
from test_worktree import KIND, WorktreeStep, evidence, stray

from onceborn.activities.kind import (
    Absent,
    Compensated,
    OursHalfMade,
    Present,
    StepRetry,
    Transferred,
    as_json,
)
from onceborn.runtime import failpoints
from onceborn.runtime.ledger.database import Database


@pytest.fixture
def rig(tmp_path: Path, database: Database) -> Rig:
    return new_rig(tmp_path, database)


@pytest.fixture
def source(tmp_path: Path) -> Repository:
    repository = Repository(tmp_path / "source")
    repository.commit({"README": "one\n", "src/a.txt": "a" * 10_000, ".gitignore": "*.o\n"})
    return repository


def transferred(rig: Rig, step: WorktreeStep) -> dict[str, Any]:
    """The proof of a transfer, as the ledger would keep it."""
    undone = KIND.compensate(step, rig.world())
    assert isinstance(undone, Transferred), undone
    proof: dict[str, Any] = json.loads(as_json(undone.proof))
    return proof


def found(proof: dict[str, Any]) -> dict[str, str]:
    return {entry["path"]: entry["what"] for entry in proof["findings"]}


# -- a whole one with somebody's work in it -------------------------------------------------------


def edited(path: Path) -> None:
    (path / "README").write_text("edited")


def untracked(path: Path) -> None:
    (path / "new dir").mkdir()
    (path / "new dir" / "ж.txt").write_text("n")


def ignored(path: Path) -> None:
    (path / "x.o").write_text("n")


def staged(path: Path) -> None:
    (path / "README").write_text("staged")
    git(path, "add", "README")
    (path / "README").write_text("one\n")


def hidden(path: Path) -> None:
    git(path, "update-index", "--assume-unchanged", "README")
    (path / "README").write_text("hidden")


def skipped(path: Path) -> None:
    git(path, "update-index", "--skip-worktree", "README")
    (path / "README").write_text("hidden")


WORK: list[tuple[Callable[[Path], None], str]] = [
    (edited, "README"),
    (untracked, "new dir/ж.txt"),
    (ignored, "x.o"),
    (staged, "README"),
    (hidden, "README"),
    (skipped, "README"),
]


@pytest.mark.proves("X05", "SA05")
@pytest.mark.parametrize(("work", "name"), WORK, ids=[w.__name__ for w, _ in WORK])
def test_a_worktree_with_work_is_handed_over(
    rig: Rig, source: Repository, work: Callable[[Path], None], name: str
) -> None:
    step = rig.made(source.path, "x")
    path = rig.path(step)
    work(path)
    before = {p: p.read_bytes() for p in path.rglob("*") if p.is_file()}
    for _ in range(2):
        proof = transferred(rig, step)
        assert name in found(proof)
        assert proof["path"] == str(path)
        assert proof["branch"] == "x"
        assert proof["branch_commit"] == proof["base_commit"] == source.head
        assert proof["ownership_key"] == step.idempotency_key
    assert {p: p.read_bytes() for p in path.rglob("*") if p.is_file()} == before
    assert isinstance(KIND.observe(step, rig.world()), Present)


@pytest.mark.proves("X05", "SA05")
@pytest.mark.parametrize("left_behind", [False, True])
def test_commits_of_its_own_are_handed_over(
    rig: Rig, source: Repository, left_behind: bool
) -> None:
    step = rig.made(source.path, "x")
    path = rig.path(step)
    (path / "b").write_text("b")
    git(path, "add", "b")
    git(path, "commit", "--quiet", "-m", "work")
    commit = git(path, "rev-parse", "HEAD")
    if left_behind:
        git(path, "reset", "--quiet", "--hard", source.head)
    proof = transferred(rig, step)
    assert commit in found(proof)
    assert git(path, "cat-file", "-t", commit) == "commit"
    assert git(path, "rev-parse", "x") == (source.head if left_behind else commit)


def test_a_long_list_is_bounded(rig: Rig, source: Repository) -> None:
    step = rig.made(source.path, "x")
    for n in range(500):
        (rig.path(step) / f"file-{n}").touch()
    proof = transferred(rig, step)
    assert len(proof["findings"]) == 200
    assert proof["findings_total"] == 500


def test_a_name_that_is_not_utf8_can_be_recorded(rig: Rig, source: Repository) -> None:
    step = rig.made(source.path, "x")
    (rig.path(step) / os.fsdecode(b"bad\xff")).touch()
    proof = transferred(rig, step)
    assert json.dumps(proof).encode()
    assert proof["findings_total"] == 1


def test_somebodys_lock_is_respected(rig: Rig, source: Repository) -> None:
    step = rig.made(source.path, "x")
    git(rig.clone(step), "worktree", "lock", "--reason", "on a stick", str(rig.path(step)))
    assert "on a stick" in found(transferred(rig, step))["locked"]
    shutil.move(rig.path(step), rig.path(step).with_name("away"))
    assert "on a stick" in found(transferred(rig, step))["locked"]
    shutil.move(rig.path(step).with_name("away"), rig.path(step))
    evidence(KIND.observe(step, rig.world()))


@pytest.mark.proves("SA20")
def test_deleted_by_hand_with_commits_keeps_the_branch(rig: Rig, source: Repository) -> None:
    step = rig.made(source.path, "x")
    git(rig.path(step), "commit", "--quiet", "--allow-empty", "-m", "work")
    commit = git(rig.path(step), "rev-parse", "HEAD")
    shutil.rmtree(rig.path(step))
    assert commit in found(transferred(rig, step))
    assert git(rig.clone(step), "rev-parse", "x") == commit
    assert list(rig.clone(step).glob("worktrees/*")) == []


# -- submodules -----------------------------------------------------------------------------------


@pytest.mark.proves("SA09")
@pytest.mark.parametrize("work", ["", "edit", "untracked", "commit", "stash"])
def test_submodules_are_looked_into(
    rig: Rig, source: Repository, tmp_path: Path, work: str
) -> None:
    library = Repository(tmp_path / "library")
    library.commit({"l": "1"})
    source.git(
        "-c", "protocol.file.allow=always", "submodule", "add", "--quiet", str(library.path), "lib"
    )
    source.commit({"m": "1"})
    step = rig.made(source.path, "x")
    path = rig.path(step)
    git(path, "-c", "protocol.file.allow=always", "submodule", "update", "--init", "--quiet")
    inside = path / "lib"
    if work == "edit":
        (inside / "l").write_text("2")
    elif work == "untracked":
        (inside / "new").write_text("2")
    elif work == "commit":
        # Committed, and then put back to what the repository names: clean to git's status.
        git(inside, "switch", "--quiet", "-c", "mine")
        git(inside, "commit", "--quiet", "--allow-empty", "-m", "mine")
        git(path, "submodule", "update", "--quiet")
    elif work == "stash":
        (inside / "l").write_text("2")
        git(inside, "stash", "--quiet")
    if work:
        assert found(transferred(rig, step))
        assert (inside / "l").exists()
    else:
        assert isinstance(KIND.compensate(step, rig.world()), Compensated)
        assert stray(rig, step) == []


# -- half-made ones -------------------------------------------------------------------------------


def _admin(rig: Rig, step: WorktreeStep) -> Path:
    return rig.clone(step) / "worktrees" / "0-source"


def _only(admin: Path, *names: str) -> None:
    for entry in admin.iterdir():
        if entry.name not in names:
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()


def half_made(rig: Rig, step: WorktreeStep, how: str) -> None:
    """Put a whole worktree into a state in which a killed ``git worktree add`` may leave it."""
    admin, path = _admin(rig, step), rig.path(step)
    (admin / "locked").write_text("initializing")
    if how in ("nameless", "empty gitdir", "no HEAD", "empty HEAD", "empty commondir"):
        shutil.rmtree(path)
    if how == "nameless":
        _only(admin, "locked")
    elif how == "empty gitdir":
        _only(admin, "locked", "gitdir")
        (admin / "gitdir").write_text("")
        path.mkdir()
    elif how == "no HEAD":
        _only(admin, "locked", "gitdir")
        path.mkdir()
        (path / ".git").write_text("")
    elif how == "empty HEAD":
        _only(admin, "locked", "gitdir")
        (admin / "HEAD").write_text("")
    elif how == "empty commondir":
        _only(admin, "locked", "gitdir")
        (admin / "HEAD").write_text("0" * 40)
        (admin / "commondir").write_text("")
    elif how == "no link":
        _only(admin, "locked", "gitdir", "HEAD", "commondir")
        (path / ".git").write_text("gitdir: " + str(rig.clone(step)) + "/work")
    elif how == "cut off":
        (admin / "index").rename(admin / "index.lock")
        (path / "src" / "a.txt").write_text("a" * 1234)
        (path / "README").unlink()
    elif how == "cut off at nothing":
        (admin / "index").rename(admin / "index.lock")
        (path / "src" / "a.txt").write_text("")
    elif how == "still locked":
        pass
    elif how == "orphaned":
        shutil.rmtree(admin)
    else:
        raise AssertionError(how)


HALF_MADE = [
    "nameless",
    "empty gitdir",
    "no HEAD",
    "empty HEAD",
    "empty commondir",
    "no link",
    "cut off",
    "cut off at nothing",
    "still locked",
    "orphaned",
]


@pytest.mark.proves("SA03")
@pytest.mark.parametrize("how", HALF_MADE)
def test_a_half_made_one_is_undone_without_a_trace(rig: Rig, source: Repository, how: str) -> None:
    step = rig.made(source.path, "x")
    other = rig.made(source.path, "other")
    (rig.path(other) / "work").write_text("w")
    half_made(rig, step, how)
    seen = KIND.observe(step, rig.world())
    assert isinstance(seen, OursHalfMade), seen
    assert isinstance(KIND.compensate(step, rig.world()), Compensated)
    assert isinstance(KIND.observe(step, rig.world()), Absent)
    evidence(KIND.observe(other, rig.world()))
    assert (rig.path(other) / "work").read_text() == "w"
    (rig.path(other) / "work").unlink()
    assert isinstance(KIND.compensate(other, rig.world()), Compensated)
    assert stray(rig, step) == []


@pytest.mark.proves("SA03")
@pytest.mark.parametrize("how", HALF_MADE)
def test_a_half_made_one_is_made_whole(rig: Rig, source: Repository, how: str) -> None:
    step = rig.made(source.path, "x")
    half_made(rig, step, how)
    KIND.perform(step, rig.world())
    evidence(KIND.observe(step, rig.world()))
    assert git(rig.path(step), "status", "--porcelain", "--ignored") == ""


@pytest.mark.proves("X05")
@pytest.mark.parametrize("how", ["cut off", "still locked", "orphaned"])
@pytest.mark.parametrize(
    ("name", "content"), [("precious", "p"), ("src/a.txt", "not a beginning"), ("x.o", "")]
)
def test_a_half_made_one_with_anything_else_in_it_goes_to_quarantine(
    rig: Rig, source: Repository, how: str, name: str, content: str
) -> None:
    step = rig.made(source.path, "x")
    half_made(rig, step, how)
    (rig.path(step) / name).write_text(content)
    # Making it whole must not throw that away either: the driver hands it over first.
    with pytest.raises(StepRetry) as caught:
        KIND.perform(step, rig.world())
    assert caught.value.reason_code == "worktree.leftover"
    assert isinstance(KIND.observe(step, rig.world()), OursHalfMade)
    proof = transferred(rig, step)
    (content_of,) = proof["content"]
    assert [entry["path"] for entry in content_of["findings"]] == [name]
    kept = Path(content_of["folder"])
    assert kept.is_relative_to(rig.data / "quarantine")
    assert (kept / name).read_text() == content
    # The name and the path are free again.
    assert isinstance(KIND.observe(step, rig.world()), Absent)
    KIND.perform(step, rig.world())
    evidence(KIND.observe(step, rig.world()))
    assert (kept / name).read_text() == content


@pytest.mark.proves("X05")
def test_what_is_only_staged_in_a_half_made_one_is_kept(rig: Rig, source: Repository) -> None:
    step = rig.made(source.path, "x")
    path = rig.path(step)
    (path / "new").write_text("staged, then deleted")
    git(path, "add", "new")
    (path / "new").unlink()
    proof = transferred(rig, step)
    (content_of,) = proof["content"]
    assert [entry["path"] for entry in content_of["findings"]] == ["new"]
    assert (Path(content_of["folder"]) / ".onceborn-records" / "index").exists()


@pytest.mark.proves("SA20")
def test_files_deleted_by_hand_are_no_work(rig: Rig, source: Repository) -> None:
    step = rig.made(source.path, "x")
    (rig.path(step) / "README").unlink()
    shutil.rmtree(rig.path(step) / "src")
    assert isinstance(KIND.compensate(step, rig.world()), Compensated)
    assert stray(rig, step) == []


@pytest.mark.parametrize("point", ["worktree.moved_away", "worktree.records_removed"])
@pytest.mark.parametrize("precious", [False, True])
def test_an_interrupted_undoing_goes_on(
    rig: Rig, source: Repository, point: str, precious: bool
) -> None:
    step = rig.made(source.path, "x")
    half_made(rig, step, "cut off")
    if precious:
        (rig.path(step) / "precious").write_text("p")
    failpoints.configure(f"{point}=raise")
    try:
        with pytest.raises(failpoints.FailpointError):
            KIND.compensate(step, rig.world())
    finally:
        failpoints.configure("")
    assert isinstance(KIND.observe(step, rig.world()), OursHalfMade)
    if precious:
        (content_of,) = transferred(rig, step)["content"]
        assert (Path(content_of["folder"]) / "precious").read_text() == "p"
    else:
        assert isinstance(KIND.compensate(step, rig.world()), Compensated)
        assert stray(rig, step) == []
    assert isinstance(KIND.observe(step, rig.world()), Absent)
