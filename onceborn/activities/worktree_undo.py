"""Undoing a worktree: what is provably ours and holds nothing of anybody else goes; the rest stays.

A whole worktree goes by plain ``git worktree remove`` if it is clean and its branch never had a
commit of its own. A half-made one is first moved out of the way, then its one record and its branch
go, and the moved folder is deleted only if every file in it is a file of the commit, or a beginning
of one. Whatever fails these tests is left where it is, or in quarantine, and handed over with a
list. Never a repository-wide prune, never force.
"""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path
from typing import Any

from ..runtime.failpoints import failpoint
from ..runtime.protocol.plan import WorktreeRequest
from . import gitfiles, gitlocks, ownership, worktree_commands
from .git import Git, GitError
from .gitfiles import Registration
from .kind import Compensated, Step, StepRetry, Transferred, Undetermined, Undone, World
from .worktree_content import RECORDS, Finding, bounded, hidden_work, uncommitted, unlike_commit
from .worktree_judge import missing_files
from .worktree_look import Look, look, quarantine_folder, trash_folder


class Undoing:
    """One undoing of one step. ``may_transfer``: quarantine is allowed (the caller records it)."""

    def __init__(
        self, step: Step[WorktreeRequest], world: World, *, may_transfer: bool = True
    ) -> None:
        self._step = step
        self._world = world
        self._git = Git.of(world)
        self._may_transfer = may_transfer
        self._removed: list[str] = []
        self._proven: Path | None = None
        """A moved folder that was seen to be clean before it was moved."""
        self._stuck: dict[str, str] = {}
        """Folders in the trash that hold nothing of anybody but cannot be removed now: why."""

    def run(self) -> Undone:
        """Undo; harmless where there is nothing of ours, and where it is run again."""
        try:
            return self._run(look(self._step, self._world.host))
        except GitError as error:
            lock = gitlocks.lock_in(error)
            if lock is not None:
                gitlocks.settle([lock], look(self._step, self._world.host).clone, self._world)
            return Undetermined(error.message)

    def _run(self, seen: Look) -> Undone:
        if seen.switched:
            return self._kept(seen, [Finding("HEAD", "not on the branch that was made for it")])
        if seen.branch_ours:
            self._wait_for_index(seen)
            commits = self._commits(seen)
            whole = seen.populated and not missing_files(seen, self._git)
            if whole or self._locked_by_somebody(seen):
                work = commits + self._work_in(seen)
                if work:
                    return self._kept(seen, work)
                self._remove_whole(seen)
            else:
                self._move_away(seen)
                self._remove_records(seen)
            if commits or seen.base is None:
                stays = self._empty_trash()
                return self._kept(look(self._step, self._world.host), commits, content=stays)
            ownership.delete_branch(self._git, seen.clone, seen.branch, seen.base)
            self._removed.append(seen.full_branch)
            failpoint("worktree.branch_removed")
        return self._finish()

    def _wait_for_index(self, seen: Look) -> None:
        """Somebody's git may be at work in a finished worktree; a dead one's lock is cleared."""
        if seen.registration is not None and not seen.registration.unfinished:
            lock = seen.registration.admin / "index.lock"
            gitlocks.settle([lock], seen.clone, self._world)

    # -- a whole one ----------------------------------------------------------------------------

    def _locked_by_somebody(self, seen: Look) -> bool:
        registration = seen.registration
        return registration is not None and registration.locked not in (None, "initializing")

    def _work_in(self, seen: Look) -> list[Finding]:
        """What somebody did in it or on its branch."""
        assert seen.registration is not None
        found: list[Finding] = []
        if self._locked_by_somebody(seen):
            found.append(Finding("locked", f"locked by somebody: {seen.registration.locked}"))
        if seen.path_exists:
            found += uncommitted(self._git, seen.registration, seen.path)
            found += hidden_work(self._git, seen.registration, seen.path)
        return found

    def _commits(self, seen: Look) -> list[Finding]:
        """Commits of its own, also such as were made and then left behind."""
        logs = [gitfiles.branch_reflog(seen.clone, seen.branch)]
        if seen.registration is not None:
            logs.append(seen.registration.admin / "logs" / "HEAD")
        found = {entry.new for log in logs for entry in gitfiles.reflog(log)}
        found |= {seen.commit} if seen.commit else set()
        return [
            Finding(commit, "a commit beyond the base")
            for commit in sorted(found - {seen.base or ""})
            if commit.strip("0")
        ]

    def _remove_whole(self, seen: Look) -> None:
        assert seen.registration is not None
        if (seen.registration.admin / "modules").exists():
            # Git refuses to remove a worktree with submodules; a moved one it lets go.
            self._proven = self._move_away(seen)
            self._remove_records(seen)
            return
        failpoint("worktree.remove")
        try:
            worktree_commands.remove(self._git, seen.clone, seen.path)
        except GitError:
            # Where a file cannot be deleted, git has cleared the record all the same (seen). What
            # is left goes the way of a half-made one: moved away, judged anew.
            after = look(self._step, self._world.host)
            if after.registration is not None or not after.path_exists:
                raise
            self._rename_away(after.path)
            return
        self._removed.append(str(seen.path))

    # -- a half-made one ------------------------------------------------------------------------

    def _move_away(self, seen: Look) -> Path | None:
        """Rename our folder into the trash; a folder that is not registered to us stays."""
        if not seen.path_exists:
            return None
        if seen.registration is None and not (seen.orphaned and seen.intended):
            if seen.empty and seen.intended:
                failpoint("worktree.folder_remove")
                self._world.guard()
                seen.path.rmdir()
                failpoint("worktree.folder_removed")
            return None
        if seen.path.is_symlink() or not seen.path.is_dir():
            return None
        return self._rename_away(seen.path)

    def _rename_away(self, path: Path) -> Path:
        folder = trash_folder(self._world.host, self._step.idempotency_key)
        failpoint("worktree.move_away")
        self._world.guard()
        folder.mkdir(parents=True, exist_ok=True)
        target = _free_name(folder)
        path.rename(target)
        self._removed.append(str(path))
        failpoint("worktree.moved_away")
        return target

    def _remove_records(self, seen: Look) -> None:
        if seen.registration is not None:
            self._keep_records(seen.registration)
            worktree_commands.complete_record(self._git, seen.registration)
            if seen.registration.locked is not None:
                # Git's own mark of an unfinished one: somebody's lock was told apart before.
                worktree_commands.unlock(self._git, seen.clone, seen.path)
            # The folder is gone, so this clears the one record, whatever state it is in.
            worktree_commands.remove(self._git, seen.clone, seen.path)
        for entry in gitfiles.nameless_entries(seen.clone, seen.path):
            self._remove_nameless(entry, seen.clone)
        failpoint("worktree.records_removed")

    def _keep_records(self, registration: Registration) -> None:
        """The index and reflogs lie in the record: they stay with the folder until it is judged."""
        folders = look(self._step, self._world.host).trash
        if folders:
            target = folders[-1] / RECORDS
            failpoint("worktree.records_keep")
            self._world.guard()
            shutil.copytree(registration.admin, target, symlinks=True, dirs_exist_ok=True)
            failpoint("worktree.records_kept")

    def _remove_nameless(self, entry: Path, clone: Path) -> None:
        # It names no path, so it is nobody's worktree; but its maker may be at work on it now.
        if gitlocks.works_there(clone):
            raise StepRetry(
                "git.locked", f"a live git process works in {clone}; {entry} is left for now"
            )
        failpoint("worktree.nameless_remove")
        self._world.guard()
        shutil.rmtree(entry)
        failpoint("worktree.nameless_removed")
        self._removed.append(str(entry))

    # -- branch, trash, result --------------------------------------------------------------------

    def _finish(self) -> Undone:
        """Judge what lies in the trash, and say what is left of ours."""
        stays = self._empty_trash()
        after = look(self._step, self._world.host)
        if stays and not self._may_transfer:
            return Undetermined("what an earlier try left holds more than files of the commit")
        if after.branch_ours:
            return Undetermined(f"the branch {after.branch} is still there")
        if self._stuck and not self._may_transfer:
            return Undetermined(f"what an earlier try left cannot be removed now: {self._stuck}")
        if not self._may_transfer:
            return Compensated({**after.facts(), "removed": self._removed})
        if after.path_exists and after.intended and not after.empty:
            return self._kept(after, [Finding(".", "it cannot be shown whose this is")])
        key = self._step.idempotency_key
        quarantined = self._quarantined()
        proof = {**after.facts(), "removed": self._removed, "ownership_key": key}
        if self._stuck and not quarantined:
            # The intent says what it is compared with: it stays until the last of it is gone.
            return Transferred({**proof, "not_removed": self._stuck}, "pending")
        ownership.forget_intent(self._world, key)
        self._drop_empty_parent(after.path)
        if quarantined:
            return Transferred({**proof, "quarantined": quarantined, "content": stays})
        return Compensated(proof)

    def _quarantined(self) -> list[str]:
        folder = quarantine_folder(self._world.host, self._step.idempotency_key)
        return sorted(map(str, folder.glob("*")))

    def _drop_empty_parent(self, path: Path) -> None:
        """The task's own folder, which the last of its worktrees leaves empty."""
        if len(Path(self._step.request.path).parts) > 2:
            self._world.guard()
            with contextlib.suppress(OSError):
                path.parent.rmdir()

    def _empty_trash(self) -> list[dict[str, Any]]:
        host, key = self._world.host, self._step.idempotency_key
        stays: list[dict[str, Any]] = []
        for folder in look(self._step, host).trash:
            findings = [] if folder == self._proven else self._judge_trash(folder)
            if not findings:
                failpoint("trash.remove")
                self._world.guard()
                try:
                    shutil.rmtree(folder)
                except OSError as error:
                    self._stuck[str(folder)] = f"{error.strerror}: {error.filename}"
                failpoint("trash.removed")
                continue
            stays.append({"folder": str(folder), **bounded(findings)})
            if self._may_transfer:
                quarantine = quarantine_folder(host, key)
                failpoint("quarantine.keep")
                self._world.guard()
                quarantine.mkdir(parents=True, exist_ok=True)
                target = _free_name(quarantine)
                folder.rename(target)
                failpoint("quarantine.kept")
                stays[-1]["folder"] = str(target)
        if not stays and not self._stuck:
            drop_empty_trash(self._world, key)
        return stays

    def _judge_trash(self, folder: Path) -> list[Finding]:
        intent = ownership.read_intent(self._world.host, self._step.idempotency_key)
        if intent is None:
            return [Finding(".", "it is not known of which commit it was made")]
        meant = intent["meant"]
        return unlike_commit(
            self._git, Path(meant["clone"]), meant["commit"], folder, self._world.heartbeat
        )

    def _kept(self, seen: Look, work: list[Finding], **more: Any) -> Transferred | Undetermined:
        """Everything stays where it is, and is handed over."""
        if not self._may_transfer:
            return Undetermined(f"{seen.path} holds work; it is not touched")
        return Transferred(
            {
                **seen.facts(),
                "ownership_key": self._step.idempotency_key,
                "base_commit": seen.base,
                "removed": self._removed,
                "quarantined": self._quarantined(),
                **bounded(work),
                **more,
            }
        )


def drop_empty_trash(world: World, key: str) -> None:
    """Remove this step's own folder in the trash, where it is empty."""
    folder = trash_folder(world.host, key)
    if folder.is_dir() and not any(folder.iterdir()):
        failpoint("trash.drop")
        world.guard()
        folder.rmdir()
        failpoint("trash.dropped")


def _free_name(folder: Path) -> Path:
    number = 0
    while (folder / str(number)).exists():
        number += 1
    return folder / str(number)
