"""Cleanup jobs as their workers see them: taken by a claim, ended, or tried again later.

A job that is not done after as many attempts as a step has is shown as stuck; it is still tried,
rarely, for as long as it exists. Source: design 1-protocol, 'Step states'.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

from sqlalchemy import Connection, Row

from .ledger import cleanup as ledger
from .ledger import steps
from .ledger.cleanup import JobClaim
from .ledger.database import Database
from .settings import Settings

RARELY_MS: Final = 3_600_000
"""Between two attempts at a job that is stuck."""


@dataclass(frozen=True, slots=True)
class Job:
    """A claimed job with the step whose effect it is of."""

    claim: JobClaim
    row: Row[Any]
    step: Row[Any]


class Cleanup:
    """The ledger's side of cleanup jobs. Safe to share between threads."""

    def __init__(self, database: Database, settings: Settings) -> None:
        self._database = database
        self._settings = settings
        self._lease_ms = settings.limits.lease_ms

    def take(self, host_id: str) -> Job | None:
        """Claim the pending job of this host that has been due for longest; ``None``: none is."""
        with self._database.reading() as connection:
            if not ledger.any_due(connection, self._database, host_id):
                return None
        with self._database.transaction("cleanup.claim") as connection:
            claim = ledger.claim_due(connection, self._database, host_id, self._lease_ms)
            return None if claim is None else load(connection, claim)

    def read(self, job_id: str) -> tuple[Row[Any], Row[Any]]:
        """A job's row and its step's, as they are."""
        with self._database.reading() as connection:
            row = ledger.load(connection, job_id)
            return row, steps.load(connection, row.operation_id, row.step_key)

    def check(self, claim: JobClaim) -> bool:
        """Whether the claim still holds its job."""
        with self._database.reading() as connection:
            return ledger.still_claimed(connection, claim)

    def renew(self, claim: JobClaim) -> None:
        """Raises FenceLost: the claim no longer holds its job."""
        with self.holding(claim):
            pass

    @contextmanager
    def holding(self, claim: JobClaim) -> Iterator[Connection]:
        """A transaction that holds the claimed job."""
        with self._database.transaction("cleanup.renew") as connection:
            ledger.renew(connection, self._database, claim, self._lease_ms)
            yield connection

    # -- how an attempt ends; each raises FenceLost where the claim is lost -----------------------

    def done(self, claim: JobClaim, result: Mapping[str, Any]) -> None:
        with self._database.transaction("cleanup.record") as connection:
            ledger.finish(connection, self._database, claim, "done", result)

    def keep(self, claim: JobClaim, proof: Mapping[str, Any]) -> None:
        """It holds somebody's work after all: quarantined from now on."""
        with self._database.transaction("cleanup.record") as connection:
            ledger.keep(connection, claim, proof)

    def later(self, job: Job, error: str) -> None:
        """Try again, by exponential backoff with jitter; rarely once it is stuck."""
        with self._database.transaction("cleanup.record") as connection:
            ledger.later(
                connection, self._database, job.claim, error[:2000], self._delay_ms(job.row)
            )

    def _delay_ms(self, row: Row[Any]) -> int:
        if is_stuck(row, self._settings):
            return RARELY_MS
        wait = self._settings.retry_base_s * 2 ** (row.attempts - 1)
        return int(min(wait, self._settings.retry_max_s) * random.uniform(0.8, 1.2) * 1000)  # noqa: S311


def load(connection: Connection, claim: JobClaim) -> Job:
    """The job of a claim that was just made, as the claim left it."""
    row = ledger.load(connection, claim.job_id)
    return Job(claim, row, steps.load(connection, row.operation_id, row.step_key))


def is_stuck(row: Row[Any], settings: Settings) -> bool:
    """Whether a pending job has failed as often as a step may."""
    return bool(row.state == "pending" and row.attempts >= settings.step_attempts)
