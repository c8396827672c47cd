"""What the history says of who wrote: fences only rise, and every write is its owner's.

The transitions are written down here a second time, as the protocol has them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from .ledger import Ledger

_OPERATION = {
    ("preparing", "preparing_release"),
    ("preparing_release", "preparing"),
    ("preparing", "completing"),
    ("completing", "completed"),
    ("preparing", "aborted"),
    ("preparing_release", "aborted"),
}
_STEP = {
    ("planned", "running"),
    ("planned", "succeeded"),
    ("planned", "armed"),
    ("planned", "failed"),
    ("retry_wait", "running"),
    ("unknown", "running"),
    ("running", "succeeded"),
    ("running", "retry_wait"),
    ("running", "unknown"),
    ("running", "failed"),
    ("armed", "succeeded"),
    ("armed", "cancelled"),
}
_UNDO = {
    ("none", "required"),
    ("required", "running"),
    ("required", "compensated"),
    ("retry_wait", "running"),
    ("unknown", "running"),
    ("running", "compensated"),
    ("running", "transferred"),
    ("running", "retry_wait"),
    ("running", "unknown"),
}


def foreign_writes(ledger: Ledger) -> Iterator[tuple[str, str]]:
    """(operation, what is wrong) for each write that cannot have been the owner's."""
    if "history_steps" not in ledger.tables():
        return
    for row in ledger.rows("SELECT * FROM history_operations ORDER BY number"):
        yield from ((row["operation_id"], what) for what in _operation(row))
    for row in ledger.rows("SELECT * FROM history_steps ORDER BY number"):
        key = row["step_key"]
        yield from ((row["operation_id"], f"step {key}: {what}") for what in _step(row))


def _operation(row: dict[str, Any]) -> Iterator[str]:
    before, after = int(row["old_fence"]), int(row["new_fence"])
    if after < before:
        yield f"its fence went from {before} back to {after}"
    if after > before + 1:
        yield f"its fence leapt from {before} to {after}"
    change = (row["old_state"], row["new_state"])
    if change[0] != change[1] and change not in _OPERATION:
        yield f"it went from {change[0]} to {change[1]}"
    if change[0] in ("completed", "aborted"):
        yield f"it was written to after it was {change[0]}"


def _step(row: dict[str, Any]) -> Iterator[str]:
    state = (row["old_state"], row["new_state"])
    undo = (row["old_compensation"], row["new_compensation"])
    token = (row["old_attempt_token"], row["new_attempt_token"])
    if state[0] != state[1] and state not in _STEP:
        yield f"it went from {state[0]} to {state[1]}"
    if undo[0] != undo[1] and undo not in _UNDO:
        yield f"its undoing went from {undo[0]} to {undo[1]}"
    fence = int(row["fence"])
    attempts = _rise(row, "attempt") + _rise(row, "undo_attempt")
    if token[0] != token[1]:
        # A claim: a new token, under the fence of this instant, counted as one more attempt.
        if int(row["new_attempt_fence"]) != fence:
            yield f"fence {row['new_attempt_fence']} claimed it under fence {fence}"
        if attempts != 1:
            yield f"a claim counted {attempts} attempts"
        return
    row_only = token[1] is None
    required = undo == ("none", "required")
    if row_only or required:
        return
    if int(row["new_attempt_fence"]) != fence:
        yield f"an attempt of fence {row['new_attempt_fence']} wrote to it under fence {fence}"
    if "running" not in (state[0], undo[0]):
        yield "an attempt wrote to it that did not hold it"


def _rise(row: dict[str, Any], column: str) -> int:
    return int(row[f"new_{column}"]) - int(row[f"old_{column}"])
