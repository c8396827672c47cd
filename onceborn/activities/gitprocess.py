"""One child process from its start to its end: drained, bounded, timed, and certainly dead."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final

from ..runtime.protocol.errors import OncebornError

_BEAT_S: Final = 1.0
_TERM_GRACE_S: Final = 3.0
_KILL_GRACE_S: Final = 10.0
_CHUNK: Final = 1 << 16


class ProcessWillNotDie(OncebornError):
    """A killed process is still there (it waits for a device); its host lock stays taken."""

    code = "process_will_not_die"


@dataclass(frozen=True, slots=True)
class Output:
    stdout: bytes
    stderr: bytes
    truncated: bool


class Overdue(Exception):
    """The time limit has passed; the process still runs."""

    def __init__(self, stdout: bytes, stderr: bytes) -> None:
        self.stdout = stdout
        self.stderr = stderr
        super().__init__("time limit")


class _Kept:
    """What is kept of a stream: its head (stdout) or its tail (stderr), up to ``limit`` bytes."""

    def __init__(self, limit: int, *, tail: bool) -> None:
        self.bytes = bytearray()
        self.truncated = False
        self._limit = limit
        self._tail = tail

    def add(self, chunk: bytes) -> None:
        if self._tail:
            self.bytes += chunk
            if len(self.bytes) > self._limit:
                del self.bytes[: -self._limit]
                self.truncated = True
        else:
            room = self._limit - len(self.bytes)
            self.bytes += chunk[:room]
            self.truncated = self.truncated or len(chunk) > room


def pump(
    process: subprocess.Popen[bytes],
    stdin: bytes | None,
    limit_s: float,
    beat: Callable[[], None],
    stdout_limit: int,
    stderr_limit: int,
) -> Output:
    """Feed and drain the process until it has exited; beats about once a second.

    Raises:
        Overdue: ``limit_s`` seconds have passed. The process is still running.
    """
    assert process.stdout is not None
    assert process.stderr is not None
    out, err = _Kept(stdout_limit, tail=False), _Kept(stderr_limit, tail=True)
    streams = {process.stdout: out, process.stderr: err}
    deadline = time.monotonic() + limit_s
    beat_at = time.monotonic() + _BEAT_S
    with contextlib.ExitStack() as stack:
        selector = stack.enter_context(selectors.DefaultSelector())
        exit_fd = _exit_descriptor(process.pid)
        if exit_fd is not None:
            stack.callback(os.close, exit_fd)
            selector.register(exit_fd, selectors.EVENT_READ)
        for stream in streams:
            stack.callback(stream.close)
            os.set_blocking(stream.fileno(), False)
            selector.register(stream, selectors.EVENT_READ)
        feed = _feeder(process, stdin, selector, stack)
        while True:
            now = time.monotonic()
            if now >= deadline:
                raise Overdue(bytes(out.bytes), bytes(err.bytes))
            if now >= beat_at:
                beat()
                beat_at = now + _BEAT_S
            # Exit is asked for before the last drain, so nothing written before it is missed.
            exited = process.poll() is not None
            open_streams = [s for s in streams if not s.closed]
            for stream in open_streams:
                if _drain(stream, streams[stream]):
                    selector.unregister(stream)
                    stream.close()
            if exited:
                return Output(bytes(out.bytes), bytes(err.bytes), out.truncated)
            if feed is not None and feed():
                feed = None
            pause = min(deadline, beat_at) - time.monotonic()
            selector.select(max(0.0, pause if exit_fd is not None else min(pause, 0.02)))


def _exit_descriptor(pid: int) -> int | None:
    """A descriptor that becomes readable when the child exits; ``None`` where there is none."""
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):
        return None


def _drain(stream: IO[bytes], kept: _Kept) -> bool:
    """Read what is there; true at the end of the stream."""
    while True:
        try:
            chunk = os.read(stream.fileno(), _CHUNK)
        except BlockingIOError:
            return False
        if not chunk:
            return True
        kept.add(chunk)


def _feeder(
    process: subprocess.Popen[bytes],
    data: bytes | None,
    selector: selectors.BaseSelector,
    stack: contextlib.ExitStack,
) -> Callable[[], bool] | None:
    stdin = process.stdin
    if stdin is None or data is None:
        return None
    stack.callback(stdin.close)
    os.set_blocking(stdin.fileno(), False)
    selector.register(stdin, selectors.EVENT_WRITE)
    rest = memoryview(data)

    def feed() -> bool:
        nonlocal rest
        try:
            while rest:
                rest = rest[os.write(stdin.fileno(), rest[:_CHUNK]) :]
        except BlockingIOError:
            return False
        except BrokenPipeError:
            pass  # It stopped reading; its exit code says why.
        selector.unregister(stdin)
        stdin.close()
        return True

    return feed


def stop_group(process: subprocess.Popen[bytes]) -> None:
    """End the process and its whole group: SIGTERM, then SIGKILL; returns once all are gone.

    Raises:
        ProcessWillNotDie: something of it outlives SIGKILL.
    """
    group = process.pid  # It leads its own session, so its group's number is its own.
    for signal_number, grace in ((signal.SIGTERM, _TERM_GRACE_S), (signal.SIGKILL, _KILL_GRACE_S)):
        if _signal(group, signal_number) and _gone(process, group, grace):
            return
        if not _alive(process, group):
            return
    raise ProcessWillNotDie(pid=group)


def _signal(group: int, number: int) -> bool:
    try:
        os.killpg(group, number)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def _alive(process: subprocess.Popen[bytes], group: int) -> bool:
    if process.poll() is None:
        return True
    if not _signal(group, 0):
        return False
    # The dead that nobody has waited for still count as a group; they do nothing any more.
    return _living_members(group)


def _living_members(group: int) -> bool:
    proc = Path("/proc")
    if not (proc / "self" / "stat").exists():
        return True
    for stat in proc.glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError):
            # "pid (name) state ppid pgrp ...": the name may hold anything, even a bracket.
            state, _parent, pgrp = stat.read_text(errors="replace").rpartition(")")[2].split()[:3]
            if int(pgrp) == group and state not in ("Z", "X"):
                return True
    return False


def _gone(process: subprocess.Popen[bytes], group: int, grace: float) -> bool:
    deadline = time.monotonic() + grace
    pause = 0.002
    while _alive(process, group):
        if time.monotonic() >= deadline:
            return False
        time.sleep(pause)
        pause = min(pause * 2, 0.1)
    return True
