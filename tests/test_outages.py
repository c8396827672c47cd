"""Temporal or the database away: the caller is told clearly, and what was admitted is finished."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.postgresql import PostgreSQL, embedded
from support.stack import Play, at_gate, until

from demo.__main__ import outcome
from onceborn.temporal_dev.address import temporal_folder


@contextmanager
def playing(folder: Path, database_url: str) -> Iterator[Play]:
    """A stage with a Temporal of its own, which the test may stop."""
    play = Play(
        folder.resolve(),
        DATABASE_URL=database_url,
        ONCEBORN_LEASE_S="2",
        ONCEBORN_SWEEP_INTERVAL_S="0.5",
    )
    try:
        play.up()
        yield play
    finally:
        play.down()


def _ready(play: Play) -> dict[str, object]:
    with play.client() as client:
        answer = client.get("/readyz")
    return {"status": answer.status_code, **answer.json()}


@pytest.mark.proves("X07")
def test_temporals_data_is_lost_entirely(database_url: str, tmp_path: Path) -> None:
    with playing(tmp_path, database_url) as play:
        assert play.temporal is not None
        play.temporal.start()
        gate = tmp_path / "gate"
        play.worker(f"worktree.performed=wait:{gate}")
        waiting = play.creating("E", **play.manifest())
        at_gate(play, gate, "the worker to be inside the step")
        task_id = play.holder("E")
        play.temporal.stop()
        for file in temporal_folder(play.data).glob("temporal.db*"):
            file.unlink()
        play.temporal.start()
        gate.touch()
        assert outcome(waiting.result()) == "created"
        play.alone(task_id)
        assert outcome(play.create("E", **play.manifest())) == "found_settled"


@pytest.mark.proves("SC04", "SC14")
def test_without_temporal_a_create_is_admitted_and_finished_when_it_is_back(
    database_url: str, tmp_path: Path
) -> None:
    with playing(tmp_path, database_url) as play:
        assert play.temporal is not None
        refused = play.create("E", **play.manifest())
        problem = refused.json()
        assert (refused.status_code, problem["code"]) == (503, "engine_unavailable")
        assert "Retry-After" in refused.headers
        task_id = problem["task_id"]
        again = play.create("E", **play.manifest())
        assert (outcome(again), again.json()["id"]) == ("found_unsettled", task_id)
        worker = play.start("early", "worker")
        until("the worker to wait", lambda: play.logged("early", "engine_unavailable"))
        play.temporal.start()
        play.alone(task_id)
        assert outcome(play.create("E", **play.manifest())) == "found_settled"
        assert worker.poll() is None


@pytest.mark.proves("X07", "SC14")
def test_temporal_goes_away_in_the_middle_and_comes_back(database_url: str, tmp_path: Path) -> None:
    with playing(tmp_path, database_url) as play:
        assert play.temporal is not None
        play.temporal.start()
        gate = tmp_path / "gate"
        play.worker(f"worktree.performed=wait:{gate}")
        waiting = play.creating("E", **play.manifest())
        at_gate(play, gate, "the worker to be inside the step")
        play.temporal.stop()
        gate.touch()
        task_id = play.holder("E")
        until("the step to be recorded", lambda: _succeeded(play, task_id))
        play.temporal.start()
        assert outcome(waiting.result()) == "created"
        play.alone(task_id)


def _succeeded(play: Play, task_id: str) -> bool:
    return bool(play.steps(task_id)["worktree:0"]["state"] == "succeeded")


def test_the_database_goes_away_and_comes_back(
    temporal_address: str, temporal_namespace: str, tmp_path: Path
) -> None:
    with embedded() as server:
        url = PostgreSQL(server.url).fresh()
        play = Play(
            tmp_path.resolve(),
            DATABASE_URL=url,
            TEMPORAL_ADDRESS=temporal_address,
            TEMPORAL_NAMESPACE=temporal_namespace,
            ONCEBORN_LEASE_S="2",
            ONCEBORN_SWEEP_INTERVAL_S="0.5",
        )
        try:
            play.up()
            gate = tmp_path / "gate"
            play.worker(f"worktree.performed=wait:{gate}")
            waiting = play.creating("E", **play.manifest())
            at_gate(play, gate, "the worker to be inside the step")
            server.stop()
            refused = play.create("F", **play.manifest())
            assert (refused.status_code, refused.json()["code"]) == (503, "database_unavailable")
            assert _ready(play)["status"] == 503
            cut_off = waiting.result()
            assert (cut_off.status_code, cut_off.json()["code"]) == (503, "database_unavailable")
            late = play.start("late", "worker")
            until("a worker to wait", lambda: play.logged("late", "database_unavailable"))
            gate.touch()
            server.start()
            task_id = play.holder("E")
            play.alone(task_id)
            assert outcome(play.create("E", **play.manifest())) == "found_settled"
            assert play.query("SELECT id FROM tasks WHERE external_id = 'F'") == []
            assert late.poll() is None
        finally:
            play.down()
