"""The step kinds that write rows only, on both databases."""

from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy import select, update
from support.runs import admit, configuration, new_operation

from onceborn.activities.agent_launch import AgentLaunch
from onceborn.activities.kind import Step, StepFailed, StepRetry
from onceborn.activities.session_prepare import SessionPrepare
from onceborn.runtime.ledger import sessions
from onceborn.runtime.ledger import tables as t
from onceborn.runtime.ledger.database import Database
from onceborn.runtime.protocol.canonical import Domain, digest
from onceborn.runtime.protocol.evidence import LaunchArmed, SessionPrepared
from onceborn.runtime.protocol.plan import AgentLaunchRequest, SessionPrepareRequest


def step_of(operation: tuple[str, str], request: Any) -> Step[Any]:
    workspace_id, operation_id = operation
    return Step(
        operation_id=operation_id,
        task_id="tsk_1",
        workspace_id=workspace_id,
        key=request.kind,
        request=request,
        idempotency_key="key",
    )


@pytest.fixture
def operation(database: Database) -> tuple[str, str]:
    return new_operation(database)


@pytest.fixture
def prepare(operation: tuple[str, str]) -> Step[SessionPrepareRequest]:
    launch = configuration("agent", "{prompt_file}", prompt="π", environment=("KEY",))
    return step_of(operation, SessionPrepareRequest(session_id="ses_1", launch=launch))


def apply(database: Database, step: Step[SessionPrepareRequest]) -> SessionPrepared:
    with database.transaction("test") as connection:
        return SessionPrepare().apply(step, connection, database)


def retract(database: Database, step: Step[SessionPrepareRequest]) -> Any:
    with database.transaction("test") as connection:
        return SessionPrepare().retract(step, connection, database)


def test_a_session_is_written_as_its_evidence_says(
    database: Database, prepare: Step[SessionPrepareRequest]
) -> None:
    evidence = apply(database, prepare)
    with database.reading() as connection:
        row = sessions.get(connection, "ses_1")
    assert row is not None
    document = prepare.request.launch.model_dump(mode="json")
    assert evidence.launch_hash == row.launch_hash == digest(Domain.LAUNCH, document)
    assert sessions.launch_hash(row.launch) == row.launch_hash
    assert (row.operation_id, row.profile) == (prepare.operation_id, "p")
    assert apply(database, prepare) == evidence  # convergent


def test_a_session_of_another_is_not_taken_over(
    database: Database, prepare: Step[SessionPrepareRequest]
) -> None:
    apply(database, prepare)
    other = step_of(new_operation(database), prepare.request)
    with pytest.raises(StepFailed) as failure:
        apply(database, other)
    assert failure.value.reason_code == "session.exists"
    # Undoing the other's step does not touch it either.
    assert retract(database, other)["deleted"] is False
    with database.reading() as connection:
        assert sessions.get(connection, "ses_1") is not None


def test_an_untouched_session_is_retracted_with_proof(
    database: Database, prepare: Step[SessionPrepareRequest]
) -> None:
    apply(database, prepare)
    expected = {"session_id": "ses_1", "session": "absent", "deleted": True}
    assert retract(database, prepare) == expected
    with database.reading() as connection:
        assert connection.execute(select(t.sessions)).all() == []
    assert retract(database, prepare) == expected | {"deleted": False}


def test_a_session_in_use_or_altered_is_not_retracted(
    database: Database, prepare: Step[SessionPrepareRequest]
) -> None:
    apply(database, prepare)
    admit(database, prepare.workspace_id, session_id="ses_1")
    with pytest.raises(StepRetry, match="in use by a run"):
        retract(database, prepare)
    with database.transaction("test") as connection:
        connection.execute(update(t.runs).values(session_id=None))
        connection.execute(update(t.sessions).values(launch="{}"))
    with pytest.raises(StepRetry, match="altered"):
        retract(database, prepare)


def test_arming_writes_nothing_and_retracting_proves_that_there_is_no_run(
    database: Database, operation: tuple[str, str]
) -> None:
    step = step_of(operation, AgentLaunchRequest(session_id="ses_1", dispatch_key="k"))
    kind = AgentLaunch()
    with database.transaction("test") as connection:
        evidence = kind.apply(step, connection, database)
        assert kind.retract(step, connection, database) == {"dispatch_key": "k", "runs": 0}
    assert evidence == LaunchArmed(session_id="ses_1", dispatch_key="k", run_id=None)
    other_workspace, _ = new_operation(database)
    admit(database, other_workspace, dispatch_key="k")
    with database.transaction("test") as connection:
        kind.retract(step, connection, database)  # another workspace's run is not this launch's
    run_id, _ = admit(database, operation[0], dispatch_key="k")
    with database.transaction("test") as connection, pytest.raises(StepRetry) as refusal:
        kind.retract(step, connection, database)
    assert refusal.value.fields == {"run_id": run_id}
