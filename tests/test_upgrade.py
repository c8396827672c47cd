"""Upgrades: a database of each earlier schema, with creations in every state, is driven on.

And a creation in flight keeps the plan that it was admitted with, whatever the new release plans.
"""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from alembic import command
from alembic.script import ScriptDirectory
from sqlalchemy import select, update
from support import upgrades
from support.catalog import dump as catalog
from support.loop import Bench
from support.world import HOST, PROFILES, rows
from test_loop import Scene

from onceborn.activities.cleanup import CleanupDriver
from onceborn.runtime import planning
from onceborn.runtime.access import Principal
from onceborn.runtime.admission import Admission
from onceborn.runtime.cleanup import Cleanup
from onceborn.runtime.ledger import schema
from onceborn.runtime.ledger import tables as t
from onceborn.runtime.ledger.attestation import Attestor
from onceborn.runtime.ledger.database import Database
from onceborn.runtime.protocol import rules
from onceborn.runtime.protocol.errors import ConfigurationError
from onceborn.runtime.protocol.plan import Plan, PlannedStep, RepoAttachRequest
from onceborn.runtime.protocol.rules import StopReason
from onceborn.runtime.protocol.states import OPEN_OPERATION_STATES, CompensationState, StepState

REVISIONS = [
    script.revision for script in ScriptDirectory.from_config(schema._config()).walk_revisions()
]

WHAT_TO_DO = """\
{path} {trouble}.

Each revision has a recorded database for each backend, from which upgrades are tested for as long
as that revision may be upgraded from. On the code with which {revision} is (to be) released:

    .venv/bin/python tools/record_upgrade.py

and commit what it writes. A released revision is never changed, and never recorded again: if it is
released, it is the change of the migration that has to be taken back.
"""


def recorded(revision: str, backend: str) -> upgrades.Dump:
    path = upgrades.FOLDER / f"{revision}.{backend}.sql"
    if not path.exists():
        missing = WHAT_TO_DO.format(path=path.name, trouble="is missing", revision=revision)
        pytest.fail(missing, pytrace=False)
    return upgrades.Dump.read(path)


@pytest.fixture
def old(empty_database_url: str) -> Iterator[Database]:
    database = Database(empty_database_url)
    yield database
    database.dispose()


def at_revision(database: Database, revision: str, backend: str) -> upgrades.Dump:
    """The schema of a revision with the rows that were recorded on it."""
    found = recorded(revision, backend)
    try:
        with database.transaction("test.old") as connection:
            command.upgrade(schema._config(connection), revision)
            found.load(connection)
    except Exception as error:
        trouble = f"does not fit the schema that the migration makes: {error}"
        told = WHAT_TO_DO.format(
            path=f"{revision}.{backend}.sql", trouble=trouble, revision=revision
        )
        pytest.fail(told, pytrace=False)
    assert schema.current(database) == revision
    return found


def expected_end(operation: dict[str, Any]) -> str:
    return str(json.loads(operation["manifest"])["metadata"]["ends"])


@pytest.mark.parametrize("revision", REVISIONS)
def test_what_is_recorded_holds_creations_in_every_state(
    old: Database, backend: str, revision: str
) -> None:
    at_revision(old, revision, backend)
    with old.reading() as connection:
        operations = set(connection.exec_driver_sql("SELECT state FROM operations").scalars())
        steps = set(connection.exec_driver_sql("SELECT state FROM steps").scalars())
        undone = set(connection.exec_driver_sql("SELECT compensation FROM steps").scalars())
    assert operations >= {*OPEN_OPERATION_STATES, "completed", "aborted"}
    assert steps >= set(StepState)
    assert undone >= set(CompensationState) - {CompensationState.RETRY_WAIT}  # nobody writes it


@pytest.mark.parametrize("revision", REVISIONS)
def test_a_database_of_an_earlier_schema_is_upgraded_and_driven_on(
    old: Database, backend: str, revision: str, database: Database, tmp_path: Path
) -> None:
    dump = at_revision(old, revision, backend)
    assert schema.upgrade(old) == schema.head()
    schema.require_head(old)
    assert catalog(old) == catalog(database)  # as a new one is
    data = tmp_path / "data"
    upgrades.make_source(tmp_path, data)
    dump.build(data.resolve())
    driven_on(old, data)


def driven_on(old: Database, data: Path) -> None:
    """Every creation, by its next owner, to the end that was recorded for it."""
    before = {row["id"]: row for row in rows(old, t.operations)}
    unparked(old)
    bench = Bench(old, data)
    old.clock.advance(3_600_000)
    ends: Counter[str] = Counter()
    while taken := bench.recovery.claim(HOST, 99):
        for owned in taken:
            assert owned.fence == before[owned.operation_id]["fence"] + 1
            reason = bench.run(owned)
            assert reason == expected_end(before[owned.operation_id]), owned
            ends[reason] += 1
    still_open = sum(row["state"] in OPEN_OPERATION_STATES for row in before.values())
    assert sum(ends.values()) == still_open > 20
    all_is_well(old, before, data)


def unparked(database: Database) -> None:
    """What an operator does about each that was parked."""
    with database.transaction("test.unpark") as connection:
        connection.execute(
            update(t.operations).values(
                parked_reason=None, parked_at=None, claims_without_progress=0
            )
        )


def all_is_well(database: Database, before: dict[str, dict[str, Any]], data: Path) -> None:
    tasks = {row["operation_id"]: row for row in rows(database, t.tasks)}
    events = Counter(row["aggregate_id"] for row in rows(database, t.outbox))
    runs = Counter(row["task_id"] for row in rows(database, t.runs))
    for operation in rows(database, t.operations):
        plan = json.loads(operation["plan"])
        assert operation["plan"] == before[operation["id"]]["plan"]
        assert operation["state"] == expected_end(operation), operation
        completed = operation["state"] == "completed"
        assert events[operation["task_id"]] == int(completed)
        assert runs[operation["task_id"]] == int(completed and plan["run"] is not None)
        assert (operation["id"] in tasks) is completed
        if completed:
            lost = operation["outcome"] == "created_identity_lost"
            assert (tasks[operation["id"]]["external_id"] is None) is lost
    assert {row["preparing"] for row in rows(database, t.workspace_counters)} == {0}
    paths = {
        json.loads(row["evidence"])["branch"]
        for row in rows(database, t.steps)
        if row["kind"] == "worktree"
        and row["state"] == "succeeded"
        and row["compensation"] in ("none", "transferred")
    }
    assert {each["branch"] for each in upgrades.worktrees_of(data)} == paths


@pytest.mark.parametrize("revision", REVISIONS)
def test_identities_and_cleanup_jobs_of_an_earlier_schema_hold(
    old: Database, backend: str, revision: str, tmp_path: Path
) -> None:
    dump = at_revision(old, revision, backend)
    schema.upgrade(old)
    data = tmp_path / "data"
    upgrades.make_source(tmp_path, data)
    dump.build(data.resolve())
    bench = Bench(old, data)
    attestor = Attestor(old)
    attestor.require()
    admission = Admission(old, attestor, lambda: PROFILES, bench.settings)
    workspace = rows(old, t.workspaces)[0]["id"]
    principal = Principal("tok_test", workspace, "member", "token:test")
    for task in rows(old, t.tasks):
        if task["external_id"] is None:
            continue
        found = admission.admit(principal, workspace, {"external_id": task["external_id"]})
        settled = "found_settled" if task["complete"] else "found_unsettled"
        assert (found.outcome, found.task_id) == (settled, task["id"])
    kept = {row["id"] for row in rows(old, t.cleanup_jobs) if row["state"] == "quarantined"}
    pending = {row["id"] for row in rows(old, t.cleanup_jobs) if row["state"] == "pending"}
    assert kept
    assert pending
    cleanup = Cleanup(old, bench.settings)
    old.clock.advance(3_600_000)
    assert CleanupDriver(old, bench.host, bench.locks, cleanup).drive_due() == len(pending)
    states = {row["id"]: row["state"] for row in rows(old, t.cleanup_jobs)}
    assert states == dict.fromkeys(pending, "done") | dict.fromkeys(kept, "quarantined")


# -- a later revision ------------------------------------------------------------------------------

LATER = """
import sqlalchemy as sa
from alembic import op

revision = "9999"
down_revision = "{head}"

def upgrade():
    op.add_column("operations", sa.Column("note", sa.Text(), nullable=False, server_default="none"))
    op.execute("UPDATE operations SET note = 'driven' WHERE fence > 0")
    op.create_index("ix_operations_note", "operations", ["note"])
"""


@pytest.fixture
def later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A program whose newest revision is one that is not written yet; its name."""
    made = tmp_path / "migrations"
    shutil.copytree(Path(schema.__file__).parents[2] / "migrations", made)
    (made / "versions" / "9999_later.py").write_text(LATER.format(head=schema.head()))
    monkeypatch.setattr(schema, "MIGRATIONS", str(made))
    assert schema.head() == "9999"
    return "9999"


def test_a_later_revision_is_upgraded_to_with_the_rows_in_place(
    old: Database, backend: str, later: str, tmp_path: Path
) -> None:
    dump = at_revision(old, REVISIONS[0], backend)
    before = {row["id"]: row for row in rows(old, t.operations)}
    with pytest.raises(ConfigurationError, match="onceborn db upgrade"):
        schema.require_head(old)
    assert schema.upgrade(old) == later
    assert {row["id"]: row for row in rows(old, t.operations)} == before
    with old.reading() as connection:
        notes = connection.exec_driver_sql("SELECT fence > 0, note FROM operations").all()
    assert {(bool(driven), note) for driven, note in notes} == {(False, "none"), (True, "driven")}
    data = tmp_path / "data"
    upgrades.make_source(tmp_path, data)
    dump.build(data.resolve())
    driven_on(old, data)


def test_a_revision_without_a_recorded_database_says_what_to_do(backend: str, later: str) -> None:
    with pytest.raises(pytest.fail.Exception, match=r"tools/record_upgrade\.py"):
        recorded(later, backend)


# -- plans -----------------------------------------------------------------------------------------

Change = Callable[[Plan], Plan]


def as_it_is(plan: Plan) -> Plan:
    return plan


def with_a_step_more(plan: Plan) -> Plan:
    """A release that attaches the house's own repository beside what was asked for."""
    first = plan.steps[0].request
    assert isinstance(first, RepoAttachRequest)
    house = RepoAttachRequest(
        repository="house", source=first.source, clone=first.clone, base_ref=None
    )
    more = PlannedStep(key="repo_attach:house", request=house)
    return plan.model_copy(update={"steps": (plan.steps[0], more, *plan.steps[1:])})


def in_another_order(plan: Plan) -> Plan:
    """A release that attaches all repositories before it makes the first worktree."""
    ordered = sorted(plan.steps, key=lambda step: step.kind != "repo_attach")
    return plan.model_copy(update={"steps": tuple(ordered)})


class Released(Exception):
    pass


@pytest.mark.proves("SC09")
@pytest.mark.parametrize(
    ("earlier", "later"),
    [
        (as_it_is, with_a_step_more),
        (with_a_step_more, as_it_is),
        (as_it_is, in_another_order),
    ],
)
def test_a_creation_in_flight_keeps_its_own_plan_over_a_release(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, earlier: Change, later: Change
) -> None:
    """Cut off before each of its actions by a release that plans more, fewer or other steps."""
    sound = planning.resolve

    def planned_by(change: Change) -> None:
        monkeypatch.setattr(planning, "resolve", lambda *a, **k: change(sound(*a, **k)))

    sources = [scene.repository]
    if in_another_order in (earlier, later):
        sources.append(scene.folder / "second")
        upgrades.git(scene.folder, "clone", "--quiet", str(scene.repository), str(sources[1]))
    body = {"repositories": [{"source": str(source)} for source in sources]}
    cut_at, more = 0, True
    while more:
        planned_by(earlier)
        owned = scene.begin(None, **body)
        steps = kept(scene, owned.operation_id)
        more = driven_up_to(scene, owned, cut_at)
        planned_by(later)
        if more:
            assert scene.hands().run(scene.next_owner()) is StopReason.COMPLETED
        assert kept(scene, owned.operation_id) == steps
        cut_at += 1
    assert cut_at > len(steps)
    new = scene.begin(None, **body)
    assert kept(scene, new.operation_id) != steps
    assert scene.hands().run(new) is StopReason.COMPLETED
    assert {row["state"] for row in rows(scene.database, t.operations)} == {"completed"}
    assert len(scene.events()) == cut_at + 1


def driven_up_to(scene: Scene, owned: Any, cut_at: int) -> bool:
    """Drive it for so many actions; False if it has ended before that."""
    done = 0

    def watch(action: rules.Action) -> None:
        nonlocal done
        if done == cut_at and not isinstance(action, rules.Stop):
            raise Released
        done += 1

    try:
        scene.bench.run(owned, watch=watch)
    except Released:
        return True
    return False


def kept(scene: Scene, operation_id: str) -> list[str]:
    with scene.database.reading() as connection:
        keys = connection.execute(
            select(t.steps.c.step_key)
            .where(t.steps.c.operation_id == operation_id)
            .order_by(t.steps.c.position)
        )
        return list(keys.scalars())


@pytest.fixture
def scene(database: Database, tmp_path: Path) -> Scene:
    return Scene(database, tmp_path)
