"""The agent's shim: one process per run, alive for the agent's whole life.

    python -I -S .../shim/__main__.py RUN_DIRECTORY TOKEN

It holds the run's lock, so a second shim for the run fails; it launches only with the token that
``launch.json`` names under that lock, and only if ``started.json`` does not exist: one launch for
ever. It is nobody's child, so a worker may come and go; whoever asks reads the files and the lock
(../agent.py). Its start is waited for, so these modules import little, ``typing`` not at all.

Files in the run's directory, each written to a temporary name, synced and renamed:

``launch.json``
    By the launcher: what to start. The values of environment variables are not in it: they come in
    the shim's own environment.
``started.json``
    The agent's process, written before the agent may run its first instruction.
``exit.json``
    How it ended, written when no process of it is left.
``log``, ``log.head``, ``log.previous``
    Stdout and stderr, bounded: the newest, the first and the last but one part.
``shim.log``
    What went wrong in the shim itself.

The first process exits once it is known what became of the launch, with one of the codes below; the
shim goes on.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Final

LAUNCHED: Final = 0
"""Started, or its end is recorded already (a program that does not exist)."""
FAILED: Final = 70
"""Something unexpected; see ``shim.log``."""
BUSY: Final = 75
"""Another shim, or a launcher, holds the run's lock."""
NOT_OURS: Final = 76
"""``launch.json`` names another token: a later launcher's."""
ALREADY_LAUNCHED: Final = 77
"""``started.json`` exists."""
