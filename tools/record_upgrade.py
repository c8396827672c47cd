"""Record a database of the newest schema with creations in every state, for tests/test_upgrade.py.

    python tools/record_upgrade.py

Run it once for each new revision, before its release, on the code that the revision is released
with; it writes tests/upgrades/<revision>.<backend>.sql. A file of a released revision is never
recorded again.
"""

from __future__ import annotations

import json
import logging
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import structlog
from sqlalchemy import insert, select, update

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from support import sqlite, upgrades  # noqa: E402
from support.loop import Bench  # noqa: E402
from support.postgresql import PostgreSQL, embedded  # noqa: E402
from support.world import HOST, workplace  # noqa: E402

from onceborn.runtime import failpoints  # noqa: E402
from onceborn.runtime.ids import new_id  # noqa: E402
from onceborn.runtime.ledger import schema  # noqa: E402
from onceborn.runtime.ledger import tables as t  # noqa: E402
from onceborn.runtime.ledger.database import Database  # noqa: E402
from onceborn.runtime.protocol import rules  # noqa: E402
from onceborn.runtime.recovery import Owned  # noqa: E402

ABOUT = """\
Schema {revision} on {backend}, with creations in every state. Written by tools/record_upgrade.py;
never changed once the revision is released.\
"""


class _Enough(Exception):
    pass


class Recorder:
    """Makes creations and leaves each in one state. ``ends`` is how the runtime must end it."""

    def __init__(self, database: Database, folder: Path) -> None:
        self.database = database
        self.data = folder / "data"
        upgrades.make_source(folder, self.data)
        self.place = workplace(database, self.data)
        self.bench = Bench(database, self.data)

    def begin(self, name: str, ends: str, *, doomed: bool = False, agent: bool = True) -> Owned:
        """A creation under fence 1, with nothing done yet."""
        admitted = self.admit(name, ends, doomed=doomed, agent=agent)
        return self.bench.recovery.take(admitted.handle)

    def admit(self, name: str, ends: str, *, doomed: bool = False, agent: bool = True) -> Any:
        body: dict[str, Any] = {"title": name, "metadata": {"ends": ends}}
        body["repositories"] = [{"source": upgrades.SOURCE}]
        if doomed:  # the second repository's branch exists there
            second = {"source": f"{upgrades.SOURCE}/", "branch": "taken"}
            body["repositories"].append(second)
        if agent:
            body |= {"profile": "marker", "start_agent": True}
        return self.place.create(f"upgrade/{name}", **body)

    def run(self, owned: Owned, until: Callable[[rules.Action], bool] | None = None) -> None:
        """Drive it to its end, or up to an action, which is not done."""

        def watch(action: rules.Action) -> None:
            if until is not None and until(action):
                raise _Enough

        try:
            self.bench.run(owned, watch=watch)
        except _Enough:
            pass
        except failpoints.FailpointError:
            pass
        finally:
            failpoints.configure("")

    def cut(self, owned: Owned, point: str) -> None:
        """Drive it until a boundary, where its owner is gone."""
        failpoints.configure(f"{point}=raise@1")
        self.run(owned)

    def operation(self, owned: Owned, **values: Any) -> None:
        self._update(update(t.operations).where(t.operations.c.id == owned.operation_id), values)

    def step(self, owned: Owned, key: str, **values: Any) -> None:
        s = t.steps.c
        statement = update(t.steps).where(s.operation_id == owned.operation_id, s.step_key == key)
        self._update(statement, values)

    def _update(self, statement: Any, values: dict[str, Any]) -> None:
        with self.database.transaction("record.update") as connection:
            assert connection.execute(statement.values(values)).rowcount == 1

    def dirty(self, owned: Owned) -> None:
        """Somebody works in the worktree."""
        with self.database.reading() as connection:
            request = connection.execute(
                select(t.steps.c.request)
                .where(t.steps.c.operation_id == owned.operation_id)
                .where(t.steps.c.step_key == "worktree:0")
            ).scalar_one()
        path = json.loads(request)["path"]
        (self.data / path / "work").write_text("somebody's")


def _is(kind: type[Any], key: str = "") -> Callable[[rules.Action], bool]:
    return lambda action: isinstance(action, kind) and (not key or action.step.key == key)


def record(to: Recorder) -> None:
    """Every state in which a release may find a creation."""
    to.admit("admitted", "completed")
    to.begin("handed-off", "completed")
    to.run(to.begin("attached", "completed"), _is(rules.Perform, "worktree:0"))
    to.run(to.begin("made", "completed"), _is(rules.Perform, "session_prepare"))
    to.run(to.begin("prepared", "completed"), _is(rules.Perform, "agent_launch"))
    to.run(to.begin("armed", "completed"), _is(rules.EnterCompletion))
    to.run(to.begin("completing", "completed"), _is(rules.CommitCompletion))
    to.run(to.begin("without-agent", "completed", agent=False), _is(rules.EnterCompletion))
    # Attempts whose result nobody has recorded, before and after their effect.
    to.cut(to.begin("attaching", "completed"), "repo_attach.claimed")
    to.cut(to.begin("attach-unrecorded", "completed"), "repo_attach.performed")
    to.cut(to.begin("making", "completed"), "worktree.claimed")
    to.cut(to.begin("make-unrecorded", "completed"), "worktree.performed")
    unknown = to.begin("unknown", "completed")
    to.cut(unknown, "worktree.performed")
    to.step(unknown, "worktree:0", state="unknown", doubts=1, due_at=1)
    waiting = to.begin("retry-wait", "completed")
    failpoints.configure("git.spawn=raise@1")
    to.run(waiting, _is(rules.Wait))
    # A release under way, and one that is done.
    releasing = to.begin("releasing", "completed")
    to.run(releasing, _is(rules.Perform, "worktree:0"))
    to.operation(releasing, state="preparing_release")
    released = to.begin("released", "completed")
    to.operation(released, state="preparing_release")
    to.run(released, _is(rules.Perform, "worktree:0"))
    # On the way back.
    to.run(to.begin("failed", "aborted", doomed=True), _is(rules.RequireUndo))
    to.run(to.begin("undo-required", "aborted", doomed=True), _is(rules.Compensate))
    to.run(to.begin("half-undone", "aborted", doomed=True), _is(rules.Compensate, "repo_attach:0"))
    to.cut(to.begin("undo-unrecorded", "aborted", doomed=True), "worktree.undone")
    undoing = to.begin("undo-unknown", "aborted", doomed=True)
    to.run(undoing, _is(rules.Compensate, "worktree:0"))
    to.step(undoing, "worktree:0", compensation="unknown", doubts=1, due_at=1, undo_attempt=1)
    to.run(to.begin("undone", "aborted", doomed=True), _is(rules.Abort))
    deleted = to.begin("deleted", "aborted")
    to.run(deleted, _is(rules.Perform, "session_prepare"))
    to.operation(deleted, deleted=True)
    disarmed = to.begin("disarmed", "aborted")
    to.run(disarmed, _is(rules.EnterCompletion))
    to.operation(disarmed, deleted=True)
    to.run(disarmed, _is(rules.Compensate, "session_prepare"))
    parked = to.begin("parked", "completed")
    to.run(parked, _is(rules.Perform, "worktree:0"))
    to.bench.recovery.park(parked.operation_id, parked.fence, "recorded so")
    # Ends, and what they leave.
    to.run(to.begin("completed", "completed"))
    to.run(to.begin("aborted", "aborted", doomed=True))
    for name in ("kept", "to-clean"):
        left = to.begin(name, "aborted", doomed=True)
        to.run(left, _is(rules.Compensate, "worktree:0"))
        to.dirty(left)
        to.run(left)
        if name == "to-clean":
            j = t.cleanup_jobs.c
            statement = update(t.cleanup_jobs).where(j.operation_id == left.operation_id)
            to._update(statement, {"state": "pending", "due_at": 1})
    with to.database.transaction("record.action") as connection:
        connection.execute(
            insert(t.operator_actions).values(
                id=new_id("act"),
                workspace_id=to.place.workspace_id,
                actor="token:recorded",
                action="unpark",
                operation_id=parked.operation_id,
                detail="{}",
                created_at=to.database.clock.now(),
            )
        )


def _write(database: Database, backend: str, folder: Path) -> None:
    schema.upgrade(database)
    recorder = Recorder(database, folder)
    record(recorder)
    data = recorder.data.resolve()
    with database.snapshot() as connection:
        statements = list(upgrades.statements_of(connection, t.metadata.sorted_tables))
    dump = upgrades.Dump(statements, upgrades.worktrees_of(data), upgrades.intents_of(data))
    path = upgrades.FOLDER / f"{schema.head()}.{backend}.sql"
    dump.write(path, ABOUT.format(revision=schema.head(), backend=backend))
    print(f"{path.relative_to(ROOT)}: {len(statements)} rows, host {HOST}")
    database.dispose()


def main() -> None:
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    with tempfile.TemporaryDirectory(prefix="upgrade-") as folder:
        place = Path(folder).resolve()
        (place / "one").mkdir()
        _write(Database(sqlite.url(place / "ledger.db")), "sqlite", place / "one")
        with embedded() as process:
            server = PostgreSQL(process.url)
            _write(Database(server.empty()), "postgresql", place / "two")


if __name__ == "__main__":
    main()
