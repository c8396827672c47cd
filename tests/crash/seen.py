"""What the checker looks at: the ledger's rows and every managed clone's branches, read once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from . import world
from .bystanders import Bystanders
from .ledger import Ledger

Row = dict[str, Any]

ENDED = ("completed", "aborted")


class Seen:
    """One data folder and its ledger. ``at_rest``: nobody works on them any more."""

    def __init__(self, url: str, data: Path, bystanders: Bystanders, *, at_rest: bool) -> None:
        self.ledger = Ledger(url)
        self.data = data.resolve()
        self.bystanders = bystanders
        self.at_rest = at_rest
        self.operations = self.ledger.rows("SELECT * FROM operations ORDER BY created_at, id")
        self.steps = {o["id"]: self._of(o, "steps", " ORDER BY position") for o in self.operations}
        self.jobs = {o["id"]: self._of(o, "cleanup_jobs") for o in self.operations}
        self.branches = [b for clone in world.clones(self.data) for b in world.branches(clone)]

    def _of(self, operation: Row, table: str, order: str = "") -> list[Row]:
        statement = f"SELECT * FROM {table} WHERE operation_id = ?{order}"
        return self.ledger.rows(statement, operation["id"])
