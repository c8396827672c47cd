"""What ``next_action`` looks at. Times are already decided by the database: booleans and waits."""

from __future__ import annotations

from dataclasses import dataclass

from .plan import ROW_ONLY_KINDS
from .states import CompensationState, OperationState, StepState


@dataclass(frozen=True, slots=True)
class StepView:
    """One step as the ledger has it."""

    key: str
    kind: str
    state: StepState
    attempt: int
    compensation: CompensationState = CompensationState.NONE
    undo_attempt: int = 0
    due: bool = True
    """A waiting step or compensation may be tried (again) now."""
    wait_ms: int = 0
    """Milliseconds until it is due; 0 where it is."""
    exhausted: bool = False
    """As many looks as allowed have left it undetermined: it parks the operation."""

    @property
    def row_only(self) -> bool:
        return self.kind in ROW_ONLY_KINDS


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One operation with its steps in the plan's order, read in one transaction."""

    operation_id: str
    state: OperationState
    fence: int
    mine: bool
    """The fence is the one that the reader holds."""
    steps: tuple[StepView, ...]
    parked: str | None = None
    budget_spent: bool = False
    """As many claims as allowed ended without progress: it is parked."""
    blocked: str | None = None
    """What it has waited for longer than anybody may hold it."""
    deleted: bool = False
    """The workspace, and with it the task, was deleted: undo."""
    run_id: str | None = None
    """The run that Complete admitted and that is not started in Temporal yet."""
