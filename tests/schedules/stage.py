"""Makes a schedule happen: owners, sweeps and creators as tasks, over one ledger and one world."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, cast

import structlog
from temporalio import activity

from onceborn.activities import attempt as attempts
from onceborn.activities.drive import Driver
from onceborn.activities.kind import Host
from onceborn.activities.locks import HostLocks
from onceborn.runtime import failpoints
from onceborn.runtime.admission import Admitted
from onceborn.runtime.completion import Completion
from onceborn.runtime.ledger import runs, stuck
from onceborn.runtime.protocol import rules
from onceborn.runtime.protocol.errors import DatabaseUnavailable, FenceLost
from onceborn.runtime.protocol.orders import Looked, OperationRef, order_of
from onceborn.runtime.recovery import Owned, Recovery
from onceborn.workflows.creation_activities import CreationActivities
from onceborn.workflows.dispatch import _note
from onceborn.workflows.engine import Engine

from .baton import ENDLESS, Ending, Task, boundary, current
from .check import findings
from .events import Event, Schedule
from .kinds import fake_kinds
from .ledger import LEASE_MS, START_MS, Ledger
from .world import FakeWorld

FAILURES_IN_A_ROW: Final = 5
"""As in workflows/creation.py."""
ROUNDS: Final = 60
UNPARKED_AT_MOST: Final = 4
MANY_ACTIONS: Final = 400
MANY_BOUNDARIES: Final = 1_000


class Stage:
    """One ledger, one world, one host's hands; plays one schedule after the other."""

    def __init__(self) -> None:
        self.ledger = Ledger()
        self.world = FakeWorld(self.ledger)
        database = self.ledger.database
        settings = self.ledger.place.settings
        limits = settings.limits
        self.host_id = self._host_id()
        host = Host(host_id=self.host_id, data=Path("/host"))
        # Every renewal is due at once: time does not pass by itself here.
        attempts.RENEW_EVERY_S = 0.0  # type: ignore[misc]
        self.recovery = Recovery(database, limits, "schedule")
        self.completion = Completion(database, limits)
        driver = Driver(
            database,
            host,
            cast("HostLocks", _LocksOf(self.world)),
            limits,
            settings,
            fake_kinds(self.world),
        )
        activities = CreationActivities(
            database, driver, self.recovery, cast("Engine", None), limits, self.host_id
        )
        self._by_name = {_name(a): a for a in (*activities.short(), *activities.long())}
        self._clear()

    def _host_id(self) -> str:
        (row,) = self.ledger.ask("SELECT id FROM hosts")
        return str(row["id"])

    def _clear(self) -> None:
        self.tasks: list[Task] = []
        self.refs: list[OperationRef] = []
        self.answers: list[Admitted] = []
        self.wrong: list[str] = []
        self.late: list[Task] = []
        self._number = 0

    # -- one schedule -------------------------------------------------------------------------

    def play(
        self, schedule: Schedule, tell: Callable[[str], None] = lambda line: None
    ) -> list[str]:
        """What is wrong with how it ended; nothing, it is to be hoped.

        ``tell`` gets a line for each event, with where every task then stands.
        """
        self.ledger.clear()
        self.world.clear()
        self._clear()
        self.schedule = schedule
        random.seed(schedule.seed)  # the engine's own backoff jitter
        quiet = structlog.get_config()
        structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(50))
        failpoints.watch(boundary)
        try:
            for event in schedule.events:
                self.happen(event)
                tell(f"{event!s:<40} {self._tasks_now()}")
            self.settle()
            self.wrong += findings(self)
            self.wake_the_late()
        finally:
            self._end_all()
            failpoints.watch(None)
            structlog.configure(**quiet)
        return sorted(set(self.wrong + self.world.wrong))

    def ends(self) -> Counter[str]:
        """How many operations ended in which way, of the schedule that was played last."""
        rows = self.ledger.ask("SELECT state, outcome, parked_reason FROM operations")
        ends = Counter(str(row["outcome"] or row["state"]) for row in rows)
        ends["late tasks woken"] += len(self.late)
        return ends

    def _tasks_now(self) -> str:
        return ", ".join(f"{task.name}@{task.point}" for task in self.alive())

    def happen(self, event: Event) -> None:
        """One event; nothing where it has no target now."""
        getattr(self, f"_{event.does}")(event)

    # -- events -------------------------------------------------------------------------------

    def _run(self, event: Event) -> None:
        task = _pick(self.alive(), event.at)
        if task is not None:
            self.resume(task, max(event.n, 1), cast("Ending", event.what or "pause"))

    def _last(self, event: Event) -> None:
        """The youngest task goes on: the present owner, more often than not."""
        self._run(Event("run", -1, event.n, event.what))

    def _until(self, event: Event) -> None:
        """A task goes on to a boundary by name (``what``), and dies there if ``n`` is 1."""
        task = _pick(self.alive(), event.at)
        if task is None:
            return
        for _ in range(MANY_BOUNDARIES):
            self.resume(task, 1)
            if task.done or task.point == event.what:
                break
        else:
            self.wrong.append(f"{task.name} never comes to {event.what}")
        if event.n:
            self.resume(task, 0, "die")

    def _takeover(self, event: Event) -> None:
        """Time passes, and a sweep takes what has lost its owner."""
        self.ledger.clock.advance(event.n)
        self.resume(self.spawn("sweep", self.sweep))

    def _create(self, event: Event) -> None:
        self.spawn("creator", lambda: self.create("F" if event.at % 8 == 7 else "E"))

    def _sweep(self, event: Event) -> None:
        self.spawn("sweep", self.sweep)

    def _clock(self, event: Event) -> None:
        self.ledger.clock.advance(event.n)

    def _fork(self, event: Event) -> None:
        """The engine gave an activity up, or lost its worker: it goes on under the same fence."""
        ref = _pick(self.refs, event.at)
        if ref is None:
            return
        for task in self.alive():
            if task.fence == ref.fence and task.order is not None:
                task.orphan = True
        self.spawn("again", lambda: self.own(ref, "look" if event.at % 2 else "begin"), ref.fence)

    def _duplicate(self, event: Event) -> None:
        """The engine delivers an activity twice."""
        task = _pick([task for task in self.alive() if task.order is not None], event.at)
        if task is not None and task.order is not None:
            order = task.order
            self.spawn("twice", lambda: self._once(order), task.fence)

    def _child(self, event: Event) -> None:
        child = _pick(self.world.alone, event.at)
        if child is not None:
            self.world.leave(child, finish=bool(event.n))

    def _lie(self, event: Event) -> None:
        key = _pick(self._step_keys(), event.at)
        if key is not None:
            self.world.lies[key].append(event.what)

    def _blind(self, event: Event) -> None:
        key = _pick(self._step_keys(), event.at)
        if key is not None:
            self.world.blind[key] += event.n

    def _vanish(self, event: Event) -> None:
        place = _pick([p for p in self.world.places.values() if p.full and not p.work], event.at)
        if place is not None:
            self.world.spoilt.add(str(place.folder))
            place.branch, place.folder, place.full = None, None, False

    def _plant(self, event: Event) -> None:
        path = _pick(self._paths(), event.at)
        if path is not None:
            self.world.plant(path, branch=bool(event.n))

    def _work(self, event: Event) -> None:
        mine = [p for p in self.world.places.values() if p.folder and p.branch == p.folder]
        place = _pick(mine, event.at)
        if place is not None:
            place.work = True

    def _release(self, event: Event) -> None:
        self.ledger.outside(
            "UPDATE operations SET state = 'preparing_release'"
            " WHERE state = 'preparing' AND NOT deleted"
        )

    def _delete(self, event: Event) -> None:
        """What deleting the workspace does to what is being prepared (design 1-protocol)."""
        now = "state IN ('preparing', 'preparing_release') AND NOT deleted"
        self.ledger.outside(
            "UPDATE tasks SET external_id = NULL WHERE operation_id IN"
            f" (SELECT id FROM operations WHERE {now})"
        )
        if event.at % 2:
            self.ledger.outside(
                "UPDATE steps SET state = 'cancelled' WHERE state = 'armed' AND"
                " compensation = 'none' AND operation_id IN"
                f" (SELECT id FROM operations WHERE {now})"
            )
        self.ledger.outside(
            "UPDATE operations SET deleted = TRUE, fence = fence + 1, token_spent = TRUE,"
            f" state = 'preparing' WHERE {now}"
        )

    def _unpark(self, event: Event) -> None:
        self.unpark()

    # -- tasks --------------------------------------------------------------------------------

    def alive(self) -> list[Task]:
        return [task for task in self.tasks if not task.done]

    def spawn(self, kind: str, body: Callable[[], None], fence: int = -1) -> Task:
        self._number += 1
        task = Task(f"{kind}{self._number}", body, self.ledger.busy)
        task.fence = fence
        self.tasks.append(task)
        return task

    def resume(self, task: Task, budget: int = ENDLESS, ending: Ending = "pause") -> None:
        task.resume(budget, ending)
        if task.failure is not None:
            self.note_failure(task)

    def note_failure(self, task: Task) -> None:
        error = task.failure
        task.failure = None
        if not isinstance(error, DatabaseUnavailable):
            self.wrong.append(f"{task.name.rstrip('0123456789')} failed: {error!r}")

    def create(self, external_id: str) -> None:
        """A create, from its admission to its end, in one process."""
        task = _me()
        body: dict[str, Any] = {
            "repositories": [
                {"source": f"https://git.localhost/{n}.git"}
                for n in range(self.schedule.repositories)
            ]
        }
        if self.schedule.agent != "none":
            body |= {"profile": "marker", "start_agent": self.schedule.agent == "start"}
        admitted = self.ledger.place.create(external_id, **body)
        self.answers.append(admitted)
        if admitted.handle is None:
            return
        failpoints.failpoint("creator.admitted")
        try:
            owned = self.recovery.take(admitted.handle)
        except FenceLost:
            return
        task.fence = owned.fence
        self.own(self.note(owned), "begin")

    def sweep(self) -> None:
        """One pass; each creation that is taken gets an owner of its own."""
        failpoints.failpoint("sweep.pass")
        for owned in self.recovery.claim(self.host_id, 8):
            ref = self.note(owned)
            self.spawn("owner", lambda ref=ref: self.own(ref, "begin"), ref.fence)
        with self.ledger.database.reading() as connection:
            waiting = runs.undispatched(connection, self.host_id, 100)
        for run_id in waiting:
            self.dispatch(run_id)

    def note(self, owned: Owned) -> OperationRef:
        ref = OperationRef(owned.operation_id, owned.fence)
        self.refs.append(ref)
        return ref

    def own(self, ref: OperationRef, first: str) -> None:
        """The loop of workflows/creation.py."""
        task = _me()
        looked = self._read(first, ref)
        failures = 0
        for _ in range(MANY_ACTIONS):
            action = rules.next_action(looked.snapshot)
            if isinstance(action, rules.Stop) or task.orphan:
                return
            if isinstance(action, rules.Wait):
                task.rest(f"wait {action.wait_ms}")
                looked = self._read("look", ref)
                continue
            if isinstance(action, rules.DispatchRun):
                self.dispatch(action.run_id)
                looked = self._read("look", ref)
                continue
            named = order_of(action, ref)
            assert named is not None
            try:
                looked = self._once(named)
            except Exception:
                failures += 1
                if failures > FAILURES_IN_A_ROW:
                    return  # the workflow fails; the sweep claims again
                task.rest("failed")
                looked = self._read("look", ref)
                continue
            failures = 0
            if looked.busy and not task.orphan:
                task.rest("busy")
                looked = self._read("look", ref)
        raise AssertionError("an owner never ends")

    def _once(self, named: tuple[str, Any]) -> Looked:
        task = _me()
        task.order = named
        try:
            return cast("Looked", self._by_name[named[0]](named[1]))
        finally:
            task.order = None

    def _read(self, name: str, ref: OperationRef) -> Looked:
        while True:
            try:
                return cast("Looked", self._by_name[name](ref))
            except DatabaseUnavailable:
                _me().rest("unreachable")

    def dispatch(self, run_id: str) -> None:
        """Start in Temporal, which takes an ID once, and note it (workflows/dispatch.py)."""
        failpoints.failpoint("engine.start_run")
        self.world.agents[run_id] = 1
        failpoints.failpoint("engine.started_run")
        _note(self.ledger.database, run_id)

    # -- the end ------------------------------------------------------------------------------

    def settle(self) -> None:
        """No more faults: honest owners bring everything to its end."""
        self.world.lies.clear()
        self.world.blind.clear()
        dice = random.Random(self.schedule.seed)
        for child in list(self.world.alone):
            while child in self.world.alone:
                self.world.leave(child, finish=dice.random() < 0.7)
        for task in self.alive():
            lot = dice.choice(("dies", "late", "late", "goes on"))
            starts = task.name.startswith(("creator", "sweep")) and task.fence < 0
            if lot == "late" and not starts and not self.world.locks.of(task):
                self.late.append(task)
            elif lot == "dies":
                self.resume(task, 0, "die")
                self.finish(task)
            else:
                self.finish(task)
        unparked = 0
        for _ in range(ROUNDS):
            self.everybody_finishes()
            if not self._open():
                break
            parked = self.ledger.ask(
                "SELECT parked_reason FROM operations WHERE parked_reason IS NOT NULL"
            )
            if parked and unparked >= UNPARKED_AT_MOST:
                self.wrong.append(f"parked again and again: {parked[0]['parked_reason']}")
                return
            unparked += self.unpark()
            self.ledger.clock.advance(self._longest_lease())
            self.finish(self.spawn("sweep", self.sweep))
        else:
            self.wrong.append("an operation never ends")
        self.finish(self.spawn("sweep", self.sweep))

    def _open(self) -> list[dict[str, Any]]:
        return self.ledger.ask(
            "SELECT id FROM operations WHERE state NOT IN ('completed', 'aborted')"
        )

    def _longest_lease(self) -> int:
        (row,) = self.ledger.ask("SELECT max(lease_until) AS until FROM operations")
        now = START_MS + self.ledger.clock.offset_ms
        return max(int(row["until"]) - now, 0) + LEASE_MS

    def everybody_finishes(self) -> None:
        for _ in range(50):
            todo = [task for task in self.alive() if task not in self.late]
            if not todo:
                return
            for task in todo:
                self.finish(task, 3)
        self.wrong.append("somebody never ends")

    def finish(self, task: Task, most: int = 40) -> None:
        """Let it go on; what it waits for comes about."""
        for _ in range(most):
            if task.done:
                return
            if task.point.startswith("wait "):
                self.ledger.clock.advance(int(task.point.split()[1]))
            self.resume(task)

    def unpark(self) -> int:
        """An operator un-parks what is parked: that clears the parking, and nothing else."""
        parked = self.ledger.ask("SELECT id FROM operations WHERE parked_reason IS NOT NULL")
        database = self.ledger.database
        for row in parked:
            with database.transaction("operators.unpark") as connection:
                stuck.unpark(connection, database, row["id"])
        return len(parked)

    def wake_the_late(self) -> None:
        """Owners that slept through it all wake up: nothing may change."""
        before = (self.ledger.everything(), self.world.snapshot())
        for task in self.late:
            self.finish(task)
            if not task.done:
                self.wrong.append(f"a late {task.name.rstrip('0123456789')} does not stop")
        if (self.ledger.everything(), self.world.snapshot()) != before:
            self.wrong.append("a late owner changed something")

    def _end_all(self) -> None:
        for task in self.alive():
            for _ in range(20):
                if task.done:
                    break
                task.resume(0, "die")
            task.failure = None

    # -- targets ------------------------------------------------------------------------------

    def _step_keys(self) -> list[str]:
        numbers = range(self.schedule.repositories)
        return [f"{kind}:{n}" for n in numbers for kind in ("repo_attach", "worktree")]

    def _paths(self) -> list[str]:
        rows = self.ledger.ask(
            "SELECT json_extract(request, '$.path') AS path FROM steps"
            " WHERE kind = 'worktree' ORDER BY rowid"
        )
        return [row["path"] for row in rows]


class _LocksOf:
    """The world's present locks: the world is emptied between schedules."""

    def __init__(self, world: FakeWorld) -> None:
        self._world = world

    def try_lock(self, resource: str) -> Any:
        return self._world.locks.try_lock(resource)

    def holder(self, resource: str) -> str:
        return f"the lock of {resource}"


def _me() -> Task:
    task = current()
    assert task is not None
    return task


def _pick(among: list[Any], at: int) -> Any:
    return among[at % len(among)] if among else None


def _name(function: Callable[..., Any]) -> str:
    definition = activity._Definition.must_from_callable(function)
    assert definition.name is not None
    return definition.name
