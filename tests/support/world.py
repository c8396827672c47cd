"""A workspace to create in: what most tests of the core start from."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, select

from onceborn.runtime import access, workspaces
from onceborn.runtime.access import Principal
from onceborn.runtime.admission import Admission, Admitted
from onceborn.runtime.ledger import hosts
from onceborn.runtime.ledger import tables as t
from onceborn.runtime.ledger.attestation import Attestor
from onceborn.runtime.ledger.database import Database
from onceborn.runtime.profiles import Profile
from onceborn.runtime.settings import Settings

HOST = "hst_" + "0" * 32
PROFILES = {
    "marker": Profile(argv=("/bin/sh", "-c", "echo ran > agent-ran")),
    "off": Profile(argv=("/bin/true",), enabled=False),
}


@dataclass
class Workplace:
    """One workspace on a database, with an admission of its own."""

    database: Database
    settings: Settings
    workspace_id: str
    principal: Principal
    admission: Admission

    def create(self, external_id: Any = None, **body: Any) -> Admitted:
        """A create, as a surface would ask for it."""
        if external_id is not None:
            body["external_id"] = external_id
        body.setdefault("title", "a task")
        return self.admission.admit(self.principal, self.workspace_id, body)


def workplace(
    database: Database,
    data: Path,
    *,
    name: str = "w",
    capacity: int | None = None,
    host_id: str = HOST,
    roots: tuple[Path, ...] = (),
    **settings: Any,
) -> Workplace:
    """A fresh workspace, with a registered host."""
    workspace_id = workspaces.create_workspace(database, name, capacity=capacity)
    token = access.create_token(database, workspace_id, role="member", name="test")
    principal = access.authenticate(database, f"Bearer {token.token}")
    with database.transaction("test.host") as connection:
        hosts.seen(connection, database, host_id, "test", f"onceborn.host.{host_id}")
    chosen = Settings(data=data, repository_roots=roots, **settings)
    admission = Admission(database, Attestor(database), lambda: PROFILES, chosen)
    return Workplace(database, chosen, workspace_id, principal, admission)


def rows(database: Database, table: Any) -> list[dict[str, Any]]:
    """Every row of a table."""
    with database.reading() as connection:
        return [dict(row._mapping) for row in connection.execute(select(table))]


def digest_of_everything(database: Database) -> str:
    """A digest of every row of every table: equal means that nothing was written."""
    with database.snapshot() as connection:
        return hashlib.sha256(repr(_everything(connection)).encode()).hexdigest()


def _everything(connection: Connection) -> list[Any]:
    return [
        (table.name, sorted(repr(tuple(row)) for row in connection.execute(select(table))))
        for table in t.metadata.sorted_tables
    ]


@dataclass
class Recorder:
    """Counts beats."""

    beats: int = 0
    seen: list[str] = field(default_factory=list)

    def __call__(self) -> None:
        self.beats += 1
