"""What the loop asks of the driver, and what it gets back. Plain data: it travels by Temporal."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from .snapshot import Snapshot, StepView


class Verb(StrEnum):
    """What to do with a step."""

    PERFORM = "perform"
    RESOLVE = "resolve"
    COMPENSATE = "compensate"


@dataclass(frozen=True, slots=True)
class StepOrder:
    """Drive one step, if it still is as ``expected`` shows it."""

    operation_id: str
    fence: int
    verb: Verb
    expected: StepView


@dataclass(frozen=True, slots=True)
class Looked:
    """The snapshot after the order. ``busy``: somebody holds the host lock; ask again later."""

    snapshot: Snapshot
    busy: bool = False


@dataclass(frozen=True, slots=True)
class OperationRef:
    """One operation under one fence."""

    operation_id: str
    fence: int


@dataclass(frozen=True, slots=True)
class SettleOrder:
    """Move the operation itself; ``detail`` is a reason or an ID, as the move needs it."""

    operation_id: str
    fence: int
    detail: str = ""
