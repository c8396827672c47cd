"""The kind ``worktree`` on real repositories: making, refusing, recognising."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from gitrepos import Repository, Rig, git, new_rig
from sqlalchemy import delete

from onceborn.activities.kind import (
    Absent,
    Compensated,
    Conflict,
    Observation,
    OursHalfMade,
    Present,
    Step,
    StepFailed,
    StepRetry,
    Undetermined,
)
from onceborn.activities.locks import HostLocks
from onceborn.activities.worktree import Worktree
from onceborn.runtime.ledger import tables
from onceborn.runtime.ledger.database import Database
from onceborn.runtime.protocol.errors import FenceLost
from onceborn.runtime.protocol.evidence import WorktreeMade
from onceborn.runtime.protocol.plan import WorktreeRequest

KIND = Worktree()
WorktreeStep = Step[WorktreeRequest]


@pytest.fixture
def rig(tmp_path: Path, database: Database) -> Rig:
    return new_rig(tmp_path, database)


@pytest.fixture
def source(tmp_path: Path) -> Repository:
    repository = Repository(tmp_path / "source")
    repository.commit({"README": "one\n", "src/a.txt": "a" * 10_000, "ж ш.txt": "x"})
    return repository


def evidence(seen: Observation) -> WorktreeMade:
    assert isinstance(seen, Present), seen
    assert isinstance(seen.evidence, WorktreeMade)
    return seen.evidence


def refused(rig: Rig, step: WorktreeStep) -> StepFailed:
    """The permanent failure of a perform; nothing that it makes is there."""
    with pytest.raises(StepFailed) as caught:
        KIND.perform(step, rig.world())
    assert isinstance(KIND.observe(step, rig.world()), Absent | Conflict)
    assert isinstance(KIND.compensate(step, rig.world()), Compensated)
    return caught.value


def stray(rig: Rig, step: WorktreeStep) -> list[str]:
    """Everything of tasks that is in the clone, and everything in the folders of worktrees."""
    clone = rig.clone(step)
    found = git(clone, "for-each-ref", "--format=%(refname)", "refs/heads").split("\n")
    found += [str(p) for p in clone.glob("worktrees/*")]
    found += [str(p) for p in clone.rglob("*.lock")]
    for name in ("worktrees", "trash", "quarantine", "intents"):
        found += [str(p) for p in (rig.data / name).glob("*")]
    return [line for line in found if line]


# -- the whole of it ------------------------------------------------------------------------------


def test_make_observe_undo(rig: Rig, source: Repository) -> None:
    step = rig.ready(source.path, "onceborn/fix-1")
    assert isinstance(KIND.observe(step, rig.world()), Absent)
    KIND.perform(step, rig.world())
    made = evidence(KIND.observe(step, rig.world()))
    path = rig.path(step)
    assert made.path == str(path)
    assert made.base_commit == source.head
    assert made.head == "refs/heads/onceborn/fix-1"
    assert made.ownership_key == step.idempotency_key
    assert Path(made.registration, "gitdir").read_text() == f"{path}/.git\n"
    assert git(path, "status", "--porcelain") == ""
    assert git(path, "rev-parse", "HEAD") == source.head
    assert git(path, "reflog", "show", "onceborn/fix-1", "--format=%gs") == step.idempotency_key
    undone = KIND.compensate(step, rig.world())
    assert isinstance(undone, Compensated)
    assert isinstance(KIND.observe(step, rig.world()), Absent)
    assert stray(rig, step) == []
    assert isinstance(KIND.compensate(step, rig.world()), Compensated)


def test_performing_again_keeps_what_is_whole(rig: Rig, source: Repository) -> None:
    step = rig.made(source.path, "onceborn/x")
    (rig.path(step) / "work").write_text("mine")
    before = evidence(KIND.observe(step, rig.world()))
    KIND.perform(step, rig.world())
    assert evidence(KIND.observe(step, rig.world())) == before
    assert (rig.path(step) / "work").read_text() == "mine"


def test_not_attached(rig: Rig, source: Repository) -> None:
    step = rig.ready(source.path, "x")
    with rig.database.transaction("test") as connection:
        connection.execute(delete(tables.attachments))
    with pytest.raises(StepFailed) as caught:
        KIND.perform(step, rig.world())
    assert caught.value.reason_code == "worktree.not_attached"


@pytest.mark.proves("SA02")
def test_eight_at_once_on_one_repository(rig: Rig, source: Repository) -> None:
    attach = rig.attached(source.path)
    steps = [
        rig.ready(source.path, f"onceborn/task-{n}")
        if n % 2
        else rig.worktree_step(attach, f"onceborn/task-{n}", path=f"worktrees/t{n}/0-source")
        for n in range(8)
    ]
    errors: list[BaseException] = []
    start = threading.Barrier(8)

    def make(step: WorktreeStep) -> None:
        try:
            start.wait()
            KIND.perform(step, rig.world())
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=make, args=(step,)) for step in steps]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    for step in steps:
        evidence(KIND.observe(step, rig.world()))
    clone = rig.clone(attach)
    assert len(git(clone, "for-each-ref", "refs/heads").split("\n")) == 8
    assert len(list(clone.glob("worktrees/*"))) == 8
    assert list(clone.rglob("*.lock")) == []
    for step in steps:
        assert isinstance(KIND.compensate(step, rig.world()), Compensated)
    assert stray(rig, steps[0]) == []


# -- refusals -------------------------------------------------------------------------------------


@pytest.mark.proves("SA01")
@pytest.mark.parametrize("where", ["remote", "local", "packed"])
@pytest.mark.parametrize(
    ("there", "asked"), [("release/2026.4", "release"), ("a", "a/b"), ("a", "a/b/c")]
)
def test_names_that_exclude_each_other(
    rig: Rig, source: Repository, where: str, there: str, asked: str
) -> None:
    if where == "remote":
        source.git("branch", there)
    attach = rig.attached(source.path)
    if where != "remote":
        git(rig.clone(attach), "branch", there, source.head)
    if where == "packed":
        git(rig.clone(attach), "pack-refs", "--all")
    step = rig.worktree_step(attach, asked)
    before = stray(rig, step)
    error = refused(rig, step)
    assert error.reason_code == "worktree.branch_name_conflict"
    assert error.fields["other"] == there
    assert f"{there}:" in error.message
    assert stray(rig, step) == before
    again = rig.worktree_step(rig.attached(source.path), "another-name")
    KIND.perform(again, rig.world())
    evidence(KIND.observe(again, rig.world()))


def test_names_that_only_begin_alike_are_fine(rig: Rig, source: Repository) -> None:
    source.git("branch", "release/2026.4")
    source.git("branch", "rel")
    rig.made(source.path, "release-2")
    rig.made(source.path, "release/2026")
    rig.made(source.path, "release/2026.4-fix")


@pytest.mark.proves("SA04")
def test_a_branch_with_unpushed_commits_is_refused_and_survives(
    rig: Rig, source: Repository
) -> None:
    attach = rig.attached(source.path)
    clone = rig.clone(attach)
    theirs = git(clone, "commit-tree", "-p", source.head, "-m", "mine", f"{source.head}^{{tree}}")
    git(clone, "branch", "feature", theirs)
    step = rig.worktree_step(attach, "feature")
    seen = KIND.observe(step, rig.world())
    assert isinstance(seen, Conflict)
    assert seen.code == "worktree.branch_exists"
    assert "feature" in seen.reason
    error = refused(rig, step)
    assert error.reason_code == "worktree.branch_exists"
    assert error.fields["branch"] == "feature"
    # A compensation that runs in spite of that has nothing to undo.
    assert isinstance(KIND.compensate(step, rig.world()), Compensated)
    assert git(clone, "rev-parse", "feature") == theirs


@pytest.mark.proves("SA04")
def test_a_branch_of_the_remote_is_refused(rig: Rig, source: Repository) -> None:
    source.git("branch", "feature")
    error = refused(rig, rig.ready(source.path, "feature"))
    assert error.reason_code == "worktree.branch_exists"
    assert error.fields["reference"] == "refs/remotes/origin/feature"


@pytest.mark.proves("SA04")
def test_another_creations_branch_is_not_ours(rig: Rig, source: Repository) -> None:
    first = rig.made(source.path, "feature")
    second = rig.ready(source.path, "feature")
    error = refused(rig, second)
    assert error.reason_code == "worktree.branch_in_use"
    assert str(rig.path(first)) in error.message
    evidence(KIND.observe(first, rig.world()))


@pytest.mark.proves("SA19")
def test_a_branch_in_use_in_the_source_names_where(
    rig: Rig, source: Repository, tmp_path: Path
) -> None:
    second = tmp_path / "by hand"
    source.git("worktree", "add", "--quiet", "-b", "feature", str(second))
    (second / "work").write_text("theirs")
    for branch, path in (("feature", second), ("trunk", source.path)):
        error = refused(rig, rig.ready(source.path, branch))
        assert error.reason_code == "worktree.branch_in_use"
        assert error.fields == {"branch": branch, "path": str(path)}
        assert branch in error.message
        assert str(path) in error.message
    assert (second / "work").read_text() == "theirs"
    assert git(second, "symbolic-ref", "HEAD") == "refs/heads/feature"
    # The same by way of the worktree as the source.
    assert refused(rig, rig.ready(second, "trunk")).fields["path"] == str(source.path)


@pytest.mark.proves("SA19")
def test_a_branch_that_is_checked_out_before_its_first_commit(rig: Rig, source: Repository) -> None:
    first = rig.made(source.path, "one")
    git(rig.path(first), "switch", "--quiet", "--orphan", "two")
    step = rig.ready(source.path, "two")
    error = refused(rig, step)
    assert error.reason_code == "worktree.branch_in_use"
    assert git(rig.path(first), "symbolic-ref", "HEAD") == "refs/heads/two"


@pytest.mark.proves("SA19")
def test_a_retry_finds_its_own_worktree(rig: Rig, source: Repository) -> None:
    step = rig.made(source.path, "feature")
    KIND.perform(step, rig.world())
    evidence(KIND.observe(step, rig.world()))


@pytest.mark.proves("SA22")
@pytest.mark.parametrize("what", ["files", "empty", "file", "link", "dangling"])
def test_an_existing_path_is_never_attached_to(
    rig: Rig, source: Repository, tmp_path: Path, what: str
) -> None:
    step = rig.ready(source.path, "x")
    path = rig.path(step)
    path.parent.mkdir(parents=True)
    elsewhere = tmp_path / "elsewhere"
    if what == "files":
        path.mkdir()
        (path / "precious").write_text("p")
    elif what == "empty":
        path.mkdir()
    elif what == "file":
        path.write_text("p")
    else:
        if what == "link":
            elsewhere.mkdir()
        path.symlink_to(elsewhere)
    before = path.lstat()
    seen = KIND.observe(step, rig.world())
    assert isinstance(seen, Conflict)
    error = refused(rig, step)
    assert error.reason_code == seen.code == "worktree.path_exists"
    assert str(path) in error.message
    assert path.lstat().st_ino == before.st_ino
    if what == "files":
        assert (path / "precious").read_text() == "p"
    assert git(rig.clone(step), "for-each-ref", "refs/heads") == ""


@pytest.mark.proves("SA22")
def test_another_tasks_live_worktree_is_never_touched(rig: Rig, source: Repository) -> None:
    first = rig.made(source.path, "one")
    (rig.path(first) / "work").write_text("w")
    second = rig.ready(source.path, "two", path=first.request.path)
    assert refused(rig, second).reason_code == "worktree.path_exists"
    assert (rig.path(first) / "work").read_text() == "w"
    evidence(KIND.observe(first, rig.world()))


@pytest.mark.proves("SA22")
def test_a_path_that_appears_after_our_branch_is_left_alone(rig: Rig, source: Repository) -> None:
    step = rig.ready(source.path, "x")
    git(
        rig.clone(step), "update-ref", "--create-reflog", "-m", step.idempotency_key,
        "refs/heads/x", source.head, "0" * 40,
    )  # fmt: skip
    rig.path(step).mkdir(parents=True)
    (rig.path(step) / "precious").write_text("p")
    assert isinstance(KIND.observe(step, rig.world()), OursHalfMade)
    assert refused(rig, step).reason_code == "worktree.path_exists"
    assert (rig.path(step) / "precious").read_text() == "p"
    assert git(rig.clone(step), "for-each-ref", "refs/heads") == ""


# -- what repositories hold -----------------------------------------------------------------------


@pytest.mark.proves("SA08")
def test_hooks_that_fail_do_not_run(rig: Rig, source: Repository, tmp_path: Path) -> None:
    attach = rig.attached(source.path)
    clone = rig.clone(attach)
    marker = tmp_path / "ran"
    for folder in (clone / "hooks", tmp_path / "configured"):
        folder.mkdir()
        for name in ("post-checkout", "reference-transaction", "post-index-change"):
            (folder / name).write_text(f"#!/bin/sh\ntouch {marker}\nexit 1\n")
            (folder / name).chmod(0o755)
    for n in range(2):
        step = rig.worktree_step(rig.attached(source.path), f"x{n}")
        KIND.perform(step, rig.world())
        evidence(KIND.observe(step, rig.world()))
        assert isinstance(KIND.compensate(step, rig.world()), Compensated)
        assert stray(rig, step) == []
        git(clone, "config", "core.hooksPath", str(tmp_path / "configured"))
    assert not marker.exists()


@pytest.mark.proves("SA21")
def test_ignored_files_of_the_source_stay_there(rig: Rig, source: Repository) -> None:
    source.commit({".gitignore": ".env\n"})
    (source.path / ".env").write_text("SECRET=1")
    step = rig.made(source.path, "x")
    assert not (rig.path(step) / ".env").exists()
    assert sorted(p.name for p in rig.path(step).iterdir()) == [
        ".git",
        ".gitignore",
        "README",
        "src",
        "ж ш.txt",
    ]
    assert not any(p.is_symlink() for p in rig.path(step).rglob("*"))


def test_what_repositories_hold(rig: Rig, source: Repository, tmp_path: Path) -> None:
    """LFS pointers, submodules, colliding and long names, links, modes, line endings."""
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 5\n"
    files: dict[str, str | bytes] = {
        ".gitattributes": "*.bin filter=lfs diff=lfs -text\n*.crlf text eol=crlf\n",
        "big.bin": pointer,
        "Case": "upper",
        "case": "lower",
        "n" * 250: "long",
        "run.sh": "#!/bin/sh\n",
        "x.crlf": "a\nb\n",
    }
    for name, content in files.items():
        (source.path / name).write_bytes(
            content if isinstance(content, bytes) else content.encode()
        )
    (source.path / "run.sh").chmod(0o755)
    (source.path / "link").symlink_to("README")
    library = Repository(tmp_path / "library")
    library.commit()
    source.git(
        "-c", "protocol.file.allow=always", "submodule", "add", "--quiet", str(library.path), "lib"
    )
    source.commit({"more": "1"})
    step = rig.made(source.path, "x")
    path = rig.path(step)
    assert (path / "big.bin").read_text() == pointer
    assert list((path / "lib").iterdir()) == []
    assert (path / "x.crlf").read_bytes() == b"a\r\nb\r\n"
    assert (path / "link").is_symlink()
    assert os.access(path / "run.sh", os.X_OK)
    assert isinstance(KIND.compensate(step, rig.world()), Compensated)
    assert stray(rig, step) == []


def test_a_file_name_that_the_disk_cannot_hold(rig: Rig, source: Repository) -> None:
    blob = source.git("rev-parse", "HEAD:README")
    tree = subprocess.run(
        ["git", "mktree"], cwd=source.path, text=True, capture_output=True, check=True,
        input=f"100644 blob {blob}\t{'n' * 300}\n",
    ).stdout.strip()  # fmt: skip
    commit = source.git("commit-tree", "-m", "long", tree)
    source.git("update-ref", "refs/heads/long", commit)
    step = rig.worktree_step(rig.attached(source.path, base_ref="long"), "x")
    with pytest.raises(StepFailed) as caught:
        KIND.perform(step, rig.world())
    assert caught.value.reason_code == "worktree.name_too_long"
    assert isinstance(KIND.observe(step, rig.world()), OursHalfMade | Absent)
    assert isinstance(KIND.compensate(step, rig.world()), Compensated)
    assert stray(rig, step) == []


@pytest.mark.proves("SA12")
def test_spaces_and_cyrillic_all_the_way(tmp_path: Path, database: Database) -> None:
    folder = tmp_path / "мои данные 'q"
    folder.mkdir()
    rig = new_rig(folder, database)
    source = Repository(folder / "исходный код", branch="ствол")
    source.commit()
    step = rig.made(source.path, "задача/ёж")
    assert git(rig.path(step), "symbolic-ref", "HEAD") == "refs/heads/задача/ёж"
    assert isinstance(KIND.compensate(step, rig.world()), Compensated)
    assert stray(rig, step) == []


@pytest.mark.proves("SA23")
def test_a_data_folder_behind_a_link(tmp_path: Path, database: Database) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "alias").symlink_to(tmp_path / "real")
    rig = new_rig(tmp_path / "alias", database, roots=[tmp_path.resolve()])
    source = Repository(tmp_path / "source")
    source.commit()
    step = rig.made(source.path, "x")
    made = evidence(KIND.observe(step, rig.world()))
    assert made.path.startswith(str(tmp_path.resolve() / "real"))
    later = new_rig(tmp_path / "real", database, roots=[tmp_path.resolve()])
    assert evidence(KIND.observe(step, later.world())) == made
    assert isinstance(KIND.compensate(step, later.world()), Compensated)
    assert stray(rig, step) == []


# -- what happens to it afterwards ----------------------------------------------------------------


@pytest.mark.proves("SA16")
def test_a_worktree_that_disappears_is_no_success(rig: Rig, source: Repository) -> None:
    step = rig.made(source.path, "x")
    shutil.rmtree(rig.path(step))
    assert isinstance(KIND.observe(step, rig.world()), OursHalfMade)
    KIND.perform(step, rig.world())
    evidence(KIND.observe(step, rig.world()))
    assert len(list(rig.clone(step).glob("worktrees/*"))) == 1


@pytest.mark.proves("SA16")
@pytest.mark.parametrize("what", ["file", "index", "link", "registration", "commit"])
def test_a_part_that_disappears_is_no_success(rig: Rig, source: Repository, what: str) -> None:
    step = rig.made(source.path, "x")
    path, clone = rig.path(step), rig.clone(step)
    if what == "file":
        (path / "src" / "a.txt").unlink()
    elif what == "index":
        (clone / "worktrees/0-source/index").unlink()
    elif what == "link":
        (path / ".git").unlink()
    elif what == "registration":
        shutil.rmtree(clone / "worktrees/0-source")
    else:
        git(path, "commit", "--quiet", "--allow-empty", "-m", "another")
        assert isinstance(KIND.observe(step, rig.world()), Undetermined)
        return
    assert not isinstance(KIND.observe(step, rig.world()), Present)


@pytest.mark.proves("SA20")
def test_deleted_by_hand_counts_as_done(rig: Rig, source: Repository) -> None:
    other = rig.made(source.path, "other")
    step = rig.made(source.path, "x")
    shutil.rmtree(rig.path(step))
    shutil.rmtree(rig.path(other))
    assert isinstance(KIND.compensate(step, rig.world()), Compensated)
    assert isinstance(KIND.observe(step, rig.world()), Absent)
    # The other one's stale entry is not ours to clear.
    assert len(list(rig.clone(step).glob("worktrees/*"))) == 1
    assert isinstance(KIND.observe(other, rig.world()), OursHalfMade)


@pytest.mark.proves("SA18")
@pytest.mark.parametrize("what", ["switched", "renamed", "detached", "deleted"])
def test_a_switched_or_renamed_branch_is_reported(rig: Rig, source: Repository, what: str) -> None:
    step = rig.made(source.path, "x")
    path = rig.path(step)
    if what == "switched":
        git(path, "switch", "--quiet", "-c", "other")
    elif what == "renamed":
        git(path, "branch", "--quiet", "-m", "other")
    elif what == "detached":
        git(path, "switch", "--quiet", "--detach")
    else:
        git(path, "switch", "--quiet", "-c", "other")
        git(path, "branch", "--quiet", "-D", "x")
    before = stray(rig, step)
    seen = KIND.observe(step, rig.world())
    assert isinstance(seen, Undetermined)
    assert "ours" in seen.reason
    with pytest.raises((StepFailed, StepRetry)):
        KIND.perform(step, rig.world())
    undone = KIND.compensate(step, rig.world())
    assert not isinstance(undone, Compensated)
    assert stray(rig, step) == before
    assert (path / "README").exists()


# -- killed in the middle -------------------------------------------------------------------------

KILLED = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from gitrepos import new_rig
from onceborn.activities.locks import HostLocks
from onceborn.activities.worktree import Worktree
from onceborn.runtime import failpoints
from onceborn.runtime.ledger.database import Database
rig = new_rig(Path(sys.argv[2]), Database(sys.argv[3]))
attach = rig.attach_step(sys.argv[4], operation=sys.argv[5])
step = rig.worktree_step(attach, "onceborn/x")
kind = Worktree()
with HostLocks(rig.data / "locks").try_lock(kind.resource(step)) as lock:
    rig.lock_fds = (lock.fd,)
    failpoints.configure(sys.argv[6])
    getattr(kind, sys.argv[7])(step, rig.world())
"""

PERFORM_POINTS = [
    "intent.before",
    "intent.written",
    "git.spawn",
    "git.spawned",
    "git.exited",
    "worktree.branch_made",
    "git.spawn@2",
    "git.spawned@2",
    "git.exited@2",
    "worktree.added",
]


def killed(rig: Rig, step: WorktreeStep, url: str, point: str, verb: str) -> None:
    """Run ``verb`` in a process that dies at ``point``, and wait until its children are gone."""
    name, _, nth = point.partition("@")
    action = f"{name}=kill@{nth or 1}"
    done = subprocess.run(
        [
            sys.executable, "-c", KILLED, str(Path(__file__).parent), str(rig.data.parent), url,
            step.request.source, step.operation_id, action, verb,
        ],
        check=False,
        timeout=60,
    )  # fmt: skip
    assert done.returncode == -9, f"{point} was not reached"
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        with HostLocks(rig.data / "locks").try_lock(KIND.resource(step)) as lock:
            if lock is not None:
                return
        os.sched_yield()
    raise AssertionError("its children live on")


@pytest.mark.proves("SA03", "X12")
@pytest.mark.parametrize("point", PERFORM_POINTS)
def test_a_killed_perform_is_recognised_and_finished(
    rig: Rig, source: Repository, database_url: str, point: str
) -> None:
    step = rig.ready(source.path, "onceborn/x")
    killed(rig, step, database_url, point, "perform")
    seen = KIND.observe(step, rig.world())
    assert isinstance(seen, Absent | OursHalfMade | Present)
    if isinstance(seen, OursHalfMade):
        assert seen.proof["branch_ours"]
    KIND.perform(step, rig.world())
    evidence(KIND.observe(step, rig.world()))
    assert git(rig.path(step), "status", "--porcelain") == ""
    assert isinstance(KIND.compensate(step, rig.world()), Compensated)
    assert stray(rig, step) == []


@pytest.mark.proves("SA03", "SA04")
@pytest.mark.parametrize("point", PERFORM_POINTS)
def test_a_killed_perform_is_undone_without_a_trace(
    rig: Rig, source: Repository, database_url: str, point: str
) -> None:
    step = rig.ready(source.path, "onceborn/x")
    killed(rig, step, database_url, point, "perform")
    assert isinstance(KIND.compensate(step, rig.world()), Compensated)
    assert isinstance(KIND.observe(step, rig.world()), Absent)
    assert stray(rig, step) == []


@pytest.mark.parametrize(
    "point",
    [
        "git.spawned@4",
        "git.exited@4",
        "worktree.remove",
        "git.spawned@5",
        "worktree.branch_removed",
    ],
)
def test_a_killed_undoing_is_finished(
    rig: Rig, source: Repository, database_url: str, point: str
) -> None:
    step = rig.made(source.path, "onceborn/x")
    killed(rig, step, database_url, point, "compensate")
    assert isinstance(KIND.compensate(step, rig.world()), Compensated)
    assert isinstance(KIND.observe(step, rig.world()), Absent)
    assert stray(rig, step) == []


@pytest.mark.proves("SA03")
def test_git_killed_in_the_middle_of_a_checkout(rig: Rig, source: Repository) -> None:
    """The real thing: many files, and SIGKILL for git while it writes them."""
    source.commit({f"many/{n}": f"{n}" * 2000 for n in range(3000)})
    step = rig.ready(source.path, "onceborn/x")
    path = rig.path(step)
    halfway = path / "many"
    killed_one = threading.Event()

    def kill_git() -> None:
        while not halfway.exists():
            os.sched_yield()
        for process in Path("/proc").glob("[0-9]*"):
            try:
                command = (process / "cmdline").read_bytes()
                if b"reset\0--hard" in command and (process / "cwd").readlink() == path:
                    os.kill(int(process.name), 9)
                    killed_one.set()
            except OSError:
                continue

    thread = threading.Thread(target=kill_git)
    thread.start()
    try:
        KIND.perform(step, rig.world())
    except StepRetry:
        assert killed_one.is_set()
    thread.join()
    assert isinstance(KIND.observe(step, rig.world()), OursHalfMade | Present)
    KIND.perform(step, rig.world())
    evidence(KIND.observe(step, rig.world()))
    assert git(path, "status", "--porcelain") == ""
    assert isinstance(KIND.compensate(step, rig.world()), Compensated)
    assert stray(rig, step) == []


def test_each_mutation_is_guarded(rig: Rig, source: Repository) -> None:
    """The guard refuses the n-th mutation: nothing happens then, and a later attempt ends well."""
    whole = rig.ready(source.path, "onceborn/w")
    start = rig.guarded
    KIND.perform(whole, rig.world())
    performing = rig.guarded - start
    start = rig.guarded
    KIND.compensate(whole, rig.world())
    undoing = rig.guarded - start
    assert performing >= 3
    assert undoing >= 2
    for verb, mutations in (("perform", performing), ("compensate", undoing)):
        for allowed in range(mutations):
            step = rig.ready(source.path, f"onceborn/{verb}-{allowed}")
            if verb == "compensate":
                KIND.perform(step, rig.world())
            start = rig.guarded

            def refuse(limit: int = start + allowed) -> None:
                if rig.guarded >= limit:
                    raise FenceLost

            rig.before_mutation = refuse
            with pytest.raises(FenceLost):
                getattr(KIND, verb)(step, rig.world())
            rig.before_mutation = lambda: None
            if verb == "perform":
                KIND.perform(step, rig.world())
                evidence(KIND.observe(step, rig.world()))
            assert isinstance(KIND.compensate(step, rig.world()), Compensated)
            assert stray(rig, step) == []
