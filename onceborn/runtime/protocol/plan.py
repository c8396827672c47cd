"""What was asked for (manifest) and what that means (plan), as closed models.

A plan is complete: a worker needs nothing but it and the world. Paths in it are relative to the
host's data folder, so that a folder that moved, or is a symbolic link, changes no hash.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Final, Literal, Self

from pydantic import (
    AfterValidator,
    Field,
    JsonValue,
    StringConstraints,
    TypeAdapter,
    model_validator,
)

from .canonical import Domain, canonical_bytes, digest
from .errors import InvalidField
from .evidence import Closed
from .refs import check_branch, check_ref, check_source

MAX_TITLE: Final = 500
MAX_TEXT: Final = 256 * 1024
MAX_METADATA_BYTES: Final = 64 * 1024
MAX_REPOSITORIES: Final = 16


def _rule(check: Any, field: str) -> AfterValidator:
    def validate(value: str) -> str:
        try:
            return str(check(value, field))
        except InvalidField as error:
            raise ValueError(error.message) from None

    return AfterValidator(validate)


def _bounded_json(value: dict[str, JsonValue]) -> dict[str, JsonValue]:
    try:
        written = canonical_bytes(value)
        # What is stored is read and hashed again: the digits of a double beyond 2**53 read as an
        # integer, which canonical JSON refuses, so such a number is refused while it still can be.
        canonical_bytes(json.loads(written))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"metadata cannot be written as canonical JSON: {error}") from None
    size = len(written)
    if size > MAX_METADATA_BYTES:
        raise ValueError(f"metadata is {size} bytes; at most {MAX_METADATA_BYTES} are allowed")
    return value


def _storable(value: str) -> str:
    if "\x00" in value:
        raise ValueError("must not contain U+0000, which PostgreSQL cannot store")
    return value


_Storable = AfterValidator(_storable)
Title = Annotated[
    str, StringConstraints(min_length=1, max_length=MAX_TITLE, strict=True), _Storable
]
Text = Annotated[str, StringConstraints(max_length=MAX_TEXT, strict=True), _Storable]
Name = Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9_.-]{0,63}$", strict=True)]


class RepositoryRequest(Closed):
    """One repository that the task works on."""

    source: Annotated[str, _rule(check_source, "source")] = Field(
        description="Absolute path on the server, https, ssh or git URL, or host:path."
    )
    base_ref: Annotated[str, _rule(check_ref, "base_ref")] | None = Field(
        default=None,
        description="Branch, tag or full commit ID to start from; default: the remote's own.",
    )
    branch: Annotated[str, _rule(check_branch, "branch")] | None = Field(
        default=None, description="Name of the fresh branch; default: made from title and task ID."
    )


class Manifest(Closed):
    """What the caller asked for, without the external ID, which names the entity instead."""

    title: Title
    description: Text = ""
    repositories: Annotated[tuple[RepositoryRequest, ...], Field(max_length=MAX_REPOSITORIES)] = ()
    profile: Name | None = Field(
        default=None, description="Name of an agent profile of the server."
    )
    prompt: Text = ""
    start_agent: Annotated[bool, Field(strict=True)] = False
    metadata: Annotated[dict[str, JsonValue], AfterValidator(_bounded_json)] = Field(
        default_factory=dict
    )

    @model_validator(mode="after")
    def _agent_has_profile(self) -> Self:
        if self.start_agent and self.profile is None:
            raise InvalidManifest("profile", "profile is required where start_agent is true")
        seen: set[str] = set()
        for index, repository in enumerate(self.repositories):
            if repository.source in seen:
                field = f"repositories.{index}.source"
                raise InvalidManifest(field, f"{field} repeats an earlier repository")
            seen.add(repository.source)
        return self

    def digest(self) -> str:
        return digest(Domain.MANIFEST, self.model_dump(mode="json"))


class InvalidManifest(ValueError):
    """A rule across fields is broken; carries the field that is to blame."""

    def __init__(self, field: str, message: str) -> None:
        self.field = field
        super().__init__(message)


# -- the requests of the step kinds ---------------------------------------------------------------


class RepoAttachRequest(Closed):
    """Have the repository's managed clone on the host and resolve the base to a commit."""

    kind: Literal["repo_attach"] = "repo_attach"
    repository: str
    source: str
    clone: str
    """Relative to the host's data folder; shared by all tasks on the same source."""
    base_ref: str | None


class WorktreeRequest(Closed):
    """Make a fresh branch at the attached base commit and a worktree on it."""

    kind: Literal["worktree"] = "worktree"
    repository: str
    source: str
    clone: str
    path: str
    """Relative to the host's data folder."""
    branch: str


class LaunchConfiguration(Closed):
    """What the shim needs to start the agent, resolved from the profile at admission."""

    profile: str
    argv: tuple[str, ...]
    environment: tuple[str, ...]
    """Names that may be passed on from the worker's environment."""
    working_directory: str
    """Relative to the host's data folder."""
    time_limit_s: int
    prompt: str


class SessionPrepareRequest(Closed):
    """Write the session's row and its launch configuration."""

    kind: Literal["session_prepare"] = "session_prepare"
    session_id: str
    launch: LaunchConfiguration


class AgentLaunchRequest(Closed):
    """Arm the launch; Complete admits the run."""

    kind: Literal["agent_launch"] = "agent_launch"
    session_id: str
    dispatch_key: str


StepRequest = Annotated[
    RepoAttachRequest | WorktreeRequest | SessionPrepareRequest | AgentLaunchRequest,
    Field(discriminator="kind"),
]
STEP_REQUEST: TypeAdapter[StepRequest] = TypeAdapter(StepRequest)

ROW_ONLY_KINDS: Final = frozenset({"session_prepare", "agent_launch"})
"""Kinds that only write rows: effect and success are one transaction, without ``unknown``."""

LONG_KINDS: Final = frozenset({"repo_attach"})
"""Kinds that may take longer than a workflow task: regular activities with a heartbeat."""


class PlannedStep(Closed):
    """One required effect. ``key`` is unique within the plan, e.g. ``worktree:0``."""

    key: str
    request: StepRequest

    @property
    def kind(self) -> str:
        return self.request.kind

    def request_hash(self) -> str:
        return request_hash(self.request)


class PlannedRun(Closed):
    """The run that Complete admits, with reference and version pinned at admission."""

    workflow_ref: str
    workflow_version: str
    dispatch_key: str
    session_id: str


class Plan(Closed):
    """The manifest resolved into typed steps with complete requests, the host, and the run."""

    operation_id: str
    task_id: str
    host_id: str
    steps: tuple[PlannedStep, ...]
    run: PlannedRun | None = None

    def digest(self) -> str:
        return digest(Domain.PLAN, self.model_dump(mode="json"))


def request_hash(request: StepRequest) -> str:
    """Hash of one step's request."""
    return digest(Domain.REQUEST, request.model_dump(mode="json"))


def idempotency_key(operation_id: str, kind: str, step_key: str, request_digest: str) -> str:
    """The deterministic key of one step: what marks an effect as ours (design 2-steps)."""
    return digest(Domain.IDEMPOTENCY, [operation_id, kind, step_key, request_digest])


def launch_dispatch_key(operation_id: str, session_id: str) -> str:
    """The dispatch key of a creation's own run (design 3-runs-and-decisions)."""
    return f"task-launch/{operation_id}/{session_id}"
