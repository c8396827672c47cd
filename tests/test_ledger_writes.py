"""Every write of an owner names its fence, the state and its attempt's token, and its row count
decides: whatever of that no longer holds, nothing is written, and it is told."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection, update
from support.world import digest_of_everything, rows, workplace

from onceborn.runtime.completion import Completion
from onceborn.runtime.ledger import operations, steps
from onceborn.runtime.ledger import tables as t
from onceborn.runtime.ledger.database import Database
from onceborn.runtime.ledger.operations import Limits
from onceborn.runtime.ledger.steps import Claim, Expected
from onceborn.runtime.protocol.errors import (
    AbortRefused,
    CompletionRefused,
    FenceLost,
    StaleExpectation,
)
from onceborn.runtime.protocol.evidence import WorktreeMade
from onceborn.runtime.protocol.states import CompensationState as C
from onceborn.runtime.protocol.states import OperationState as O
from onceborn.runtime.protocol.states import StepState as S
from onceborn.runtime.recovery import Recovery
from onceborn.runtime.release import finish_claimed

LEASE_MS = 30_000
KEY = "repo_attach:0"
EVIDENCE = WorktreeMade(
    repository="0",
    path="/p",
    branch="b",
    base_commit="c",
    head="h",
    registration="r",
    ownership_key="k",
)


@dataclass
class Held:
    """An operation under fence 1, with one step claimed."""

    database: Database
    operation_id: str
    claim: Claim
    undo: Claim
    """A claim of the second step's undoing."""

    def change(self, table: Any, **values: Any) -> None:
        with self.database.transaction("test") as connection:
            connection.execute(update(table).values(**values))

    def write(self, action: Callable[[Connection], Any]) -> Any:
        with self.database.transaction("test") as connection:
            return action(connection)

    def expected(self, key: str = KEY) -> Expected:
        row = next(r for r in rows(self.database, t.steps) if r["step_key"] == key)
        return Expected(
            self.operation_id,
            key,
            1,
            S(row["state"]),
            row["attempt"],
            C(row["compensation"]),
            row["undo_attempt"],
        )


@pytest.fixture
def held(database: Database, tmp_path: Path) -> Held:
    place = workplace(database, tmp_path)
    admitted = place.create("E", repositories=[{"source": "https://git.localhost/r.git"}])
    assert admitted.handle is not None
    owned = Recovery(database, Limits(), "test").take(admitted.handle)
    made = Held(database, owned.operation_id, *[Claim("", "", 1, "")] * 2)
    made.claim = made.write(
        lambda c: steps.claim(c, database, made.expected(), LEASE_MS, undo=False)
    )
    second = made.expected("worktree:0")
    made.undo = made.write(lambda c: steps.claim(c, database, second, LEASE_MS, undo=True))
    return made


def writes(held: Held) -> dict[str, Callable[[Connection], Any]]:
    """All that an owner of fence 1, and its attempts, write."""
    database, claim, undo = held.database, held.claim, held.undo
    return {
        "renew": lambda c: steps.renew(c, database, claim, LEASE_MS),
        "succeed": lambda c: steps.succeed(c, database, claim, EVIDENCE, LEASE_MS),
        "wait": lambda c: steps.wait(c, database, claim, S.UNKNOWN, None, 0, LEASE_MS),
        "fail": lambda c: steps.fail(c, database, claim, {}, LEASE_MS),
        "undone": lambda c: steps.undone(c, database, undo, C.COMPENSATED, {}, LEASE_MS),
        "undo_later": lambda c: steps.undo_later(c, database, undo, C.UNKNOWN, {}, 0, LEASE_MS),
    }


OPERATION_CHANGES = {
    "another fence": {"fence": 2},
    "completing": {"state": O.COMPLETING},
    "aborted": {"state": O.ABORTED},
    "parked": {"parked_reason": "why"},
}
STEP_CHANGES = {
    "another token": {"attempt_token": "another"},
    "not running": {"state": S.UNKNOWN, "compensation": C.UNKNOWN},
}


def _nothing_is_written(held: Held, also: dict[str, Callable[[Connection], Any]]) -> None:
    before = digest_of_everything(held.database)
    for name, write in {**writes(held), **also}.items():
        with pytest.raises(FenceLost):
            held.write(write)
        assert digest_of_everything(held.database) == before, name
    with held.database.reading() as connection:
        assert not steps.still_held(connection, held.claim)
        assert not steps.still_held(connection, held.undo)


@pytest.mark.proves("X03", "X11")
@pytest.mark.parametrize("what", OPERATION_CHANGES)
def test_nothing_is_written_on_an_operation_that_is_not_ours_any_more(
    held: Held, what: str
) -> None:
    database, operation_id = held.database, held.operation_id
    expected = held.expected()
    held.change(t.operations, **OPERATION_CHANGES[what])
    _nothing_is_written(
        held,
        {
            "hold": lambda c: operations.hold(c, database, operation_id, 1, lease_ms=LEASE_MS),
            "claim": lambda c: steps.claim(c, database, expected, LEASE_MS, undo=False),
        },
    )


@pytest.mark.proves("X03", "X11")
@pytest.mark.parametrize("what", STEP_CHANGES)
def test_nothing_is_written_on_a_step_that_another_attempt_has(held: Held, what: str) -> None:
    held.change(t.steps, **STEP_CHANGES[what])
    _nothing_is_written(held, {})


@pytest.mark.proves("X03", "S03")
@pytest.mark.parametrize("state", [O.PREPARING, O.PREPARING_RELEASE, O.COMPLETING])
def test_no_move_is_made_under_another_fence(held: Held, state: O) -> None:
    database, operation_id, limits = held.database, held.operation_id, Limits()
    held.change(t.operations, state=state, fence=2)
    held.change(t.steps, state=S.SUCCEEDED, attempt_token=None)
    before = digest_of_everything(database)
    completion, recovery = Completion(database, limits), Recovery(database, limits, "late")
    for move in (completion.enter, completion.commit, completion.abort):
        with pytest.raises(FenceLost):
            move(operation_id, 1)
    with pytest.raises(FenceLost):
        finish_claimed(database, limits, operation_id, 1)
    with pytest.raises(FenceLost):
        held.write(lambda c: operations.move(c, operation_id, 1, state, O.ABORTED))
    recovery.park(operation_id, 1, "late")
    held.write(lambda c: operations.count_driver(c, operation_id, 1))
    assert digest_of_everything(database) == before


@pytest.mark.proves("X11")
@pytest.mark.parametrize("field", ["state", "attempt", "compensation", "undo_attempt"])
def test_a_claim_is_for_what_the_snapshot_showed(held: Held, field: str) -> None:
    """A redelivered order names an attempt that was: it takes nothing, whatever came after."""
    shown = held.expected()
    other = {"state": S.UNKNOWN, "attempt": 0, "compensation": C.UNKNOWN, "undo_attempt": 7}
    late = replace(shown, **{field: other[field]})
    before = digest_of_everything(held.database)
    for undo in (False, True):
        with pytest.raises(StaleExpectation):
            held.write(
                lambda c, undo=undo: steps.claim(c, held.database, late, LEASE_MS, undo=undo)
            )
    with pytest.raises(StaleExpectation):
        held.write(lambda c: steps.settle_row(c, late, S.SUCCEEDED))
    assert digest_of_everything(held.database) == before


@pytest.mark.proves("X11")
def test_two_attempts_never_have_the_same_token(held: Held) -> None:
    again = held.write(
        lambda c: steps.claim(c, held.database, held.expected(), LEASE_MS, undo=False)
    )
    assert again.fence == held.claim.fence
    assert again.token != held.claim.token
    with pytest.raises(FenceLost):
        held.write(lambda c: steps.renew(c, held.database, held.claim, LEASE_MS))
    held.write(lambda c: steps.renew(c, held.database, again, LEASE_MS))


@pytest.mark.parametrize("state", [S.UNKNOWN, S.RUNNING, S.SUCCEEDED, S.ARMED])
def test_abort_is_refused_while_anything_may_exist(held: Held, state: S) -> None:
    """One step failed for good; the other is in doubt, at work, or there."""
    held.change(t.steps, state=S.FAILED, compensation=C.NONE)
    with held.database.transaction("test") as connection:
        connection.execute(update(t.steps).where(t.steps.c.step_key == KEY).values(state=state))
    before = digest_of_everything(held.database)
    with pytest.raises(AbortRefused):
        Completion(held.database, Limits()).abort(held.operation_id, 1)
    assert digest_of_everything(held.database) == before


def test_abort_is_refused_where_nothing_failed(held: Held) -> None:
    held.change(t.steps, state=S.PLANNED, compensation=C.NONE)
    with pytest.raises(AbortRefused):
        Completion(held.database, Limits()).abort(held.operation_id, 1)


@pytest.mark.proves("S05")
@pytest.mark.parametrize("phase", ["enter", "commit"])
def test_both_phases_of_complete_prove_every_step(held: Held, phase: str) -> None:
    held.change(t.operations, state=O.PREPARING if phase == "enter" else O.COMPLETING)
    before = digest_of_everything(held.database)
    with pytest.raises(CompletionRefused) as refused:
        getattr(Completion(held.database, Limits()), phase)(held.operation_id, 1)
    assert "evidence" in str(refused.value.fields["field"])
    assert digest_of_everything(held.database) == before
