"""What says that an effect in the world is ours, and what we meant to make.

The intent file is written and synced before the first mutation; it alone proves nothing about what
exists. A branch is ours only if the first entry of its reflog carries our key, which nobody else
writes, and which survives a rename. Source: design 2-steps, 'Ownership'.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..runtime.failpoints import failpoint
from . import gitfiles
from .git import Git
from .gitfiles import ReflogEntry
from .kind import Host, Step, World, as_json


def intent_file(host: Host, key: str) -> Path:
    """Where the intent of the step with this idempotency key is."""
    return host.data / "intents" / f"{key}.json"


def write_intent(world: World, step: Step[Any], meant: Mapping[str, Any]) -> None:
    """Say durably what this step is about to make; writing it again changes nothing."""
    file = intent_file(world.host, step.idempotency_key)
    text = as_json(
        {
            "idempotency_key": step.idempotency_key,
            "meant": dict(meant),
            "operation_id": step.operation_id,
            "step_key": step.key,
            "task_id": step.task_id,
        }
    )
    if file.exists() and file.read_text() == text:
        return
    failpoint("intent.before")
    world.guard()
    file.parent.mkdir(parents=True, exist_ok=True)
    unfinished = file.with_suffix(".tmp")
    with unfinished.open("w") as out:
        out.write(text)
        out.flush()
        os.fsync(out.fileno())
    unfinished.replace(file)
    sync_folder(file.parent)
    failpoint("intent.written")


def read_intent(host: Host, key: str) -> dict[str, Any] | None:
    """The intent, or ``None`` where none was written."""
    try:
        document: dict[str, Any] = json.loads(intent_file(host, key).read_text())
    except FileNotFoundError:
        return None
    return document


def forget_intent(world: World, key: str) -> None:
    """What was meant is undone; harmless where there is no intent."""
    failpoint("intent.forget")
    world.guard()
    intent_file(world.host, key).unlink(missing_ok=True)
    failpoint("intent.forgotten")


def sync_folder(folder: Path) -> None:
    """Make a name that was just put into a folder survive a power cut."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def birth(clone: Path, branch: str) -> ReflogEntry | None:
    """How a branch came to be, as the first entry of its reflog tells it."""
    return next(gitfiles.reflog(gitfiles.branch_reflog(clone, branch)), None)


def is_ours(entry: ReflogEntry | None, key: str) -> bool:
    """Whether a branch that began with ``entry`` was made by the step with this key."""
    return entry is not None and entry.is_birth and entry.message == key


def make_branch(git: Git, clone: Path, branch: str, commit: str, key: str) -> None:
    """Make a branch that carries our key.

    Raises:
        GitError: it could not be made; an existing branch is never moved.
    """
    git.run(
        [
            "update-ref",
            "--create-reflog",
            "-m",
            key,
            f"refs/heads/{branch}",
            commit,
            "0" * len(commit),
        ],
        git_dir=clone,
        mutates=True,
    )


def delete_branch(git: Git, clone: Path, branch: str, commit: str) -> None:
    """Delete a branch that points to ``commit``, its reflog with it.

    Raises:
        GitError: it points elsewhere, or could not be deleted.
    """
    git.run(
        ["update-ref", "-d", f"refs/heads/{branch}", commit],
        git_dir=clone,
        mutates=True,
    )
