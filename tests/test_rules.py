"""The engine's laws over every snapshot that can be reached (design 1-protocol, 'Crash-only').

What is legal is written here a second time, one predicate for each kind of action, from the text of
the protocol: ``next_action`` must choose exactly what they allow, everywhere.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.model import Edge, Point, Transition, explore

from onceborn.runtime.protocol import rules
from onceborn.runtime.protocol.rules import StopReason
from onceborn.runtime.protocol.snapshot import Snapshot, StepView
from onceborn.runtime.protocol.states import (
    COMPENSATION_TRANSITIONS,
    OPERATION_TRANSITIONS,
    STEP_TRANSITIONS,
)
from onceborn.runtime.protocol.states import CompensationState as C
from onceborn.runtime.protocol.states import OperationState as O
from onceborn.runtime.protocol.states import StepState as S

PLANS: dict[str, tuple[str, ...]] = {
    "nothing": (),
    "session": ("session_prepare",),
    "repository": ("repo_attach", "worktree"),
    "launch": ("session_prepare", "agent_launch"),
    "launch alone": ("agent_launch",),
    "whole": ("repo_attach", "worktree", "session_prepare", "agent_launch"),
    "two repositories": ("repo_attach", "worktree", "repo_attach", "worktree"),
}

TABLES: tuple[dict[Any, frozenset[Any]], ...] = (
    OPERATION_TRANSITIONS,
    STEP_TRANSITIONS,
    COMPENSATION_TRANSITIONS,
)

PROTOCOL_ONLY: set[Transition] = {
    # Deletion of a workspace may end a creation that has nothing to undo in its own transaction;
    # the loop itself finishes the release first and then aborts from preparing.
    (O.PREPARING_RELEASE, O.ABORTED),
}

DONE = (S.SUCCEEDED, S.ARMED)
PENDING = (C.REQUIRED, C.RUNNING, C.RETRY_WAIT, C.UNKNOWN)

Graph = dict[Point, list[Edge]]
_graphs: dict[str, Graph] = {}


@pytest.fixture(params=PLANS)
def graph(request: pytest.FixtureRequest) -> Graph:
    """Every reachable point of one plan."""
    name: str = request.param
    if name not in _graphs:
        _graphs[name] = explore(PLANS[name])
        print(f"{name}: {len(_graphs[name])} reachable states")
    return _graphs[name]


# -- what the protocol allows ---------------------------------------------------------------------


def acts(s: Snapshot) -> bool:
    """Only the present owner acts, and nobody on what is parked or has ended."""
    ended = s.state in (O.COMPLETED, O.ABORTED)
    return s.mine and s.parked is None and not ended and not s.budget_spent


def doubtful(s: Snapshot) -> list[int]:
    """Attempts whose outcome is not known."""
    return [at for at, step in enumerate(s.steps) if step.state in (S.RUNNING, S.UNKNOWN)]


def going_back(s: Snapshot) -> bool:
    return s.deleted or any(step.state is S.FAILED for step in s.steps)


def unmarked(s: Snapshot) -> bool:
    """An effect exists that nothing says to undo."""
    return any(step.state in DONE and step.compensation is C.NONE for step in s.steps)


def clear(s: Snapshot) -> bool:
    """The owner may decide where to go: preparing, and nothing in doubt."""
    return acts(s) and s.state is O.PREPARING and not doubtful(s)


def is_next_forward(s: Snapshot, at: int) -> bool:
    """The first step of the plan that is not done, in a creation that goes forward."""
    before = all(step.state in DONE for step in s.steps[:at])
    return clear(s) and not going_back(s) and before and s.steps[at].state not in DONE


def is_next_back(s: Snapshot, at: int) -> bool:
    """The last step of the plan that is still to be undone, once every effect is marked."""
    later = any(step.compensation in PENDING for step in s.steps[at + 1 :])
    mine = s.steps[at].compensation in PENDING
    return clear(s) and going_back(s) and not unmarked(s) and mine and not later


def is_next_doubt(s: Snapshot, at: int) -> bool:
    return acts(s) and s.state is O.PREPARING and doubtful(s)[:1] == [at]


def may_perform(s: Snapshot, at: int) -> bool:
    step = s.steps[at]
    ready = step.state is S.PLANNED or (step.state is S.RETRY_WAIT and step.due)
    return is_next_forward(s, at) and ready


def may_resolve(s: Snapshot, at: int) -> bool:
    step = s.steps[at]
    ready = step.state is S.RUNNING or (step.due and not step.exhausted)
    return is_next_doubt(s, at) and ready


def may_compensate(s: Snapshot, at: int) -> bool:
    step = s.steps[at]
    started = step.compensation in (C.REQUIRED, C.RUNNING)
    return is_next_back(s, at) and (started or (step.due and not step.exhausted))


def may_wait(s: Snapshot, at: int) -> bool:
    step = s.steps[at]
    looked = (is_next_doubt(s, at) and step.state is S.UNKNOWN) or (
        is_next_back(s, at) and step.compensation in (C.RETRY_WAIT, C.UNKNOWN)
    )
    retried = is_next_forward(s, at) and step.state is S.RETRY_WAIT
    return not step.due and (retried or (looked and not step.exhausted))


def may_give_up(s: Snapshot, at: int) -> bool:
    """Parked for an operator: looking settles nothing, or undoing does not work."""
    step = s.steps[at]
    doubt = is_next_doubt(s, at) and step.state is S.UNKNOWN
    back = is_next_back(s, at) and step.compensation in (C.RETRY_WAIT, C.UNKNOWN)
    return step.exhausted and (doubt or back)


def is_out_of_budget(s: Snapshot) -> bool:
    still_open = s.state not in (O.COMPLETED, O.ABORTED)
    return still_open and s.mine and s.parked is None and s.budget_spent


def may_require_undo(s: Snapshot) -> bool:
    return clear(s) and going_back(s) and unmarked(s)


def may_finish_release(s: Snapshot) -> bool:
    return acts(s) and s.state is O.PREPARING_RELEASE


def may_enter_completion(s: Snapshot) -> bool:
    done = all(step.state in DONE and step.compensation is C.NONE for step in s.steps)
    return clear(s) and not going_back(s) and done


def may_commit_completion(s: Snapshot) -> bool:
    return acts(s) and s.state is O.COMPLETING


def may_abort(s: Snapshot) -> bool:
    undone = all(step.compensation not in PENDING for step in s.steps)
    return clear(s) and going_back(s) and not unmarked(s) and undone


def may_dispatch(s: Snapshot) -> bool:
    return s.state is O.COMPLETED and s.run_id is not None


def stops_for(s: Snapshot) -> StopReason | None:
    if s.state is O.ABORTED:
        return StopReason.ABORTED
    if s.state is O.COMPLETED:
        return StopReason.COMPLETED if s.run_id is None else None
    if not s.mine:
        return StopReason.FENCE_LOST
    return StopReason.PARKED if s.parked is not None else None


STEPWISE: dict[type[Any], Callable[[Snapshot, int], bool]] = {
    rules.Perform: may_perform,
    rules.Resolve: may_resolve,
    rules.Compensate: may_compensate,
    rules.Wait: may_wait,
    rules.Park: may_give_up,
}
WHOLE: dict[type[Any], Callable[[Snapshot], bool]] = {
    rules.RequireUndo: may_require_undo,
    rules.FinishRelease: may_finish_release,
    rules.EnterCompletion: may_enter_completion,
    rules.CommitCompletion: may_commit_completion,
    rules.Abort: may_abort,
    rules.DispatchRun: may_dispatch,
    rules.Park: is_out_of_budget,
}


def allowed(s: Snapshot) -> list[tuple[Any, ...]]:
    """All that the protocol allows, each as (kind of action, what it is about)."""
    found: list[tuple[Any, ...]] = [
        (kind, at)
        for kind, is_legal in STEPWISE.items()
        for at in range(len(s.steps))
        if is_legal(s, at)
    ]
    found += [(kind, None) for kind, is_legal in WHOLE.items() if is_legal(s)]
    reason = stops_for(s)
    return found if reason is None else [*found, (rules.Stop, reason)]


def chosen(s: Snapshot) -> tuple[Any, ...]:
    """The action of the rules in the same form."""
    action = rules.next_action(s)
    match action:
        case rules.Perform(step) | rules.Resolve(step) | rules.Compensate(step):
            return (type(action), s.steps.index(step))
        case rules.Stop(reason):
            return (rules.Stop, reason)
        case rules.Wait(wait_ms):
            (at,) = (at for at in range(len(s.steps)) if may_wait(s, at))
            assert wait_ms == s.steps[at].wait_ms > 0
            return (rules.Wait, at)
        case rules.Park(reason):
            named = [at for at, step in enumerate(s.steps) if step.key in reason.split()]
            return (rules.Park, named[0] if named else None)
        case _:
            return (type(action), None)


# -- the laws -------------------------------------------------------------------------------------


def test_exactly_one_action_is_legal_and_the_rules_choose_it(graph: Graph) -> None:
    for point in graph:
        assert allowed(point.seen) == [chosen(point.seen)], point


def test_every_action_is_chosen_somewhere() -> None:
    kinds = {type(rules.next_action(p.seen)) for name in PLANS for p in _graph(name)}
    assert kinds == set(get_args(rules.Action))


def test_every_transition_taken_is_in_the_tables(graph: Graph) -> None:
    for point, edges in graph.items():
        for edge in edges:
            for before, after in edge.took:
                assert after in _table(before)[before], (point, edge)


def test_every_change_of_state_is_a_transition_taken(graph: Graph) -> None:
    # The model may not move a state behind the back of the test above.
    for point, edges in graph.items():
        for edge in edges:
            pairs: list[Transition] = [(point.seen.state, edge.to.seen.state)]
            for old, new in zip(point.seen.steps, edge.to.seen.steps, strict=True):
                pairs += [(old.state, new.state), (old.compensation, new.compensation)]
            for before, after in pairs:
                if before is not after:
                    assert _leads(edge.took, before, after), (point, edge)


def test_every_entry_of_the_tables_is_reached() -> None:
    taken = {
        _typed(transition)
        for name in PLANS
        for edges in _graph(name).values()
        for edge in edges
        for transition in edge.took
    }
    entries = {
        _typed((before, after))
        for table in TABLES
        for before, afters in table.items()
        for after in afters
    }
    assert entries - taken == {_typed(transition) for transition in PROTOCOL_ONLY}


def test_every_state_can_still_end(graph: Graph) -> None:
    # By the runtime and time alone: no command of anybody is needed.
    backwards: dict[Point, list[Point]] = {}
    for point, edges in graph.items():
        for edge in edges:
            if edge.runtime:
                backwards.setdefault(edge.to, []).append(point)
    ends = [p for p in graph if p.seen.state in (O.COMPLETED, O.ABORTED) or p.seen.parked]
    can_end, queue = set(ends), deque(ends)
    while queue:
        for before in backwards.get(queue.popleft(), []):
            if before not in can_end:
                can_end.add(before)
                queue.append(before)
    assert can_end == set(graph)


def test_nothing_of_ours_is_left_untracked_by_an_abort(graph: Graph) -> None:
    for point in graph:
        if point.seen.state is O.ABORTED:
            assert set(point.effects) <= {"none", "moved"}, point


def test_nothing_is_missing_from_a_completed_creation(graph: Graph) -> None:
    completed = [point for point in graph if point.seen.state is O.COMPLETED]
    assert completed
    for point in completed:
        assert set(point.effects) <= {"full"}, point
        assert all(step.state is S.SUCCEEDED for step in point.seen.steps), point


def test_the_ledger_never_says_more_than_the_world(graph: Graph) -> None:
    for point in graph:
        for step, effect in zip(point.seen.steps, point.effects, strict=True):
            if step.state in DONE and step.compensation is C.NONE:
                assert effect == "full", point
            if step.state in (S.PLANNED, S.RETRY_WAIT, S.CANCELLED):
                assert effect == "none", point
            if step.state is S.FAILED and step.compensation is C.NONE:
                assert effect == "none", point


def test_the_predicates_of_complete_and_abort_agree_with_the_choice(graph: Graph) -> None:
    for point in graph:
        seen = point.seen
        if not acts(seen):
            continue
        action = rules.next_action(seen)
        completes = isinstance(action, rules.EnterCompletion | rules.CommitCompletion)
        assert rules.may_complete(seen) == completes, point
        assert rules.may_abort(seen) == isinstance(action, rules.Abort), point


def test_the_way_a_creation_goes_never_turns_back(graph: Graph) -> None:
    # Once it is being undone it stays so, until it is aborted.
    for point, edges in graph.items():
        if going_back(point.seen) and point.seen.state is not O.COMPLETED:
            assert all(going_back(edge.to.seen) for edge in edges), point


def _graph(name: str) -> Graph:
    if name not in _graphs:
        _graphs[name] = explore(PLANS[name])
    return _graphs[name]


def _table(state: Any) -> dict[Any, frozenset[Any]]:
    return next(table for table in TABLES if any(state is key for key in table))


def _typed(transition: Transition) -> tuple[type, str, str]:
    # States of different tables can have one name, and are then equal as strings.
    before, after = transition
    assert type(before) is type(after)
    return (type(before), before, after)


def _leads(took: tuple[Transition, ...], before: Any, after: Any) -> bool:
    """Whether the transitions, in their order, lead from the one to the other."""
    at = before
    for first, second in took:
        if first is at:
            at = second
    return at is after


# -- totality -------------------------------------------------------------------------------------

KINDS = ("repo_attach", "worktree", "session_prepare", "agent_launch", "some_later_kind")
STEPS = st.builds(
    StepView,
    key=st.text(min_size=1, max_size=8),
    kind=st.sampled_from(KINDS),
    state=st.sampled_from(S),
    attempt=st.integers(0, 20),
    compensation=st.sampled_from(C),
    undo_attempt=st.integers(0, 20),
    due=st.booleans(),
    wait_ms=st.integers(0, 10**6),
    exhausted=st.booleans(),
)
SNAPSHOTS = st.builds(
    Snapshot,
    operation_id=st.just("op"),
    state=st.sampled_from(O),
    fence=st.integers(0, 9),
    mine=st.booleans(),
    steps=st.lists(STEPS, max_size=5).map(tuple),
    parked=st.none() | st.just("a reason"),
    budget_spent=st.booleans(),
    deleted=st.booleans(),
    run_id=st.none() | st.just("run"),
)


@given(SNAPSHOTS)
def test_every_snapshot_whatsoever_has_an_action(snapshot: Snapshot) -> None:
    assert isinstance(rules.next_action(snapshot), get_args(rules.Action))


@given(SNAPSHOTS)
def test_only_the_owner_is_told_to_write(snapshot: Snapshot) -> None:
    action = rules.next_action(snapshot)
    if not snapshot.mine:
        assert isinstance(action, rules.Stop | rules.DispatchRun)
