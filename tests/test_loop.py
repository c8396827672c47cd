"""The engine on real git and both databases, without Temporal: the loop to its two ends."""

from __future__ import annotations

import contextlib
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import update
from support.loop import Bench
from support.world import Workplace, digest_of_everything, rows, workplace

from onceborn.runtime import failpoints
from onceborn.runtime.ledger import tables as t
from onceborn.runtime.ledger.database import Database
from onceborn.runtime.protocol import rules
from onceborn.runtime.protocol.errors import DatabaseUnavailable
from onceborn.runtime.protocol.orders import OperationRef, order_of
from onceborn.runtime.protocol.rules import StopReason
from onceborn.runtime.recovery import Owned


def git(*arguments: str, cwd: Path) -> str:
    identity = ["-c", "user.name=t", "-c", "user.email=t@localhost"]
    done = subprocess.run(
        ["git", *identity, *arguments], cwd=cwd, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def repository(folder: Path, branch: str = "trunk") -> Path:
    folder.mkdir(parents=True)
    git("init", "-q", "-b", branch, cwd=folder)
    (folder / "file.txt").write_text("content\n")
    git("add", ".", cwd=folder)
    git("commit", "-q", "-m", "first", cwd=folder)
    return folder


@pytest.fixture(autouse=True)
def _inert_failpoints() -> Iterator[None]:
    yield
    failpoints.configure("")


class Scene:
    """A workspace, a repository and a host's hands."""

    def __init__(self, database: Database, folder: Path, **settings: Any) -> None:
        self.database = database
        self.folder = folder
        self.repository = repository(folder / "repo")
        self.place: Workplace = workplace(database, folder / "data", roots=(folder,), **settings)
        self.bench = self.hands()

    def hands(self) -> Bench:
        return Bench(self.database, self.folder / "data", roots=(self.folder,))

    def begin(self, external_id: str | None = "E", **body: Any) -> Owned:
        body.setdefault("repositories", [{"source": str(self.repository)}])
        admitted = self.place.create(external_id, **body)
        assert admitted.handle is not None
        return self.bench.recovery.take(admitted.handle)

    def next_owner(self) -> Owned:
        """The sweep, after the lease has ended."""
        self.database.clock.advance(3_600_000)
        (owned,) = self.bench.recovery.claim(self.bench.host.host_id, 9)
        return owned

    def operation(self) -> dict[str, Any]:
        return rows(self.database, t.operations)[0]

    def steps(self) -> dict[str, dict[str, Any]]:
        return {row["step_key"]: row for row in rows(self.database, t.steps)}

    def events(self) -> list[tuple[str, int]]:
        return [(row["type"], row["revision"]) for row in rows(self.database, t.outbox)]

    def worktrees(self) -> list[Path]:
        return [p for p in (self.folder / "data" / "worktrees").glob("*/*") if p.is_dir()]

    def branches(self) -> list[str]:
        (clone,) = (self.folder / "data" / "repositories").glob("*.git")
        return git("for-each-ref", "--format=%(refname)", "refs/heads", cwd=clone).split()


@pytest.fixture
def scene(database: Database, tmp_path: Path) -> Scene:
    return Scene(database, tmp_path)


@pytest.mark.proves("C01", "C07", "S06")
def test_a_creation_completes_with_evidence_and_one_event(scene: Scene) -> None:
    owned = scene.begin()
    assert scene.bench.run(owned) is StopReason.COMPLETED
    operation, steps = scene.operation(), scene.steps()
    assert (operation["state"], operation["outcome"]) == ("completed", "created")
    assert operation["fence"] == owned.fence + 1
    assert {s["state"] for s in steps.values()} == {"succeeded"}
    worktree = json.loads(steps["worktree:0"]["evidence"])
    path = Path(worktree["path"])
    assert git("rev-parse", "HEAD", cwd=path) == worktree["base_commit"]
    assert f"refs/heads/{git('branch', '--show-current', cwd=path)}" == worktree["head"]
    assert scene.events() == [("task.created", 1)]
    (task,) = rows(scene.database, t.tasks)
    assert (task["complete"], task["revision"], task["list_position"]) == (True, 1, 1)


@pytest.mark.proves("C07")
@pytest.mark.parametrize("count", [0, 3])
def test_no_repository_and_three(scene: Scene, count: int) -> None:
    more = [repository(scene.folder / "more" / str(n)) for n in range(count)]
    owned = scene.begin(repositories=[{"source": str(path)} for path in more])
    assert scene.bench.run(owned) is StopReason.COMPLETED
    assert len(scene.steps()) == 2 * count
    assert len(scene.worktrees()) == count
    assert scene.events() == [("task.created", 1)]


@pytest.mark.proves("C08")
@pytest.mark.parametrize("start", [True, False])
def test_an_agent_is_admitted_exactly_where_one_was_asked_for(scene: Scene, start: bool) -> None:
    owned = scene.begin(profile="marker", start_agent=start)
    assert scene.bench.run(owned) is StopReason.COMPLETED
    runs = rows(scene.database, t.runs)
    assert len(runs) == int(start)
    assert ("agent_launch" in scene.steps()) is start
    assert len(rows(scene.database, t.sessions)) == 1
    if start:
        launch = scene.steps()["agent_launch"]
        assert launch["state"] == "succeeded"
        assert json.loads(launch["evidence"])["run_id"] == runs[0]["id"]
        assert runs[0]["dispatch_key"].startswith(f"task-launch/{owned.operation_id}/ses_")


@pytest.mark.proves("X02", "SA01")
def test_a_step_that_fails_for_good_undoes_the_rest_in_reverse(scene: Scene) -> None:
    taken = repository(scene.folder / "second")
    git("branch", "release/2026.4", cwd=taken)
    owned = scene.begin(
        repositories=[
            {"source": str(scene.repository)},
            {"source": str(taken), "branch": "release"},
        ]
    )
    undone: list[str] = []

    def watch(action: rules.Action) -> None:
        if isinstance(action, rules.Compensate):
            undone.append(action.step.key)

    assert scene.bench.run(owned, watch=watch) is StopReason.ABORTED
    assert undone == ["repo_attach:1", "worktree:0", "repo_attach:0"]
    failure = json.loads(scene.operation()["failure"])
    assert failure["step"] == "worktree:1"
    assert "release/2026.4" in failure["reason"]
    assert [u["step"] for u in failure["undone"]] == undone
    assert all(u["how"] == "compensated" and u["proof"] for u in failure["undone"])
    assert rows(scene.database, t.tasks) == []
    assert rows(scene.database, t.attachments) == []
    assert scene.worktrees() == []
    assert scene.events() == []
    again = scene.place.create("E", repositories=[{"source": str(taken), "branch": "other"}])
    assert again.handle is not None
    assert scene.bench.run(scene.bench.recovery.take(again.handle)) is StopReason.COMPLETED


@pytest.mark.proves("SA06")
def test_an_empty_repository_is_one_clear_permanent_error(scene: Scene) -> None:
    empty = scene.folder / "empty"
    empty.mkdir()
    git("init", "-q", "-b", "master", cwd=empty)
    owned = scene.begin(repositories=[{"source": str(empty)}])
    assert scene.bench.run(owned) is StopReason.ABORTED
    failure = json.loads(scene.operation()["failure"])
    assert failure["code"] == "repository.empty"
    assert str(empty) in failure["reason"]
    assert scene.steps()["repo_attach:0"]["attempt"] == 1


BOUNDARIES = [
    "step.claim.begin",
    "step.claim.commit",
    "step.claim.committed",
    "repo_attach.claimed",
    "repo_attach.performed",
    "repo_attach.observed",
    "repo_attach.recorded",
    "step.record.begin",
    "step.record.commit",
    "step.record.committed",
    "step.rows.commit",
    "step.rows.committed",
    "worktree.lock",
    "worktree.claimed",
    "worktree.performed",
    "worktree.observed",
    "worktree.recorded",
    "session_prepare.apply.commit",
    "session_prepare.apply.committed",
    "agent_launch.apply.commit",
    "agent_launch.apply.committed",
    "complete.enter.commit",
    "complete.enter.committed",
    "complete.commit.begin",
    "complete.commit.commit",
    "complete.commit.committed",
    "git.spawn",
    "git.exited",
    "lock.acquired",
]


@pytest.mark.proves("X01", "X04", "S03", "S04", "SA03")
@pytest.mark.parametrize("boundary", BOUNDARIES)
def test_an_owner_that_is_gone_at_a_boundary_is_followed_by_one_that_finishes(
    scene: Scene, boundary: str
) -> None:
    """The attempt is cut off (an error nobody handles); the next owner meets what is left."""
    owned = scene.begin(profile="marker", start_agent=True)
    failpoints.configure(f"{boundary}=raise@1")
    with contextlib.suppress(failpoints.FailpointError, DatabaseUnavailable):
        scene.bench.run(owned)
    failpoints.configure("")
    if scene.operation()["state"] != "completed":
        after = scene.next_owner()
        assert after.fence == owned.fence + 1
        assert scene.hands().run(after) is StopReason.COMPLETED
    assert len(scene.worktrees()) == len(scene.branches()) == 1
    assert len(rows(scene.database, t.runs)) == len(rows(scene.database, t.sessions)) == 1
    assert len(rows(scene.database, t.attachments)) == 1
    assert scene.events() == [("task.created", 1)]
    counters = rows(scene.database, t.workspace_counters)[0]
    assert counters["preparing"] == 0


@pytest.mark.proves("X03", "X11")
def test_an_old_owner_that_wakes_up_late_changes_nothing(scene: Scene) -> None:
    owned = scene.begin()
    ref = OperationRef(owned.operation_id, owned.fence)
    snapshot = scene.bench.call("begin", ref).snapshot
    late = order_of(rules.next_action(snapshot), ref)
    assert late is not None
    assert scene.hands().run(scene.next_owner()) is StopReason.COMPLETED
    before = digest_of_everything(scene.database)
    files = sorted(str(p) for p in (scene.folder / "data").rglob("*"))
    looked = scene.bench.call(*late)
    assert rules.next_action(looked.snapshot) == rules.Stop(StopReason.COMPLETED)
    assert digest_of_everything(scene.database) == before
    assert sorted(str(p) for p in (scene.folder / "data").rglob("*")) == files


@pytest.mark.proves("X03")
def test_a_lost_fence_stops_every_move(scene: Scene) -> None:
    owned = scene.begin()
    stale = OperationRef(owned.operation_id, owned.fence)
    scene.next_owner()
    before = digest_of_everything(scene.database)
    snapshot = scene.bench.call("look", stale).snapshot
    assert rules.next_action(snapshot) == rules.Stop(StopReason.FENCE_LOST)
    moves = [rules.RequireUndo(), rules.FinishRelease(), rules.EnterCompletion()]
    for move in (*moves, rules.CommitCompletion(), rules.Abort(), rules.Park("no")):
        named = order_of(move, stale)
        assert named is not None
        scene.bench.call(*named)
    assert digest_of_everything(scene.database) == before


@pytest.mark.proves("X11")
def test_a_second_attempt_under_one_fence_is_told_apart_by_its_token(scene: Scene) -> None:
    """The engine runs the same activity twice: the later finds that its expectation is gone."""
    owned = scene.begin()
    ref = OperationRef(owned.operation_id, owned.fence)
    order = order_of(rules.next_action(scene.bench.call("begin", ref).snapshot), ref)
    assert order is not None
    scene.bench.call(*order)
    before = digest_of_everything(scene.database)
    looked = scene.bench.call(*order)
    assert digest_of_everything(scene.database) == before
    assert looked.snapshot.steps[0].attempt == 1


@pytest.mark.proves("S01", "S02")
def test_a_release_while_preparing_ends_in_identity_lost(scene: Scene) -> None:
    owned = scene.begin()
    with scene.database.transaction("test") as connection:
        connection.execute(update(t.operations).values(state="preparing_release"))
    assert scene.bench.run(owned) is StopReason.COMPLETED
    assert scene.operation()["outcome"] == "created_identity_lost"
    (event,) = rows(scene.database, t.outbox)
    assert event["type"] == "task.created"
    assert "external_id" not in json.loads(event["payload"])
    assert rows(scene.database, t.tasks)[0]["external_id"] is None


@pytest.mark.proves("S05")
@pytest.mark.parametrize(
    ("table", "column", "field"),
    [
        ("operations", "plan", "plan_hash"),
        ("operations", "manifest", "manifest_hash"),
        ("operations", "actor", "actor_hash"),
        ("steps", "request", "request"),
        ("steps", "request_hash", "request"),
        ("steps", "evidence", "evidence"),
        ("steps", "evidence_hash", "evidence"),
    ],
)
def test_a_changed_document_parks_the_operation_and_names_the_field(
    scene: Scene, table: str, column: str, field: str
) -> None:
    owned = scene.begin()

    def tamper(action: rules.Action) -> None:
        if not isinstance(action, rules.EnterCompletion):
            return
        target = t.metadata.tables[table]
        row = rows(scene.database, target)[0]
        changed = row[column].replace("a", "b", 3) if column != "actor" else "somebody else"
        statement = update(target).values({column: changed})
        if table == "steps":
            statement = statement.where(target.c.position == row["position"])
        with scene.database.transaction("test") as connection:
            connection.execute(statement)

    assert scene.bench.run(owned, watch=tamper) is StopReason.PARKED
    assert field in scene.operation()["parked_reason"]
    assert scene.events() == []


@pytest.mark.proves("X10")
def test_no_progress_over_the_budget_parks_and_releases_nothing(scene: Scene) -> None:
    owned: Owned = scene.begin()
    failpoints.configure("repo_attach.claimed=raise")
    for _ in range(5):
        with pytest.raises(failpoints.FailpointError):
            scene.bench.run(owned)
        owned = scene.next_owner()
    assert scene.bench.run(owned) is StopReason.PARKED
    assert "no progress" in scene.operation()["parked_reason"]
    assert rows(scene.database, t.tasks)[0]["external_id"] == "E"
    assert scene.place.create("E").outcome is not None


def test_claims_whose_driver_never_ran_do_not_spend_the_budget(scene: Scene) -> None:
    scene.begin()
    for _ in range(20):
        owned = scene.next_owner()
    assert scene.bench.run(owned) is StopReason.COMPLETED


@pytest.mark.proves("F05")
def test_completing_and_aborting_give_the_place_back(scene: Scene) -> None:
    full = workplace(
        scene.database, scene.folder / "data", name="full", capacity=1, roots=(scene.folder,)
    )
    first = full.create("E")
    assert first.handle is not None
    assert scene.bench.run(scene.bench.recovery.take(first.handle)) is StopReason.COMPLETED
    second = full.create("F", repositories=[{"source": str(scene.folder / "nothing")}])
    assert second.handle is not None
    assert scene.bench.run(scene.bench.recovery.take(second.handle)) is StopReason.ABORTED
    assert full.create("G").handle is not None
