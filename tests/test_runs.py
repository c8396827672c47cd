"""Run admission and the ledger's moves, on both databases."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from sqlalchemy import func, select
from support.runs import admit, new_operation, run_row
from support.world import digest_of_everything

from onceborn.runtime import workspaces
from onceborn.runtime.ledger import runs
from onceborn.runtime.ledger import tables as t
from onceborn.runtime.ledger.database import Database
from onceborn.runtime.protocol.dispatch import InvalidDispatchKey, check_dispatch_key
from onceborn.runtime.protocol.errors import InvalidField
from onceborn.runtime.runs import admit_run


@pytest.fixture
def workspace(database: Database) -> str:
    return workspaces.create_workspace(database, "w", capacity=None)


# -- the key --------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", ["k", " k ", "K", "a" * 255, "é" * 127, "\n", "\u200b", "ключ"])
def test_a_dispatch_key_is_opaque(key: str) -> None:
    assert check_dispatch_key(key) == key


@pytest.mark.parametrize("key", ["", "a" * 256, "é" * 128, "a\x00b", "\ud800", 7, b"k", ["k"]])
def test_what_is_not_a_dispatch_key_is_refused(key: object) -> None:
    with pytest.raises(InvalidDispatchKey) as refusal:
        check_dispatch_key(key)
    assert refusal.value.field == "dispatch_key"


def test_the_longest_key_works_on_the_database(database: Database, workspace: str) -> None:
    first = admit(database, workspace, dispatch_key="я" * 127 + "x")
    assert admit(database, workspace, dispatch_key="я" * 127 + "x") == (first[0], True)


# -- admission ------------------------------------------------------------------------------------


@pytest.mark.proves("N01")
def test_a_key_seen_before_is_the_first_run_and_writes_nothing(
    database: Database, workspace: str
) -> None:
    run_id, deduplicated = admit(database, workspace, dispatch_key="k")
    assert not deduplicated
    before = digest_of_everything(database)
    assert admit(database, workspace, dispatch_key="k") == (run_id, True)
    assert admit(database, workspace, dispatch_key="k", input={"b": 2}) == (run_id, True)
    assert admit(database, workspace, dispatch_key="k", workflow_ref="gone") == (run_id, True)
    assert admit(database, workspace, dispatch_key="k", input={"b": float("nan")}) == (run_id, True)
    assert digest_of_everything(database) == before


@pytest.mark.proves("N03", "N04")
def test_without_a_key_equal_requests_are_two_runs(database: Database, workspace: str) -> None:
    first, second = admit(database, workspace), admit(database, workspace)
    assert first[0] != second[0]
    assert (first[1], second[1]) == (False, False)


@pytest.mark.proves("N05")
def test_a_key_in_another_workspace_is_another_run(database: Database, workspace: str) -> None:
    other = workspaces.create_workspace(database, "other", capacity=None)
    first = admit(database, workspace, dispatch_key="k")
    second = admit(database, other, dispatch_key="k")
    assert first[0] != second[0]
    assert not second[1]


def test_keys_are_compared_byte_by_byte(database: Database, workspace: str) -> None:
    keys = ["k", "K", " k", "k ", "é", "e\u0301"]
    assert len({admit(database, workspace, dispatch_key=key)[0] for key in keys}) == len(keys)


def test_reference_and_version_are_pinned(database: Database, workspace: str) -> None:
    run_id, _ = admit(database, workspace, workflow_ref="agent", workflow_version="7")
    row = run_row(database, run_id)
    assert (row.workflow_ref, row.workflow_version, row.input) == ("agent", "7", '{"a":1}')
    assert (row.state, row.launch_token, row.result) == ("admitted", None, None)


def test_an_input_that_is_not_json_is_refused(database: Database, workspace: str) -> None:
    with pytest.raises(InvalidField) as refusal:
        admit(database, workspace, dispatch_key="k", input={"x": float("inf")})
    assert refusal.value.field == "input"


@pytest.mark.proves("N02")
def test_twenty_racers_over_two_pools_are_one_run(
    database_url: str, database: Database, workspace: str
) -> None:
    other = Database(database_url)
    barrier = threading.Barrier(20)
    answers: list[tuple[str, bool]] = []

    def race(pool: Database) -> None:
        barrier.wait()
        answers.append(admit(pool, workspace, dispatch_key="k"))

    threads = [
        threading.Thread(target=race, args=(pool,)) for pool in [database, other] for _ in range(10)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    other.dispose()
    assert len({run_id for run_id, _ in answers}) == 1
    assert sorted(deduplicated for _, deduplicated in answers) == [False] + [True] * 19
    with database.reading() as connection:
        assert connection.scalar(select(func.count()).select_from(t.runs)) == 1


@pytest.mark.proves("SB09")
def test_the_rest_of_a_larger_transaction_commits(database: Database, workspace: str) -> None:
    run_id, _ = admit(database, workspace, dispatch_key="k")
    with database.transaction("larger") as connection:
        again = admit_run(
            connection,
            database,
            workspace_id=workspace,
            workflow_ref="ref",
            workflow_version="1",
            input={},
            host_id="hst_1",
            dispatch_key="k",
        )
        other, _ = admit_run(
            connection,
            database,
            workspace_id=workspace,
            workflow_ref="ref",
            workflow_version="1",
            input={},
            host_id="hst_1",
        )
    assert again == (run_id, True)
    assert run_row(database, other).state == "admitted"


def test_a_collision_on_the_primary_key_is_an_error(database: Database, workspace: str) -> None:
    run_id, _ = admit(database, workspace)
    row = run_row(database, run_id)
    values = {name: getattr(row, name) for name in runs.NewRun.__dataclass_fields__}
    duplicate = runs.NewRun(**values | {"dispatch_key": "k"})
    with pytest.raises(Exception, match=r"(?i)unique"), database.transaction("test") as connection:
        runs.insert(connection, database, duplicate)


# -- moves ----------------------------------------------------------------------------------------


def test_the_moves_of_a_run_and_their_row_counts(database: Database, workspace: str) -> None:
    run_id, _ = admit(database, workspace)
    with database.transaction("test") as connection:
        assert not runs.claim_launch(connection, run_id, seen=None, token="a")  # not started
        assert runs.mark_started(connection, database, run_id)
        assert not runs.mark_started(connection, database, run_id)
        assert runs.claim_launch(connection, run_id, seen=None, token="a")
        assert not runs.claim_launch(connection, run_id, seen=None, token="b")  # a stale reading
        assert runs.holds_launch(connection, run_id, "a")
        assert runs.claim_launch(connection, run_id, seen="a", token="b")
        assert not runs.holds_launch(connection, run_id, "a")
        assert not runs.mark_running(connection, run_id, "a")  # the former launcher
        assert runs.mark_running(connection, run_id, "b")
        assert not runs.claim_launch(connection, run_id, seen="b", token="c")  # launched for ever
        assert _finish(connection, database, run_id, "succeeded")
        assert not _finish(connection, database, run_id, "lost")
    row = run_row(database, run_id)
    assert (row.state, row.result) == ("succeeded", "{}")
    assert row.started_at is not None
    assert row.finished_at is not None
    assert row.created_at <= row.started_at <= row.finished_at


def _finish(connection: Any, database: Database, run_id: str, ending: Any) -> bool:
    return runs.finish(
        connection,
        database,
        run_id,
        expected=("started", "running"),
        ending=ending,
        result="{}",
    )


def test_what_the_sweep_sees(database: Database, workspace: str) -> None:
    ids = [admit(database, workspace)[0] for _ in range(5)]
    elsewhere, _ = admit(database, workspace, host_id="hst_2")
    with database.transaction("test") as connection:
        for run_id in ids[2:]:
            runs.mark_started(connection, database, run_id)
        runs.claim_launch(connection, ids[3], seen=None, token="a")
        runs.mark_running(connection, ids[3], "a")
        _finish(connection, database, ids[4], "failed")
        assert set(runs.undispatched(connection, "hst_1", 10)) == set(ids[:2])
        assert len(runs.undispatched(connection, "hst_1", 1)) == 1
        assert runs.undispatched(connection, "hst_2", 10) == [elsewhere]
        assert set(runs.open_runs(connection, "hst_1", 10)) == set(ids[2:4])
        first = runs.open_runs(connection, "hst_1", 1)
        second = runs.open_runs(connection, "hst_1", 1, after=first[0])
        assert {*first, *second} == set(ids[2:4])


def test_a_started_run_is_dispatched_once_noted(database: Database) -> None:
    workspace_id, _ = new_operation(database)
    run_id, _ = admit(database, workspace_id)
    with database.transaction("test") as connection:
        runs.mark_started(connection, database, run_id)
        assert runs.undispatched(connection, "hst_1", 10) == []


@pytest.mark.parametrize("backend", ["sqlite"], indirect=True)
@pytest.mark.parametrize("query", ["undispatched", "open_runs"])
def test_the_sweep_reads_the_small_indexes(database: Database, query: str) -> None:
    seen: list[str] = []
    from sqlalchemy import event

    with database.reading() as connection:

        @event.listens_for(connection, "before_cursor_execute")
        def note(_c: Any, _cu: Any, statement: str, parameters: Any, *_: Any) -> None:
            if not statement.startswith("EXPLAIN"):
                plan = connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {statement}", parameters)
                seen.extend(str(row[-1]) for row in plan)

        getattr(runs, query)(connection, "hst_1", 10)
    index = {"undispatched": "ix_runs_admitted", "open_runs": "ix_runs_open"}[query]
    assert any(index in line for line in seen), seen
