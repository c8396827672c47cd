"""What the routes are served with."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Final, Protocol, TypeVar

from ...runtime.admission import Admission
from ...runtime.ledger.attestation import Attestor
from ...runtime.ledger.database import Database
from ...runtime.protocol.errors import DatabaseUnavailable
from ...runtime.protocol.handle import CreationHandle
from ...runtime.settings import Settings

T = TypeVar("T")

ANSWER_WITHIN_S: Final = 30.0
"""Beyond every limit that the database itself is given: a server that has gone silent."""
THREADS = 16
"""As many as the database has pooled connections, so no thread ever waits for one."""


class HandsOff(Protocol):
    """What the routes need of ``workflows.handoff.Handoff``."""

    async def begin(self, handle: CreationHandle) -> None: ...

    async def settled(self, operation_id: str) -> Any: ...


class Checks(Protocol):
    """What readiness needs of ``workflows.engine.Engine``."""

    async def check(self) -> None:
        """Raises EngineUnavailable."""


@dataclass(slots=True)
class Services:
    """One API process. Ledger calls are synchronous and run in its own bounded threads."""

    settings: Settings
    database: Database
    admission: Admission
    handoff: HandsOff
    engine: Checks
    attestor: Attestor
    stopping: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the process was told to stop: creates that wait are answered."""
    threads: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(THREADS, thread_name_prefix="ledger")
    )

    async def run(self, work: Callable[[], T]) -> T:
        """Run a synchronous call in a ledger thread.

        Raises:
            DatabaseUnavailable: it has not answered within ``ANSWER_WITHIN_S`` seconds.
        """
        running = asyncio.get_running_loop().run_in_executor(self.threads, work)
        try:
            return await asyncio.wait_for(running, ANSWER_WITHIN_S)
        except TimeoutError:
            raise DatabaseUnavailable from None
