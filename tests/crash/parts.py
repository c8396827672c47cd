"""The parts that a cell's processes play: the one to whom it happens, and the owners after it."""

from __future__ import annotations

import os
from typing import Final

from onceborn.activities import agent
from onceborn.runtime import failpoints
from onceborn.runtime.ledger import database as ledger_database

from .hands import AFTER_LEASE_MS, Hands, Place
from .scenes import Scene

PATIENCE_S: Final = 0.4
"""How long the next owner waits for one that is paused, before the paused one wakes up."""


def act(scene: Scene, place: Place, armed: str, record: str, *, pausing: bool = False) -> str:
    """The one to whom it happens."""
    if pausing:
        _hasten()
    os.environ["ONCEBORN_FAILPOINTS_RECORD"] = record
    if armed.startswith("shim."):
        os.environ["ONCEBORN_FAILPOINTS"] = armed
    hands = Hands(place, clock_ms=0 if scene.phase == "first" else AFTER_LEASE_MS)
    failpoints.configure(armed, record)
    return hands.first() if scene.phase == "first" else hands.settle()


def succeed(
    scene: Scene,
    place: Place,
    clock_ms: int,
    *,
    pausing: bool = False,
    again: bool = False,
    twin: bool = False,
) -> str:
    """The next owner; with ``again`` the caller asks once more, too."""
    if pausing:
        _hasten()
    if twin:
        now = 0 if scene.phase == "first" else AFTER_LEASE_MS
        Hands(place, clock_ms=now, patience_s=PATIENCE_S).redelivered()
    hands = Hands(place, clock_ms=clock_ms, patience_s=PATIENCE_S if pausing else 30.0)
    return hands.retried() if again else hands.settle()


def _hasten() -> None:
    """Bounds that only a paused process makes one wait for, shorter."""
    ledger_database.BUSY_TIMEOUT_MS = 150  # type: ignore[misc]
    ledger_database.IDLE_IN_TRANSACTION_MS = 200  # type: ignore[misc,attr-defined]
    agent.LOCK_PATIENCE_S = 0.2  # type: ignore[misc]
    agent.SPAWN_PATIENCE_S = 1.0  # type: ignore[misc]
