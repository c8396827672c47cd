"""A look at one worktree: what stands at its path, in the clone and on its branch.

Reads files only, starts no git and changes nothing. What it means is decided elsewhere
(worktree_judge.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from ..runtime.protocol.plan import WorktreeRequest
from . import gitfiles, ownership
from .gitfiles import ReflogEntry, Registration
from .kind import Host, Step

LOCAL: Final = "refs/heads"


@dataclass(frozen=True, slots=True)
class Look:
    """What was seen. ``branch`` is the one that the step asks for."""

    clone: Path
    path: Path
    branch: str
    path_exists: bool
    """Something stands at the path, be it a folder, a file or a link."""
    empty: bool
    """It is an empty folder: git would use it, and it may be the first thing that git made."""
    registration: Registration | None
    """The clone's own record of a worktree at this path."""
    linked: bool
    """The path's ``.git`` file points back to that record."""
    orphaned: bool
    """The path's ``.git`` file points to a record that this clone does not have any more."""
    commit: str | None
    """Where the branch points to; ``None`` where it does not exist."""
    birth: ReflogEntry | None
    branch_ours: bool
    head_ours: bool
    """The branch that HEAD names instead is ours by its reflog: ours was renamed."""
    intended: bool
    """Our intent file is there: whatever we made came after it."""
    trash: tuple[Path, ...]
    """Folders of ours that were moved out of the way and not dealt with yet."""

    @property
    def full_branch(self) -> str:
        return f"{LOCAL}/{self.branch}"

    @property
    def base(self) -> str | None:
        """The commit at which our branch began."""
        return self.birth.new if self.birth is not None and self.branch_ours else None

    @property
    def switched(self) -> bool:
        """Our worktree is on something else than the branch that we made for it."""
        registration = self.registration
        if registration is None or registration.unfinished:
            return False
        if self.branch_ours:
            return registration.head != self.full_branch
        return self.head_ours or (self.intended and self.linked)

    @property
    def populated(self) -> bool:
        """Git finished making it: record, link, HEAD and index are all there."""
        registration = self.registration
        return (
            registration is not None
            and not registration.unfinished
            and self.linked
            and (registration.admin / "index").is_file()
            and not (registration.admin / "index.lock").exists()
        )

    def facts(self) -> dict[str, Any]:
        """The look as a proof. JSON."""
        registration = self.registration
        return {
            "path": str(self.path),
            "path_exists": self.path_exists,
            "registration": str(registration.admin) if registration else None,
            "head": registration.head if registration else None,
            "branch": self.branch,
            "branch_commit": self.commit,
            "branch_ours": self.branch_ours,
            "trash": [str(folder) for folder in self.trash],
        }


def look(step: Step[WorktreeRequest], host: Host) -> Look:
    """See what stands there now."""
    request, key = step.request, step.idempotency_key
    clone, path = host.path(request.clone).resolve(), host.path(request.path)
    registration = gitfiles.registration_of(clone, path)
    commit = gitfiles.read_ref(clone, f"{LOCAL}/{request.branch}")
    birth = ownership.birth(clone, request.branch) if commit is not None else None
    linked_to = gitfiles.linked_admin(path)
    exists = path.is_symlink() or path.exists()
    return Look(
        clone=clone,
        path=path,
        branch=request.branch,
        path_exists=exists,
        empty=exists and path.is_dir() and not path.is_symlink() and not any(path.iterdir()),
        registration=registration,
        linked=registration is not None and linked_to == registration.admin,
        orphaned=linked_to is not None
        and linked_to.parent == clone / "worktrees"
        and not linked_to.exists(),
        commit=commit,
        birth=birth,
        branch_ours=ownership.is_ours(birth, key),
        head_ours=_head_is_ours(clone, registration, request.branch, key),
        intended=ownership.intent_file(host, key).exists(),
        trash=tuple(_folders(trash_folder(host, key))),
    )


def _head_is_ours(clone: Path, registration: Registration | None, branch: str, key: str) -> bool:
    if registration is None or not registration.head.startswith(f"{LOCAL}/"):
        return False
    actual = registration.head.removeprefix(f"{LOCAL}/")
    return actual != branch and ownership.is_ours(ownership.birth(clone, actual), key)


def trash_folder(host: Host, key: str) -> Path:
    """Where folders of this step are moved before they are looked into and deleted."""
    return host.data / "trash" / key


def quarantine_folder(host: Host, key: str) -> Path:
    """Where folders of this step stay whose content is not only ours."""
    return host.data / "quarantine" / key


def _folders(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except FileNotFoundError:
        return []
