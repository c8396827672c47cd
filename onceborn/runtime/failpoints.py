"""Named points at which a test can make the process die, pause, fail or lose an answer.

Inert unless ``ONCEBORN_FAILPOINTS`` is set: one dictionary look-up. The variable holds
``name=action`` pairs separated by ``;``. Actions:

``kill``
    SIGKILL this process.
``stop``
    SIGSTOP this process (its threads too); it goes on after SIGCONT.
``raise``
    Raise ``FailpointError``. After a commit this is a lost answer.
``wait:PATH``
    Go on once PATH exists; ``PATH.reached`` is made on arrival.

An action may carry ``@N``: it fires on the N-th hit only (``kill@2``); without it, on every hit.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Final


class FailpointError(RuntimeError):
    """A failpoint raised."""


def _parse(text: str) -> dict[str, tuple[str, int]]:
    points: dict[str, tuple[str, int]] = {}
    for pair in filter(None, (part.strip() for part in text.split(";"))):
        name, _, action = pair.partition("=")
        action, _, nth = action.partition("@")
        points[name] = (action, int(nth or 0))
    return points


_POINTS: Final = _parse(os.environ.get("ONCEBORN_FAILPOINTS", ""))
_hits: Final[Counter[str]] = Counter()
_lock: Final = threading.Lock()
_watch: Callable[[str], None] | None = None


def configure(text: str) -> None:
    """Replace what is armed in this process (tests)."""
    _POINTS.clear()
    _hits.clear()
    _POINTS.update(_parse(text))


def watch(hook: Callable[[str], None] | None) -> None:
    """Have every boundary of this process call ``hook`` with its name; ``None`` ends it (tests).

    What the hook raises is raised at the boundary.
    """
    global _watch
    _watch = hook


def failpoint(name: str) -> None:
    """Mark a boundary."""
    if _watch is not None:
        _watch(name)
    if _POINTS and name in _POINTS:
        _fire(name)


def armed(name: str) -> bool:
    """Whether a behaviour that only tests ask for is switched on (action ``on``)."""
    return bool(_POINTS) and name in _POINTS


def _fire(name: str) -> None:
    action, nth = _POINTS[name]
    with _lock:
        _hits[name] += 1
        if nth and _hits[name] != nth:
            return
    if action == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif action == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif action == "raise":
        raise FailpointError(name)
    elif action.startswith("wait:"):
        path = Path(action.removeprefix("wait:"))
        path.with_name(path.name + ".reached").touch()
        while not path.exists():
            time.sleep(0.01)
