"""What a look at a worktree means: the observation, and why a fresh one cannot be made."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from ..runtime.ledger import attachments
from ..runtime.protocol.evidence import WorktreeMade
from ..runtime.protocol.plan import WorktreeRequest
from ..runtime.protocol.refs import is_local_source
from . import gitfiles
from .git import Git, GitError
from .kind import (
    Absent,
    Conflict,
    Observation,
    OursHalfMade,
    Present,
    Step,
    StepFailed,
    Undetermined,
    World,
)
from .worktree_look import LOCAL, Look

REMOTE: Final = "refs/remotes/origin"


def judge(seen: Look, step: Step[WorktreeRequest], world: World) -> Observation:
    """The observation that a look amounts to."""
    if seen.switched:
        head = seen.registration.head if seen.registration else None
        return Undetermined(
            f"the worktree {seen.path} is ours but is on {head}, not on {seen.full_branch}"
        )
    if seen.branch_ours:
        return _judge_ours(seen, step, world)
    if seen.trash:
        return OursHalfMade(seen.facts())
    refusal = standing_in_the_way(seen, step)
    if refusal is not None:
        return Conflict(refusal.reason_code, refusal.message)
    return Absent(seen.facts())


def _judge_ours(seen: Look, step: Step[WorktreeRequest], world: World) -> Observation:
    if not seen.populated or seen.trash or seen.registration is None:
        return OursHalfMade(seen.facts())
    base = attached_base(step, world)
    if seen.commit != base:
        return Undetermined(f"our branch {seen.branch} is at {seen.commit}, not at the base {base}")
    try:
        missing = missing_files(seen, Git.of(world))
    except GitError as error:
        return Undetermined(f"the worktree {seen.path} could not be read: {error.message}")
    if missing:
        return OursHalfMade({**seen.facts(), "missing_files": missing[:20]})
    return Present(
        WorktreeMade(
            repository=step.request.repository,
            path=str(seen.path),
            branch=seen.branch,
            base_commit=base,
            head=seen.registration.head,
            registration=str(seen.registration.admin),
            ownership_key=step.idempotency_key,
            warnings=tuple(world.warnings),
        )
    )


def missing_files(seen: Look, git: Git) -> list[str]:
    """Files of the index that are not in the worktree.

    Raises:
        GitError: it cannot be read.
    """
    assert seen.registration is not None
    listed = git.run(
        ["ls-files", "--deleted", "-z"],
        git_dir=seen.registration.admin,
        work_tree=seen.path,
        cwd=seen.path,
    )
    return [name for name in listed.text.split("\0") if name]


def attached_base(step: Step[WorktreeRequest], world: World) -> str:
    """The commit that the repository's attachment names.

    Raises:
        StepFailed: ``worktree.not_attached``: this operation has no attachment of it.
    """
    with world.database.reading() as connection:
        row = attachments.find(connection, step.operation_id, step.request.repository)
    if row is None:
        raise StepFailed(
            "worktree.not_attached",
            f"repository {step.request.repository} is not attached to this creation",
            repository=step.request.repository,
        )
    return row.base_commit


# -- refusals -------------------------------------------------------------------------------------


def standing_in_the_way(seen: Look, step: Step[WorktreeRequest]) -> StepFailed | None:
    """What exists, and is not ours, exactly where the step would make something."""
    if (seen.path_exists and not seen.empty) or seen.registration is not None:
        return StepFailed(
            "worktree.path_exists",
            f"{seen.path} exists already and is not this creation's; it is left alone",
            path=str(seen.path),
        )
    if seen.empty and not seen.intended:
        return StepFailed(
            "worktree.path_exists",
            f"{seen.path} exists already (an empty folder); it is left alone",
            path=str(seen.path),
        )
    if seen.commit is None or seen.branch_ours:
        return None
    return in_use(seen, step) or _exists(seen, seen.full_branch)


def refusal(seen: Look, step: Step[WorktreeRequest]) -> StepFailed | None:
    """Why a fresh branch of this name cannot be made; ``None`` where it can.

    Codes: ``worktree.path_exists``, ``worktree.branch_in_use``, ``worktree.branch_exists``,
    ``worktree.branch_name_conflict``. Each names what stands in the way.
    """
    standing = standing_in_the_way(seen, step)
    if standing is not None or seen.branch_ours:
        return standing
    used = in_use(seen, step)
    if used is not None:
        return used
    taken = gitfiles.taken_name(seen.clone, (LOCAL, REMOTE), seen.branch)
    if taken is None:
        return None
    if taken in (seen.full_branch, f"{REMOTE}/{seen.branch}"):
        return _exists(seen, taken)
    other = taken.removeprefix(f"{LOCAL}/").removeprefix(f"{REMOTE}/")
    return StepFailed(
        "worktree.branch_name_conflict",
        f"the branch {seen.branch} cannot exist beside the branch {other}: one name is a leading "
        "part of the other; choose another name",
        branch=seen.branch,
        other=other,
    )


def _exists(seen: Look, taken: str) -> StepFailed:
    where = "in the remote repository" if taken.startswith(REMOTE) else "already"
    return StepFailed(
        "worktree.branch_exists",
        f"the branch {seen.branch} exists {where}; choose another name",
        branch=seen.branch,
        reference=taken,
    )


def in_use(seen: Look, step: Step[WorktreeRequest]) -> StepFailed | None:
    """The refusal where the branch is checked out: in the clone's worktrees, or in the source's."""
    repositories = [(seen.clone, seen.clone)]
    if is_local_source(step.request.source):
        source = Path(step.request.source).resolve()
        folders = gitfiles.git_folders(source)
        if folders is not None:
            common = folders[1]
            # A linked worktree's main working tree is the folder that its `.git` is in.
            repositories.append((common, common.parent if common.name == ".git" else source))
    for common, main in repositories:
        path = gitfiles.checked_out(common, main, seen.branch)
        if path is not None and path != seen.path:
            return StepFailed(
                "worktree.branch_in_use",
                f"the branch {seen.branch} is checked out at {path}; choose another name",
                branch=seen.branch,
                path=str(path),
            )
    return None
