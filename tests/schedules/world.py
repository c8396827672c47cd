"""A world in memory: places for worktrees, clones, locks, children that outlive their parents.

It does what a host does, and it keeps watch: a mutation without the host lock, by an attempt that
is not the step's present one, on something of somebody else, or twice, is noted as ``wrong``.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final

from onceborn.runtime.failpoints import failpoint

from .baton import Died, current
from .ledger import Ledger

FOREIGN: Final = "somebody else"

_ATTEMPT = (
    "SELECT s.attempt_token, s.state = 'running' OR s.compensation = 'running', o.state, o.fence,"
    " o.parked_reason FROM steps s JOIN operations o ON o.id = s.operation_id"
    " WHERE s.idempotency_key = ?"
)
_CLAIMED = (
    "SELECT w.token1 FROM witness w JOIN steps s ON s.operation_id = w.operation"
    " AND s.step_key = w.key WHERE s.idempotency_key = ? AND w.actor = ? AND w.tbl = 'step'"
    " AND w.token1 IS NOT w.token0 ORDER BY w.seq DESC LIMIT 1"
)


@dataclass
class Place:
    """Where one worktree is to be: a branch and a folder, each with whose it is."""

    branch: str | None = None
    folder: str | None = None
    full: bool = False
    work: bool = False
    """Somebody has worked in it: it must never be lost."""


@dataclass
class Lock:
    """A held host lock. ``fd`` is what children would inherit."""

    resource: str
    holder: object
    fd: int = 3
    child: Child | None = None


@dataclass
class Child:
    """A process of an attempt's: it inherited the lock and goes on when its parent is gone."""

    lock: Lock
    key: str
    token: str | None
    actor: str
    stages: deque[Callable[[], None]] = field(default_factory=deque)
    alone: bool = False


class Locks:
    """The host locks: the contract of ``activities.locks.HostLocks``, in memory."""

    def __init__(self) -> None:
        self.held: dict[str, Lock] = {}

    @contextmanager
    def try_lock(self, resource: str) -> Iterator[Lock | None]:
        failpoint("lock.before")
        if resource in self.held:
            yield None
            return
        lock = self.held[resource] = Lock(resource, current())
        try:
            failpoint("lock.acquired")
            yield lock
        finally:
            if lock.child is None or not lock.child.alone:
                self.held.pop(resource, None)

    def mine(self, resource: str) -> bool:
        lock = self.held.get(resource)
        return lock is not None and lock.holder is current()

    def of(self, task: object) -> list[Lock]:
        return [lock for lock in self.held.values() if lock.holder is task]


class FakeWorld:
    """All that is outside of the ledger."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self.clear()

    def clear(self) -> None:
        self.locks = Locks()
        self.places: dict[str, Place] = defaultdict(Place)
        self.clones: dict[str, bool] = {}
        """Whether each clone is whole."""
        self.quarantine: dict[str, list[str]] = defaultdict(list)
        """By step: what was moved away because it holds somebody's work."""
        self.lies: dict[str, deque[str]] = defaultdict(deque)
        self.blind: dict[str, int] = defaultdict(int)
        self.alone: list[Child] = []
        """Children that outlive their parents."""
        self.agents: dict[str, int] = defaultdict(int)
        self.spoilt: set[str] = set()
        """Keys of steps whose effect somebody else took away."""
        self.planted: dict[str, Place] = {}
        self.wrong: list[str] = []
        self.effects: list[tuple[str, str, str]] = []

    # -- what an attempt does -----------------------------------------------------------------

    def guarded(self, key: str, guard: Callable[[], None]) -> None:
        """Ask the guard; what it lets through is looked at by plain SQL."""
        guard()
        row = self.ledger.peek(_ATTEMPT, key)
        task = current()
        if task is None or row is None:
            return
        token, running, state, fence, parked = row
        if token != self._token(key, task.name):
            self.wrong.append(f"guard let {task.name} through with another attempt's token")
        if fence != task.fence or parked is not None:
            self.wrong.append(f"guard let {task.name} through under fence {task.fence} of {fence}")
        if not running or state in ("completed", "aborted"):
            self.wrong.append(f"guard let {task.name} through on a step that it does not run")

    def run(self, resource: str, key: str, *stages: Callable[[], None]) -> None:
        """Have a child do the stages, one after the other; it may outlive its parent."""
        task = current()
        assert task is not None
        failpoint("child.spawn")
        lock = self.locks.held.get(resource)
        if lock is None or lock.holder is not task:
            self.wrong.append(f"{task.name} acts on {resource} without its lock")
            return
        child = Child(lock, key, self._token(key, task.name), task.name, deque(stages))
        lock.child = child
        try:
            while child.stages:
                failpoint("child.stage")
                self.step(child)
            failpoint("child.exited")
        except Died as death:
            if death.child_lives and child.stages:
                child.alone = True
                self.alone.append(child)
            raise
        finally:
            if not child.alone:
                lock.child = None

    def step(self, child: Child) -> None:
        """The child's next stage."""
        self._watch(child)
        child.stages.popleft()()
        self.effects.append((child.actor, child.key, child.lock.resource))

    def leave(self, child: Child, *, finish: bool) -> None:
        """A child that was left alone goes on for a stage, or is killed."""
        if finish and child.stages:
            try:
                self.step(child)
            except Exception:
                child.stages.clear()
        else:
            child.stages.clear()
        if not child.stages:
            self.alone.remove(child)
            self.locks.held.pop(child.lock.resource, None)

    def _watch(self, child: Child) -> None:
        if self.locks.held.get(child.lock.resource) is not child.lock:
            self.wrong.append(f"{child.actor} acts on {child.lock.resource} after its lock is gone")
        row = self.ledger.peek(_ATTEMPT, child.key)
        if row is None:
            self.wrong.append(f"{child.actor} acts for a step that is not there")
            return
        token, running, state, _fence, _parked = row
        if token != child.token or not running:
            self.wrong.append(f"{child.actor} acts for a step that another attempt has")
        if state in ("completed", "aborted"):
            self.wrong.append(f"{child.actor} acts for an operation that is {state}")

    def _token(self, key: str, actor: str) -> str | None:
        row = self.ledger.peek(_CLAIMED, key, actor)
        return None if row is None else row[0]

    # -- what happens to it -------------------------------------------------------------------

    def plant(self, path: str, *, branch: bool) -> None:
        """Somebody puts something of his own where a worktree is to be."""
        place = self.places[path]
        if branch and place.branch is None:
            place.branch = FOREIGN
        elif not branch and place.folder is None:
            place.folder = FOREIGN
        else:
            return
        self.planted[path] = Place(
            branch=FOREIGN if place.branch == FOREIGN else None,
            folder=FOREIGN if place.folder == FOREIGN else None,
        )

    def snapshot(self) -> str:
        """All of it that counts, as text."""
        return repr(
            (
                {path: place for path, place in self.places.items() if place != Place()},
                self.clones,
                {key: kept for key, kept in self.quarantine.items() if kept},
                dict(self.agents),
            )
        )
