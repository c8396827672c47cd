"""The states and the only transitions between them.

docs/states.md is generated from these tables (``make docs``); a test holds it current.
Source: design 1-protocol, 'Operation states' and 'Step states'.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final


class OperationState(StrEnum):
    """Where one creation stands. Parked is a flag beside the state, not a state."""

    PREPARING = "preparing"
    PREPARING_RELEASE = "preparing_release"
    COMPLETING = "completing"
    COMPLETED = "completed"
    ABORTED = "aborted"


class StepState(StrEnum):
    """Where one required effect stands."""

    PLANNED = "planned"
    RUNNING = "running"
    RETRY_WAIT = "retry_wait"
    UNKNOWN = "unknown"
    FAILED = "failed"
    SUCCEEDED = "succeeded"
    ARMED = "armed"
    CANCELLED = "cancelled"


class CompensationState(StrEnum):
    """Where the undoing of one effect stands."""

    NONE = "none"
    REQUIRED = "required"
    RUNNING = "running"
    RETRY_WAIT = "retry_wait"
    UNKNOWN = "unknown"
    COMPENSATED = "compensated"
    TRANSFERRED = "transferred"


class Outcome(StrEnum):
    """The four outcomes of a create, and how each answers (design 1-protocol)."""

    CREATED = "created"
    FOUND_SETTLED = "found_settled"
    FOUND_UNSETTLED = "found_unsettled"
    CREATED_IDENTITY_LOST = "created_identity_lost"

    @property
    def deduplicated(self) -> bool:
        return self in (Outcome.FOUND_SETTLED, Outcome.FOUND_UNSETTLED)

    @property
    def creation_complete(self) -> bool:
        return self is not Outcome.FOUND_UNSETTLED


_O, _S, _C = OperationState, StepState, CompensationState

OPERATION_TRANSITIONS: Final[dict[OperationState, frozenset[OperationState]]] = {
    _O.PREPARING: frozenset({_O.PREPARING_RELEASE, _O.COMPLETING, _O.ABORTED}),
    _O.PREPARING_RELEASE: frozenset({_O.PREPARING, _O.ABORTED}),
    _O.COMPLETING: frozenset({_O.COMPLETED}),
    _O.COMPLETED: frozenset(),
    _O.ABORTED: frozenset(),
}

STEP_TRANSITIONS: Final[dict[StepState, frozenset[StepState]]] = {
    # Row-only kinds go from planned to their end in one transaction and know no running.
    _S.PLANNED: frozenset({_S.RUNNING, _S.SUCCEEDED, _S.ARMED, _S.FAILED}),
    _S.RUNNING: frozenset(
        # running -> running is a takeover: a new attempt with a new token.
        {_S.RUNNING, _S.SUCCEEDED, _S.RETRY_WAIT, _S.UNKNOWN, _S.FAILED}
    ),
    _S.RETRY_WAIT: frozenset({_S.RUNNING}),
    _S.UNKNOWN: frozenset({_S.RUNNING}),
    _S.ARMED: frozenset({_S.SUCCEEDED, _S.CANCELLED}),
    _S.FAILED: frozenset(),
    _S.SUCCEEDED: frozenset(),
    _S.CANCELLED: frozenset(),
}

COMPENSATION_TRANSITIONS: Final[dict[CompensationState, frozenset[CompensationState]]] = {
    _C.NONE: frozenset({_C.REQUIRED}),
    # Row-only kinds go to compensated, or to waiting for another try, in one transaction.
    _C.REQUIRED: frozenset({_C.RUNNING, _C.COMPENSATED, _C.RETRY_WAIT}),
    _C.RUNNING: frozenset({_C.RUNNING, _C.COMPENSATED, _C.TRANSFERRED, _C.RETRY_WAIT, _C.UNKNOWN}),
    _C.RETRY_WAIT: frozenset({_C.RUNNING, _C.COMPENSATED, _C.RETRY_WAIT}),
    _C.UNKNOWN: frozenset({_C.RUNNING}),
    _C.COMPENSATED: frozenset(),
    _C.TRANSFERRED: frozenset(),
}

OPEN_OPERATION_STATES: Final = (_O.PREPARING, _O.PREPARING_RELEASE, _O.COMPLETING)
"""In SQL order: the states that the sweep and the capacity count look at."""

COMPENSATION_SETTLED: Final = frozenset({_C.COMPENSATED, _C.TRANSFERRED})
COMPENSATION_PENDING: Final = frozenset({_C.REQUIRED, _C.RUNNING, _C.RETRY_WAIT, _C.UNKNOWN})
