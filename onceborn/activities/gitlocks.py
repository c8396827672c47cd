"""Lock files of git that a dead process left behind, told from those of a live one by evidence.

A lock file is stale only if all of this holds: it is older than a short bound; no process on this
host has it open; no git process lives that works in this repository or one of its worktrees (git
closes a lock file before it renames it, so "not open" alone says nothing). Only then is it removed,
with a warning in the log. A live owner's is waited for within a bound, and never removed.

Without ``/proc`` nothing can be proven, so nothing is removed.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Final

import structlog

from ..runtime.failpoints import failpoint
from . import gitfiles
from .git import GitError
from .kind import StepRetry, World
from .locks import HostLocks

log = structlog.get_logger(__name__)

STALE_AFTER_S: Final = 2.0
"""Younger than this is never stale: its owner may be between two steps of starting."""
PATIENCE_S: Final = 10.0
"""How long a live owner is waited for before the step is tried again later."""

_IN_MESSAGE: Final = re.compile(r"'([^'\n]+\.lock)': File exists")
_PAUSE_S: Final = 0.1


def lock_in(error: GitError) -> Path | None:
    """The lock file on which a command failed, or ``None`` where it failed for another reason."""
    found = _IN_MESSAGE.search(error.result.stderr)
    return Path(found.group(1)) if found else None


def settle(
    locks: Iterable[Path], clone: Path, world: World, *, patience_s: float = PATIENCE_S
) -> None:
    """Return once none of these lock files is in the way.

    Raises:
        StepRetry: ``git.locked``: a live process still holds one after ``patience_s`` seconds.
    """
    deadline = time.monotonic() + patience_s
    for lock in locks:
        while lock.exists():
            world.heartbeat()
            if _clear_if_stale(lock, clone, world):
                break
            if time.monotonic() >= deadline:
                raise StepRetry(
                    "git.locked",
                    f"{lock} is held by a live process; the step is tried again later",
                    lock=str(lock),
                )
            time.sleep(_PAUSE_S)


def _clear_if_stale(lock: Path, clone: Path, world: World) -> bool:
    # One clearer at a time, or the second would remove the lock of whoever came after the first.
    with HostLocks(world.host.data / "locks").try_lock(f"stale-locks/{clone}") as mine:
        if mine is None:
            return False
        seen = _identity(lock)
        if seen is None:
            return True
        age = time.time() - lock.stat().st_mtime
        if age < STALE_AFTER_S or not owner_is_dead(lock, clone):
            return False
        failpoint("git.lock_clear")
        world.guard()
        if _identity(lock) != seen:
            return False  # its owner ended while we looked, and somebody else has taken it
        lock.unlink(missing_ok=True)
        failpoint("git.lock_cleared")
        log.warning("git.stale_lock_cleared", lock=str(lock), age_s=round(age, 1))
        world.warnings.append(f"a stale lock file of git was removed: {lock.name}")
        return True


def _identity(lock: Path) -> tuple[int, int] | None:
    try:
        found = lock.stat()
    except FileNotFoundError:
        return None
    return found.st_ino, found.st_mtime_ns


def owner_is_dead(lock: Path, clone: Path) -> bool:
    """Whether it is proven that no live process on this host can own the lock file."""
    proc = Path("/proc")
    if not (proc / "self" / "fd").is_dir():
        return False
    places = [clone.resolve(), *(r.worktree for r in gitfiles.registrations(clone))]
    target = str(lock.parent.resolve() / lock.name)
    for process in proc.glob("[0-9]*"):
        try:
            if _has_open(process, target) or (_is_git(process) and _works_in(process, places)):
                return False
        except (FileNotFoundError, ProcessLookupError):
            continue  # It ended while we looked.
        except PermissionError:
            if _may_be_git(process):
                return False
    return True


def works_there(clone: Path) -> bool:
    """Whether any live git process works in the clone or its worktrees, as far as can be told."""
    return not owner_is_dead(clone / "no.lock", clone)


def _has_open(process: Path, target: str) -> bool:
    try:
        descriptors = list((process / "fd").iterdir())
    except PermissionError:
        # Another user's process: only a git of that user could hold it, which is asked next.
        return False
    for descriptor in descriptors:
        try:
            if os.readlink(descriptor) == target:  # noqa: PTH115 - may end in " (deleted)"
                return True
        except OSError:
            continue
    return False


def _is_git(process: Path) -> bool:
    return (process / "comm").read_text().startswith("git")


def _may_be_git(process: Path) -> bool:
    try:
        return _is_git(process)
    except OSError:
        return False


def _works_in(process: Path, places: list[Path]) -> bool:
    """Whether its folder, an argument or its environment names one of these places."""
    if (process / "stat").read_text(errors="replace").rpartition(")")[2].split()[0] in ("Z", "X"):
        return False
    folder = (process / "cwd").readlink()
    if any(folder.is_relative_to(place) for place in places):
        return True
    told = (process / "cmdline").read_bytes() + b"\x00" + (process / "environ").read_bytes()
    return any(os.fsencode(place) in told for place in places)
