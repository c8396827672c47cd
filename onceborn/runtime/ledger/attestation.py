"""Proof that the schema makes identities unique, byte by byte, before any of them is served.

Two looks. The catalog: the column's collation, and the unique partial index with its columns, their
order and collation, its predicate, and (PostgreSQL) that it is valid and ready. The behaviour, in a
transaction that is rolled back: ``a`` and ``A`` are two, the same one twice is refused, two absent
ones are not. Source: design 1-protocol, 'Attestation'.

A further index that a law rests on is one more entry in ``ATTESTED``.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from sqlalchemy import Connection, Index, Table, event, exc, func, insert, select
from sqlalchemy.engine import ExceptionContext
from sqlalchemy.schema import CreateIndex

from ..protocol.errors import SchemaUnattested
from . import catalog
from .database import Database
from .tables import DISPATCH_KEY_INDEX, EXTERNAL_ID_INDEX, workspaces


@dataclass(frozen=True, slots=True)
class Attested:
    """An index that a law rests on, and how to make rows that it judges."""

    index: Index
    key: str
    """The column that holds the identity; the index's other column is the workspace."""
    row: Callable[[str, str | None], dict[str, Any]]
    """Values of a probing row: of this workspace, with this identity or with none."""

    @property
    def table(self) -> Table:
        table = self.index.table
        assert table is not None
        return table


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong with the schema."""

    index: str
    wrong: str
    mend: str


@dataclass(frozen=True, slots=True)
class Attestation:
    """What the looks showed; sound where there are no findings."""

    findings: tuple[Finding, ...]

    @property
    def ok(self) -> bool:
        return not self.findings


def _task_row(workspace_id: str, identity: str | None) -> dict[str, Any]:
    mark = secrets.token_hex(16)
    return {
        "id": mark,
        "workspace_id": workspace_id,
        "operation_id": mark,
        # The number is unique in the workspace; the workspace is the probe's own.
        "number": secrets.randbelow(2**62),
        "external_id": identity,
        "title": "attestation",
        "description": "",
        "metadata": "{}",
        "created_at": 0,
    }


def _run_row(workspace_id: str, identity: str | None) -> dict[str, Any]:
    return {
        "id": secrets.token_hex(16),
        "workspace_id": workspace_id,
        "dispatch_key": identity,
        "workflow_ref": "attestation",
        "workflow_version": "1",
        "input": "{}",
        "host_id": "attestation",
        "state": "cancelled",
        "created_at": 0,
    }


ATTESTED: Final = (
    Attested(EXTERNAL_ID_INDEX, "external_id", _task_row),
    Attested(DISPATCH_KEY_INDEX, "dispatch_key", _run_row),
)


def attest(database: Database) -> Attestation:
    """Look at the catalog, and then try.

    Raises:
        DatabaseUnavailable: the database cannot be reached; that proves nothing either way.
    """
    with database.snapshot() as connection:
        findings = [found for entry in ATTESTED for found in _catalog_findings(connection, entry)]
    suspect = {finding.index for finding in findings}
    for entry in ATTESTED:
        # What the catalog refuses is refused; a missing table could not even be tried.
        if entry.index.name not in suspect:
            findings += _behaviour_findings(database, entry)
    return Attestation(tuple(findings))


# -- the catalog ----------------------------------------------------------------------------------


def _catalog_findings(connection: Connection, entry: Attested) -> list[Finding]:
    name, table = str(entry.index.name), entry.table.name
    sqlite = connection.dialect.name == "sqlite"
    wanted = "BINARY" if sqlite else "C"
    make = str(CreateIndex(entry.index).compile(dialect=connection.dialect)).strip()
    remake = f"DROP INDEX {name}; {make}"
    findings: list[Finding] = []

    def note(wrong: str, mend: str) -> None:
        findings.append(Finding(name, wrong, mend))

    columns = catalog.column_collations(connection, table)
    if columns is None:
        note(f"table {table} is missing", "run `onceborn db upgrade`")
        return findings
    for column in entry.index.columns:
        found = columns.get(column.name)
        if found != wanted:
            note(
                f"column {table}.{column.name} has collation {found}, not {wanted}",
                "restore the schema from a backup"
                if sqlite
                else f'ALTER TABLE {table} ALTER COLUMN {column.name} TYPE text COLLATE "C"',
            )
    index = catalog.index(connection, table, name)
    if index is None:
        note(f"index {name} is missing", make)
        return findings
    if not index.unique:
        note(f"index {name} is not unique", remake)
    if index.columns != tuple(column.name for column in entry.index.columns):
        note(f"index {name} is on ({', '.join(index.columns)})", remake)
    if any(collation != wanted for collation in index.collations):
        note(f"index {name} has collations {index.collations}, not {wanted}", remake)
    predicate = entry.index.dialect_options["postgresql"]["where"].text
    if catalog.plain(index.predicate) != catalog.plain(predicate):
        note(f"index {name} has the predicate {index.predicate}, not {predicate}", remake)
    if not index.usable:
        note(f"index {name} is not valid and ready", f"REINDEX INDEX {name}")
    return findings


# -- the behaviour --------------------------------------------------------------------------------


class _Undo(Exception):
    """Ends the probing transaction, so that nothing of it stays."""


def _behaviour_findings(database: Database, entry: Attested) -> list[Finding]:
    wrong: list[str] = []
    try:
        with database.transaction("attestation.probe") as connection:
            wrong += _probe(connection, entry)
            raise _Undo
    except _Undo:
        pass
    name = str(entry.index.name)
    return [Finding(name, fact, "compare the schema with a fresh one") for fact in wrong]


def _probe(connection: Connection, entry: Attested) -> list[str]:
    one, other = (f"attestation-{secrets.token_hex(16)}" for _ in range(2))
    for workspace in (one, other):
        connection.execute(
            insert(workspaces).values(id=workspace, name="attestation", created_at=0)
        )

    def accepted(workspace: str, identity: str | None) -> bool:
        try:
            with connection.begin_nested():
                connection.execute(insert(entry.table).values(entry.row(workspace, identity)))
        except exc.IntegrityError:
            return False
        return True

    wrong: list[str] = []
    if not accepted(one, "a"):
        wrong.append(f"a first {entry.key} is refused")
    if not accepted(one, "A"):
        wrong.append(f"{entry.key} 'a' and 'A' are one")
    if not accepted(other, "a"):
        wrong.append(f"{entry.key} 'a' cannot be held in two workspaces")
    if accepted(one, "a"):
        wrong.append(f"{entry.key} 'a' can be held twice in one workspace")
    if not (accepted(one, None) and accepted(one, None)):
        wrong.append(f"two rows without {entry.key} collide")
    columns = entry.table.c
    found = connection.execute(
        select(func.count())
        .select_from(entry.table)
        .where(columns.workspace_id == one, columns[entry.key] == "a")
    ).scalar_one()
    if found != 1 and not wrong:
        wrong.append(f"looking {entry.key} 'a' up finds {found} rows")
    return wrong


# -- what a process keeps -------------------------------------------------------------------------


class Attestor:
    """The attestation of one database, made once, and again after its connection was lost.

    A failed one is looked at again after ``again_after_s`` seconds, so that a mended schema is
    served without a restart. Safe to use from several threads.
    """

    def __init__(self, database: Database, *, again_after_s: float = 5.0) -> None:
        self._database = database
        self._again_after_s = again_after_s
        self._lock = threading.Lock()
        self._known: Attestation | None = None
        self._looked_at = 0.0
        self._generation = 0
        event.listen(database.engine, "handle_error", self._on_error)

    def attestation(self) -> Attestation:
        """The present attestation, made now if there is none.

        Raises:
            DatabaseUnavailable: as ``attest``.
        """
        known = self._known
        if known is not None and known.ok:
            return known
        with self._lock:
            known = self._known  # once: it may be forgotten at any moment
            if known is None or (not known.ok and self._is_stale()):
                generation = self._generation
                attestation = attest(self._database)
                self._looked_at = time.monotonic()
                # A connection that was lost meanwhile may have been another server's.
                self._known = attestation if generation == self._generation else None
                return attestation
            return known

    def require(self) -> None:
        """Let pass only if the schema is attested.

        Raises:
            SchemaUnattested: carries the findings.
            DatabaseUnavailable: as ``attest``.
        """
        attestation = self.attestation()
        if not attestation.ok:
            raise SchemaUnattested(findings=[finding.wrong for finding in attestation.findings])

    def forget(self) -> None:
        """Look again before the next use: the database may be another one now."""
        self._generation += 1
        self._known = None

    def _is_stale(self) -> bool:
        return time.monotonic() - self._looked_at >= self._again_after_s

    def _on_error(self, context: ExceptionContext) -> None:
        if context.is_disconnect:
            self.forget()
