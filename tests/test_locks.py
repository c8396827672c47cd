"""Host locks: exclusive between processes and threads, and held by children that inherit them."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from onceborn.activities.locks import HostLocks
from onceborn.runtime import failpoints

WORKER = """
import subprocess, sys
from pathlib import Path
from onceborn.activities.locks import HostLocks
lock = HostLocks(Path(sys.argv[1])).acquire("clone/x")
child = subprocess.Popen(
    ["cat"], stdin=int(sys.argv[2]), stdout=subprocess.DEVNULL,
    pass_fds=(lock.fd,) if sys.argv[3] == "inherit" else (),
)
print(child.pid, flush=True)
child.wait()
"""


@pytest.fixture
def locks(tmp_path: Path) -> HostLocks:
    return HostLocks(tmp_path / "locks")


def test_one_holder_at_a_time(locks: HostLocks) -> None:
    with locks.try_lock("worktree/a") as first:
        assert first is not None
        with locks.try_lock("worktree/a") as second, locks.try_lock("worktree/b") as other:
            assert second is None
            assert other is not None
    with locks.try_lock("worktree/a") as again:
        assert again is not None


def test_threads_of_one_process_exclude_each_other(locks: HostLocks) -> None:
    held, done = threading.Event(), threading.Event()

    def hold() -> None:
        with locks.try_lock("r") as lock:
            assert lock is not None
            held.set()
            done.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    assert held.wait(30)
    with locks.try_lock("r") as mine:
        assert mine is None
    done.set()
    thread.join()
    with locks.try_lock("r") as mine:
        assert mine is not None


def test_the_file_is_never_unlinked_and_says_who(locks: HostLocks) -> None:
    resource = "worktree/a b/ж"
    with locks.try_lock(resource):
        before = locks.file(resource).stat().st_ino
        assert locks.file(resource).read_text() == f"{os.getpid()} {resource}\n"
    assert locks.file(resource).stat().st_ino == before  # a new one might get the same number
    with locks.try_lock(resource):
        assert locks.file(resource).stat().st_ino == before


def test_an_error_inside_lets_go(locks: HostLocks) -> None:
    with pytest.raises(RuntimeError), locks.try_lock("r"):
        raise RuntimeError
    failpoints.configure("lock.acquired=raise")
    try:
        with pytest.raises(failpoints.FailpointError):
            locks.acquire("r")
    finally:
        failpoints.configure("")
    with locks.try_lock("r") as lock:
        assert lock is not None


def _killed_worker(locks: HostLocks, child_inherits: bool) -> tuple[int, int]:
    """Kill a worker whose child lives on; returns the pipe that keeps the child, and its pid."""
    read_end, write_end = os.pipe()
    worker = subprocess.Popen(
        [
            sys.executable,
            "-c",
            WORKER,
            str(locks.folder),
            str(read_end),
            "inherit" if child_inherits else "not",
        ],
        stdout=subprocess.PIPE,
        pass_fds=(read_end,),
    )
    os.close(read_end)
    assert worker.stdout is not None
    child = int(worker.stdout.readline())
    with locks.try_lock("clone/x") as while_alive:
        assert while_alive is None
    worker.send_signal(signal.SIGKILL)
    worker.wait()
    worker.stdout.close()
    return write_end, child


@pytest.mark.proves("X12")
def test_a_killed_workers_child_still_holds_the_lock(locks: HostLocks) -> None:
    keeper, child = _killed_worker(locks, child_inherits=True)
    with locks.try_lock("clone/x") as next_attempt:
        assert next_attempt is None
    descriptor = os.pidfd_open(child)
    os.close(keeper)  # Its input ends, so the child does.
    assert select.select([descriptor], [], [], 30)[0]
    os.close(descriptor)
    with locks.try_lock("clone/x") as next_attempt:
        assert next_attempt is not None


@pytest.mark.proves("X12")
def test_letting_go_does_not_take_the_lock_from_a_child(locks: HostLocks) -> None:
    with locks.try_lock("r") as lock:
        assert lock is not None
        child = subprocess.Popen(["cat"], stdin=subprocess.PIPE, pass_fds=(lock.fd,))
    with locks.try_lock("r") as other:
        assert other is None
    child.communicate()
    with locks.try_lock("r") as other:
        assert other is not None


def test_without_inheriting_it_would_not(locks: HostLocks) -> None:
    keeper, _child = _killed_worker(locks, child_inherits=False)
    with locks.try_lock("clone/x") as next_attempt:
        assert next_attempt is not None
    os.close(keeper)
