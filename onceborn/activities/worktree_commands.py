"""The three ``git worktree`` commands that we use, steady beside others on the same clone.

Each of them reads the record of every worktree of the clone, and fails where another git is just
writing one (seen: ``failed to read .../commondir``). It has changed nothing then, so it is run
again, within a bound.
"""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Final

from ..runtime.failpoints import failpoint
from .git import Git, GitError
from .gitfiles import Registration

_BEING_WRITTEN: Final = re.compile(r"failed to read [^\n]*/worktrees/[^\n]*/commondir")
_PATIENCE_S: Final = 3.0
_COMMONDIR: Final = "../..\n"


def add(git: Git, clone: Path, path: Path, branch: str) -> None:
    """Make a worktree at ``path`` on an existing branch that is checked out nowhere.

    Raises:
        GitError: it could not be made.
    """
    _run(git, clone, "add", "--quiet", "--", str(path), branch)


def unlock(git: Git, clone: Path, path: Path) -> None:
    """Take the lock from a worktree's record.

    Raises:
        GitError: there is no such worktree, or it is not locked.
    """
    _run(git, clone, "unlock", "--", str(path))


def remove(git: Git, clone: Path, path: Path) -> None:
    """Remove a clean worktree, or the one record of a missing one. Never forced.

    Raises:
        GitError: it is not clean, it is locked, or there is no such worktree.
    """
    _run(git, clone, "remove", "--", str(path))


def complete_record(git: Git, registration: Registration) -> None:
    """Give our own record the one line that a git which died there did not write.

    Without it every ``git worktree`` command on the clone fails, for all tasks.
    """
    file = registration.admin / "commondir"
    if not file.is_file() or file.stat().st_size == 0:
        failpoint("worktree.record_complete")
        git.guard()
        file.write_text(_COMMONDIR)
        failpoint("worktree.record_completed")


def _run(git: Git, clone: Path, *command: str) -> None:
    deadline = time.monotonic() + _PATIENCE_S
    pause = 0.005
    while True:
        try:
            git.run(["worktree", *command], git_dir=clone, mutates=True)
            return
        except GitError as error:
            passing = _BEING_WRITTEN.search(error.result.stderr) is not None
            if not passing or time.monotonic() >= deadline:
                raise
        time.sleep(pause)
        pause = min(pause * 2, 0.2)
