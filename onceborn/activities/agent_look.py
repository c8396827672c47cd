"""What became of a launch: reading its files and lock, stopping it, clearing up after a shim."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from ..runtime.failpoints import failpoint
from .shim.processes import is_process

State = Literal["absent", "starting", "running", "ended", "lost"]

TAIL_BYTES: Final = 8 * 1024
_MINIMUM_SECRET: Final = 6


@dataclass(frozen=True, slots=True)
class Look:
    """What was seen. ``started`` and ``exit`` are the files' content.

    ``absent``: not launched. ``starting``: a shim or launcher holds the lock. ``lost``: launched,
    and its shim died without recording the end.
    """

    directory: Path
    state: State
    started: dict[str, Any] | None = None
    exit: dict[str, Any] | None = None

    @property
    def over(self) -> bool:
        return self.state in ("ended", "lost")

    def evidence(self) -> dict[str, Any]:
        """What was seen, with the log's tail. JSON."""
        return {
            "state": self.state,
            "started": self.started,
            "exit": self.exit,
            "log_tail": log_tail(self.directory),
        }


def look(directory: Path) -> Look:
    """See where a run's launch stands. Changes nothing; may be called at any time by anybody."""
    ended = _if_ended(directory)
    if ended is not None:
        return ended
    if _lock_is_held(directory):
        # Its end may have been written between the two looks; the lock is let go after it.
        started = read_json(directory / "started.json")
        return Look(directory, "running" if started else "starting", started)
    # Nobody holds it: what is in the files now is final, unless a new launcher comes.
    ended = _if_ended(directory)
    if ended is not None:
        return ended
    started = read_json(directory / "started.json")
    return Look(directory, "lost" if started else "absent", started)


def _if_ended(directory: Path) -> Look | None:
    document = read_json(directory / "exit.json")
    if document is None:
        return None
    return Look(directory, "ended", read_json(directory / "started.json"), document)


def _lock_is_held(directory: Path) -> bool:
    failpoint("agent.look")
    try:
        descriptor = os.open(directory / "lock", os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        # Shared: two looks at once do not take each other for a shim.
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    else:
        return False
    finally:
        os.close(descriptor)


def read_json(path: Path) -> dict[str, Any] | None:
    """A file of the run's directory; None where it does not exist. Never half-written."""
    try:
        document: dict[str, Any] = json.loads(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        return None
    return document


def log_tail(directory: Path) -> str:
    """The end of the agent's output, at most 8 KiB, without the secrets it was entrusted with."""
    parts: list[bytes] = []
    size = 0
    for name in ("log", "log.previous", "log.head"):
        if size >= TAIL_BYTES:
            break
        with contextlib.suppress(FileNotFoundError), open(directory / name, "rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - (TAIL_BYTES - size)))
            part = file.read()
            parts.insert(0, part)
            size += len(part)
    text = b"".join(parts).decode("utf-8", errors="replace")
    launch = read_json(directory / "launch.json") or {}
    for name in launch.get("environment", ()):
        value = os.environ.get(name, "")
        if name not in _PUBLIC and len(value) >= _MINIMUM_SECRET:
            text = text.replace(value, f"[{name}]")
    return text


_PUBLIC: Final = frozenset({"PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "TZ", "TMPDIR"})


# -- stopping -------------------------------------------------------------------------------------


def stop(directory: Path) -> bool:
    """Ask the run's shim to stop its agent; whether there was one to ask. Does not wait.

    The shim is signalled only if it is still the recorded process (start time and boot).
    """
    started = read_json(directory / "started.json")
    if started is None:
        return False
    pid = int(started["shim_pid"])
    with _process(pid) as handle:
        if handle is None or not is_process(pid, started["shim_start_time"], started["boot_id"]):
            return False
        failpoint("agent.stop")
        signal.pidfd_send_signal(handle, signal.SIGTERM)
        failpoint("agent.stopped")
        return True


def clear_strays(run_id: str, *, bound_s: float = 10.0) -> tuple[list[int], list[int]]:
    """End every process that carries the run's mark in its environment: (ended, still there).

    For a run whose shim was killed: the agent died with it, but not what the agent had started.
    """
    signalled: set[int] = set()
    until = time.monotonic() + bound_s
    while found := _marked(run_id):
        for pid in found:
            with _process(pid) as handle:
                # Looked at again through the handle: a number used again is never signalled.
                if handle is not None and _carries(pid, run_id):
                    failpoint("agent.stray")
                    with contextlib.suppress(ProcessLookupError):
                        signal.pidfd_send_signal(handle, signal.SIGKILL)
                    signalled.add(pid)
        if time.monotonic() > until:
            break
        time.sleep(0.02)
    return sorted(signalled - set(found)), sorted(found)


def _marked(run_id: str) -> list[int]:
    names = (name for name in os.listdir("/proc") if name.isdecimal())  # noqa: PTH208
    return [int(name) for name in names if _carries(int(name), run_id)]


def _carries(pid: int, run_id: str) -> bool:
    try:
        environment = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return False
    return f"ONCEBORN_RUN_ID={run_id}".encode() in environment.split(b"\x00")


@contextlib.contextmanager
def _process(pid: int) -> Iterator[int | None]:
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        yield None
        return
    try:
        yield handle
    finally:
        os.close(handle)
