"""The product as real processes, on both databases: killed, paused, raced, and cut off."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.stack import Play, at_gate, at_once, until

from demo.__main__ import outcome
from onceborn.workflows.engine import creation_id


@pytest.fixture
def play(
    database_url: str, temporal_address: str, temporal_namespace: str, tmp_path: Path
) -> Iterator[Play]:
    stage = Play(
        tmp_path.resolve(),
        DATABASE_URL=database_url,
        TEMPORAL_ADDRESS=temporal_address,
        TEMPORAL_NAMESPACE=temporal_namespace,
        ONCEBORN_LEASE_S="2",
        ONCEBORN_SWEEP_INTERVAL_S="0.5",
    )
    try:
        stage.up()
        yield stage
    finally:
        stage.down()


@pytest.mark.proves("C01", "C02", "C03", "C08", "F01", "F02", "F09", "S06")
def test_created_then_found_with_no_side_effect(play: Play) -> None:
    play.worker()
    first = play.create("E", **play.manifest())
    assert outcome(first) == "created"
    task = first.json()
    play.alone(task["id"])
    before = play.digest()
    # The creation, its run, and the one by which the namespace was seen to be ready; what is
    # visible lags behind what was started.
    until("all workflows to be visible", lambda: play.workflows() == 3)
    same = play.create("E", **play.manifest())
    assert (outcome(same), same.headers["Onceborn-Request-Match"]) == ("found_settled", "same")
    other = play.create("E", **play.manifest(title="Another"))
    assert (outcome(other), other.headers["Onceborn-Request-Match"]) == (
        "found_settled",
        "differs",
    )
    assert other.json()["title"] == task["title"]
    assert play.digest() == before
    with play.client() as client:
        read = client.get(f"/api/v1/tasks/{task['id']}").json()
        path = f"/api/v1/workspaces/{play.workspace_id}/tasks/by-external-id"
        looked = client.get(path, params={"external_id": "E"}).json()
    assert "creation_complete" not in read
    assert (looked["deduplicated"], looked["creation_complete"]) == (True, True)
    assert play.digest() == before
    assert play.workflows() == 3


@pytest.mark.proves("R01", "SB01")
@pytest.mark.parametrize("racers", [20, 200])
def test_racers_over_two_server_processes(play: Play, racers: int) -> None:
    play.worker()
    bases = [play.base, play.api("api-2")]
    play.create("before", title="before")

    def race(number: int) -> tuple[str, str]:
        response = play.create("E", base=bases[number % 2], **play.manifest())
        return outcome(response), response.json()["id"]

    answers = at_once(racers, race)
    assert [name for name, _ in answers].count("created") == 1
    assert {name for name, _ in answers} <= {"created", "found_unsettled", "found_settled"}
    (task_id,) = {identifier for _, identifier in answers}
    play.alone(task_id)
    play.create("after", title="after")
    numbers = play.query("SELECT number FROM tasks ORDER BY number")
    assert [row["number"] for row in numbers] == [1, 2, 3]
    assert len(play.query("SELECT id FROM operations")) == 3


@pytest.mark.proves("SA02")
def test_eight_creations_on_one_repository_at_once(play: Play) -> None:
    play.worker()
    answers = at_once(8, lambda n: play.create(f"E{n}", **play.manifest(title=f"task {n}")))
    assert [outcome(response) for response in answers] == ["created"] * 8
    for response in answers:
        play.alone(response.json()["id"])
    (clone,) = (play.data / "repositories").glob("*.git")
    assert len(list((clone / "worktrees").iterdir())) == 8
    assert not list(clone.rglob("*.lock"))


KILLED_AT = [
    "creation.begin.commit",
    "repo_attach.performed",
    "worktree.performed",
    "step.record.committed",
    "complete.enter.committed",
    "complete.commit.committed",
    "run.started.commit",
]


@pytest.mark.proves("X01", "S03", "SC04", "SC13")
@pytest.mark.parametrize("boundary", KILLED_AT)
def test_a_worker_killed_at_a_boundary_is_followed_by_another(play: Play, boundary: str) -> None:
    victim = play.worker(f"{boundary}=kill@1")
    waiting = play.creating("E", **play.manifest())
    victim.wait(60)
    assert victim.returncode == -signal.SIGKILL
    task_id = play.holder("E")
    play.worker()
    assert outcome(waiting.result()) == "created"
    play.alone(task_id)
    assert outcome(play.create("E", **play.manifest())) == "found_settled"


@pytest.mark.proves("X01", "SC04")
@pytest.mark.parametrize("boundary", ["handoff.take.begin", "handoff.take.committed"])
def test_an_api_killed_before_it_handed_off(play: Play, boundary: str) -> None:
    play.worker()
    doomed = play.start("doomed", "api", "--port", "0", ONCEBORN_FAILPOINTS=f"{boundary}=kill")
    base = until("its address", lambda: play._address(doomed, "doomed"))
    lost = play._threads.submit(play.create, "E", base=base, **play.manifest())
    doomed.wait(60)
    assert lost.exception() is not None
    assert outcome(play.create("E", **play.manifest())) in ("found_unsettled", "found_settled")
    play.alone(play.holder("E"))


@pytest.mark.proves("F03", "F06", "F09", "SC03")
def test_a_preparing_task_stays_what_it_is_until_the_runtime_ends_it(
    play: Play, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    play.worker(f"worktree.claimed=wait:{gate}")
    waiting = play.creating("E", **play.manifest(start_agent=False))
    at_gate(play, gate, "the worker to be inside the step")
    task_id = play.holder("E")
    answers = [play.create("E", **play.manifest(start_agent=True)) for _ in range(10)]
    assert {(outcome(a), a.json()["id"]) for a in answers} == {("found_unsettled", task_id)}
    with play.client() as client:
        assert "creation_complete" not in client.get(f"/api/v1/tasks/{task_id}").json()
        assert client.get("/api/v1/tasks").json()["tasks"] == []
    progress = play.progress(task_id)
    states = {step["key"]: step["state"] for step in progress["steps"]}
    assert states == {
        "repo_attach:0": "succeeded",
        "worktree:0": "running",
        "session_prepare": "planned",
    }
    gate.touch()
    assert outcome(waiting.result()) == "created"
    play.alone(task_id, agents=0)


PAUSED_AT = ["worktree.lock", "worktree.claimed", "step.guard", "worktree.recorded"]


@pytest.mark.proves("X03", "X11")
@pytest.mark.parametrize("boundary", PAUSED_AT)
def test_a_worker_paused_beyond_timeout_and_lease_changes_nothing_when_it_wakes_up(
    play: Play, boundary: str, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    paused = play.worker(f"{boundary}=wait:{gate}")
    waiting = play.creating("E", **play.manifest())
    at_gate(play, gate, "the worker to be inside the step")
    play.pause(paused)
    task_id = play.holder("E")
    play.worker()
    holds_the_lock = boundary in ("worktree.claimed", "step.guard")
    if holds_the_lock:
        # Nobody may act beside it; an owner under a later fence waits for its lock.
        until("the next owner", lambda: play.operation(task_id)["fence"] > 1)
        before = None
    else:
        assert outcome(waiting.result()) == "created"
        play.alone(task_id)
        before = play.digest()
    gate.touch()
    paused.send_signal(signal.SIGCONT)
    assert outcome(waiting.result()) == "created"
    play.end(paused)
    play.alone(task_id)
    if before is not None:
        assert play.digest() == before
    steps = play.steps(task_id)
    if holds_the_lock:
        assert steps["worktree:0"]["attempt"] > 1 or steps["repo_attach:0"]["attempt"] > 1


@pytest.mark.proves("X12")
def test_a_worker_killed_while_its_git_child_lives(play: Play, tmp_path: Path) -> None:
    victim = play.worker(f"git.spawned=wait:{tmp_path / 'gate'}")
    waiting = play.creating("E", **play.manifest())
    at_gate(play, tmp_path / "gate", "a git child")
    play.kill(victim)
    play.worker()
    assert outcome(waiting.result()) == "created"
    play.alone(play.holder("E"))


@pytest.mark.proves("X08", "SC13", "SC02")
@pytest.mark.parametrize("how", ["terminate", "cancel"])
def test_a_workflow_ended_from_outside_is_driven_on(play: Play, tmp_path: Path, how: str) -> None:
    gate = tmp_path / "gate"
    play.worker(f"worktree.claimed=wait:{gate}")
    waiting = play.creating("E", **play.manifest())
    at_gate(play, gate, "the worker to be inside the step")
    task_id = play.holder("E")
    operation_id = play.operation(task_id)["id"]
    play.workflow(how, creation_id(operation_id, 1))
    gate.touch()
    assert outcome(waiting.result()) == "created"
    play.alone(task_id)


@pytest.mark.proves("X02")
def test_an_aborted_creation_is_answered_with_step_reason_and_what_was_undone(play: Play) -> None:
    play.worker()
    response = play.create("E", **play.manifest(repositories=[{"source": str(play.data / "no")}]))
    problem = response.json()
    assert response.status_code == 422
    assert (problem["code"], problem["step"]) == ("creation_aborted", "repo_attach:0")
    assert problem["reason_code"] == "repository.not_found"
    assert problem["undone"] == []
    assert outcome(play.create("E", **play.manifest())) == "created"
    assert json.loads(play.query("SELECT payload FROM outbox")[0]["payload"])["external_id"] == "E"
