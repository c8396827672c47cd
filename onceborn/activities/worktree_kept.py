"""What an undone worktree left in quarantine: looked at, and removed when an operator names it.

Only what the entry's proof recorded as existing, only below the data folder, and only what is still
provably of that entry: a folder that the clone has registered on our branch, a branch whose first
reflog entry is our key, our own folders in quarantine and trash. Folders are moved out of the way
first and compared again there, so that work which began since cancels the removal.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..runtime.failpoints import failpoint
from ..runtime.protocol.errors import EntryChanged, EntryRefused
from ..runtime.protocol.plan import WorktreeRequest
from . import gitfiles, ownership, worktree_commands
from .git import Git, GitError
from .gitfiles import Registration
from .kind import Host, Step, World, as_json
from .processes_at import users_below
from .worktree_look import LOCAL, Look, look, quarantine_folder, trash_folder


@dataclass(frozen=True, slots=True)
class Folder:
    """One folder of an entry, as a walk without following links saw it. Bytes and counts."""

    path: Path
    digest: str
    files: int
    size: int


@dataclass(frozen=True, slots=True)
class WorktreeContents:
    """What an entry holds now; nothing at all where everything is gone."""

    folders: tuple[Folder, ...] = ()
    branches: Mapping[str, str] = field(default_factory=dict)
    """Branches of ours, with the commits that they point to."""
    registration: Registration | None = None
    record_digest: str = ""
    refusals: tuple[str, ...] = ()
    """Why it cannot be purged as it is."""

    @property
    def empty(self) -> bool:
        return not (self.folders or self.branches or self.registration or self.refusals)

    @property
    def digest(self) -> str:
        told = {**self.facts(), "contents": [f.digest for f in self.folders]}
        told["record_content"] = self.record_digest
        return hashlib.sha256(as_json(told).encode("utf-8", "surrogateescape")).hexdigest()[:16]

    def facts(self) -> dict[str, Any]:
        return {
            "folders": [
                {"path": str(f.path), "files": f.files, "bytes": f.size} for f in self.folders
            ],
            "branches": dict(self.branches),
            "record": str(self.registration.admin) if self.registration else None,
            "head": self.registration.head if self.registration else None,
            "refusals": list(self.refusals),
        }


class WorktreeKept:
    """The kept kind of ``worktree``."""

    def contents(
        self, job_id: str, step: Step[WorktreeRequest], proof: Mapping[str, Any], host: Host
    ) -> WorktreeContents:
        """What the entry holds now."""
        seen, folders, refusals = look(step, host), _own_folders(job_id, step, host, proof), []
        registration = None
        # What did not exist when it was handed over may since have been made again.
        if proof.get("path_exists") or proof.get("registration"):
            if _is_entrys(seen):
                registration = seen.registration
                folders += [seen.path] if seen.path_exists else []
                if registration is not None and registration.locked not in (None, "initializing"):
                    refusals.append(f"locked by somebody in git: {registration.locked}")
            elif seen.path_exists:
                refusals.append(f"{seen.path} cannot be shown to be of this entry")
        branches = _branches(seen, step.idempotency_key, proof)
        for name in branches:
            at = gitfiles.checked_out(seen.clone, seen.clone, name)
            if at is not None and at != seen.path:
                refusals.append(f"the branch {name} is checked out at {at}")
        return WorktreeContents(
            folders=tuple(_walked(path) for path in folders),
            branches=branches,
            registration=registration,
            record_digest=_walked(registration.admin).digest if registration else "",
            refusals=tuple(refusals),
        )

    def purge(
        self,
        job_id: str,
        step: Step[WorktreeRequest],
        proof: Mapping[str, Any],
        world: World,
        digest: str,
    ) -> dict[str, Any]:
        """Remove the entry if it still is what ``digest`` was of."""
        now = self.contents(job_id, step, proof, world.host)
        if now.refusals:
            raise EntryRefused(f"It cannot be purged: {'; '.join(now.refusals)}", entry=job_id)
        if now.digest != digest:
            raise changed(job_id, now.digest)
        for folder in now.folders:
            _refuse_if_used(job_id, folder.path)
        failpoint("purge.checked")
        moved = self._moved_away(job_id, now, world)
        failpoint("purge.moved")
        try:
            for folder, place in moved:
                _refuse_if_used(job_id, place)
                if _walked(place).digest != folder.digest:
                    raise changed(job_id)
        except (EntryChanged, EntryRefused):
            _move_back(moved, world)
            raise
        self._remove(job_id, step, now, moved, world)
        left = self.contents(job_id, step, proof, world.host)
        if not left.empty:
            raise changed(job_id, left.digest)
        return {"removed": now.facts()}

    def _moved_away(
        self, job_id: str, now: WorktreeContents, world: World
    ) -> list[tuple[Folder, Path]]:
        place = _purge_folder(world.host, job_id)
        moved: list[tuple[Folder, Path]] = []
        for folder in now.folders:
            if folder.path.parent == place:  # by a purge that was cut off
                moved.append((folder, folder.path))
                continue
            failpoint("purge.folder_move")
            world.guard()
            place.mkdir(parents=True, exist_ok=True)
            target = _free_name(place)
            folder.path.rename(target)
            moved.append((folder, target))
            failpoint("purge.folder_moved")
        return moved

    def _remove(
        self,
        job_id: str,
        step: Step[WorktreeRequest],
        now: WorktreeContents,
        moved: list[tuple[Folder, Path]],
        world: World,
    ) -> None:
        seen, git = look(step, world.host), Git.of(world)
        try:
            if now.registration is not None:
                worktree_commands.complete_record(git, now.registration)
                if now.registration.locked is not None:
                    worktree_commands.unlock(git, seen.clone, seen.path)
                worktree_commands.remove(git, seen.clone, seen.path)
            for name, commit in now.branches.items():
                ownership.delete_branch(git, seen.clone, name, commit)
        except GitError as error:
            raise EntryRefused(f"Not all of it could be removed: {error.message}") from error
        for _, place in moved:
            failpoint("purge.folder_remove")
            world.guard()
            shutil.rmtree(place)
            failpoint("purge.folder_removed")
        key = step.idempotency_key
        ownership.forget_intent(world, key)
        own = [_purge_folder(world.host, job_id), trash_folder(world.host, key)]
        for folder in (*own, quarantine_folder(world.host, key), seen.path.parent):
            # Each only if it is empty; the last is the task's own folder.
            if folder.is_relative_to(world.host.data) and folder.parent != world.host.data:
                with contextlib.suppress(OSError):
                    folder.rmdir()


def changed(job_id: str, digest: str | None = None) -> EntryChanged:
    """The refusal of a purge whose digest is not of what is there."""
    if digest is None:
        return EntryChanged("Somebody works in it now; nothing was removed.", entry=job_id)
    return EntryChanged(
        "It does not hold what was listed. Look at what is there; to remove that, name it with "
        f"--digest {digest}",
        entry=job_id,
        digest=digest,
    )


# -- what is of an entry --------------------------------------------------------------------------


def _is_entrys(seen: Look) -> bool:
    """Whether the record at the path is provably of this step: on a branch of ours, or linked to
    what we said we would make there."""
    if seen.path.is_symlink() or (seen.path_exists and not seen.path.is_dir()):
        return False
    return seen.registration is not None and (seen.branch_ours or seen.switched or seen.head_ours)


def _branches(seen: Look, key: str, proof: Mapping[str, Any]) -> dict[str, str]:
    """Branches that the proof names, where they are ours: also ours under another name."""
    names = {seen.branch} if proof.get("branch_ours") else set()
    head = str(proof.get("head") or "")
    if head.startswith(f"{LOCAL}/"):
        names.add(head.removeprefix(f"{LOCAL}/"))
    found = {name: gitfiles.read_ref(seen.clone, f"{LOCAL}/{name}") for name in sorted(names)}
    return {
        name: commit
        for name, commit in found.items()
        if commit is not None and ownership.is_ours(ownership.birth(seen.clone, name), key)
    }


def _own_folders(
    job_id: str, step: Step[WorktreeRequest], host: Host, proof: Mapping[str, Any]
) -> list[Path]:
    """The entry's folders in our quarantine and trash that are there."""
    key = step.idempotency_key
    named = {*proof.get("quarantined", ()), *proof.get("trash", ())}
    named |= {str(content["folder"]) for content in proof.get("content", ())}
    ours = (quarantine_folder(host, key), trash_folder(host, key))
    paths = [path for path in map(Path, sorted(named)) if path.parent in ours]
    purging = _purge_folder(host, job_id)
    paths += sorted(purging.iterdir()) if purging.is_dir() else []
    return [path for path in paths if path.is_dir() and not path.is_symlink()]


def _purge_folder(host: Host, job_id: str) -> Path:
    return host.data / "trash" / job_id


# -- folders --------------------------------------------------------------------------------------


def _walked(folder: Path) -> Folder:
    """Everything below a folder by name, kind, size and time of change; links are not followed."""
    told, files, size = hashlib.sha256(), 0, 0
    for name, status in _entries(folder):
        line = f"{name}\0{status.st_mode}\0{status.st_mtime_ns}\0"
        if not stat.S_ISDIR(status.st_mode):
            files += 1
            size += status.st_size
            line += f"{status.st_size}\0"
        told.update(line.encode("utf-8", "surrogateescape"))
    return Folder(folder, told.hexdigest(), files, size)


def _entries(folder: Path) -> Iterator[tuple[str, os.stat_result]]:
    for place, folders, files in os.walk(folder):
        folders.sort()
        for name in sorted([*files, *folders]):
            path = Path(place) / name
            yield str(path.relative_to(folder)), path.lstat()


def _refuse_if_used(job_id: str, folder: Path) -> None:
    users = users_below(folder)
    if users is None:
        reason = "This host cannot tell whether a process works there (no /proc)."
        raise EntryRefused(reason, entry=job_id)
    if users:
        reason = f"Process {users[0]} works in {folder}; nothing was removed."
        raise EntryRefused(reason, entry=job_id, process=users[0])


def _move_back(moved: list[tuple[Folder, Path]], world: World) -> None:
    for folder, place in moved:
        if place != folder.path:
            failpoint("purge.move_back")
            world.guard()
            place.rename(folder.path)
            failpoint("purge.moved_back")
    for place in {place.parent for _, place in moved}:
        with contextlib.suppress(OSError):
            place.rmdir()


def _free_name(folder: Path) -> Path:
    number = 0
    while (folder / str(number)).exists():
        number += 1
    return folder / str(number)
