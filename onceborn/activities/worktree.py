"""The kind ``worktree``: a fresh branch at the attached base commit, and a git worktree on it.

Never with force, never under another name. The branch carries our key in the first entry of its
reflog; what cannot be shown to be ours is not touched (worktree_undo.py).
"""

from __future__ import annotations

import re
from typing import Final

from ..runtime.failpoints import failpoint
from ..runtime.protocol.plan import WorktreeRequest
from . import gitfiles, gitlocks, ownership, worktree_commands
from .git import Git, GitError
from .kind import (
    Compensated,
    Observation,
    Present,
    Step,
    StepFailed,
    StepRetry,
    Undone,
    World,
)
from .worktree_judge import attached_base, in_use, judge, refusal
from .worktree_look import Look, look
from .worktree_undo import Undoing, drop_empty_trash


class Worktree:
    """See the module."""

    name: Final = "worktree"

    def resource(self, step: Step[WorktreeRequest]) -> str:
        return f"worktree/{step.request.path}"

    def observe(self, step: Step[WorktreeRequest], world: World) -> Observation:
        return judge(look(step, world.host), step, world)

    def perform(self, step: Step[WorktreeRequest], world: World) -> None:
        """Raises StepFailed with the codes of ``refusal``, ``worktree.not_attached``,
        ``worktree.name_too_long`` or ``worktree.filter_missing``; StepRetry ``worktree.leftover``,
        ``worktree.filter_failed``, ``worktree.git_failed``, ``git.locked``.
        """
        base = attached_base(step, world)
        seen = look(step, world.host)
        if seen.branch_ours and (_more_than_a_branch(seen) or seen.commit != base):
            if isinstance(judge(seen, step, world), Present):
                return
            seen = _cleared(step, world)
        refused = refusal(seen, step)
        if refused is not None:
            raise refused
        # An undoing that died between the trash and its folder left that empty.
        drop_empty_trash(world, step.idempotency_key)
        ownership.write_intent(
            world,
            step,
            {
                "branch": seen.branch,
                "clone": str(seen.clone),
                "commit": base,
                "path": str(seen.path),
            },
        )
        git = Git.of(world)
        if not seen.branch_ours:
            self._make_branch(git, seen, base, step, world)
        failpoint("worktree.branch_made")
        self._add(git, seen, step)
        failpoint("worktree.added")

    def compensate(self, step: Step[WorktreeRequest], world: World) -> Undone:
        return Undoing(step, world).run()

    def _make_branch(
        self, git: Git, seen: Look, base: str, step: Step[WorktreeRequest], world: World
    ) -> None:
        # Git would wait for it before it failed; a dead owner's is told at once.
        ref_lock = seen.clone / f"{seen.full_branch}.lock"
        gitlocks.settle([ref_lock], seen.clone, world)
        try:
            ownership.make_branch(git, seen.clone, seen.branch, base, step.idempotency_key)
            return
        except GitError as error:
            lock = gitlocks.lock_in(error)
            if lock is None:
                # Somebody may have taken the name since we looked.
                raise refusal(look(step, world.host), step) or _failed(error) from error
        gitlocks.settle([lock], seen.clone, world)
        try:
            ownership.make_branch(git, seen.clone, seen.branch, base, step.idempotency_key)
        except GitError as error:
            raise _failed(error) from error

    def _add(self, git: Git, seen: Look, step: Step[WorktreeRequest]) -> None:
        try:
            worktree_commands.add(git, seen.clone, seen.path, seen.branch)
        except GitError as error:
            if "File name too long" in error.result.stderr:
                raise StepFailed(
                    "worktree.name_too_long",
                    f"a file of the repository has too long a name below {seen.path}",
                    path=str(seen.path),
                ) from error
            raise in_use(seen, step) or _filter_failed(error) or _failed(error) from error


def _more_than_a_branch(seen: Look) -> bool:
    return (
        seen.registration is not None
        or seen.path_exists
        or bool(seen.trash)
        or bool(gitfiles.nameless_entries(seen.clone, seen.path))
    )


def _cleared(step: Step[WorktreeRequest], world: World) -> Look:
    """The look after our own leftovers are gone."""
    undone = Undoing(step, world, may_transfer=False).run()
    if not isinstance(undone, Compensated):
        raise StepRetry("worktree.leftover", "what an earlier try left could not be cleared yet")
    return look(step, world.host)


_FILTER: Final = re.compile(r"^fatal: (?P<file>.+): smudge filter (?P<filter>.+) failed$", re.M)
_FILTER_ENDED: Final = "the remote end hung up unexpectedly"
"""What git says of a filter process that ends early; making a worktree speaks to nobody else."""
_MISSING: Final = re.compile(r"^.*: not found$|^error: cannot (?:run|exec|spawn) .*$", re.M)


def _filter_failed(error: GitError) -> StepFailed | StepRetry | None:
    """A program that the operator's git configuration names for files of this kind."""
    said = error.result.stderr
    found = _FILTER.search(said)
    if found is None and _FILTER_ENDED not in said:
        return None
    file, name = (found["file"], found["filter"]) if found else ("a file", "process")
    what = f"{file} needs the filter {name} of host.gitconfig"
    fields = {"file": file, "filter": name, "stderr": said[-1000:]}
    missing = _MISSING.search(said)
    if missing is None:
        return StepRetry("worktree.filter_failed", f"{what}, which failed", **fields)
    return StepFailed(
        "worktree.filter_missing",
        f"{what}, whose program is not on this host ({missing[0].strip()}): install it, or take"
        " the filter out of host.gitconfig to get pointer files",
        **fields,
    )


def _failed(error: GitError) -> StepRetry:
    return StepRetry("worktree.git_failed", error.message, stderr=error.result.stderr[-1000:])
