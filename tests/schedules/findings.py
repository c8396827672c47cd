"""What random schedules once found, as schedules that stay: each failed before its fix.

They name boundaries, not numbers of them, so that a new boundary in the code does not shift them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from .events import Event, Schedule

TO_ITS_END: Final = 1_000


@dataclass(frozen=True)
class Finding:
    """``was``: what the schedule came to. ``why``: and what was to blame."""

    name: str
    was: str
    why: str
    schedule: Schedule


def _of(*events: Event, repositories: int = 1) -> Schedule:
    return Schedule(0, repositories, "none", events)


FINDINGS: Final = (
    Finding(
        "hand-off during a release",
        "the creator got HandleRejected for a creation that was in the best of health",
        "the hand-off asked for the state preparing, and a release may be under way before it",
        _of(
            Event("create"),
            Event("until", what="creator.admitted"),
            Event("release"),
            Event("run", 0, TO_ITS_END),
        ),
    ),
    Finding(
        "Complete delivered again after the end",
        "the late one met a CHECK constraint instead of its lost fence",
        "it gives the workspace's place back first, and no place was taken any more",
        _of(
            Event("create"),
            Event("until", what="complete.commit.begin"),
            Event("duplicate"),
            Event("run", 0, TO_ITS_END),
            Event("run", 0, TO_ITS_END),
        ),
    ),
    Finding(
        "died between quarantine and its record",
        "aborted, and a quarantine entry that the ledger knew nothing of",
        "where a lost attempt left nothing in its place, nothing else of it was looked for",
        _of(
            Event("create"),
            Event("lie", 1, what="half"),
            Event("until", what="worktree.performed"),
            Event("work"),
            Event("until", n=1, what="child.exited"),
            Event("takeover", n=95_000),
            Event("lie", 1, what="nothing_failed"),
            Event("last", n=TO_ITS_END),
        ),
    ),
    Finding(
        "deleted between quarantine and its record",
        "aborted, and a quarantine entry that the ledger knew nothing of",
        "as above, but nothing failed: a deletion took the fence, and Abort followed at once",
        _of(
            Event("create"),
            Event("lie", 1, what="half"),
            Event("until", what="worktree.performed"),
            Event("work"),
            Event("until", what="child.exited"),
            Event("delete"),
        ),
    ),
    Finding(
        "waited too long, once",
        "parked again by every owner after every un-park, without a look at whether it is free",
        "since when it waits was kept over un-park and change of owner",
        _of(
            Event("create"),
            Event("until", what="repo_attach.claimed"),
            Event("takeover", n=95_000),
            Event("last", n=TO_ITS_END),
            Event("clock", n=1_100_000),
        ),
    ),
)
