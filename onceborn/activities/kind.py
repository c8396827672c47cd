"""What the driver knows of a step kind. A new kind is one file and one line in ``registry.py``."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, Literal, Protocol, TypeVar

from sqlalchemy import Connection

from ..runtime.ledger.database import Database
from ..runtime.protocol.errors import OncebornError
from ..runtime.protocol.evidence import Evidence
from ..runtime.protocol.plan import StepRequest

R = TypeVar("R", bound=StepRequest)


@dataclass(frozen=True, slots=True)
class Step(Generic[R]):
    """One step as its kind sees it."""

    operation_id: str
    task_id: str
    workspace_id: str
    key: str
    request: R
    idempotency_key: str
    """Deterministic; what marks an effect in the world as this step's (design 2-steps)."""


# -- what an observation can show -----------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Present:
    """The effect exists exactly as asked for."""

    evidence: Evidence


@dataclass(frozen=True, slots=True)
class Absent:
    """Nothing of it exists; ``proof`` says what was looked at. JSON."""

    proof: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class OursHalfMade:
    """A part of it exists and is provably ours; ``proof`` says which and by what mark. JSON."""

    proof: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Conflict:
    """Something that is proven not ours stands where the effect should be. It is not touched."""

    code: str
    reason: str


@dataclass(frozen=True, slots=True)
class Undetermined:
    """It could not be told; looked at again later, and parked in time."""

    reason: str


Observation = Present | Absent | OursHalfMade | Conflict | Undetermined


# -- what an undoing can end in -------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Compensated:
    """The effect is gone (or never was). ``proof`` is what a look afterwards showed. JSON."""

    proof: Mapping[str, Any]


Disposition = Literal["quarantined", "pending"]
"""``quarantined``: it may hold somebody's work; the runtime never touches it again. ``pending``:
seen to be ours and clean, and only not removable now; undone again later by the same
``compensate``, which judges it anew. What is not known to be clean is never ``pending``."""


@dataclass(frozen=True, slots=True)
class Transferred:
    """Handed to a durable cleanup job: ``proof`` has paths, marks and a list of what is in it."""

    proof: Mapping[str, Any]
    disposition: Disposition = "quarantined"


Undone = Compensated | Transferred | Undetermined


# -- how a perform can fail -----------------------------------------------------------------------


class StepFailed(OncebornError):
    """The step cannot succeed, whatever is tried: permanent, with a stable code.

    ``StepFailed("worktree.branch_exists", "branch x exists ...", branch="x")``. Raised only where
    nothing of ours was left behind, or what was is found by ``observe``.
    """

    def __init__(self, reason_code: str, message: str, **fields: Any) -> None:
        super().__init__(message, **fields)
        self.reason_code = reason_code


class StepRetry(OncebornError):
    """The step did not succeed this time; it is observed and tried again later."""

    def __init__(self, reason_code: str, message: str, **fields: Any) -> None:
        super().__init__(message, **fields)
        self.reason_code = reason_code


@dataclass(frozen=True, slots=True)
class Host:
    """The folders of one host. All absolute, symbolic links resolved."""

    host_id: str
    data: Path
    repository_roots: tuple[Path, ...] = ()
    """Local repositories may be attached from below these only."""
    git_time_limit_s: float = 900.0

    def path(self, relative: str) -> Path:
        """A path of a plan, below the data folder.

        Raises:
            StepFailed: it would leave the data folder.
        """
        joined = self.data / relative
        resolved = joined.parent.resolve() / joined.name
        if not resolved.is_relative_to(self.data) or ".." in Path(relative).parts:
            raise StepFailed("path.escapes", f"{relative} is not below the data folder")
        return resolved


@dataclass(slots=True)
class World:
    """What a step may touch, given by the driver for one attempt.

    ``guard`` reads fence, state and attempt token again and raises ``FenceLost`` if any of them has
    changed: it is called before **every** mutation. ``lock_fds`` are the descriptors of the host
    locks that every child process inherits.
    """

    host: Host
    database: Database
    guard: Callable[[], None]
    heartbeat: Callable[[], None]
    """Called by long work at least every few seconds: renews lease and liveness."""
    transaction: Callable[[], AbstractContextManager[Connection]]
    """A ledger transaction that has checked fence, state and token; for a kind's own rows."""
    lock_fds: tuple[int, ...] = ()
    warnings: list[str] = field(default_factory=list)

    def heartbeats(self) -> Iterator[None]:
        """Beats for as long as it is iterated."""
        while True:
            self.heartbeat()
            yield


class HostKind(Protocol[R]):
    """A kind whose effect is on the host. All four run under the step's host lock."""

    @property
    def name(self) -> str: ...

    def resource(self, step: Step[R]) -> str:
        """The name of the one thing that the host lock stands for, e.g. ``clone/<name>``."""
        ...

    def observe(self, step: Step[R], world: World) -> Observation: ...

    def perform(self, step: Step[R], world: World) -> None:
        """Convergent; may be cut off at any instruction. Raises StepFailed or StepRetry."""
        ...

    def compensate(self, step: Step[R], world: World) -> Undone:
        """Undo what is provably ours; harmless where there is nothing."""
        ...


class RowKind(Protocol[R]):
    """A kind that only writes rows, in the transaction that records its success."""

    @property
    def name(self) -> str: ...

    def apply(self, step: Step[R], connection: Connection, database: Database) -> Evidence:
        """Write the rows and say what they are. Raises StepFailed."""
        ...

    def retract(
        self, step: Step[R], connection: Connection, database: Database
    ) -> Mapping[str, Any]:
        """Delete our untouched rows; returns the proof. Raises StepRetry if they are in use."""
        ...


class Contents(Protocol):
    """What a quarantined entry holds now."""

    @property
    def digest(self) -> str:
        """Changes with whatever is in it; an entry that holds nothing any more has one too."""
        ...

    def facts(self) -> Mapping[str, Any]:
        """For people and programs. JSON."""
        ...


class KeptKind(Protocol):
    """How what a kind of step left in quarantine is looked at, and removed for an operator."""

    def contents(
        self, job_id: str, step: Step[Any], proof: Mapping[str, Any], host: Host
    ) -> Contents:
        """What it holds now. Reads files only."""
        ...

    def purge(
        self, job_id: str, step: Step[Any], proof: Mapping[str, Any], world: World, digest: str
    ) -> Mapping[str, Any]:
        """Remove it, under the step's host lock, if it still is what ``digest`` was of.

        Returns what was removed. Cut off at any instruction, it is looked at and named again.

        Raises:
            EntryChanged, EntryRefused: nothing was removed.
        """
        ...


def as_json(document: Mapping[str, Any]) -> str:
    """A proof as compact JSON."""
    return json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
