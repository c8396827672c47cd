"""Admission: the four outcomes' first half, on both databases."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import exc, update
from support.world import digest_of_everything, rows, workplace

from onceborn.runtime import failpoints
from onceborn.runtime.ledger import tables as t
from onceborn.runtime.ledger.database import Database
from onceborn.runtime.protocol.errors import (
    CapacityReached,
    InvalidExternalId,
    InvalidField,
    NoHostAvailable,
)
from onceborn.runtime.protocol.states import Outcome


@pytest.fixture(autouse=True)
def _inert_failpoints() -> Any:
    yield
    failpoints.configure("")


def _complete(database: Database) -> None:
    with database.transaction("test") as connection:
        connection.execute(update(t.tasks).values(complete=True, revision=1, list_position=1))
        connection.execute(update(t.operations).values(state="completed", fence=2))


def test_created_carries_a_handle_that_stays_private(database: Database, tmp_path: Path) -> None:
    place = workplace(database, tmp_path)
    admitted = place.create("E", profile=None)
    assert admitted.outcome is None
    assert admitted.handle is not None
    assert admitted.handle.completion_token.hex() not in repr(admitted)
    stored = rows(database, t.operations)[0]
    assert admitted.handle.completion_token.hex() not in repr(stored)
    with pytest.raises(TypeError):
        admitted.handle.__reduce__()


@pytest.mark.proves("F01", "F06", "SB02", "SC03")
@pytest.mark.parametrize("settled", [False, True])
def test_found_writes_nothing(database: Database, tmp_path: Path, settled: bool) -> None:
    place = workplace(database, tmp_path)
    first = place.create("E")
    if settled:
        _complete(database)
    before = digest_of_everything(database)
    answers = [place.create("E", title=f"other {n}") for n in range(10)]
    outcome = Outcome.FOUND_SETTLED if settled else Outcome.FOUND_UNSETTLED
    assert {(a.outcome, a.task_id, a.handle) for a in answers} == {(outcome, first.task_id, None)}
    assert digest_of_everything(database) == before


@pytest.mark.proves("F04", "SB03", "C03")
@pytest.mark.parametrize(
    "body",
    [
        {"title": None},
        {"title": 7},
        {"repositories": [{"source": "/nowhere/at/all"}]},
        {"repositories": "x"},
        {"profile": "off"},
        {"profile": "unheard-of"},
        {"start_agent": "yes"},
        {"unknown_field": 1},
    ],
)
def test_a_held_identity_is_found_however_wrong_the_rest_is(
    database: Database, tmp_path: Path, body: dict[str, Any]
) -> None:
    place = workplace(database, tmp_path)
    first = place.create("E")
    _complete(database)
    again = place.create("E", **body)
    assert (again.outcome, again.task_id) == (Outcome.FOUND_SETTLED, first.task_id)
    with pytest.raises(InvalidField):
        place.create("F", **body)


@pytest.mark.proves("C03")
def test_the_request_match_says_same_differs_or_unknown(database: Database, tmp_path: Path) -> None:
    place = workplace(database, tmp_path)
    place.create("E", metadata={"a": 1, "b": [1, 2]})
    assert place.create("E", metadata={"b": [1, 2], "a": 1.0}).request_match == "same"
    assert place.create("E", description="", metadata={"a": 1, "b": [1, 2]}).request_match == "same"
    assert place.create("E", metadata={"a": "1", "b": [1, 2]}).request_match == "differs"
    assert place.create("E", metadata={"a": 1, "b": [2, 1]}).request_match == "differs"
    assert place.create("E", title=5).request_match == "unknown"


@pytest.mark.proves("C04")
def test_without_an_external_id_every_create_is_a_task(database: Database, tmp_path: Path) -> None:
    place = workplace(database, tmp_path)
    made = {place.create().task_id, place.create("").task_id, place.create(" \u2003").task_id}
    assert len(made) == 3
    assert {row["external_id"] for row in rows(database, t.tasks)} == {None}


@pytest.mark.proves("C05")
def test_an_identity_belongs_to_its_workspace(database: Database, tmp_path: Path) -> None:
    one, other = workplace(database, tmp_path), workplace(database, tmp_path, name="w2")
    assert one.create("E").task_id != other.create("E").task_id
    assert len(rows(database, t.tasks)) == 2


@pytest.mark.proves("C06")
def test_identities_are_compared_byte_by_byte(database: Database, tmp_path: Path) -> None:
    place = workplace(database, tmp_path)
    composed, decomposed = "caf\u00e9", "cafe\u0301"
    made = [place.create(e) for e in ("e", "E", "e\u200b", composed, decomposed)]
    assert [a.outcome for a in made] == [None] * 5
    assert place.create("  E\u3000").task_id == made[1].task_id


@pytest.mark.proves("V01", "V02", "SB06")
@pytest.mark.parametrize("value", ["x" * 256, "\u00e9" * 128, "e\n", "\t", "\x00", 5, {}, "\ud800"])
def test_a_bad_identity_is_refused_before_anything_is_written(
    database: Database, tmp_path: Path, value: Any
) -> None:
    place = workplace(database, tmp_path)
    before = digest_of_everything(database)
    with pytest.raises(InvalidExternalId) as refusal:
        place.create(value)
    assert refusal.value.field == "external_id"
    assert digest_of_everything(database) == before


@pytest.mark.proves("V01")
@pytest.mark.parametrize("value", ["x" * 255, "\u00e9" * 127 + "x"])
def test_the_longest_identity_is_held_and_found(
    database: Database, tmp_path: Path, value: str
) -> None:
    place = workplace(database, tmp_path)
    assert place.create(value).task_id == place.create(f" {value} ").task_id


@pytest.mark.proves("F05")
def test_a_full_workspace_still_finds(database: Database, tmp_path: Path) -> None:
    place = workplace(database, tmp_path, capacity=1)
    first = place.create("E")
    assert place.create("E").task_id == first.task_id
    before = digest_of_everything(database)
    with pytest.raises(CapacityReached):
        place.create("F")
    assert digest_of_everything(database) == before


@pytest.mark.proves("F05", "R02")
def test_the_last_place_goes_to_one_and_the_other_finds_it(
    database: Database, tmp_path: Path
) -> None:
    place = workplace(database, tmp_path, capacity=1)
    failpoints.configure("admission.miss_lookup=on")
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda _: place.create("E"), range(8)))
    assert sorted(a.outcome is None for a in answers) == [False] * 7 + [True]
    assert len({a.task_id for a in answers}) == 1


@pytest.mark.proves("R01", "R02", "R04", "SB01", "SB02", "SB10")
@pytest.mark.parametrize("racers", [20, 200])
@pytest.mark.parametrize("forced", [False, True])
def test_of_many_racers_one_creates_and_the_rest_find(
    database: Database, database_url: str, tmp_path: Path, racers: int, forced: bool
) -> None:
    place = workplace(database, tmp_path)
    other = Database(database_url)
    place.create("before")
    if forced:
        failpoints.configure("admission.miss_lookup=on")
    second = type(place.admission)(
        other, place.admission._attestor, place.admission._profiles, place.settings
    )
    barrier = threading.Barrier(min(racers, 40))

    def race(number: int) -> Any:
        if number < barrier.parties:
            barrier.wait()
        admission = (place.admission, second)[number % 2]
        return admission.admit(
            place.principal, place.workspace_id, {"external_id": "E", "title": str(number)}
        )

    with ThreadPoolExecutor(40) as pool:
        answers = list(pool.map(race, range(racers)))
    other.dispose()
    failpoints.configure("")
    assert [a.outcome for a in answers].count(None) == 1
    assert len({a.task_id for a in answers}) == 1
    assert len(rows(database, t.tasks)) == len(rows(database, t.operations)) == 2
    place.create("after")
    assert sorted(row["number"] for row in rows(database, t.tasks)) == [1, 2, 3]


@pytest.mark.proves("R03")
def test_a_primary_key_collision_is_an_error_and_not_found(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = workplace(database, tmp_path)
    monkeypatch.setattr("onceborn.runtime.planning.new_id", lambda kind: f"{kind}_same")
    place.create("E")
    before = digest_of_everything(database)
    with pytest.raises(exc.IntegrityError):
        place.create("F")
    assert digest_of_everything(database) == before


@pytest.mark.proves("SB09")
def test_the_lost_answer_of_the_commit_is_settled_by_reading(
    database: Database, tmp_path: Path
) -> None:
    place = workplace(database, tmp_path)
    failpoints.configure("admission.committed=raise@1")
    admitted = place.create("E")
    assert admitted.handle is not None
    assert len(rows(database, t.tasks)) == 1


def test_an_error_before_the_commit_is_reported_and_leaves_nothing(
    database: Database, tmp_path: Path
) -> None:
    place = workplace(database, tmp_path)
    before = digest_of_everything(database)
    failpoints.configure("admission.commit=raise@1")
    with pytest.raises(failpoints.FailpointError):
        place.create("E")
    assert digest_of_everything(database) == before


@pytest.mark.proves("SA13")
@pytest.mark.parametrize(
    ("repository", "field"),
    [
        ({"source": "https://h/r", "base_ref": "--orphan"}, "repositories.0.base_ref"),
        ({"source": "https://h/r", "base_ref": "--lock"}, "repositories.0.base_ref"),
        ({"source": "https://h/r", "branch": "-x"}, "repositories.0.branch"),
        ({"source": "-x"}, "repositories.0.source"),
        ({"source": "ext::sh -c x"}, "repositories.0.source"),
        ({"source": "https://u:secret@h/r"}, "repositories.0.source"),
        ({"source": "/etc"}, "repositories.0.source"),
        ({}, "repositories.0.source"),
    ],
)
def test_bad_refs_and_addresses_are_refused_by_field(
    database: Database, tmp_path: Path, repository: dict[str, Any], field: str
) -> None:
    place = workplace(database, tmp_path)
    before = digest_of_everything(database)
    with pytest.raises(InvalidField) as refusal:
        place.create("E", repositories=[repository])
    assert refusal.value.field == field
    assert "secret" not in refusal.value.message
    assert digest_of_everything(database) == before


def test_the_first_wrong_field_is_named(database: Database, tmp_path: Path) -> None:
    place = workplace(database, tmp_path)
    with pytest.raises(InvalidField) as refusal:
        place.create("E", title=1, repositories=1, profile=1, zzz=1)
    assert refusal.value.field == "title"
    with pytest.raises(InvalidField) as refusal:
        place.create("E", zzz=1)
    assert refusal.value.field == "zzz"
    with pytest.raises(InvalidField) as refusal:
        place.create("E", start_agent=True)
    assert refusal.value.field == "profile"


def test_without_a_host_a_create_says_what_to_do(database: Database, tmp_path: Path) -> None:
    place = workplace(database, tmp_path)
    with database.transaction("test") as connection:
        connection.execute(t.hosts.delete())
    with pytest.raises(NoHostAvailable, match="onceborn worker"):
        place.create("E")
