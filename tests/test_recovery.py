"""Owners: the hand-off, the sweep's claims, fences and leases; on both databases."""

from __future__ import annotations

import dataclasses
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from sqlalchemy import update
from support.world import HOST, Workplace, rows, workplace

from onceborn.runtime.ledger import tables as t
from onceborn.runtime.ledger.database import Database
from onceborn.runtime.ledger.operations import Limits
from onceborn.runtime.protocol.errors import FenceLost, HandleRejected
from onceborn.runtime.protocol.handle import CreationHandle
from onceborn.runtime.recovery import Recovery

LIMITS = Limits()


def _handle(place: Workplace, external_id: str | None = None) -> CreationHandle:
    handle = place.create(external_id).handle
    assert handle is not None
    return handle


def _recovery(database: Database, owner: str = "a") -> Recovery:
    return Recovery(database, LIMITS, owner)


def test_the_handle_is_exchanged_for_fence_1_once(database: Database, tmp_path: Path) -> None:
    handle = _handle(workplace(database, tmp_path))
    owned = _recovery(database).take(handle)
    assert (owned.operation_id, owned.fence, owned.host_id) == (handle.operation_id, 1, HOST)
    with pytest.raises(FenceLost):
        _recovery(database).take(handle)
    assert rows(database, t.operations)[0]["fence"] == 1


@pytest.mark.parametrize(
    "changed",
    [
        {"completion_token": b"x" * 32},
        {"actor_hash": "0" * 64},
        {"manifest_hash": "0" * 64},
        {"plan_hash": "0" * 64},
    ],
)
def test_a_handle_that_does_not_match_is_refused(
    database: Database, tmp_path: Path, changed: dict[str, object]
) -> None:
    handle = _handle(workplace(database, tmp_path))
    with pytest.raises(HandleRejected):
        _recovery(database).take(dataclasses.replace(handle, **changed))  # type: ignore[arg-type]
    assert rows(database, t.operations)[0]["fence"] == 0


@pytest.mark.proves("SC04")
def test_the_sweep_takes_what_was_never_handed_off(database: Database, tmp_path: Path) -> None:
    handle = _handle(workplace(database, tmp_path))
    recovery = _recovery(database)
    assert recovery.claim(HOST, 10) == []
    database.clock.advance(5_000)
    (owned,) = recovery.claim(HOST, 10)
    assert (owned.operation_id, owned.fence) == (handle.operation_id, 1)
    with pytest.raises(FenceLost):
        recovery.take(handle)


def test_a_lease_that_ends_now_has_expired(database: Database, tmp_path: Path) -> None:
    handle = _handle(workplace(database, tmp_path))
    recovery = _recovery(database)
    recovery.take(handle)
    with database.transaction("test") as connection:
        connection.execute(update(t.operations).values(lease_until=database.clock.now() + 60_000))
    assert not recovery.any_due(HOST)
    with database.transaction("test") as connection:
        connection.execute(update(t.operations).values(lease_until=database.clock.now()))
    assert recovery.any_due(HOST)
    assert [o.fence for o in recovery.claim(HOST, 1)] == [2]


def test_a_claim_takes_the_oldest_and_no_more_than_asked(
    database: Database, tmp_path: Path
) -> None:
    place = workplace(database, tmp_path)
    made = [_handle(place, f"E{n}").operation_id for n in range(6)]
    for number, operation_id in enumerate(made):
        with database.transaction("test") as connection:
            connection.execute(
                update(t.operations)
                .where(t.operations.c.id == operation_id)
                .values(lease_until=number)
            )
    recovery = _recovery(database)
    assert {o.operation_id for o in recovery.claim(HOST, 2)} == set(made[:2])
    assert recovery.claim(HOST, 0) == []
    assert {o.operation_id for o in recovery.claim(HOST, 9)} == set(made[2:])


@pytest.mark.proves("SB10")
def test_two_sweeps_never_get_the_same_operation(
    database: Database, database_url: str, tmp_path: Path
) -> None:
    place = workplace(database, tmp_path)
    for number in range(60):
        place.create(f"E{number}")
    with database.transaction("test") as connection:
        connection.execute(update(t.operations).values(lease_until=0))
    other = Database(database_url)
    recoveries = [_recovery(database, "a"), _recovery(other, "b")]

    def sweep(number: int) -> list[str]:
        return [o.operation_id for o in recoveries[number % 2].claim(HOST, 7)]

    with ThreadPoolExecutor(8) as pool:
        taken = [operation for batch in pool.map(sweep, range(24)) for operation in batch]
    other.dispose()
    assert len(taken) == len(set(taken)) == 60
    assert {row["fence"] for row in rows(database, t.operations)} == {1}


def test_other_hosts_parked_and_ended_operations_are_left(
    database: Database, tmp_path: Path
) -> None:
    place = workplace(database, tmp_path)
    _handle(place)
    database.clock.advance(60_000)
    recovery = _recovery(database)
    assert recovery.claim("hst_" + "1" * 32, 5) == []
    with database.transaction("test") as connection:
        connection.execute(update(t.operations).values(parked_reason="by hand"))
    assert recovery.claim(HOST, 5) == []
    with database.transaction("test") as connection:
        connection.execute(update(t.operations).values(parked_reason=None, state="aborted"))
    assert recovery.claim(HOST, 5) == []
