"""Reading tasks: by ID, in pages, and how their creation stands."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from sqlalchemy import update
from support.settle import settle
from support.world import digest_of_everything, workplace

from onceborn.runtime import tasks
from onceborn.runtime.ledger import tables as t
from onceborn.runtime.ledger.database import Database
from onceborn.runtime.ledger.events import events_after
from onceborn.runtime.protocol.errors import InvalidField, NotFound


@pytest.mark.proves("F09", "S06")
def test_a_preparing_task_is_read_by_id_and_in_no_list(database: Database, tmp_path: Path) -> None:
    place = workplace(database, tmp_path)
    made = place.create("E", metadata={"a": [1, None]})
    view = tasks.get(database, place.workspace_id, made.task_id)
    assert (view.id, view.external_id, view.complete) == (made.task_id, "E", False)
    assert (view.number, view.revision, view.metadata) == (1, 0, {"a": [1, None]})
    assert (view.repositories, view.session_id, view.run) == ((), None, None)
    assert tasks.page(database, place.workspace_id).tasks == ()


def test_another_workspace_sees_nothing(database: Database, tmp_path: Path) -> None:
    place, other = workplace(database, tmp_path), workplace(database, tmp_path, name="w2")
    made = settle(place, place.create("E"))
    for task_id in (made.task_id, "tsk_unheard_of", "", "a\x00b", "../x", "ä" * 5):
        with pytest.raises(NotFound):
            tasks.get(database, other.workspace_id, task_id)
        with pytest.raises(NotFound):
            tasks.progress(database, other.workspace_id, task_id)
    assert tasks.page(database, other.workspace_id).tasks == ()


def test_pages_are_the_latest_first_and_do_not_shift(database: Database, tmp_path: Path) -> None:
    place = workplace(database, tmp_path)
    made = [settle(place, place.create(title=f"t{n}")).task_id for n in range(5)]
    first = tasks.page(database, place.workspace_id, limit=2)
    assert [view.id for view in first.tasks] == [made[4], made[3]]
    settle(place, place.create(title="later"))
    second = tasks.page(database, place.workspace_id, limit=2, cursor=first.next_cursor)
    third = tasks.page(database, place.workspace_id, limit=2, cursor=second.next_cursor)
    assert [view.id for view in second.tasks + third.tasks] == [made[2], made[1], made[0]]
    assert third.next_cursor is None


def test_a_full_last_page_has_no_cursor(database: Database, tmp_path: Path) -> None:
    place = workplace(database, tmp_path)
    for _ in range(2):
        settle(place, place.create())
    page = tasks.page(database, place.workspace_id, limit=2)
    assert (len(page.tasks), page.next_cursor) == (2, None)


@pytest.mark.parametrize("limit", [0, -1, 201])
def test_a_limit_out_of_bounds_is_named(database: Database, limit: int) -> None:
    with pytest.raises(InvalidField) as refused:
        tasks.page(database, "wsp_any", limit=limit)
    assert refused.value.field == "limit"


@pytest.mark.parametrize("cursor", ["", "x", "dDIuMQ", "ä", "\x00", "dDEuLTE", "9" * 99])
def test_a_cursor_that_we_did_not_make_is_named(database: Database, cursor: str) -> None:
    with pytest.raises(InvalidField) as refused:
        tasks.page(database, "wsp_any", cursor=cursor)
    assert refused.value.field == "cursor"


@pytest.mark.proves("F09")
def test_progress_shows_the_steps_in_order(database: Database, tmp_path: Path) -> None:
    place = workplace(database, tmp_path, roots=(tmp_path,))
    made = place.create(
        "E", repositories=[{"source": str(tmp_path / "r")}], profile="marker", start_agent=True
    )
    before = digest_of_everything(database)
    progress = tasks.progress(database, place.workspace_id, made.task_id)
    assert (progress.state, progress.fence, progress.outcome) == ("preparing", 0, None)
    assert [step.key for step in progress.steps] == [
        "repo_attach:0",
        "worktree:0",
        "session_prepare",
        "agent_launch",
    ]
    assert {step.state for step in progress.steps} == {"planned"}
    assert digest_of_everything(database) == before


def test_progress_of_a_completed_creation_has_its_outcome(
    database: Database, tmp_path: Path
) -> None:
    place = workplace(database, tmp_path)
    made = settle(place, place.create("E"))
    progress = tasks.progress(database, place.workspace_id, made.task_id)
    assert (progress.state, progress.outcome, progress.failure) == ("completed", "created", None)
    assert progress.finished_at is not None


def test_an_aborted_creation_is_still_readable(database: Database, tmp_path: Path) -> None:
    place = workplace(database, tmp_path, roots=(tmp_path,))
    made = place.create("E", repositories=[{"source": str(tmp_path / "r")}])
    failure = {"code": "repository.not_found", "reason": "there is no such repository"}
    with database.transaction("test") as connection:
        connection.execute(
            update(t.steps)
            .where(t.steps.c.position == 0)
            .values(state="failed", failure=json.dumps(failure))
        )
    settle(place, made, abort=True)
    with pytest.raises(NotFound):
        tasks.get(database, place.workspace_id, made.task_id)
    progress = tasks.progress(database, place.workspace_id, made.task_id)
    assert progress.state == "aborted"
    assert progress.failure == {**failure, "step": "repo_attach:0", "undone": []}
    assert progress.steps[0].failure == failure


def test_what_was_proven_is_in_the_plans_order(database: Database, tmp_path: Path) -> None:
    place = workplace(database, tmp_path, roots=(tmp_path,))
    sources = [str(tmp_path / f"r{n}") for n in range(12)]
    made = place.create(repositories=[{"source": s} for s in sources], profile="marker")
    with database.transaction("test") as connection:
        for position in reversed(range(24)):
            number = str(position // 2)
            attached = {"kind": "repo_attach", "repository": number, "base_commit": "c" + number}
            worktree = {"kind": "worktree", "repository": number, "branch": "b", "path": "/p"}
            evidence = worktree if position % 2 else attached
            connection.execute(
                update(t.steps)
                .where(t.steps.c.position == position)
                .values(evidence=json.dumps(evidence))
            )
    view = tasks.get(database, place.workspace_id, made.task_id)
    assert [r.source for r in view.repositories] == sources
    assert [r.base_commit for r in view.repositories] == [f"c{n}" for n in range(12)]
    assert {(r.branch, r.path) for r in view.repositories} == {("b", "/p")}


@pytest.mark.proves("C01")
def test_events_are_read_in_order_and_resumed(database: Database, tmp_path: Path) -> None:
    place = workplace(database, tmp_path)
    made = [settle(place, place.create(f"E{n}")).task_id for n in range(3)]
    with database.reading() as connection:
        events = events_after(connection, place.workspace_id)
        rest = events_after(connection, place.workspace_id, after=events[0].feed_number, limit=1)
        assert events_after(connection, "wsp_other") == []
    assert [(e.type, e.aggregate_id, e.revision) for e in events] == [
        ("task.created", task_id, 1) for task_id in made
    ]
    assert [e.id for e in rest] == [events[1].id]
