"""What the loop asks of the driver, and what it gets back. Plain data: it travels by Temporal."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from . import rules
from .plan import LONG_KINDS
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


Order = StepOrder | SettleOrder


def order_of(action: rules.Action, ref: OperationRef) -> tuple[str, Order] | None:
    """The name of what carries the action out, and its argument.

    Steps are named by verb and kind (``perform_worktree``), so that the engine's history reads like
    the plan. ``None`` for what needs nobody: ``Wait`` and ``Stop``.
    """
    match action:
        case rules.Perform(step):
            return _step(Verb.PERFORM, step, ref)
        case rules.Resolve(step):
            return _step(Verb.RESOLVE, step, ref)
        case rules.Compensate(step):
            return _step(Verb.COMPENSATE, step, ref)
        case rules.RequireUndo():
            return _move("require_undo", ref)
        case rules.FinishRelease():
            return _move("finish_release", ref)
        case rules.EnterCompletion():
            return _move("enter_completion", ref)
        case rules.CommitCompletion():
            return _move("commit_completion", ref)
        case rules.Abort():
            return _move("abort", ref)
        case rules.Park(reason):
            return _move("park", ref, reason)
        case rules.DispatchRun(run_id):
            return _move("dispatch_run", ref, run_id)
        case rules.Wait() | rules.Stop():
            return None


LONG_STEPS_QUEUE: Final = ".long"
"""Added to a host's task queue: where its long steps wait for one of the few places they have."""


def is_long(order: StepOrder) -> bool:
    """Whether the order may outlast a workflow task. Undoing never does."""
    return order.expected.kind in LONG_KINDS and order.verb is not Verb.COMPENSATE


def step_order_name(verb: Verb, kind: str) -> str:
    """The name under which a worker offers to drive steps of a kind."""
    return f"{verb.value}_{kind}"


def _step(verb: Verb, step: StepView, ref: OperationRef) -> tuple[str, Order]:
    name = step_order_name(verb, step.kind)
    return name, StepOrder(ref.operation_id, ref.fence, verb, step)


def _move(name: str, ref: OperationRef, detail: str = "") -> tuple[str, Order]:
    return name, SettleOrder(ref.operation_id, ref.fence, detail)
