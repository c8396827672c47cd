"""The independent checker: the five invariants of the runtime, for every operation that it finds.

Nothing of the product is imported here: the rules are written down a second time, and looked up in
the ledger by SQL, in repositories by git, in ``/proc`` and in the outbox.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .aborted import aborted, leftovers
from .bystanders import Bystanders
from .completed import completed
from .history import foreign_writes
from .seen import ENDED, Seen


@dataclass(frozen=True)
class Violation:
    """``invariant``: its number in design/6-quality."""

    invariant: int
    operation: str
    what: str

    def __str__(self) -> str:
        return f"invariant {self.invariant}: {self.operation}: {self.what}"


class Checker:
    """Checks one data folder and its ledger. ``at_rest``: nobody works on them any more."""

    def __init__(
        self,
        url: str,
        data: Path,
        bystanders: Bystanders | None = None,
        *,
        at_rest: bool = True,
    ) -> None:
        self._seen = Seen(url, data, bystanders or Bystanders(), at_rest=at_rest)

    def check(self) -> list[Violation]:
        """Every violation; empty where all five hold."""
        seen = self._seen
        found = [*self._single(), *self._settled()]
        for operation in seen.operations:
            name = operation["id"]
            if operation["state"] == "completed":
                found += [Violation(3, name, what) for what in completed(seen, operation)]
            elif operation["state"] == "aborted":
                found += [Violation(4, name, what) for what in aborted(seen, operation)]
        if all(operation["state"] in ENDED for operation in seen.operations):
            found += [Violation(4, "leftovers", what) for what in leftovers(seen)]
        found += [Violation(4, "others", what) for what in seen.bystanders.missing()]
        found += [Violation(5, name, what) for name, what in foreign_writes(seen.ledger)]
        return found

    # -- 1: one of each -----------------------------------------------------------------------

    def _single(self) -> Iterator[Violation]:
        for row in self._twice("tasks", "external_id"):
            yield Violation(1, "tasks", f"{row['n']} tasks hold the identity {row['what']!r}")
        for row in self._twice("runs", "dispatch_key"):
            yield Violation(1, "runs", f"{row['n']} runs have the dispatch key {row['what']!r}")

    def _twice(self, table: str, column: str) -> list[dict[str, Any]]:
        return self._seen.ledger.rows(
            f"SELECT workspace_id, {column} AS what, count(*) AS n FROM {table}"
            f" WHERE {column} IS NOT NULL GROUP BY workspace_id, {column} HAVING count(*) > 1"
        )

    # -- 2: every operation ends, or is parked with a reason ----------------------------------

    def _settled(self) -> Iterator[Violation]:
        for operation in self._seen.operations:
            if operation["state"] in ENDED:
                if operation["finished_at"] is None:
                    yield Violation(2, operation["id"], "ended, but nobody knows when")
            elif not (operation["parked_reason"] or "").strip():
                state = operation["state"]
                yield Violation(2, operation["id"], f"is {state}, and not parked with a reason")


def counts(violations: list[Violation]) -> Counter[int]:
    """How many violations of each invariant."""
    return Counter(violation.invariant for violation in violations)
