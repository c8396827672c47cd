"""The documents that the API takes and gives, exactly. OpenAPI is generated from these.

Typed dictionaries, because optional fields are omitted and never null.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, NotRequired

from pydantic import Field, JsonValue, with_config

# typing's own does not carry pydantic's configuration before Python 3.12.
from typing_extensions import TypedDict

from ...runtime.protocol.evidence import Evidence
from ...runtime.protocol.plan import Manifest
from ...runtime.protocol.states import CompensationState, OperationState, StepState

Time = Annotated[str, Field(json_schema_extra={"format": "date-time"})]


class CreateTask(Manifest):
    """A creation manifest, and the identity of the entity that the task is for."""

    external_id: str | None = Field(
        default=None,
        description=(
            "The caller's own name for the entity. White space at the ends is trimmed; at most 255"
            " bytes of UTF-8 without control characters; case and form are kept. At most one task"
            " of a workspace holds it. Empty or null is the same as absent."
        ),
    )
    workspace_id: str | None = Field(
        default=None, description="Default: the workspace of the token."
    )


@with_config(extra="forbid")
class Repository(TypedDict):
    """A repository of the task. Branch and path appear once its worktree is made."""

    repository: str
    source: str
    base_commit: str
    branch: NotRequired[str]
    path: NotRequired[str]


@with_config(extra="forbid")
class Run(TypedDict):
    """The agent run that the creation started."""

    id: str
    state: Literal["admitted", "started", "running", "succeeded", "failed", "cancelled", "lost"]


@with_config(extra="forbid")
class Task(TypedDict):
    """A task. Whether its creation is complete is no field of it."""

    id: str
    workspace_id: str
    number: int
    title: str
    description: str
    metadata: dict[str, JsonValue]
    revision: int
    created_at: Time
    archived_at: NotRequired[Time]
    external_id: NotRequired[str]
    repositories: list[Repository]
    session_id: NotRequired[str]
    run: NotRequired[Run]


@with_config(extra="forbid")
class CreationResult(Task):
    """The answer to a create or a lookup: one of the four outcomes.

    `deduplicated` false, `creation_complete` true: created by this request (with an external ID
    given and absent here: the identity was released meanwhile). Both true: found, complete.
    `deduplicated` true, `creation_complete` false: another create owns the identity and had not
    finished when this was read. Proceed with the task's ID, look again, or ask a human; do not
    release the identity and create again: that makes two tasks and two agents.
    """

    deduplicated: bool
    creation_complete: bool


@with_config(extra="forbid")
class TaskList(TypedDict):
    """Complete tasks, the latest first."""

    tasks: list[Task]
    next_cursor: NotRequired[str]


@with_config(extra="forbid")
class Step(TypedDict):
    """One required effect of a creation."""

    key: str
    kind: str
    state: StepState
    attempt: int
    due_at: NotRequired[Time]
    evidence: NotRequired[Evidence]
    evidence_hash: NotRequired[str]
    failure: NotRequired[dict[str, Any]]
    compensation: CompensationState
    compensation_proof: NotRequired[dict[str, Any]]


@with_config(extra="forbid")
class Creation(TypedDict):
    """How a creation stands. `outcome` appears once it is completed, `failure` once it failed."""

    task_id: str
    operation_id: str
    host_id: str
    state: OperationState
    fence: int
    parked_reason: NotRequired[str]
    outcome: NotRequired[Literal["created", "created_identity_lost"]]
    failure: NotRequired[dict[str, Any]]
    created_at: Time
    finished_at: NotRequired[Time]
    run_id: NotRequired[str]
    steps: list[Step]


@with_config(extra="forbid")
class Check(TypedDict):
    """One thing that the server needs."""

    ok: bool
    detail: NotRequired[str]


@with_config(extra="forbid")
class Readiness(TypedDict):
    """Whether creates can be served, and if not, why."""

    ready: bool
    checks: dict[str, Check]


@with_config(extra="allow")
class Problem(TypedDict):
    """A refusal (RFC 9457). `code` is stable. More fields may say more."""

    type: str
    title: str
    status: int
    detail: str
    code: str
    field: NotRequired[str]
    task_id: NotRequired[str]
    operation_id: NotRequired[str]
    step: NotRequired[str]
    reason_code: NotRequired[str]
    reason: NotRequired[str]
    undone: NotRequired[list[Any]]
