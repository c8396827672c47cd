"""From manifest to plan: every request complete, so that a worker needs nothing else."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path, PurePosixPath

from .ids import new_id
from .profiles import Profile
from .protocol.errors import InvalidField
from .protocol.plan import (
    AgentLaunchRequest,
    LaunchConfiguration,
    Manifest,
    Plan,
    PlannedRun,
    PlannedStep,
    RepoAttachRequest,
    RepositoryRequest,
    SessionPrepareRequest,
    WorktreeRequest,
    launch_dispatch_key,
)
from .protocol.refs import default_branch_name, is_local_source, short_id, slug

AGENT_WORKFLOW = "agent"
AGENT_WORKFLOW_VERSION = "1"


def resolve(
    manifest: Manifest,
    *,
    host_id: str,
    profiles: Callable[[], Mapping[str, Profile]],
    repository_roots: tuple[Path, ...],
) -> Plan:
    """The plan of a creation, with operation, task and session IDs drawn.

    Raises:
        InvalidField: a profile that is not there or disabled, an agent without a repository to
            work in, a local repository outside the server's roots. Names the field.
    """
    operation_id, task_id = new_id("op"), new_id("tsk")
    steps: list[PlannedStep] = []
    for index, repository in enumerate(manifest.repositories):
        _check_root(repository, f"repositories.{index}.source", repository_roots)
        steps += _repository_steps(manifest, repository, index, task_id)
    run: PlannedRun | None = None
    if manifest.profile is not None:
        session_id = new_id("ses")
        steps.append(_session_step(manifest, manifest.profile, profiles(), steps, session_id))
        if manifest.start_agent:
            key = launch_dispatch_key(operation_id, session_id)
            launch = AgentLaunchRequest(session_id=session_id, dispatch_key=key)
            steps.append(PlannedStep(key="agent_launch", request=launch))
            run = PlannedRun(
                workflow_ref=AGENT_WORKFLOW,
                workflow_version=AGENT_WORKFLOW_VERSION,
                dispatch_key=key,
                session_id=session_id,
            )
    return Plan(
        operation_id=operation_id, task_id=task_id, host_id=host_id, steps=tuple(steps), run=run
    )


def _repository_steps(
    manifest: Manifest, repository: RepositoryRequest, index: int, task_id: str
) -> list[PlannedStep]:
    key = str(index)
    source = repository.source
    clone = f"repositories/{hashlib.sha256(source.encode()).hexdigest()[:32]}.git"
    folder = f"{slug(manifest.title)}-{short_id(task_id)}"
    # The last part is distinct for every worktree: git names its registration after it.
    name = slug(PurePosixPath(source.replace(":", "/")).name.removesuffix(".git"))
    leaf = f"{name}-{short_id(task_id)[-8:]}-{key}"
    attach = RepoAttachRequest(
        repository=key, source=source, clone=clone, base_ref=repository.base_ref
    )
    worktree = WorktreeRequest(
        repository=key,
        source=source,
        clone=clone,
        path=f"worktrees/{folder}/{leaf}",
        branch=repository.branch or default_branch_name(manifest.title, task_id),
    )
    return [
        PlannedStep(key=f"repo_attach:{key}", request=attach),
        PlannedStep(key=f"worktree:{key}", request=worktree),
    ]


def _session_step(
    manifest: Manifest,
    name: str,
    profiles: Mapping[str, Profile],
    steps: list[PlannedStep],
    session_id: str,
) -> PlannedStep:
    profile = profiles.get(name)
    if profile is None or not profile.enabled:
        state = "disabled" if profile else "not known to this server"
        raise InvalidField("profile", f"profile {name!r} is {state}")
    worktree = next((s.request for s in steps if isinstance(s.request, WorktreeRequest)), None)
    if worktree is None:
        raise InvalidField(
            "repositories", "repositories must name at least one where a profile is given"
        )
    launch = LaunchConfiguration(
        profile=name,
        argv=profile.argv,
        environment=profile.environment,
        working_directory=worktree.path,
        time_limit_s=profile.time_limit_s,
        prompt=manifest.prompt,
    )
    request = SessionPrepareRequest(session_id=session_id, launch=launch)
    return PlannedStep(key="session_prepare", request=request)


def _check_root(repository: RepositoryRequest, field: str, roots: tuple[Path, ...]) -> None:
    # Text only: the API may run on another host. The worker looks again, links resolved.
    if not is_local_source(repository.source):
        return
    source = PurePosixPath(repository.source)
    if not any(
        source.is_relative_to(root) or source.is_relative_to(root.resolve()) for root in roots
    ):
        raise InvalidField(
            field,
            f"{field} is a path on the server that is not below an allowed root;"
            " an operator sets them with ONCEBORN_REPOSITORY_ROOTS",
        )
