"""Owners that are late, lost, cut off or ahead of time, on the real stack and by the clock.

What is left is judged by the crash matrix's checker, which knows only SQL, git and ``/proc``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from crash.bystanders import Bystanders, plant
from crash.checker import Checker
from crash.ledger import Ledger
from crash.world import git
from support.stack import Play, alive, at_gate, until
from support.world import digest_of_everything
from test_loop import Scene

from demo.__main__ import outcome
from onceborn.runtime.ledger.database import Clock, Database
from onceborn.runtime.protocol import rules
from onceborn.runtime.protocol.orders import OperationRef, order_of
from onceborn.runtime.protocol.rules import StopReason
from onceborn.workflows.engine import creation_id

Playing = Callable[..., Play]

SLOW = """\
#!/bin/sh
# Packs objects once {gate} is there, and tells who works at the same time.
for pid in $(cat {log} 2>/dev/null); do
    case "$(sed 's/.*) //' "/proc/$pid/stat" 2>/dev/null)" in
        ""|Z*|X*) ;;  # gone, or nobody has waited for it yet
        *) echo "$pid" >> {overlaps} ;;
    esac
done
echo $$ >> {log}
while [ ! -e {gate} ]; do sleep 0.05; done
exec "$@"
"""


@dataclass
class SlowRemote:
    """A repository whose fetches go on only once ``gate`` is there; each is a process."""

    folder: Path

    @property
    def gate(self) -> Path:
        return self.folder / "go-on"

    def begun(self) -> list[int]:
        """The fetches that were begun, oldest first."""
        log = self.folder / "fetches"
        return [int(pid) for pid in log.read_text().split()] if log.exists() else []

    def overlaps(self) -> list[str]:
        """Fetches that were still alive when the next one began."""
        file = self.folder / "overlaps"
        return file.read_text().split() if file.exists() else []


def slow_remote(play: Play) -> SlowRemote:
    """The operator's git configuration lets every fetch wait."""
    remote = SlowRemote(play.folder)
    hook = play.folder / "slow"
    hook.write_text(
        SLOW.format(
            gate=remote.gate, log=play.folder / "fetches", overlaps=play.folder / "overlaps"
        )
    )
    hook.chmod(0o755)
    (play.data / "git").mkdir(exist_ok=True)
    (play.data / "git" / "host.gitconfig").write_text(f"[uploadpack]\n\tpackObjectsHook = {hook}\n")
    return remote


@pytest.fixture
def playing(
    database_url: str, temporal_address: str, temporal_namespace: str, tmp_path: Path
) -> Iterator[Playing]:
    begun: list[Play] = []

    def begin(**settings: str) -> Play:
        play = Play(
            tmp_path.resolve(),
            DATABASE_URL=database_url,
            TEMPORAL_ADDRESS=temporal_address,
            TEMPORAL_NAMESPACE=temporal_namespace,
            **{"ONCEBORN_LEASE_S": "2", "ONCEBORN_SWEEP_INTERVAL_S": "0.5", **settings},
        )
        begun.append(play)
        play.up()
        Ledger(database_url).install_history()
        return play

    yield begin
    for play in begun:
        play.down()


def holds(play: Play, others: Bystanders | None = None) -> None:
    """The five invariants."""
    assert Checker(play.settings["DATABASE_URL"], play.data, others).check() == []


def conflicting(play: Play) -> dict[str, object]:
    """A request whose second worktree fails for good: its branch is in the remote."""
    second = play.folder / "second"
    second.mkdir()
    git("init", "-q", "-b", "trunk", cwd=second)
    (second / "file.txt").write_text("x\n")
    git("add", ".", cwd=second)
    git("commit", "-q", "-m", "first", cwd=second)
    git("branch", "taken", cwd=second)
    sources = [{"source": str(play.repository)}, {"source": str(second), "branch": "taken"}]
    return {"title": "Two", "repositories": sources}


# -- a long clone ---------------------------------------------------------------------------------


@pytest.mark.proves("SC05")
@pytest.mark.parametrize("backend", ["sqlite"], indirect=True)
def test_a_clone_beyond_its_limit_is_dead_with_its_children_before_the_next(
    playing: Playing,
) -> None:
    play = playing(ONCEBORN_GIT_TIME_LIMIT_S="2", ONCEBORN_RETRY_BASE_S="0.2")
    remote = slow_remote(play)
    play.worker()
    waiting = play.creating("E", **play.manifest())
    until("a second try", lambda: len(remote.begun()) >= 2)
    assert not alive(remote.begun()[0])
    remote.gate.touch()
    assert outcome(waiting.result()) == "created"
    assert remote.overlaps() == []
    task_id = play.holder("E")
    assert play.steps(task_id)["repo_attach:0"]["attempt"] >= 2
    play.alone(task_id)
    holds(play)


@pytest.mark.proves("SC06", "X12")
@pytest.mark.parametrize("backend", ["sqlite"], indirect=True)
def test_a_worker_killed_in_a_long_clone_is_noticed_by_its_heartbeat(playing: Playing) -> None:
    """Long before the lease ends, so under the same fence: it was Temporal who noticed."""
    play = playing(ONCEBORN_LEASE_S="3000")
    remote = slow_remote(play)
    victim = play.worker()
    waiting = play.creating("E", **play.manifest())
    until("the clone", remote.begun)
    play.worker()
    play.kill(victim)
    remote.gate.touch()
    assert outcome(waiting.result()) == "created"
    task_id = play.holder("E")
    operation, attach = play.operation(task_id), play.steps(task_id)["repo_attach:0"]
    assert (operation["fence"], attach["attempt_fence"]) == (2, 1)
    assert attach["attempt"] >= 2
    play.alone(task_id)
    holds(play)


# -- undoing, whatever happens to the workflow ----------------------------------------------------


@pytest.mark.proves("SC07", "X02")
def test_what_was_made_but_not_recorded_is_undone_too(playing: Playing) -> None:
    play = playing()
    others = plant(play.data)
    victim = play.worker("worktree.performed=kill@1")
    waiting = play.creating("E", **conflicting(play))
    victim.wait(60)
    task_id = play.holder("E")
    worktree = play.data / json.loads(play.steps(task_id)["worktree:0"]["request"])["path"]
    assert worktree.is_dir()
    assert play.steps(task_id)["worktree:0"]["state"] == "running"
    play.worker()
    problem = waiting.result().json()
    assert (problem["code"], problem["step"]) == ("creation_aborted", "worktree:1")
    undone = {entry["step"]: entry["how"] for entry in problem["undone"]}
    # In reverse; the last step did nothing, and there is nothing of it to undo.
    assert list(undone) == ["repo_attach:1", "worktree:0", "repo_attach:0"]
    assert not worktree.exists()
    holds(play, others)


@pytest.mark.proves("X08", "SC13", "X02")
@pytest.mark.parametrize("backend", ["postgresql"], indirect=True)
@pytest.mark.parametrize(
    ("point", "how"),
    [
        ("undo.require.begin", "cancel"),
        ("worktree.undone", "terminate"),
        ("worktree.undone", "cancel"),
        ("abort.begin", "terminate"),
    ],
)
def test_undoing_goes_on_though_the_workflow_is_ended_from_outside(
    playing: Playing, tmp_path: Path, point: str, how: str
) -> None:
    play = playing()
    others = plant(play.data)
    gate = tmp_path / "gate"
    play.worker(f"{point}=wait:{gate}")
    waiting = play.creating("E", **conflicting(play))
    at_gate(play, gate, "the worker to be undoing")
    task_id = play.holder("E")
    play.workflow(how, creation_id(play.operation(task_id)["id"], 1))
    play.worker()  # the first one thinks for a while that it still drives it
    gate.touch()
    assert waiting.result().json()["code"] == "creation_aborted"
    assert play.query("SELECT id FROM tasks WHERE external_id = 'E'") == []
    holds(play, others)
    assert outcome(play.create("E", **play.manifest())) == "created"


@pytest.mark.proves("SC13", "X08")
@pytest.mark.parametrize("backend", ["sqlite"], indirect=True)
@pytest.mark.parametrize(
    "point", ["repo_attach.claimed", "session_prepare.apply.begin", "complete.commit.begin"]
)
def test_terminated_in_each_step_it_is_driven_on(
    playing: Playing, tmp_path: Path, point: str
) -> None:
    play = playing()
    gate = tmp_path / "gate"
    play.worker(f"{point}=wait:{gate}")
    waiting = play.creating("E", **play.manifest())
    at_gate(play, gate, "the worker to be inside the step")
    task_id = play.holder("E")
    play.workflow("terminate", creation_id(play.operation(task_id)["id"], 1))
    play.worker()
    gate.touch()
    assert outcome(waiting.result()) == "created"
    play.alone(task_id)
    holds(play)


# -- a clock that jumps ---------------------------------------------------------------------------


@pytest.fixture
def scene(database: Database, database_url: str, tmp_path: Path) -> Scene:
    made = Scene(database, tmp_path)
    Ledger(database_url).install_history()
    return made


DAY_MS = 86_400_000


@pytest.mark.proves("X03", "SH01")
@pytest.mark.parametrize("jump_ms", [DAY_MS, -DAY_MS])
def test_a_clock_that_jumps_lets_no_older_owner_write(
    scene: Scene, database_url: str, jump_ms: int
) -> None:
    """Forwards every lease ends at once; backwards none does, until it is made up for."""
    owned = scene.begin()
    ref = OperationRef(owned.operation_id, owned.fence)
    snapshot = scene.bench.call("begin", ref).snapshot
    late = order_of(rules.next_action(snapshot), ref)
    assert late is not None
    jumped = Database(database_url, clock=Clock(jump_ms))
    try:
        other = _hands(scene, jumped)
        taken = other.recovery.claim(other.host.host_id, 9)
        if jump_ms < 0:
            assert taken == []
            assert scene.bench.run(ref) is StopReason.COMPLETED
        else:
            assert [one.fence for one in taken] == [owned.fence + 1]
            before = digest_of_everything(scene.database)
            looked = scene.bench.call(*late)
            assert rules.next_action(looked.snapshot) == rules.Stop(StopReason.FENCE_LOST)
            assert digest_of_everything(scene.database) == before
            # The clock is put right while the new owner is at work: it is not disturbed, nor is
            # its operation taken from it by the leases that now reach a day ahead.
            jumped.clock.offset_ms = 0
            assert scene.bench.recovery.claim(other.host.host_id, 9) == []
            assert other.run(taken[0]) is StopReason.COMPLETED
    finally:
        jumped.dispose()
    assert Checker(database_url, scene.folder / "data").check() == []


def _hands(scene: Scene, database: Database):  # type: ignore[no-untyped-def]
    ours, scene.database = scene.database, database
    try:
        return scene.hands()
    finally:
        scene.database = ours


@pytest.mark.proves("SH01", "X03")
def test_each_of_three_owners_has_a_fence_of_its_own_and_the_late_two_write_nothing(
    scene: Scene,
) -> None:
    first = scene.begin()
    refs = [OperationRef(first.operation_id, first.fence)]
    orders = []
    for _ in range(2):
        ref = refs[-1]
        order = order_of(rules.next_action(scene.bench.call("begin", ref).snapshot), ref)
        assert order is not None
        orders.append(order)
        owned = scene.next_owner()
        refs.append(OperationRef(owned.operation_id, owned.fence))
    assert [ref.fence for ref in refs] == [1, 2, 3]
    assert scene.hands().run(refs[-1]) is StopReason.COMPLETED
    before = digest_of_everything(scene.database)
    for order in orders:
        scene.bench.call(*order)
    assert digest_of_everything(scene.database) == before
    assert len(scene.worktrees()) == len(scene.branches()) == 1
