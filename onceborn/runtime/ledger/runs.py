"""Run rows and their moves. Each move names the state that it leaves, and its row count decides.

    admitted -> started -> running -> succeeded | failed | cancelled | lost

``started`` means that Temporal has accepted the run's workflow. A launcher claims the run with a
fresh launch token before it touches the host, so of two launchers only the later one's move to
``running`` counts; which of them started the agent is decided on the host (activities/shim.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Literal

from sqlalchemy import ColumnElement, Connection, and_, select, text, update

from .database import Database
from .statements import changed, insert_unless_held
from .tables import DISPATCH_KEY_INDEX, runs

Ending = Literal["succeeded", "failed", "cancelled", "lost"]

ENDINGS: Final[frozenset[str]] = frozenset({"succeeded", "failed", "cancelled", "lost"})


@dataclass(frozen=True, slots=True)
class NewRun:
    """What an admission writes. ``input`` is canonical JSON."""

    id: str
    workspace_id: str
    dispatch_key: str | None
    workflow_ref: str
    workflow_version: str
    input: str
    host_id: str
    task_id: str | None
    session_id: str | None


@dataclass(frozen=True, slots=True)
class RunRow:
    """One run as the ledger has it. ``input`` and ``result`` are JSON text, times milliseconds."""

    id: str
    workspace_id: str
    dispatch_key: str | None
    workflow_ref: str
    workflow_version: str
    input: str
    host_id: str
    task_id: str | None
    session_id: str | None
    state: str
    launch_token: str | None
    result: str | None
    created_at: int
    started_at: int | None
    finished_at: int | None

    @property
    def ended(self) -> bool:
        return self.state in ENDINGS


_COLUMNS: Final = tuple(runs.c[name] for name in RunRow.__dataclass_fields__)


def insert(connection: Connection, database: Database, run: NewRun) -> bool:
    """Write the run unless its dispatch key is held in the workspace; whether it was written.

    A collision on anything else (the primary key) is an error.
    """
    values: dict[str, Any] = {name: getattr(run, name) for name in NewRun.__dataclass_fields__}
    values |= {"state": "admitted", "created_at": database.clock.now()}
    statement = insert_unless_held(database, runs, DISPATCH_KEY_INDEX).values(**values)
    return changed(connection, statement) == 1


def held_by(connection: Connection, workspace_id: str, dispatch_key: str) -> str | None:
    """The run that holds the dispatch key in the workspace, by the unique index."""
    found: str | None = connection.scalar(
        select(runs.c.id).where(
            runs.c.workspace_id == workspace_id, runs.c.dispatch_key == dispatch_key
        )
    )
    return found


def get(connection: Connection, run_id: str) -> RunRow | None:
    """The run, or None."""
    row = connection.execute(select(*_COLUMNS).where(runs.c.id == run_id)).one_or_none()
    return None if row is None else RunRow(*row)


# -- moves ----------------------------------------------------------------------------------------


def mark_started(connection: Connection, database: Database, run_id: str) -> bool:
    """admitted -> started: Temporal has the run's workflow. Whether this call moved it."""
    return _move(
        connection,
        and_(runs.c.id == run_id, runs.c.state == "admitted"),
        state="started",
        started_at=database.clock.now(),
    )


def claim_launch(connection: Connection, run_id: str, *, seen: str | None, token: str) -> bool:
    """Take the launch of a started run that is not running yet: its token becomes ours.

    ``seen`` is the token that the claimant read: of two claimants with the same reading one wins.
    """
    unchanged = runs.c.launch_token.is_(None) if seen is None else runs.c.launch_token == seen
    return _move(
        connection,
        and_(runs.c.id == run_id, runs.c.state == "started", unchanged),
        launch_token=token,
    )


def holds_launch(connection: Connection, run_id: str, token: str) -> bool:
    """Whether the launch is still ours: read again under the run's host lock."""
    return (
        connection.execute(
            select(runs.c.id).where(
                runs.c.id == run_id, runs.c.state == "started", runs.c.launch_token == token
            )
        ).first()
        is not None
    )


def mark_running(connection: Connection, run_id: str, token: str) -> bool:
    """started -> running, by the holder of the launch token: an agent is seen on the host."""
    return _move(
        connection,
        and_(runs.c.id == run_id, runs.c.state == "started", runs.c.launch_token == token),
        state="running",
    )


def finish(
    connection: Connection,
    database: Database,
    run_id: str,
    *,
    expected: tuple[str, ...],
    ending: Ending,
    result: str,
) -> bool:
    """One of ``expected`` -> an ending, with its result (canonical JSON). Once; first one wins."""
    return _move(
        connection,
        and_(runs.c.id == run_id, runs.c.state.in_(expected)),
        state=ending,
        result=result,
        finished_at=database.clock.now(),
    )


def _move(connection: Connection, where: ColumnElement[bool], **values: Any) -> bool:
    return changed(connection, update(runs).where(where).values(**values)) == 1


# -- what the sweep looks at ----------------------------------------------------------------------

# The partial indexes' own predicates, as text: a bound parameter would not be matched with them.
_ADMITTED: Final = text("state = 'admitted'")
_STARTED_OR_RUNNING: Final = text("state IN ('started', 'running')")


def undispatched(connection: Connection, host_id: str, limit: int) -> list[str]:
    """Admitted runs of the host that are not started in Temporal yet, oldest first."""
    statement = (
        select(runs.c.id)
        .where(runs.c.host_id == host_id, _ADMITTED)
        .order_by(runs.c.created_at)
        .limit(limit)
    )
    return list(connection.scalars(statement))


def open_runs(connection: Connection, host_id: str, limit: int, *, after: str = "") -> list[str]:
    """Started and running runs of the host, in the order of their IDs, ``after`` excluded.

    Starting the workflow of each again is harmless (workflows/engine.py), and needed where
    Temporal has lost it.
    """
    statement = (
        select(runs.c.id)
        .where(runs.c.host_id == host_id, _STARTED_OR_RUNNING, runs.c.id > after)
        .order_by(runs.c.id)
        .limit(limit)
    )
    return list(connection.scalars(statement))
