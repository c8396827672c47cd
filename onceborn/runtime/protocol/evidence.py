"""Evidence: what an independent look at the world showed. One closed model per step kind."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from .canonical import Domain, digest


class Closed(BaseModel):
    """A document in which unknown fields are invalid and nothing changes after construction."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class RepoAttached(Closed):
    """The clone holds the commit and our attachment row names it."""

    kind: Literal["repo_attach"] = "repo_attach"
    repository: str
    """Key of the repository within the task."""
    clone: str
    """Absolute path of the managed clone on the host, symbolic links resolved."""
    base_ref: str
    """What the base was resolved from, e.g. ``refs/heads/trunk`` or a commit ID."""
    base_commit: str
    resolved_by: Literal["remote_head", "detached_remote_head", "branch", "tag", "commit"]
    """Why that reference: the remote's own default, or what the caller named."""
    attachment_id: str


class WorktreeMade(Closed):
    """Path, registration, branch with our key, HEAD and base were all exact."""

    kind: Literal["worktree"] = "worktree"
    repository: str
    path: str
    """Absolute, symbolic links resolved."""
    branch: str
    base_commit: str
    head: str
    """The full name of what HEAD points to, e.g. ``refs/heads/onceborn/x``."""
    registration: str
    """Absolute path of the worktree's administrative directory in the clone."""
    ownership_key: str
    """Our idempotency key, as the branch's first reflog entry carries it."""
    warnings: tuple[str, ...] = ()


class SessionPrepared(Closed):
    """The session row was byte-exact and no run uses it."""

    kind: Literal["session_prepare"] = "session_prepare"
    session_id: str
    profile: str
    launch_hash: str
    """Hash of the launch configuration as stored."""


class LaunchArmed(Closed):
    """The intent to launch is recorded; the run is admitted inside Complete."""

    kind: Literal["agent_launch"] = "agent_launch"
    session_id: str
    dispatch_key: str
    run_id: str | None = None
    """Set by Complete's second phase."""


Evidence = Annotated[
    RepoAttached | WorktreeMade | SessionPrepared | LaunchArmed, Field(discriminator="kind")
]
EVIDENCE: TypeAdapter[Evidence] = TypeAdapter(Evidence)


def evidence_hash(document: object) -> str:
    """Hash of an evidence document in its JSON form (as ``model_dump(mode="json")`` gives it)."""
    return digest(Domain.EVIDENCE, document)
