"""The checker of the crash matrix can fail: each invariant is broken on purpose, and is named."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from crash import world
from crash.bystanders import Bystanders
from crash.checker import Checker, counts
from crash.completed import MARK
from crash.hands import Hands, Place
from crash.ledger import Ledger
from crash.scenes import SCENES
from support import sqlite

git = world.git


@dataclass
class Ended:
    """A world in which a creation has ended, whatever a test then does to it."""

    place: Place
    bystanders: Bystanders

    @property
    def data(self) -> Path:
        return self.place.data

    @property
    def ledger(self) -> Ledger:
        return Ledger(self.place.url)

    def one(self, statement: str) -> Any:
        return next(iter(self.ledger.rows(statement)[0].values()))

    def evidence(self, kind: str = "worktree") -> dict[str, Any]:
        last = "SELECT evidence FROM steps WHERE kind = ? AND evidence IS NOT NULL"
        return dict(json.loads(self.ledger.rows(last, kind)[-1]["evidence"]))

    def steps(self, kind: str) -> dict[str, Any]:
        return self.ledger.rows("SELECT * FROM steps WHERE kind = ?", kind)[-1]

    @property
    def worktree(self) -> Path:
        return Path(self.evidence()["path"])

    @property
    def clone(self) -> Path:
        return world.clones(self.data)[0]


@dataclass
class Kept:
    """The same, to be copied back to where it was: git's paths are absolute."""

    ended: Ended
    copy: Path

    def restored(self) -> Ended:
        shutil.rmtree(self.ended.place.root, ignore_errors=True)
        shutil.copytree(self.copy, self.ended.place.root, symlinks=True)
        return self.ended


def _build(name: str, folder: Path) -> Kept:
    scene = next(scene for scene in SCENES if scene.name == name)
    root = folder / "world"
    root.mkdir()
    place = Place(root, sqlite.fresh(sqlite.make_template(folder), root))
    bystanders = scene.build(place)
    hands = Hands(place, clock_ms=60_000)
    hands.first() if scene.phase == "first" else hands.settle()
    hands.database.dispose()
    world.wait_until_idle(place.data)
    ended = Ended(place, bystanders)
    # What has no history yet cannot be looked at by anybody else's.
    assert ended.ledger.rows("SELECT count(*) AS n FROM history_steps")[0]["n"] > 0
    shutil.copytree(root, folder / "kept", symlinks=True)
    return Kept(ended, folder / "kept")


@pytest.fixture(scope="module")
def _completed(tmp_path_factory: pytest.TempPathFactory) -> Kept:
    return _build("between A and B", tmp_path_factory.mktemp("completed").resolve())


@pytest.fixture(scope="module")
def _aborted(tmp_path_factory: pytest.TempPathFactory) -> Kept:
    return _build("a branch is taken", tmp_path_factory.mktemp("aborted").resolve())


@pytest.fixture(scope="module")
def _transferred(tmp_path_factory: pytest.TempPathFactory) -> Kept:
    return _build("deleted, with work", tmp_path_factory.mktemp("transferred").resolve())


@pytest.fixture
def completed(_completed: Kept) -> Ended:
    return _completed.restored()


@pytest.fixture
def aborted(_aborted: Kept) -> Ended:
    return _aborted.restored()


@pytest.fixture
def transferred(_transferred: Kept) -> Ended:
    return _transferred.restored()


def _broken(ended: Ended) -> list[str]:
    found = Checker(ended.place.url, ended.data, ended.bystanders).check()
    return [str(violation) for violation in found]


def _names(ended: Ended, invariant: int, what: str) -> None:
    told = _broken(ended)
    assert any(f"invariant {invariant}:" in line and what in line for line in told), told


def test_a_world_in_which_all_holds_has_no_violation(
    completed: Ended, aborted: Ended, transferred: Ended
) -> None:
    assert [_broken(ended) for ended in (completed, aborted, transferred)] == [[], [], []]


def test_the_checker_imports_nothing_of_the_product() -> None:
    code = "import sys, crash.checker; print([m for m in sys.modules if m.startswith('onceborn')])"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parent)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == "[]"


# -- 1 --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("table", "column", "value"),
    [("tasks", "external_id", "E"), ("runs", "dispatch_key", None)],
)
def test_two_of_one_key(completed: Ended, table: str, column: str, value: str | None) -> None:
    ledger = completed.ledger
    ledger.execute(f"DROP INDEX uq_{table}_{column}")
    row = next(r for r in ledger.rows(f"SELECT * FROM {table}") if value in (None, r[column]))
    row |= {"id": "another"}
    if table == "tasks":
        row |= {"number": 99, "operation_id": "another", "list_position": None}
    places = ", ".join("?" * len(row))
    ledger.execute(f"INSERT INTO {table} ({', '.join(row)}) VALUES ({places})", *row.values())
    _names(completed, 1, "2 " + table)


# -- 2 --------------------------------------------------------------------------------------------


def test_neither_ended_nor_parked(completed: Ended) -> None:
    completed.ledger.execute("UPDATE operations SET state = 'completing'")
    _names(completed, 2, "is completing, and not parked")
    completed.ledger.execute("UPDATE operations SET parked_reason = ' '")
    _names(completed, 2, "not parked with a reason")
    completed.ledger.execute("UPDATE operations SET parked_reason = 'asked for'")
    assert counts(Checker(completed.place.url, completed.data).check())[2] == 0


# -- 3 --------------------------------------------------------------------------------------------


def _later_commit(ended: Ended) -> None:
    (ended.worktree / "new.txt").write_text("new\n")
    git("add", "new.txt", cwd=ended.worktree)
    git("commit", "-q", "-m", "later", cwd=ended.worktree)


def _other_key(ended: Ended) -> None:
    log = ended.clone / "logs" / "refs" / "heads" / ended.evidence()["branch"]
    log.write_text(log.read_text().replace(ended.steps("worktree")["idempotency_key"], "other"))


def _second_branch(ended: Ended) -> None:
    key, commit = ended.steps("worktree")["idempotency_key"], ended.evidence()["base_commit"]
    zero = "0" * len(commit)
    update = ["update-ref", "--create-reflog", "-m", key, "refs/heads/twin", commit, zero]
    git(*update, cwd=ended.clone)


def _event_again(ended: Ended) -> None:
    row = ended.ledger.rows("SELECT * FROM outbox ORDER BY feed_number DESC")[0]
    row |= {"id": "again", "feed_number": 77, "revision": 2}
    places = ", ".join("?" * len(row))
    ended.ledger.execute(f"INSERT INTO outbox ({', '.join(row)}) VALUES ({places})", *row.values())


def _sql(statement: str) -> Callable[[Ended], None]:
    return lambda ended: ended.ledger.execute(statement)


NOT_AS_EVIDENCE: dict[str, tuple[Callable[[Ended], Any], str]] = {
    "evidence altered": (
        _sql("UPDATE steps SET evidence = replace(evidence, 'trunk', 'other')"),
        "its evidence is not what was hashed",
    ),
    "request altered": (
        _sql("UPDATE steps SET request = request || ' '"),
        "its request is not what was hashed",
    ),
    "no evidence": (_sql("UPDATE steps SET evidence = NULL"), "it has no evidence"),
    "worktree gone": (lambda e: shutil.rmtree(e.worktree), "is not there"),
    "file changed": (lambda e: (e.worktree / "file.txt").write_text("x"), "content is"),
    "file gone": (lambda e: (e.worktree / "file.txt").unlink(), "content is"),
    "another commit": (_later_commit, "commit is"),
    "another branch": (lambda e: git("checkout", "-q", "-b", "x", cwd=e.worktree), "HEAD is"),
    "branch of another": (_other_key, "does not carry our key"),
    "two branches": (_second_branch, "2 branches carry our key"),
    "clone gone": (lambda e: shutil.rmtree(e.clone / "objects"), "does not hold"),
    "attachment gone": (_sql("DELETE FROM repository_attachments"), "attachments []"),
    "session altered": (_sql("UPDATE sessions SET launch_hash = 'x'"), "sessions"),
    "run gone": (_sql("DELETE FROM runs"), "0 runs where 1 was asked for"),
    "run for good": (_sql("UPDATE runs SET state = 'running'"), "its run is running for good"),
    "no event": (_sql("DELETE FROM outbox"), "0 events task.created"),
    "two events": (_event_again, "2 events task.created"),
    "incomplete task": (_sql("UPDATE tasks SET complete = false"), "task rows, complete"),
    "two agents": (lambda e: _mark(e, "twice\n"), "2 agents ran where 1 was asked for"),
    "no agent": (lambda e: (e.worktree / MARK).unlink(), "succeeded, but 0 agents ran"),
    "step not done": (_sql("UPDATE steps SET state = 'unknown'"), "is unknown/none"),
}


def _mark(ended: Ended, line: str) -> None:
    with (ended.worktree / MARK).open("a") as mark:
        mark.write(line)


@pytest.mark.parametrize("case", NOT_AS_EVIDENCE)
def test_what_is_complete_is_not_as_its_evidence_says(completed: Ended, case: str) -> None:
    break_it, what = NOT_AS_EVIDENCE[case]
    break_it(completed)
    _names(completed, 3, what)


@pytest.fixture
def process() -> Iterator[Callable[[str], None]]:
    """Starts a process with one more environment variable; ended by its own ID."""
    started: list[subprocess.Popen[bytes]] = []

    def start(variable: str) -> None:
        name, _, value = variable.partition("=")
        started.append(
            subprocess.Popen(["/bin/sh", "-c", "read x"], env={name: value}, stdin=subprocess.PIPE)
        )

    yield start
    for one in started:
        one.kill()
        one.wait()


def test_an_agent_outlives_its_run(completed: Ended, process: Callable[[str], None]) -> None:
    process(f"ONCEBORN_RUN_ID={completed.one('SELECT id FROM runs')}")
    _names(completed, 3, "1 processes of an ended run are alive")


# -- 4 --------------------------------------------------------------------------------------------


def _branch(ended: Ended, key: str) -> None:
    commit = git("for-each-ref", "--count=1", "--format=%(objectname)", cwd=ended.clone)
    zero = "0" * len(commit)
    update = ["update-ref", "--create-reflog", "-m", key, "refs/heads/left", commit, zero]
    git(*update, cwd=ended.clone)


def _request_path(ended: Ended) -> Path:
    rows = ended.ledger.rows(
        "SELECT s.request FROM steps s JOIN operations o ON o.id = s.operation_id"
        " WHERE s.kind = 'worktree' AND o.state = 'aborted' AND s.state = 'succeeded'"
    )
    return ended.data / json.loads(rows[0]["request"])["path"]


def _key(ended: Ended) -> str:
    return str(
        ended.one(
            "SELECT s.idempotency_key FROM steps s JOIN operations o ON o.id = s.operation_id"
            " WHERE s.kind = 'worktree' AND o.state = 'aborted' AND s.state = 'succeeded'"
        )
    )


def _moved(table: str, column: str, of: str) -> Callable[[Ended], None]:
    """A row of the earlier task becomes the aborted one's."""
    return _sql(
        f"UPDATE {table} SET {column} = (SELECT {of} FROM operations WHERE state = 'aborted')"
    )


LEFT: dict[str, tuple[Callable[[Ended], Any], str]] = {
    "worktree": (lambda e: _request_path(e).mkdir(parents=True), "is left and not tracked"),
    "branch": (lambda e: _branch(e, _key(e)), "branch left"),
    "nobody's branch": (lambda e: _branch(e, "unheard of"), "branch left belongs to nobody"),
    "trash": (lambda e: (e.data / "trash" / _key(e)).mkdir(), "trash/"),
    "intent": (lambda e: (e.data / "intents" / f"{_key(e)}.json").write_text("{}"), "intents/"),
    "nobody's trash": (lambda e: (e.data / "trash" / "x").mkdir(), "trash/x belongs to nobody"),
    "attachment": (
        _moved("repository_attachments", "operation_id", "id"),
        "left in repository_attachments",
    ),
    "task": (_moved("tasks", "id", "task_id"), "left in tasks"),
    "event": (_moved("outbox", "aggregate_id", "task_id"), "left in outbox"),
    "git's lock": (lambda e: (e.clone / "config.lock").touch(), "has no owner"),
    "not undone": (
        _sql("UPDATE steps SET compensation = 'required' WHERE compensation = 'compensated'"),
        "its undoing is required",
    ),
    "no proof": (_sql("UPDATE steps SET undo_proof = NULL"), "undone without a proof"),
    "no reason": (_sql("UPDATE steps SET failure = NULL"), "failed without a reason"),
    "somebody's file": (lambda e: next(iter(e.bystanders.files)).unlink(), "is gone or changed"),
    "somebody's branch": (
        lambda e: git("branch", "-D", "someone/idle", cwd=e.clone),
        "branch someone/idle of somebody else",
    ),
    "somebody's worktree": (
        lambda e: shutil.rmtree(next(iter(e.bystanders.worktrees))),
        "of somebody else is gone",
    ),
}


@pytest.mark.parametrize("case", LEFT)
def test_what_is_aborted_has_left_something_or_taken_something(aborted: Ended, case: str) -> None:
    break_it, what = LEFT[case]
    break_it(aborted)
    _names(aborted, 4, what)


def test_a_process_of_an_aborted_task(aborted: Ended, process: Callable[[str], None]) -> None:
    task = aborted.one("SELECT task_id FROM operations WHERE state = 'aborted'")
    process(f"ONCEBORN_TASK_ID={task}")
    _names(aborted, 4, "of it is alive")


def test_what_was_transferred_and_is_gone(transferred: Ended) -> None:
    proof = json.loads(transferred.one("SELECT proof FROM cleanup_jobs"))
    shutil.rmtree(proof["path"])
    _names(transferred, 4, "but gone")
    transferred.ledger.execute("DELETE FROM cleanup_jobs")
    _names(transferred, 4, "no cleanup job has it")


# -- 5 --------------------------------------------------------------------------------------------

FOREIGN = {
    "an older fence": (
        "UPDATE steps SET doubts = 9 WHERE kind = 'worktree'",
        "an attempt of fence",
    ),
    "a claim under another fence": (
        "UPDATE steps SET attempt_token = 'x', attempt = attempt + 1 WHERE kind = 'worktree'",
        "claimed it under fence",
    ),
    "a claim that is not counted": (
        "UPDATE steps SET attempt_token = 'x' WHERE kind = 'worktree'",
        "a claim counted 0 attempts",
    ),
    "a step that comes back": (
        "UPDATE steps SET state = 'planned' WHERE kind = 'worktree'",
        "went from succeeded to planned",
    ),
    "an undoing of nothing": (
        "UPDATE steps SET compensation = 'transferred' WHERE kind = 'worktree'",
        "its undoing went from none to transferred",
    ),
    "a fence that falls": ("UPDATE operations SET fence = fence - 1", "back to"),
    "a fence that leaps": ("UPDATE operations SET fence = fence + 2", "leapt from"),
    "an operation that comes back": (
        "UPDATE operations SET state = 'preparing'",
        "went from completed to preparing",
    ),
    "a write after the end": ("UPDATE operations SET owner = 'late'", "written to after it was"),
}


@pytest.mark.parametrize("case", FOREIGN)
def test_a_write_that_is_not_the_owners(completed: Ended, case: str) -> None:
    statement, what = FOREIGN[case]
    completed.ledger.execute(statement)
    _names(completed, 5, what)
