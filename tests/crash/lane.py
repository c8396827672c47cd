"""One lane of the matrix: cell after cell, each with processes of its own that really die.

The lane's process holds no connection and no thread, so it can fork a warm child for each part that
somebody plays: the one to whom it happens, the next owner, and the one after. The world always
stands at the same path, because git writes absolute paths; it is copied back before each cell.
"""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import psycopg
from sqlalchemy import make_url
from support import sqlite
from support.postgresql import PostgreSQL

from . import world
from .bystanders import Bystanders
from .checker import Checker, Violation
from .child import Child
from .hands import AFTER_LEASE_MS, Place
from .ledger import Ledger
from .parts import act, succeed
from .scenes import SCENES, Scene

POLLED: Final = frozenset({"agent.look"})
"""How often these are hit depends on how long something takes: the first time counts."""
ACTIONS: Final = ("kill", "stop", "stop, twin", "raise")


@dataclass(frozen=True)
class Cell:
    """``nth`` hit of ``point`` in ``scene``, and what happens there."""

    scene: str
    point: str
    nth: int
    action: str

    def __str__(self) -> str:
        return f"{self.scene} / {self.point}@{self.nth} / {self.action}"


@dataclass
class Result:
    """``problems`` empty: everything held."""

    cell: Cell
    backend: str
    seconds: float
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


@dataclass
class Prepared:
    scene: Scene
    place: Place
    bystanders: Bystanders
    folder: Path
    database: str
    points: list[tuple[str, int]] = field(default_factory=list)


class Lane:
    """``server`` None: SQLite."""

    def __init__(self, folder: Path, server: PostgreSQL | None) -> None:
        self.folder = folder.resolve()
        self.folder.mkdir(parents=True, exist_ok=True)
        self.server = server
        self.backend = "sqlite" if server is None else "postgresql"
        self.world = self.folder / "world"
        self.log = self.folder / "cell.log"
        self.scenes: dict[str, Prepared] = {}
        self._template = sqlite.make_template(self.folder) if server is None else None
        self._url = ""

    # -- scenes -------------------------------------------------------------------------------

    def prepare(self, scenes: list[Scene] = SCENES) -> None:
        """Build each scene, keep a copy, and find out by one recorded run which points it has."""
        for scene in scenes:
            self._clear()
            self.world.mkdir()
            url = self._fresh_url()
            place = Place(self.world, url)

            def build(scene: Scene = scene, place: Place = place) -> tuple[Place, Bystanders]:
                return place, scene.build(place)

            ended = self._child(build).wait()
            if ended.result is None:
                raise RuntimeError(f"scene {scene.name!r}: {self.log.read_text()[-4000:]}")
            place, bystanders = ended.result
            world.wait_until_idle(place.data)
            kept = self.folder / "scenes" / scene.name.replace(" ", "-").replace(",", "")
            shutil.copytree(self.world, kept, symlinks=True)
            database = url
            self._url = ""  # the scene's own; cells get copies
            prepared = Prepared(scene, place, bystanders, kept, database)
            self.scenes[scene.name] = prepared
            prepared.points = self._discover(prepared)

    def _discover(self, prepared: Prepared) -> list[tuple[str, int]]:
        place = self._restore(prepared)
        record = self.folder / "hits"
        record.unlink(missing_ok=True)
        ended = self._child(lambda: act(prepared.scene, place, "", str(record))).wait()
        problems = self._check(prepared, place)
        if ended.result is None or problems:
            raise RuntimeError(
                f"scene {prepared.scene.name!r} without a crash: {ended}, {problems}:"
                f" {self.log.read_text()[-4000:]}"
            )
        seen: Counter[str] = Counter()
        found = []
        for name in record.read_text().split():
            seen[name] += 1
            if seen[name] == 1 or name not in POLLED:
                found.append((name, seen[name]))
        return found

    def cells(self) -> list[Cell]:
        """Every hit of every point in every scene, with every action that makes sense there."""
        found = []
        for prepared in self.scenes.values():
            for point, nth in prepared.points:
                actions: tuple[str, ...] = ACTIONS
                if point.startswith("shim."):
                    actions = ("kill", "stop", "raise")  # a shim is nobody's attempt
                if point == "git.spawned":
                    actions += ("kill with children",)
                found += [Cell(prepared.scene.name, point, nth, a) for a in actions]
        return found

    # -- one cell -----------------------------------------------------------------------------

    def run(self, cell: Cell) -> Result:
        """Do it, recover, check."""
        began = time.monotonic()
        result = Result(cell, self.backend, 0.0)
        prepared = self.scenes[cell.scene]
        self.log.unlink(missing_ok=True)
        place = self._restore(prepared)
        try:
            self._happen(cell, prepared, place, result)
            self._recover(prepared, place, result)
            result.problems += map(str, self._check(prepared, place))
        except TimeoutError as error:
            result.problems.append(str(error))
        result.seconds = time.monotonic() - began
        return result

    def _happen(self, cell: Cell, prepared: Prepared, place: Place, result: Result) -> None:
        scene = prepared.scene
        action = cell.action if cell.action in ("kill", "raise") else "stop"
        armed = f"{cell.point}={action}@{cell.nth}"
        in_shim = cell.point.startswith("shim.")
        record = self.folder / "hits"
        record.unlink(missing_ok=True)
        victim = self._child(
            lambda: act(scene, place, armed, str(record), pausing=action == "stop")
        )
        if in_shim and action == "stop":
            self._shim_paused(victim, scene, place, result)
        elif action == "stop":
            if victim.wait_stopped_or_ended() is not None:
                result.notes.append("not reached")
            elif cell.action != "kill with children":
                self._paused(victim, scene, place, result, twin=cell.action == "stop, twin")
            else:
                for pid in world.descendants(victim.pid):
                    world.kill(pid)
                world.kill(victim.pid)
                victim.wait()
        else:
            ended = victim.wait()
            if action == "kill" and not in_shim and not ended.killed:
                result.notes.append("not reached")
            if action == "raise" and ended.result is None and not in_shim:
                result.notes.append("the process ended by it")
        hits = record.read_text().split().count(cell.point) if record.exists() else 0
        if hits < cell.nth and "not reached" not in result.notes:
            result.notes.append("not reached")

    def _paused(
        self, victim: Child, scene: Scene, place: Place, result: Result, *, twin: bool
    ) -> None:
        """The next owner goes on beside the paused one, which then wakes up and may do nothing.

        ``twin``: before it another attempt under the very fence of the paused one.
        """
        before = self._child(
            lambda: succeed(scene, place, AFTER_LEASE_MS, pausing=True, twin=twin)
        ).wait()
        beside = before.result
        result.notes.append(f"beside it: {beside}")
        world.wait_until_idle(place.data, but=frozenset({victim.pid}))
        digests = _digests(place)
        contents = world.contents(place.data)
        os.kill(victim.pid, signal.SIGCONT)
        victim.wait()
        world.wait_until_idle(place.data)
        if beside is None:
            result.problems.append(f"the next owner failed: {self.log.read_text()[-3000:]}")
        taken = beside not in (None, "blocked", "nothing")
        if taken and _digests(place)["all"] != digests["all"]:
            changed = _changed(contents, world.contents(place.data))
            rows = "the ledger; " if _digests(place)["ledger"] != digests["ledger"] else ""
            result.problems.append(
                f"invariant 5: the one that woke up after another owner had taken over"
                f" ({beside}) changed {rows}{changed}"
            )

    def _shim_paused(self, victim: Child, scene: Scene, place: Place, result: Result) -> None:
        """The agent's shim stops; worker and next owner find it so; it wakes up."""
        shim = self._stopped_shim(victim, place)
        if shim is None:
            result.notes.append("not reached")
            victim.wait()
            return
        world.kill(victim.pid)
        victim.wait()
        beside = self._child(lambda: succeed(scene, place, AFTER_LEASE_MS, pausing=True)).wait()
        result.notes.append(f"beside it: {beside.result}")
        world.kill(shim, signal.SIGCONT)

    def _stopped_shim(self, victim: Child, place: Place) -> int | None:
        deadline = time.monotonic() + 20
        below = str(place.data)
        while time.monotonic() < deadline:
            for process in world.processes():
                if process.state == "T" and "shim" in process.command and below in process.command:
                    return process.pid
            if _gone(victim.pid):
                deadline = min(deadline, time.monotonic() + 0.5)  # it may be about to stop
            time.sleep(0.01)
        return None

    def _recover(self, prepared: Prepared, place: Place, result: Result) -> None:
        again = prepared.scene.phase == "first"
        ended = self._child(
            lambda: succeed(prepared.scene, place, 2 * AFTER_LEASE_MS, again=again)
        ).wait()
        if ended.result in (None, "held", "blocked"):
            tail = self.log.read_text()[-3000:]
            result.problems.append(f"invariant 2: the last owner ended {ended.result}: {tail}")
        world.wait_until_idle(place.data)

    def _check(self, prepared: Prepared, place: Place) -> list[Violation]:
        found = Checker(place.url, place.data, prepared.bystanders).check()
        ledger = Ledger(place.url)
        for row in ledger.rows("SELECT * FROM operations"):
            if row["parked_reason"]:
                found.append(Violation(2, row["id"], f"parked: {row['parked_reason']}"))
        states = [
            row["state"] for row in ledger.rows("SELECT state FROM operations ORDER BY created_at")
        ]
        if not states or states[-1] != prepared.scene.end:
            found.append(Violation(2, "end", f"{states}, not {prepared.scene.end}"))
        return found

    # -- copies -------------------------------------------------------------------------------

    def _restore(self, prepared: Prepared) -> Place:
        self._clear()
        shutil.copytree(prepared.folder, self.world, symlinks=True)
        place = prepared.place
        url = place.url if self.server is None else self._copy(prepared.database)
        return Place(self.world, url, place.workspace_id, place.token, place.body)

    def _clear(self) -> None:
        for process in world.at_work(self.world):
            world.kill(process.pid)
        world.wait_until_idle(self.world)
        shutil.rmtree(self.world, ignore_errors=True)
        if self._url and self.server is not None:
            self.server.drop(self._url)
        self._url = ""

    def _fresh_url(self) -> str:
        if self.server is None:
            assert self._template is not None
            return sqlite.fresh(self._template, self.world)
        self._url = self.server.fresh()
        return self._url

    def _copy(self, url: str) -> str:
        assert self.server is not None
        name = make_url(url).database
        assert name is not None
        with psycopg.connect(self.server.url("postgres"), autocommit=True) as connection:
            # A killed process's session may not have noticed yet.
            connection.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %s", [name]
            )
        self._url = self.server.url(self.server.create(template=name))
        return self._url

    def _child(self, work: Callable[[], Any]) -> Child:
        return Child(work, self.log)

    def log_tail(self) -> str:
        """What the last cell's processes said."""
        return self.log.read_text(errors="replace")[-6000:] if self.log.exists() else ""

    def close(self) -> None:
        """Nothing of the lane is left."""
        self._clear()
        if self.server is not None:
            for prepared in self.scenes.values():
                self.server.drop(prepared.database)
            self.server.close()
        shutil.rmtree(self.folder, ignore_errors=True)


def _digests(place: Place) -> dict[str, str]:
    ledger, files = Ledger(place.url).digest(), world.digest(place.data)
    return {"ledger": ledger, "files": files, "all": ledger + files}


def _changed(before: dict[str, str], after: dict[str, str]) -> list[str]:
    return sorted(
        name for name in before.keys() | after.keys() if before.get(name) != after.get(name)
    )[:8]


def _gone(pid: int) -> bool:
    return all(process.pid != pid for process in world.processes())
