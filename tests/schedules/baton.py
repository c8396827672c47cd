"""Cooperative tasks: threads of which exactly one runs, and every boundary may be where it stops.

A task runs until its budget of boundaries is spent; then it pauses there, dies there, or loses an
answer. Nobody pauses inside a transaction: on the one connection there is, that is the same as
pausing just before or after it, since a real one would make everybody else wait.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final, Literal

from onceborn.runtime.protocol.errors import DatabaseUnavailable

Ending = Literal["pause", "die", "die_but_child", "lose", "unreachable"]
ENDLESS: Final = 1_000_000

_here = threading.local()


class Died(BaseException):
    """The process is gone: nothing of what was left to do is done. Not an ``Exception``."""

    def __init__(self, *, child_lives: bool) -> None:
        super().__init__()
        self.child_lives = child_lives


class Task:
    """One process's work on something. ``body`` runs in a thread of its own."""

    def __init__(self, name: str, body: Callable[[], None], busy: Callable[[], bool]) -> None:
        self.name = name
        self.fence = -1
        """The fence that it acts under; -1 before it has one."""
        self.order: tuple[str, object] | None = None
        """The activity that it is in, and its argument."""
        self.orphan = False
        """Its caller gave it up: it ends with the activity that it is in."""
        self.done = False
        self.point = "start"
        self.failure: BaseException | None = None
        self._body = body
        self._busy = busy
        self._budget = 0
        self._ending: Ending = "pause"
        self._dying = False
        self._go = threading.Lock()
        self._back = threading.Lock()
        self._go.acquire()
        self._back.acquire()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._started = False

    # -- from the scheduler -------------------------------------------------------------------

    def resume(self, budget: int = ENDLESS, ending: Ending = "pause") -> None:
        """Let it run for ``budget`` boundaries, then let ``ending`` happen to it there."""
        if self.done:
            return
        self._budget, self._ending = budget, ending
        if not self._started:
            self._started = True
            self._thread.start()
        else:
            self._go.release()
        self._back.acquire()
        if self.done:
            self._thread.join()

    # -- from within --------------------------------------------------------------------------

    def reached(self, point: str) -> None:
        """A boundary."""
        if self._dying:
            return
        self._budget -= 1
        if self._budget > 0:
            return
        if self._ending == "pause":
            if not self._busy():
                self._stop_at(point)
        elif self._ending == "lose":
            if point.endswith(".committed"):
                self._ending = "pause"
                raise DatabaseUnavailable()
        elif self._ending == "unreachable":
            if point.endswith(".begin"):
                self._ending = "pause"
                raise DatabaseUnavailable()
        else:
            self._die()

    def rest(self, point: str) -> None:
        """Wait for something that only others, or time, can bring about."""
        if not self._dying:
            self._stop_at(point)

    def _stop_at(self, point: str) -> None:
        self.point = point
        self._back.release()
        self._go.acquire()
        if self._budget <= 0 and self._ending in ("die", "die_but_child"):
            self._die()

    def _die(self) -> None:
        self._dying = True
        raise Died(child_lives=self._ending == "die_but_child")

    def _run(self) -> None:
        _here.task = self
        try:
            self._body()
        except Died:
            self.point = "dead"
        except BaseException as error:
            self.failure = error
        else:
            self.point = "end"
        finally:
            self.done = True
            self._back.release()


def current() -> Task | None:
    """The task that the calling thread is."""
    return getattr(_here, "task", None)


def boundary(point: str) -> None:
    """What the failpoints call."""
    task = current()
    if task is not None:
        task.reached(point)
