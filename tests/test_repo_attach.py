"""The kind ``repo_attach`` on real repositories."""

from __future__ import annotations

import base64
import contextlib
import http.server
import os
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from gitrepos import ENVIRONMENT, Repository, Rig, clone_name, git, new_rig
from sqlalchemy import func, select, update

from onceborn.activities import gitconfig
from onceborn.activities.kind import (
    Absent,
    Compensated,
    OursHalfMade,
    Present,
    Step,
    StepFailed,
    StepRetry,
)
from onceborn.activities.repo_attach import RepoAttach
from onceborn.runtime import failpoints
from onceborn.runtime.ledger import tables
from onceborn.runtime.ledger.database import Database
from onceborn.runtime.protocol.errors import FenceLost
from onceborn.runtime.protocol.evidence import RepoAttached
from onceborn.runtime.protocol.plan import RepoAttachRequest

KIND = RepoAttach()


@pytest.fixture
def rig(tmp_path: Path, database: Database) -> Rig:
    return new_rig(tmp_path, database)


@pytest.fixture
def source(tmp_path: Path) -> Repository:
    repository = Repository(tmp_path / "source")
    repository.commit({"README": "one"})
    return repository


@pytest.fixture(autouse=True)
def _no_failpoints() -> Iterator[None]:
    yield
    failpoints.configure("")


def attached(rig: Rig, step: Step[RepoAttachRequest]) -> RepoAttached:
    seen = KIND.observe(step, rig.world())
    assert isinstance(seen, Present), seen
    assert isinstance(seen.evidence, RepoAttached)
    return seen.evidence


def attach(rig: Rig, source: Path | str, base_ref: str | None = None) -> RepoAttached:
    return attached(rig, rig.attached(source, base_ref=base_ref))


def refused(rig: Rig, source: Path | str, base_ref: str | None = None) -> StepFailed:
    """The permanent failure of an attach; nothing of it is left."""
    step = rig.attach_step(source, base_ref=base_ref)
    with pytest.raises(StepFailed) as caught:
        KIND.perform(step, rig.world())
    assert isinstance(KIND.observe(step, rig.world()), Absent)
    return caught.value


# -- the whole of it ------------------------------------------------------------------------------


def test_attach_observe_undo(rig: Rig, source: Repository) -> None:
    step = rig.attach_step(source.path)
    assert isinstance(KIND.observe(step, rig.world()), Absent)
    KIND.perform(step, rig.world())
    evidence = attached(rig, step)
    assert evidence.base_commit == source.head
    assert evidence.clone == str(rig.clone(step))
    assert evidence.base_ref == "refs/heads/trunk"
    undone = KIND.compensate(step, rig.world())
    assert isinstance(undone, Compensated)
    assert isinstance(KIND.observe(step, rig.world()), Absent)
    assert rig.clone(step).is_dir()
    assert isinstance(KIND.compensate(step, rig.world()), Compensated)


def test_branches_of_the_clone_belong_to_tasks(rig: Rig, source: Repository) -> None:
    source.git("branch", "feature/x")
    step = rig.attached(source.path)
    refs = git(rig.clone(step), "for-each-ref", "--format=%(refname)").split("\n")
    assert refs == ["refs/remotes/origin/feature/x", "refs/remotes/origin/trunk"]
    assert not (rig.clone(step) / "hooks").exists()


def test_performed_twice_is_the_same(rig: Rig, source: Repository) -> None:
    step = rig.attached(source.path)
    KIND.perform(step, rig.world())
    assert attached(rig, step).base_commit == source.head
    with rig.database.reading() as connection:
        rows = connection.execute(select(func.count()).select_from(tables.attachments)).scalar()
    assert rows == 1


def test_a_refresh_brings_what_is_new_and_leaves_tasks_alone(rig: Rig, source: Repository) -> None:
    source.git("branch", "gone")
    source.git("tag", "v1")
    first = rig.attached(source.path)
    clone = rig.clone(first)
    git(clone, "update-ref", "refs/heads/task", source.head)
    git(clone, "update-ref", "refs/heads/gone", source.head)
    git(clone, "tag", "by-an-agent", source.head)
    source.git("branch", "-D", "gone")
    # `gone` is now a folder of branches: a refresh that kept the old one could not go on.
    source.git("branch", "gone/deeper")
    new = source.commit({"b": "2"})
    source.git("tag", "--force", "v1")
    source.git("tag", "v2")
    assert attach(rig, source.path).base_commit == new
    refs = dict(
        line.split(" ")
        for line in git(clone, "for-each-ref", "--format=%(refname) %(objectname)").split("\n")
    )
    assert refs["refs/remotes/origin/trunk"] == new
    assert refs["refs/tags/v2"] == new
    assert "refs/remotes/origin/gone/deeper" in refs
    assert "refs/remotes/origin/gone" not in refs
    assert {"refs/heads/task", "refs/heads/gone", "refs/tags/by-an-agent"} <= set(refs)
    # A tag that exists is never moved under a task; a base named by it is what the remote says.
    assert refs["refs/tags/v1"] != new
    assert attach(rig, source.path, "v1").base_commit == new


def test_not_present_unless_row_and_commit_are_exact(rig: Rig, source: Repository) -> None:
    step = rig.attached(source.path)
    with rig.database.transaction("test") as connection:
        connection.execute(update(tables.attachments).values(base_commit="0" * 40))
    assert isinstance(KIND.observe(step, rig.world()), OursHalfMade)
    KIND.perform(step, rig.world())
    attached(rig, step)
    shutil.rmtree(rig.clone(step))
    assert isinstance(KIND.observe(step, rig.world()), OursHalfMade)
    KIND.perform(step, rig.world())
    attached(rig, step)
    with rig.database.transaction("test") as connection:
        connection.execute(update(tables.attachments).values(source="/elsewhere"))
    assert isinstance(KIND.observe(step, rig.world()), OursHalfMade)
    assert isinstance(KIND.compensate(step, rig.world()), Compensated)
    assert isinstance(KIND.observe(step, rig.world()), Absent)


def test_another_steps_row_is_not_touched(rig: Rig, source: Repository) -> None:
    mine = rig.attached(source.path)
    other = rig.attached(source.path)
    KIND.compensate(mine, rig.world())
    assert isinstance(KIND.observe(mine, rig.world()), Absent)
    attached(rig, other)


# -- the base -------------------------------------------------------------------------------------


@pytest.mark.proves("SA06")
def test_an_empty_repository_is_one_clear_permanent_error(rig: Rig, tmp_path: Path) -> None:
    empty = Repository(tmp_path / "empty", branch="master")
    error = refused(rig, empty.path)
    assert error.reason_code == "repository.empty"
    assert str(empty.path) in error.message
    assert not (rig.data / clone_name(empty.path)).exists()
    first = empty.commit()
    assert attach(rig, empty.path).base_commit == first


@pytest.mark.proves("SA07")
def test_the_base_is_the_remotes_own_default(rig: Rig, tmp_path: Path) -> None:
    source = Repository(tmp_path / "source", branch="trunk")
    base = source.commit()
    source.git("branch", "master", source.commit({"x": "other"}, "for master"))
    source.git("reset", "--quiet", "--hard", base)
    (rig.data / "git").mkdir(exist_ok=True)
    (rig.data / "git" / "host.gitconfig").write_text("[init]\n\tdefaultBranch = master\n")
    evidence = attach(rig, source.path)
    assert (evidence.base_ref, evidence.base_commit) == ("refs/heads/trunk", base)
    assert evidence.resolved_by == "remote_head"


@pytest.mark.proves("SA07")
def test_a_default_that_does_not_exist_is_never_guessed(rig: Rig, source: Repository) -> None:
    source.git("symbolic-ref", "HEAD", "refs/heads/nowhere")
    error = refused(rig, source.path)
    assert error.reason_code == "repository.base_not_found"
    assert "base_ref" in error.message
    assert attach(rig, source.path, "trunk").base_ref == "refs/heads/trunk"


@pytest.mark.proves("SA07")
def test_a_detached_head_is_that_commit(rig: Rig, source: Repository) -> None:
    first = source.head
    source.commit({"b": "2"})
    source.git("checkout", "--quiet", "--detach", first)
    evidence = attach(rig, source.path)
    assert (evidence.base_commit, evidence.base_ref) == (first, "HEAD")
    assert evidence.resolved_by == "detached_remote_head"


def test_named_bases(rig: Rig, source: Repository) -> None:
    first = source.head
    source.git("tag", "-a", "v1", "-m", "annotated")
    source.git("branch", "both")
    source.commit({"b": "2"})
    source.git("tag", "both")
    by_tag = attach(rig, source.path, "v1")
    assert (by_tag.base_commit, by_tag.resolved_by) == (first, "tag")
    by_branch = attach(rig, source.path, "both")
    assert (by_branch.base_commit, by_branch.resolved_by) == (first, "branch")
    by_commit = attach(rig, source.path, first)
    assert (by_commit.base_commit, by_commit.resolved_by) == (first, "commit")
    assert attach(rig, source.path, "refs/tags/both").base_commit == source.head


def test_a_base_that_is_not_there(rig: Rig, source: Repository) -> None:
    for base in ("nowhere", "f" * 40):
        error = refused(rig, source.path, base)
        assert error.reason_code == "repository.base_not_found"
        assert base in error.message
    blob = source.git("rev-parse", "HEAD:README")
    source.git("tag", "a-blob", blob)
    assert refused(rig, source.path, "a-blob").reason_code == "repository.base_not_found"


def test_a_commit_that_no_branch_has_is_fetched(rig: Rig, source: Repository) -> None:
    rig.attached(source.path)
    lost = source.commit({"b": "2"})
    source.git("reset", "--quiet", "--hard", "HEAD~1")
    for _ in range(2):
        assert attach(rig, source.path, lost).base_commit == lost


def test_a_commit_of_another_task_is_no_base(rig: Rig, source: Repository) -> None:
    clone = rig.clone(rig.attached(source.path))
    theirs = git(clone, "commit-tree", "-m", "secret", f"{source.head}^{{tree}}")
    git(clone, "update-ref", "refs/heads/task", theirs)
    assert refused(rig, source.path, theirs).reason_code == "repository.base_not_found"


# -- kinds of sources -----------------------------------------------------------------------------


def test_shallow_bare_worktree_and_sha256_sources(
    rig: Rig, source: Repository, tmp_path: Path
) -> None:
    old = source.head
    new = source.commit({"b": "2"})
    git(tmp_path, "clone", "--quiet", "--depth=1", f"file://{source.path}", "shallow")
    assert attach(rig, tmp_path / "shallow").base_commit == new
    error = refused(rig, tmp_path / "shallow", old)
    assert "shallow" in error.message
    assert attach(rig, tmp_path / "shallow").base_commit == new
    git(tmp_path, "clone", "--quiet", "--bare", str(source.path), "bare.git")
    assert attach(rig, tmp_path / "bare.git").base_commit == new
    source.git("worktree", "add", "--quiet", str(tmp_path / "linked"), "-b", "linked")
    assert attach(rig, tmp_path / "linked").base_ref == "refs/heads/linked"
    (tmp_path / "sha256").mkdir()
    git(tmp_path / "sha256", "init", "--quiet", "--object-format=sha256")
    git(tmp_path / "sha256", "commit", "--quiet", "--allow-empty", "-m", "x")
    assert len(attach(rig, tmp_path / "sha256").base_commit) == 64


def test_spaces_cyrillic_and_a_very_long_path(rig: Rig, tmp_path: Path) -> None:
    folder = tmp_path / "мой проект 'q\" $x" / ("д" * 100) / ("e" * 200)
    source = Repository(folder, branch="ветка-1")
    commit = source.commit({"файл без пробелом": "1"})
    evidence = attach(rig, folder)
    assert (evidence.base_commit, evidence.base_ref) == (commit, "refs/heads/ветка-1")
    assert attach(rig, folder, "ветка-1").base_commit == commit


def test_owned_by_another_user(
    rig: Rig, source: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Git's own switch for its tests, since only root can give a file away; root does both.
    strange = "GIT_TEST_ASSUME_DIFFERENT_OWNER"
    monkeypatch.setenv(strange, "1")
    monkeypatch.setattr(gitconfig, "_PASSED_ON", (*gitconfig._PASSED_ON, strange))
    if os.getuid() == 0:
        for path in [source.path, *source.path.rglob("*")]:
            os.chown(path, 12345, 12345)
    refusing = subprocess.run(
        ["git", "ls-remote", str(source.path)],
        env={**ENVIRONMENT, strange: "1"},
        check=False,
        capture_output=True,
        text=True,
    )
    assert "dubious ownership" in refusing.stderr
    assert attach(rig, source.path).resolved_by == "remote_head"


def test_hooks_do_not_run(rig: Rig, source: Repository, tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    for name in ("post-checkout", "reference-transaction", "pre-auto-gc", "post-merge"):
        hook = source.path / ".git" / "hooks" / name
        hook.write_text(f"#!/bin/sh\ntouch {marker}\nexit 1\n")
        hook.chmod(0o755)
    step = rig.attached(source.path)
    clone = rig.clone(step)
    shutil.copytree(source.path / ".git" / "hooks", clone / "hooks")
    source.git("-c", "core.hooksPath=/dev/null", "commit", "--quiet", "--allow-empty", "-m", "2")
    rig.attached(source.path)
    assert not marker.exists()


# -- what may be attached -------------------------------------------------------------------------


def test_only_below_the_roots(rig: Rig, tmp_path: Path, source: Repository) -> None:
    inside = tmp_path / "allowed"
    inside.mkdir()
    narrow = new_rig(tmp_path, rig.database, roots=[inside])
    assert refused(narrow, source.path).reason_code == "repository.not_allowed"
    (inside / "link").symlink_to(source.path)
    assert refused(narrow, inside / "link").reason_code == "repository.not_allowed"
    (inside / "pointer").mkdir()
    (inside / "pointer" / ".git").write_text(f"gitdir: {source.path}/.git\n")
    assert refused(narrow, inside / "pointer").reason_code == "repository.not_allowed"
    nothing = new_rig(tmp_path, rig.database)
    nothing.host = type(nothing.host)("host", nothing.host.data, ())
    assert refused(nothing, source.path).reason_code == "repository.not_allowed"
    shutil.copytree(source.path, inside / "good")
    (inside / "alias").symlink_to(inside / "good")
    assert attach(narrow, inside / "alias").base_commit == source.head


def test_not_a_repository(rig: Rig, tmp_path: Path) -> None:
    (tmp_path / "plain").mkdir()
    for path in (tmp_path / "plain", tmp_path / "nowhere"):
        error = refused(rig, path)
        assert error.reason_code == "repository.not_found"
        assert str(path) in error.message


def test_a_folder_inside_a_repository_is_none(rig: Rig, source: Repository) -> None:
    (source.path / "sub").mkdir()
    assert refused(rig, source.path / "sub").reason_code == "repository.not_found"


# -- remotes --------------------------------------------------------------------------------------


def test_an_unreachable_remote_is_tried_again(rig: Rig) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
        step = rig.attach_step(f"http://127.0.0.1:{port}/x.git")
        with pytest.raises(StepRetry) as caught:
            KIND.perform(step, rig.world())
    assert caught.value.reason_code == "repository.unreachable"
    assert isinstance(KIND.observe(step, rig.world()), Absent)


@contextlib.contextmanager
def served(root: Path, *, password: str | None = None) -> Iterator[str]:
    """Repositories below ``root`` by git's own HTTP backend; yields the base address."""

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.0"

        def log_message(self, *args: object) -> None:
            pass

        def do_GET(self) -> None:
            wanted = "Basic " + base64.b64encode(f"u:{password}".encode()).decode()
            if password is not None and self.headers.get("Authorization") != wanted:
                self.send_response(401)
                self.send_header("WWW-Authenticate", 'Basic realm="x"')
                self.end_headers()
                return
            path, _, query = self.path.partition("?")
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            done = subprocess.run(
                ["git", "http-backend"],
                input=body,
                capture_output=True,
                check=False,
                env={
                    **ENVIRONMENT,
                    "GIT_PROJECT_ROOT": str(root),
                    "GIT_HTTP_EXPORT_ALL": "1",
                    "PATH_INFO": path,
                    "QUERY_STRING": query,
                    "REQUEST_METHOD": self.command,
                    "CONTENT_TYPE": self.headers.get("Content-Type", ""),
                    "HTTP_CONTENT_ENCODING": self.headers.get("Content-Encoding", ""),
                    "GIT_PROTOCOL": self.headers.get("Git-Protocol", ""),
                },
            ).stdout
            head, _, content = done.partition(b"\r\n\r\n")
            headers = dict(line.split(": ", 1) for line in head.decode().split("\r\n") if line)
            self.send_response(int(headers.pop("Status", "200").split(" ")[0]))
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(content)

        do_POST = do_GET  # noqa: N815

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_over_http(rig: Rig, source: Repository, tmp_path: Path) -> None:
    with served(tmp_path) as address:
        assert attach(rig, f"{address}/source").base_commit == source.head
        error = refused(rig, f"{address}/nowhere.git")
        assert error.reason_code == "repository.not_found"


@pytest.mark.proves("SA15")
def test_credentials_that_are_missing_fail_fast(
    rig: Rig, source: Repository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    marker = tmp_path / "asked"
    helper = tmp_path / "askpass"
    helper.write_text(f"#!/bin/sh\ntouch {marker}\necho x\n")
    helper.chmod(0o755)
    for name in ("GIT_ASKPASS", "SSH_ASKPASS"):
        monkeypatch.setenv(name, str(helper))
    monkeypatch.setenv("DISPLAY", ":0")
    with served(tmp_path, password="right") as address:
        error = refused(rig, f"{address}/source")
        assert error.reason_code == "repository.authentication"
        assert not marker.exists()
        (rig.data / "git" / "host.gitconfig").write_text(
            '[credential]\n\thelper = "!echo username=u; echo password=right #"\n'
        )
        evidence = attach(rig, f"{address}/source")
    assert evidence.base_commit == source.head
    assert "right" not in (Path(evidence.clone) / "config").read_text()


# -- interrupted ----------------------------------------------------------------------------------


KILLED = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from gitrepos import new_rig
from onceborn.activities.repo_attach import RepoAttach
from onceborn.activities.git import Git
from onceborn.activities.kind import Host
from onceborn.activities import clones, sources
from onceborn.runtime.ledger.database import Database
rig = new_rig(Path(sys.argv[2]), Database("sqlite://"))
git = Git.of(rig.world())
clone = clones.Clone(rig.host.path(sys.argv[4]), rig.world())
clone.bring_up_to_date(sys.argv[3], sources.list_remote(git, sys.argv[3]))
"""


@pytest.mark.proves("SA14")
@pytest.mark.parametrize(
    ("point", "published"),
    [
        ("clone.begun=kill", False),
        ("git.spawned=kill@2", False),
        ("git.spawned=kill@3", False),
        ("git.spawned=kill@4", False),
        ("clone.whole=kill", False),
        ("clone.published=kill", True),
    ],
)
def test_an_unfinished_clone_is_never_used(
    rig: Rig, source: Repository, tmp_path: Path, point: str, published: bool
) -> None:
    name = clone_name(source.path)
    tests = str(Path(__file__).parent)
    done = subprocess.run(
        [sys.executable, "-c", KILLED, tests, str(tmp_path), str(source.path), name],
        env={**os.environ, "ONCEBORN_FAILPOINTS": point},
        check=False,
    )
    assert done.returncode == -9
    place = rig.host.path(name)
    assert place.exists() is published
    step = rig.attach_step(source.path)
    left = isinstance(KIND.observe(step, rig.world()), OursHalfMade)
    assert left is place.with_name(f"{place.name}.unfinished").exists()
    KIND.perform(step, rig.world())
    evidence = attached(rig, step)
    assert evidence.base_commit == source.head
    assert [entry.name for entry in place.parent.iterdir()] == [place.name]
    assert git(place, "fsck", "--strict") == ""


@pytest.mark.proves("SA14")
def test_undoing_removes_an_unfinished_clone(rig: Rig, source: Repository) -> None:
    step = rig.attach_step(source.path)
    failpoints.configure("clone.whole=raise")
    with pytest.raises(failpoints.FailpointError):
        KIND.perform(step, rig.world())
    assert not rig.clone(step).exists()
    assert isinstance(KIND.compensate(step, rig.world()), Compensated)
    assert list(rig.clone(step).parent.iterdir()) == []


def test_an_older_fence_changes_nothing(rig: Rig, source: Repository) -> None:
    def lost() -> None:
        raise FenceLost

    rig.before_mutation = lost
    step = rig.attach_step(source.path)
    with pytest.raises(FenceLost):
        KIND.perform(step, rig.world())
    assert not rig.clone(step).exists()
    assert not list(rig.data.glob("repositories/*"))


def test_each_mutation_is_guarded(rig: Rig, source: Repository) -> None:
    """The guard refuses the n-th mutation: whatever n, a later attempt ends well."""
    whole = rig.attach_step(source.path)
    KIND.perform(whole, rig.world())
    mutations = rig.guarded
    assert mutations >= 5
    for allowed in range(mutations):
        shutil.rmtree(rig.clone(whole))
        step = rig.attach_step(source.path)
        start = rig.guarded

        def refuse(limit: int = start + allowed) -> None:
            if rig.guarded >= limit:
                raise FenceLost

        rig.before_mutation = refuse
        with pytest.raises(FenceLost):
            KIND.perform(step, rig.world())
        rig.before_mutation = lambda: None
        KIND.perform(step, rig.world())
        attached(rig, step)
