"""The one engine: look at an operation and name the one legal thing to do.

Pure and total. A first run, a retry, a recovery, an operator's un-park and the undoing of a deleted
workspace all ask this function; they differ only in what the ledger says. Source: design
1-protocol, 'Crash-only'.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from .snapshot import Snapshot, StepView
from .states import COMPENSATION_SETTLED as UNDONE
from .states import CompensationState as C
from .states import OperationState as O
from .states import StepState as S


class StopReason(StrEnum):
    """Why there is nothing left to do for this owner."""

    COMPLETED = "completed"
    ABORTED = "aborted"
    PARKED = "parked"
    FENCE_LOST = "fence_lost"


@dataclass(frozen=True, slots=True)
class Perform:
    """Drive a step forward: claim, and under the host lock observe, perform, observe, record."""

    step: StepView


@dataclass(frozen=True, slots=True)
class Resolve:
    """Find out by observing what became of an attempt whose result is not known."""

    step: StepView


@dataclass(frozen=True, slots=True)
class Compensate:
    """Undo one effect of ours, with proof, or hand it to a durable cleanup job."""

    step: StepView


@dataclass(frozen=True, slots=True)
class RequireUndo:
    """Mark every effect that exists as one to be undone."""


@dataclass(frozen=True, slots=True)
class FinishRelease:
    """Clear the identity whose release was claimed, and go back to preparing."""


@dataclass(frozen=True, slots=True)
class EnterCompletion:
    """Complete, phase A."""


@dataclass(frozen=True, slots=True)
class CommitCompletion:
    """Complete, phase B."""


@dataclass(frozen=True, slots=True)
class Abort:
    """End the operation aborted; every effect is proven absent, compensated or transferred."""


@dataclass(frozen=True, slots=True)
class Park:
    """Leave the operation to an operator; ``reason`` says why. Releases nothing."""

    reason: str


@dataclass(frozen=True, slots=True)
class DispatchRun:
    """Start the admitted run in Temporal."""

    run_id: str


@dataclass(frozen=True, slots=True)
class Wait:
    """Nothing may be done before ``wait_ms`` milliseconds have passed."""

    wait_ms: int


@dataclass(frozen=True, slots=True)
class Stop:
    """This owner is done."""

    reason: StopReason


Action = (
    Perform
    | Resolve
    | Compensate
    | RequireUndo
    | FinishRelease
    | EnterCompletion
    | CommitCompletion
    | Abort
    | Park
    | DispatchRun
    | Wait
    | Stop
)


def next_action(snapshot: Snapshot) -> Action:
    """The one legal action. Total: every snapshot has one, and it never raises."""
    if snapshot.state is O.COMPLETED:
        return DispatchRun(snapshot.run_id) if snapshot.run_id else Stop(StopReason.COMPLETED)
    if snapshot.state is O.ABORTED:
        return Stop(StopReason.ABORTED)
    if not snapshot.mine:
        return Stop(StopReason.FENCE_LOST)
    if snapshot.parked is not None:
        return Stop(StopReason.PARKED)
    if snapshot.budget_spent:
        return Park("no progress over as many claims as the budget allows")
    if snapshot.blocked is not None:
        return Park(f"waits too long for {snapshot.blocked}")
    if snapshot.state is O.COMPLETING:
        return CommitCompletion()
    if snapshot.state is O.PREPARING_RELEASE:
        return FinishRelease()
    return _unsettled(snapshot) or (_undo(snapshot) if undoing(snapshot) else _forward(snapshot))


def undoing(snapshot: Snapshot) -> bool:
    """Whether the operation's way leads to Abort: a step failed for good, or it was deleted."""
    return snapshot.deleted or any(step.state is S.FAILED for step in snapshot.steps)


def _unsettled(snapshot: Snapshot) -> Action | None:
    # Before anything else: no step may be left in doubt, whichever way the operation goes.
    for step in snapshot.steps:
        if step.state is S.RUNNING:
            return Resolve(step)
        if step.state is S.UNKNOWN:
            return _when_due(step, Resolve(step), "is unknown and observing does not settle it")
    return None


def _forward(snapshot: Snapshot) -> Action:
    for step in snapshot.steps:
        if step.state is S.PLANNED:
            return Perform(step)
        if step.state is S.RETRY_WAIT:
            return Perform(step) if step.due else Wait(step.wait_ms)
    return EnterCompletion()


def _undo(snapshot: Snapshot) -> Action:
    if any(_exists(step) and step.compensation is C.NONE for step in snapshot.steps):
        return RequireUndo()
    for step in reversed(snapshot.steps):
        if step.compensation in (C.REQUIRED, C.RUNNING):
            return Compensate(step)
        if step.compensation in (C.RETRY_WAIT, C.UNKNOWN):
            return _when_due(step, Compensate(step), "cannot be undone")
    return Abort()


def _exists(step: StepView) -> bool:
    return step.state in (S.SUCCEEDED, S.ARMED)


def _when_due(step: StepView, action: Action, complaint: str) -> Action:
    if step.exhausted:
        return Park(f"step {step.key} {complaint}")
    return action if step.due else Wait(step.wait_ms)


def may_complete(snapshot: Snapshot) -> bool:
    """The part of the Complete predicate that states decide; hashes are checked beside it."""
    return (
        snapshot.state in (O.PREPARING, O.COMPLETING)
        and not snapshot.deleted
        and all(
            step.compensation is C.NONE
            and step.state is (S.ARMED if step.kind == "agent_launch" else S.SUCCEEDED)
            for step in snapshot.steps
        )
    )


def may_abort(snapshot: Snapshot) -> bool:
    """The Abort predicate (design 1-protocol)."""
    return (
        snapshot.state is O.PREPARING
        and undoing(snapshot)
        and all(
            (
                step.state in (S.PLANNED, S.RETRY_WAIT, S.FAILED, S.CANCELLED)
                and step.compensation in UNDONE | {C.NONE}
            )
            or (step.state is S.SUCCEEDED and step.compensation in UNDONE)
            for step in snapshot.steps
        )
    )
