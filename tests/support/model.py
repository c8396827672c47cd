"""An abstract world for the rules: every snapshot that the loop can meet, and what is true in it.

A ``Point`` is a snapshot together with what the ledger does not know: which effects exist. Its
successors are written from the protocol's text, not from the driver: all that an action can lead to
(success, a passing failure, a lost answer, a final failure with and without something half-made, a
crash after the claim), and all that can happen beside it (a release or a workspace deletion at any
moment, a lost owner, a spent budget, an operator's un-park). Counters that no rule reads stay 0.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

from onceborn.runtime.protocol import rules
from onceborn.runtime.protocol.snapshot import Snapshot, StepView
from onceborn.runtime.protocol.states import CompensationState as C
from onceborn.runtime.protocol.states import OperationState as O
from onceborn.runtime.protocol.states import StepState as S

Effect = Literal["none", "half", "full", "moved"]
"""``moved``: handed to a cleanup job or quarantine, which tracks it."""
Transition = tuple[Any, Any]

LATER: dict[str, Any] = {"due": False, "wait_ms": 1000}
NOW: dict[str, Any] = {"due": True, "wait_ms": 0}


@dataclass(frozen=True, slots=True)
class Point:
    """A snapshot, and which effects really exist, in the plan's order."""

    seen: Snapshot
    effects: tuple[Effect, ...]

    def with_step(self, at: int, effect: Effect, **changes: Any) -> Point:
        steps, effects = list(self.seen.steps), list(self.effects)
        steps[at], effects[at] = replace(steps[at], **changes), effect
        return Point(replace(self.seen, steps=tuple(steps)), tuple(effects))

    def with_operation(self, **changes: Any) -> Point:
        return Point(replace(self.seen, **changes), self.effects)


@dataclass(frozen=True, slots=True)
class Edge:
    """One way on. ``runtime``: the runtime and time alone take it, without anybody's command."""

    to: Point
    took: tuple[Transition, ...] = ()
    runtime: bool = True


def start(kinds: Iterable[str]) -> Point:
    """A creation that was handed to its first owner."""
    steps = tuple(
        StepView(key=f"{kind}:{at}", kind=kind, state=S.PLANNED, attempt=0)
        for at, kind in enumerate(kinds)
    )
    seen = Snapshot(operation_id="op", state=O.PREPARING, fence=1, mine=True, steps=steps)
    return Point(seen, ("none",) * len(steps))


def explore(kinds: Iterable[str]) -> dict[Point, list[Edge]]:
    """Every point that can be reached, breadth first, with its edges."""
    first = start(kinds)
    graph: dict[Point, list[Edge]] = {}
    queue = deque([first])
    met = {first}
    while queue:
        point = queue.popleft()
        graph[point] = [*acting(point), *happening(point)]
        for edge in graph[point]:
            if edge.to not in met:
                met.add(edge.to)
                queue.append(edge.to)
    return graph


# -- what the chosen action can lead to -----------------------------------------------------------


def acting(point: Point) -> Iterator[Edge]:
    """All outcomes of the action that the rules choose."""
    seen = point.seen
    match rules.next_action(seen):
        case rules.Perform(step):
            at = seen.steps.index(step)
            yield from _row_forward(point, at) if step.row_only else _perform(point, at)
        case rules.Resolve(step):
            yield from _resolve(point, seen.steps.index(step))
        case rules.Compensate(step):
            at = seen.steps.index(step)
            yield from _row_back(point, at) if step.row_only else _compensate(point, at)
        case rules.RequireUndo():
            yield _require_undo(point)
        case rules.FinishRelease():
            after = point.with_operation(state=O.PREPARING)
            yield Edge(after, ((O.PREPARING_RELEASE, O.PREPARING),))
        case rules.EnterCompletion():
            after = point.with_operation(state=O.COMPLETING)
            yield Edge(after, ((O.PREPARING, O.COMPLETING),))
            yield Edge(_park(point))  # a hash that does not match
        case rules.CommitCompletion():
            yield _complete(point)
            yield Edge(_park(point))
        case rules.Abort():
            # The fence is raised: nobody owns what has ended.
            after = point.with_operation(state=O.ABORTED, mine=False)
            yield Edge(after, ((O.PREPARING, O.ABORTED),))
        case rules.Park():
            yield Edge(_park(point))
        case rules.DispatchRun():
            yield Edge(point.with_operation(run_id=None))
        case rules.Wait():
            yield Edge(_time_passes(point))
        case rules.Stop():
            pass


def _perform(point: Point, at: int) -> Iterator[Edge]:
    claim = (point.seen.steps[at].state, S.RUNNING)
    assert point.effects[at] == "none", "a step is performed where its effect may exist"
    for effect in ("none", "half", "full"):
        yield Edge(point.with_step(at, effect, state=S.RUNNING, **NOW), (claim,))
        # What a perform left is observed, and the half of it may be cleaned, in the same attempt.
        for edge in _observed(point, at, effect):
            yield Edge(edge.to, (claim, *edge.took))


def _resolve(point: Point, at: int) -> Iterator[Edge]:
    claim = (point.seen.steps[at].state, S.RUNNING)
    yield Edge(point.with_step(at, point.effects[at], state=S.RUNNING, **NOW), (claim,))
    for edge in _observed(point, at, point.effects[at]):
        yield Edge(edge.to, (claim, *edge.took))


def _observed(point: Point, at: int, effect: Effect) -> Iterator[Edge]:
    """How an attempt can end, by what is there when it looks."""

    def end(state: S, left: Effect, **changes: Any) -> Edge:
        after = point.with_step(at, left, state=state, **{**NOW, "exhausted": False, **changes})
        return Edge(after, ((S.RUNNING, state),))

    if effect == "full":
        yield end(S.SUCCEEDED, "full")
    else:
        for when in (NOW, LATER):  # absent, or half-made and cleaned
            yield end(S.RETRY_WAIT, "none", **when)
        yield end(S.FAILED, "none")  # for good, or a conflict that is proven not ours
    if effect == "half":
        # For good, with something of ours left: it becomes a compensation.
        failed = end(S.FAILED, "half", compensation=C.REQUIRED)
        yield Edge(failed.to, (*failed.took, (C.NONE, C.REQUIRED)))
        # Killed in the middle of cleaning it.
        yield Edge(point.with_step(at, "none", state=S.RUNNING, **NOW))
    for exhausted in (False, True):
        yield end(S.UNKNOWN, effect, **LATER, exhausted=exhausted)


def _compensate(point: Point, at: int) -> Iterator[Edge]:
    step, effect = point.seen.steps[at], point.effects[at]
    claim = (step.compensation, C.RUNNING)

    def end(state: C, left: Effect, **changes: Any) -> Edge:
        values = {**NOW, "exhausted": False, **changes}
        after = point.with_step(at, left, compensation=state, **values)
        took = (claim,) if state is C.RUNNING else (claim, (C.RUNNING, state))
        return Edge(after, took)

    yield end(C.COMPENSATED, "none")
    if effect != "none":
        yield end(C.TRANSFERRED, "moved")
    for left in (effect, "none"):  # not undone; or undone, and the answer lost
        yield end(C.RUNNING, left)
        for exhausted in (False, True):
            yield end(C.UNKNOWN, left, **LATER, exhausted=exhausted)
            yield end(C.RETRY_WAIT, left, **LATER, exhausted=exhausted)


def _row_forward(point: Point, at: int) -> Iterator[Edge]:
    done = S.ARMED if point.seen.steps[at].kind == "agent_launch" else S.SUCCEEDED
    yield Edge(point.with_step(at, "full", state=done), ((S.PLANNED, done),))
    yield Edge(point.with_step(at, "none", state=S.FAILED), ((S.PLANNED, S.FAILED),))


def _row_back(point: Point, at: int) -> Iterator[Edge]:
    before = point.seen.steps[at].compensation
    if not point.seen.steps[at].exhausted:
        later = point.with_step(at, point.effects[at], compensation=C.RETRY_WAIT, **LATER)
        yield Edge(later, ((before, C.RETRY_WAIT),))
    took: list[Transition] = [(before, C.COMPENSATED)]
    state = point.seen.steps[at].state
    if state is S.ARMED:
        took.append((S.ARMED, S.CANCELLED))
        state = S.CANCELLED
    after = point.with_step(at, "none", state=state, compensation=C.COMPENSATED)
    yield Edge(after, tuple(took))


def _require_undo(point: Point) -> Edge:
    steps = tuple(
        replace(step, compensation=C.REQUIRED)
        if step.state in (S.SUCCEEDED, S.ARMED) and step.compensation is C.NONE
        else step
        for step in point.seen.steps
    )
    return Edge(point.with_operation(steps=steps), ((C.NONE, C.REQUIRED),))


def _complete(point: Point, *, deleted: bool = False) -> Edge:
    took: list[Transition] = [(O.COMPLETING, O.COMPLETED)]
    steps = []
    for step in point.seen.steps:
        if step.state is S.ARMED:
            took.append((S.ARMED, S.SUCCEEDED))
        steps.append(replace(step, state=S.SUCCEEDED) if step.state is S.ARMED else step)
    launches = any(step.kind == "agent_launch" for step in steps)
    after = point.with_operation(
        state=O.COMPLETED,
        mine=False,
        steps=tuple(steps),
        deleted=deleted,
        run_id="run" if launches and not deleted else None,
    )
    return Edge(after, tuple(took), runtime=not deleted)


def _park(point: Point) -> Point:
    return point.with_operation(parked="a reason", budget_spent=False)


def _time_passes(point: Point) -> Point:
    return point.with_operation(steps=tuple(replace(step, **NOW) for step in point.seen.steps))


# -- what can happen beside it --------------------------------------------------------------------


def happening(point: Point) -> Iterator[Edge]:
    """All that others can do, at any moment of an operation that has not ended."""
    seen = point.seen
    if seen.state in (O.COMPLETED, O.ABORTED):
        return
    yield Edge(_time_passes(point))
    if seen.mine:
        yield Edge(point.with_operation(mine=False))
    else:
        yield Edge(point.with_operation(mine=True))
        yield Edge(point.with_operation(mine=True, budget_spent=seen.parked is None))
    if seen.parked is not None:
        steps = tuple(replace(step, exhausted=False) for step in seen.steps)
        yield Edge(point.with_operation(parked=None, steps=steps), runtime=False)
    if seen.mine and seen.parked is None and seen.state is not O.COMPLETING:
        # An attempt that was thought dead, under the same fence: a release does not stop it.
        for at, step in enumerate(seen.steps):
            if step.state is S.RUNNING:
                yield from _observed(point, at, point.effects[at])
    if seen.state is O.PREPARING and not seen.deleted:
        after = point.with_operation(state=O.PREPARING_RELEASE)
        yield Edge(after, ((O.PREPARING, O.PREPARING_RELEASE),), runtime=False)
    if not seen.deleted:
        yield from _deletion(point)


def _deletion(point: Point) -> Iterator[Edge]:
    """The workspace is deleted: the operation is fenced, and what was made is to be undone."""
    if point.seen.state is O.COMPLETING:
        yield _complete(point, deleted=True)
        return
    gone = point.with_operation(deleted=True, mine=False)
    yield Edge(gone, runtime=False)
    if point.seen.state is O.PREPARING_RELEASE:
        # Or the deletion ends the release under way itself.
        took = ((O.PREPARING_RELEASE, O.PREPARING),)
        yield Edge(gone.with_operation(state=O.PREPARING), took, runtime=False)
    for at, step in enumerate(gone.seen.steps):
        if step.state is S.ARMED:
            cancelled = gone.with_step(at, "none", state=S.CANCELLED)
            if step.compensation is C.NONE:
                yield Edge(cancelled, ((S.ARMED, S.CANCELLED),), runtime=False)
