"""The git wrapper and stale lock files, on real git."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from gitrepos import Repository, Rig, new_rig
from structlog.testing import capture_logs

from onceborn.activities import gitlocks
from onceborn.activities.git import Git, GitError, GitTimedOut, redact
from onceborn.activities.kind import Host, Present, StepRetry
from onceborn.activities.locks import HostLocks
from onceborn.activities.worktree import Worktree
from onceborn.runtime.ledger.database import Database
from onceborn.runtime.protocol.errors import ConfigurationError, FenceLost


@pytest.fixture
def host(tmp_path: Path) -> Host:
    data = tmp_path.resolve() / "data"
    data.mkdir()
    return Host("host", data, git_time_limit_s=60)


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    return Repository(tmp_path / "repository")


@pytest.fixture
def rig(tmp_path: Path, database: Database) -> Rig:
    return new_rig(tmp_path, database)


def shell(script: str) -> list[str]:
    """A git command that runs a script: git's own child, as hooks and helpers are."""
    return ["-c", f"alias.do=!{script}", "do"]


# -- what it runs with ----------------------------------------------------------------------------


def test_environment_is_an_allow_list(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONCEBORN_CANARY", "c")
    monkeypatch.setenv("DATABASE_URL", "postgresql://u:secret@h/d")
    monkeypatch.setenv("GIT_DIR", "/somewhere")
    seen = Git(host).run(shell("env")).text
    assert "CANARY" not in seen
    assert "secret" not in seen
    assert "/somewhere" not in seen
    assert "LC_ALL=C\n" in seen


def test_configuration_is_ours_and_beats_the_repositorys(
    host: Host, repository: Repository, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    home = tmp_path / "home"
    home.mkdir()
    (home / ".gitconfig").write_text("[user]\n\tname = somebody\n")
    monkeypatch.setenv("HOME", str(home))
    for key, value in (("core.hooksPath", "/evil"), ("gc.auto", "1"), ("core.fsmonitor", "/evil")):
        repository.git("config", key, value)
    runner = Git(host)

    def value(key: str) -> str:
        return runner.run(["config", "--get", key], git_dir=repository.path / ".git").text.strip()

    assert value("user.name") == "onceborn"
    assert value("core.hooksPath") == "/dev/null"
    assert value("core.fsmonitor") == "false"
    assert value("gc.auto") == "0"
    assert value("maintenance.auto") == "false"


def test_an_operators_own_configuration_is_included(host: Host) -> None:
    runner = Git(host)
    (host.data / "git" / "host.gitconfig").write_text("[credential]\n\thelper = theirs\n")
    assert runner.run(["config", "--get", "credential.helper"]).text == "theirs\n"


def test_arguments_never_meet_a_shell(host: Host, tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    with pytest.raises(GitError):
        Git(host).run(["rev-parse", f"$(touch {marker})", f"; touch {marker}"])
    assert not marker.exists()


def test_git_missing_is_a_clear_error(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(ConfigurationError, match="git is not installed"):
        Git(host).run(["version"])


# -- errors and output ----------------------------------------------------------------------------


def test_errors_keep_stderr_without_credentials(host: Host) -> None:
    url = "https://user:hunter2@localhost:1/x.git"
    with pytest.raises(GitError) as caught:
        Git(host).run(["ls-remote", "--", url])
    told = f"{caught.value} {caught.value.fields} {caught.value.result}"
    assert "hunter2" not in told
    assert "user" not in told
    assert "localhost" in told
    assert caught.value.result.code == 128


def test_redaction() -> None:
    assert redact("a https://u:p@h/x b ssh://git@h/y") == "a https://***@h/x b ssh://***@h/y"
    assert redact("https://h/x@y") == "https://h/x@y"


def test_output_is_bounded_and_drained(host: Host) -> None:
    script = "yes out | head -c 3000000; yes err | head -c 3000000 >&2; echo last >&2; false"
    result = Git(host).run(shell(script), check=False, stdout_limit=1000)
    assert len(result.stdout) == 1000
    assert result.truncated
    assert len(result.stderr) <= 64 * 1024
    assert result.stderr.endswith("last\n")
    assert result.code == 1


def test_input_larger_than_a_pipe(host: Host, repository: Repository) -> None:
    content = b"x" * 5_000_000
    done = Git(host).run(
        ["hash-object", "-w", "--stdin"],
        git_dir=repository.path / ".git",
        input=content,
        mutates=True,
    )
    back = Git(host).run(["cat-file", "blob", done.text.strip()], git_dir=repository.path / ".git")
    assert back.stdout == content
    assert not back.truncated


def test_a_reader_that_stops_reading_is_no_error_of_ours(host: Host) -> None:
    assert Git(host).run(shell("exec true"), input=b"x" * 5_000_000).code == 0


# -- guard, time limit, heartbeat -----------------------------------------------------------------


def test_guard_is_asked_before_every_change(host: Host, repository: Repository) -> None:
    def lost() -> None:
        raise FenceLost

    runner = Git(host, guard=lost)
    runner.run(["for-each-ref"], git_dir=repository.path / ".git")
    with pytest.raises(FenceLost):
        runner.run(["branch", "x"], git_dir=repository.path / ".git", mutates=True)


STUBBORN = "trap '' TERM; sleep 1000 & echo $! > {0}.tmp; mv {0}.tmp {0}; wait; sleep 1000"


def test_time_limit_ends_the_whole_group(host: Host, tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    with pytest.raises(GitTimedOut, match="killed after"):
        Git(host).run(
            shell(f"trap : EXIT; sleep 1000 & echo $! > {pid_file}; wait"), time_limit_s=1
        )
    assert not _lives(int(pid_file.read_text()))


def test_what_a_heartbeat_raises_ends_the_command(host: Host, tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"

    def beat() -> None:
        if pid_file.exists():
            raise FenceLost

    with pytest.raises(FenceLost):
        Git(host, heartbeat=beat).run(shell(f"sleep 1000 & echo $! > {pid_file}; wait"))
    assert not _lives(int(pid_file.read_text()))


def test_a_process_that_ignores_the_first_signal_is_killed(host: Host, tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"

    def beat() -> None:
        if pid_file.exists():
            raise FenceLost

    with pytest.raises(FenceLost):
        Git(host, heartbeat=beat).run(shell(STUBBORN.format(pid_file)))
    assert not _lives(int(pid_file.read_text()))


def _lives(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(")")[2].split()[0] not in ("Z", "X")


# -- the host lock goes with every child ----------------------------------------------------------

WORKER = """
import sys
from pathlib import Path
from onceborn.activities.git import Git
from onceborn.activities.kind import Host
from onceborn.activities.locks import HostLocks
data, fifo = Path(sys.argv[1]), sys.argv[2]
with HostLocks(data / "locks").try_lock("clone/x") as lock:
    Git(Host("host", data), lock_fds=(lock.fd,)).run(
        ["-c", f"alias.do=!echo $$ > {fifo}.pid; cat {fifo}", "do"]
    )
"""


@pytest.mark.proves("X12")
def test_a_killed_workers_git_keeps_the_resource_locked(host: Host, tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    worker = subprocess.Popen([sys.executable, "-c", WORKER, str(host.data), str(fifo)])
    writer = fifo.open("w")  # Returns once git's child reads.
    locks = HostLocks(host.data / "locks")
    worker.send_signal(signal.SIGKILL)
    worker.wait()
    child = os.pidfd_open(int(Path(f"{fifo}.pid").read_text()))
    with locks.try_lock("clone/x") as next_attempt:
        assert next_attempt is None
    writer.close()
    assert select.select([child], [], [], 30)[0]
    os.close(child)
    _until_free(locks, "clone/x")


def _until_free(locks: HostLocks, resource: str) -> None:
    # git itself ends right after its child; there is nothing else to wait on, it is nobody's child.
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        with locks.try_lock(resource) as lock:
            if lock is not None:
                return
        os.sched_yield()
    raise AssertionError(f"{resource} stays locked")


# -- stale lock files -----------------------------------------------------------------------------


def left_by_the_dead(lock: Path) -> Path:
    lock.parent.mkdir(parents=True, exist_ok=True)
    lock.touch()
    an_hour_ago = time.time() - 3600
    os.utime(lock, (an_hour_ago, an_hour_ago))
    return lock


@pytest.mark.proves("SA11")
@pytest.mark.parametrize("name", ["config.lock", "packed-refs.lock", "HEAD.lock", "shallow.lock"])
def test_a_dead_owners_lock_in_the_clone_is_cleared(
    rig: Rig, repository: Repository, name: str
) -> None:
    repository.commit()
    step = rig.attached(repository.path)
    lock = left_by_the_dead(rig.clone(step) / name)
    repository.commit({"a": "2"})
    with capture_logs() as logs:
        rig.attached(repository.path)
    assert not lock.exists()
    cleared = [line for line in logs if line["event"] == "git.stale_lock_cleared"]
    assert [line["lock"] for line in cleared] == [str(lock)]
    assert cleared[0]["log_level"] == "warning"


@pytest.mark.proves("SA11")
def test_a_dead_owners_lock_on_our_branch_is_cleared(rig: Rig, repository: Repository) -> None:
    repository.commit()
    step = rig.ready(repository.path, "onceborn/x")
    lock = left_by_the_dead(rig.clone(step) / "refs/heads/onceborn/x.lock")
    kind = Worktree()
    kind.perform(step, rig.world())
    assert isinstance(kind.observe(step, rig.world()), Present)
    assert not lock.exists()


@pytest.mark.proves("SA11")
def test_a_dead_owners_index_lock_in_our_worktree_is_cleared(
    rig: Rig, repository: Repository
) -> None:
    repository.commit()
    step = rig.made(repository.path, "onceborn/x")
    lock = left_by_the_dead(rig.clone(step) / "worktrees/0-source/index.lock")
    kind = Worktree()
    assert not isinstance(kind.observe(step, rig.world()), Present)
    kind.perform(step, rig.world())
    assert isinstance(kind.observe(step, rig.world()), Present)
    assert not lock.exists()


@pytest.mark.proves("SA11")
def test_a_lock_that_a_live_process_has_open_is_waited_for(
    rig: Rig, repository: Repository
) -> None:
    repository.commit()
    clone = rig.clone(rig.attached(repository.path))
    lock = left_by_the_dead(clone / "config.lock")
    with lock.open():
        assert not gitlocks.owner_is_dead(lock, clone)
        with pytest.raises(StepRetry) as caught:
            gitlocks.settle([lock], clone, rig.world(), patience_s=0.3)
        assert caught.value.reason_code == "git.locked"
        assert lock.exists()
        waiting = threading.Thread(
            target=gitlocks.settle, args=([lock], clone, rig.world()), kwargs={"patience_s": 60}
        )
        waiting.start()
        lock.unlink()  # Its owner is done.
        waiting.join(60)
        assert not waiting.is_alive()


@pytest.mark.proves("SA11")
def test_a_lock_is_not_stale_while_a_git_works_in_a_worktree(
    rig: Rig, repository: Repository
) -> None:
    repository.commit()
    step = rig.made(repository.path, "onceborn/x")
    clone = rig.clone(step)
    lock = left_by_the_dead(clone / "config.lock")
    worker = subprocess.Popen(
        ["git", *shell("echo here; cat")],
        cwd=rig.path(step),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert worker.stdin is not None
    assert worker.stdout is not None
    assert worker.stdout.readline() == b"here\n"
    assert not gitlocks.owner_is_dead(lock, clone)
    worker.communicate()
    assert gitlocks.owner_is_dead(lock, clone)


@pytest.mark.proves("SA11")
def test_a_young_lock_is_never_stale(rig: Rig, repository: Repository) -> None:
    repository.commit()
    clone = rig.clone(rig.attached(repository.path))
    lock = clone / "config.lock"
    lock.touch()
    os.utime(lock, (time.time() + 60, time.time() + 60))
    with pytest.raises(StepRetry):
        gitlocks.settle([lock], clone, rig.world(), patience_s=0.2)
    assert lock.exists()


@pytest.mark.proves("SA11")
def test_an_older_fence_clears_no_lock(rig: Rig, repository: Repository) -> None:
    repository.commit()
    clone = rig.clone(rig.attached(repository.path))
    lock = left_by_the_dead(clone / "config.lock")

    def lost() -> None:
        raise FenceLost

    rig.before_mutation = lost
    with pytest.raises(FenceLost):
        gitlocks.settle([lock], clone, rig.world())
    assert lock.exists()


def test_two_clearers_do_not_meet(rig: Rig, repository: Repository) -> None:
    repository.commit()
    clone = rig.clone(rig.attached(repository.path))
    lock = left_by_the_dead(clone / "config.lock")
    with HostLocks(rig.data / "locks").try_lock(f"stale-locks/{clone}"):
        with pytest.raises(StepRetry):
            gitlocks.settle([lock], clone, rig.world(), patience_s=0.2)
        assert lock.exists()
