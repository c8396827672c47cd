"""Random schedules of the real engine in a world that dies, lies, and is late (tests/schedules).

A few hundred fixed seeds; ``make schedules`` plays thousands of new ones.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from schedules.check import findings
from schedules.events import Event, Schedule, generate
from schedules.findings import FINDINGS, TO_ITS_END, Finding
from schedules.shrink import shrink
from schedules.stage import Stage
from schedules.world import Place
from sqlalchemy import update
from support.settle import settle
from support.world import digest_of_everything, rows, workplace

from onceborn.activities import attempt
from onceborn.runtime.completion import Completion
from onceborn.runtime.ledger import operations
from onceborn.runtime.ledger import tables as t
from onceborn.runtime.ledger.database import Database
from onceborn.runtime.ledger.operations import Limits
from onceborn.runtime.protocol.errors import FenceLost
from onceborn.runtime.recovery import Recovery

FIRST, COUNT, PART = 1_000, 240, 40


@pytest.fixture(scope="module")
def stage() -> Iterator[Stage]:
    renewed_every = attempt.RENEW_EVERY_S
    stage = Stage()
    yield stage
    attempt.RENEW_EVERY_S = renewed_every  # type: ignore[misc]
    stage.ledger.database.dispose()


@pytest.mark.proves("X03", "X04", "X11", "S02", "S03", "S04", "SH01", "SH04")
@pytest.mark.parametrize("first", range(FIRST, FIRST + COUNT, PART))
def test_whatever_happens_the_five_invariants_hold(stage: Stage, first: int) -> None:
    ends: Counter[str] = Counter()
    for seed in range(first, first + PART):
        wrong = stage.play(generate(seed))
        assert wrong == [], f"replay: make schedules SEED={seed}"
        ends += stage.ends()
    # A run that never gets anywhere would find nothing.
    assert ends["created"] > 0
    assert ends["aborted"] > 0
    assert ends["late tasks woken"] > 0


@pytest.mark.parametrize("finding", FINDINGS, ids=lambda finding: finding.name)
def test_what_was_once_found_stays_mended(stage: Stage, finding: Finding) -> None:
    assert stage.play(finding.schedule) == []


@pytest.mark.proves("X10")
def test_an_owner_that_dies_again_and_again_parks_the_creation_and_frees_nothing(
    stage: Stage,
) -> None:
    dies = (Event("takeover", n=95_000), Event("until", -1, 1, "repo_attach.claimed"))
    schedule = Schedule(0, 1, "start", (Event("create"), *dies * 8, Event("last", n=TO_ITS_END)))
    parked: list[str] = []

    def look(_line: str) -> None:
        held = stage.ledger.ask(
            "SELECT o.parked_reason FROM operations o JOIN tasks t ON t.operation_id = o.id"
            " WHERE o.parked_reason IS NOT NULL AND t.external_id = 'E'"
        )
        parked.extend(row["parked_reason"] for row in held)

    assert stage.play(schedule, tell=look) == []
    assert "no progress" in parked[0]


@pytest.mark.proves("SB02")
def test_racers_that_all_miss_the_lookup_find_the_one_that_won(stage: Stage) -> None:
    create = (Event("create"), Event("until", -1, what="admission.missed"))
    schedule = Schedule(0, 1, "start", (*create * 5, *[Event("run", 0, TO_ITS_END)] * 5))
    assert stage.play(schedule) == []
    outcomes = [admitted.outcome for admitted in stage.answers]
    assert sorted(outcome is None for outcome in outcomes) == [False] * 4 + [True]
    assert len({admitted.task_id for admitted in stage.answers}) == 1
    assert stage.ends()["created"] == 1


def test_a_seed_is_one_schedule_and_a_schedule_one_course(stage: Stage) -> None:
    courses: list[list[str]] = []
    for _ in range(2):
        lines: list[str] = []
        stage.play(generate(1234), tell=lines.append)
        courses.append(lines)
    assert courses[0] == courses[1]
    assert Schedule.from_json(generate(7).to_json()) == generate(7)


def test_shrinking_keeps_what_makes_it_fail() -> None:
    needed = [Event("lie", 3, 0, "half"), Event("run", 0, 5, "die")]
    noise = [Event("clock", n=n) for n in range(20)]
    schedule = Schedule(0, 2, "start", (*noise[:9], needed[0], *noise[9:], needed[1]))

    def fails(candidate: Schedule) -> bool:
        does = [event.does for event in candidate.events]
        return "lie" in does and "run" in does[does.index("lie") :]

    small = shrink(schedule, fails)
    assert [event.does for event in small.events] == ["lie", "run"]
    assert (small.repositories, small.agent) == (0, "none")


# -- that the checks can fail ---------------------------------------------------------------------

TAMPERING = {
    "a completed creation loses its event": (
        "DELETE FROM outbox",
        "completed with 0 events",
    ),
    "a worktree is not as its evidence says": (
        "UPDATE steps SET idempotency_key = 'other' WHERE kind = 'worktree'",
        "worktree:0 is not as its evidence says",
    ),
    "a place is counted that nobody takes": (
        "UPDATE workspace_counters SET preparing = preparing + 1",
        "are counted as preparing",
    ),
    "an identity is gone": (
        "UPDATE tasks SET external_id = NULL",
        "the identity was released and is held, or the other way round",
    ),
    "no run for an armed launch": (
        "DELETE FROM runs",
        "completed with 0 runs",
    ),
}


@pytest.mark.parametrize("name", TAMPERING)
def test_the_check_names_what_is_wrong(stage: Stage, name: str) -> None:
    statement, expected = TAMPERING[name]
    done = (Event("create"), Event("run", 0, TO_ITS_END))
    assert stage.play(Schedule(0, 1, "start", done)) == []
    stage.ledger.outside(statement)
    assert any(expected in line for line in findings(stage))


def test_the_check_names_what_an_abort_left(stage: Stage) -> None:
    failing = (Event("create"), Event("lie", 1, what="nothing_failed"), Event("run", 0, TO_ITS_END))
    assert stage.play(Schedule(0, 1, "none", failing)) == []
    assert stage.ends()["aborted"] == 1
    (step,) = stage.ledger.ask(
        "SELECT idempotency_key AS key, json_extract(request, '$.path') AS path FROM steps"
        " WHERE kind = 'worktree'"
    )
    stage.world.places[step["path"]].branch = step["key"]
    stage.world.quarantine[step["key"]].append("somebody's work")
    stage.world.planted["elsewhere"] = Place(folder="somebody else")
    told = " ".join(findings(stage))
    for expected in ("left untracked", "tracked nowhere", "what somebody else put at elsewhere"):
        assert expected in told


# -- what was found, on both databases ------------------------------------------------------------


@pytest.mark.proves("X01")
def test_a_release_before_the_hand_off_does_not_stand_in_its_way(
    database: Database, tmp_path: Path
) -> None:
    place = workplace(database, tmp_path)
    admitted = place.create("E")
    assert admitted.handle is not None
    with database.transaction("test") as connection:
        connection.execute(update(t.operations).values(state="preparing_release"))
    owned = Recovery(database, Limits(), "test").take(admitted.handle)
    assert (owned.operation_id, owned.fence) == (admitted.operation_id, 1)


@pytest.mark.proves("X03")
@pytest.mark.parametrize("abort", [False, True])
def test_a_late_end_of_what_has_ended_is_a_lost_fence(
    database: Database, tmp_path: Path, abort: bool
) -> None:
    """Also where nothing else is being prepared, so that there is no place to give back."""
    place = workplace(database, tmp_path)
    admitted = settle(place, place.create("E"))
    before = digest_of_everything(database)
    completion = Completion(database, Limits())
    with pytest.raises(FenceLost):
        (completion.abort if abort else completion.commit)(admitted.operation_id, 1)
    assert digest_of_everything(database) == before


@pytest.mark.proves("X10")
def test_a_new_owner_begins_to_wait_anew(database: Database, tmp_path: Path) -> None:
    place = workplace(database, tmp_path)
    admitted = place.create("E")
    assert admitted.handle is not None
    recovery, limits = Recovery(database, Limits(), "test"), Limits()
    first = recovery.take(admitted.handle)
    with database.transaction("test") as connection:
        operations.hold(
            connection, database, first.operation_id, 1, lease_ms=1, busy_with="the lock of x"
        )
    database.clock.advance(limits.busy_ms + 1)
    with database.snapshot() as connection:
        seen = operations.snapshot(connection, database, first.operation_id, 1, limits)
    assert seen.blocked == "the lock of x"
    (second,) = recovery.claim(first.host_id, 1)
    with database.snapshot() as connection:
        seen = operations.snapshot(connection, database, second.operation_id, second.fence, limits)
    assert seen.blocked is None
    assert rows(database, t.operations)[0]["busy_since"] is None
