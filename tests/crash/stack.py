"""The boundaries that exist only with Temporal, on the real processes: API, worker and engine.

``python -m crash.stack --out FILE --temporal HOST:PORT [--postgresql URL]`` (tests/ in PYTHONPATH).
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from support import sqlite
from support.postgresql import PostgreSQL
from support.stack import Play, until
from support.temporal import fresh_namespace

from .bystanders import plant
from .checker import Checker
from .lane import Cell, Result
from .ledger import Ledger

ONLY_HERE = ("engine.", "host.", "sweep.", "handoff.", "run.", "creation.begin.")
"""Prefixes of the points that are played here, in the process that hits them."""
PATIENCE_S = 60.0


class Stack:
    """Cells on the real stack, one after another."""

    def __init__(self, folder: Path, temporal: str, server: PostgreSQL | None) -> None:
        self.folder = folder
        self.temporal = temporal
        self.server = server
        self.backend = "sqlite" if server is None else "postgresql"
        self._number = 0
        self._template = sqlite.make_template(folder) if server is None else None

    @contextmanager
    def playing(self) -> Iterator[Play]:
        self._number += 1
        folder = self.folder / str(self._number)
        folder.mkdir()
        if self.server is None:
            assert self._template is not None
            url = sqlite.fresh(self._template, folder)
        else:
            url = self.server.fresh()
        play = Play(
            folder,
            DATABASE_URL=url,
            TEMPORAL_ADDRESS=self.temporal,
            TEMPORAL_NAMESPACE=fresh_namespace(self.temporal),
            ONCEBORN_LEASE_S="2",
            ONCEBORN_SWEEP_INTERVAL_S="0.5",
        )
        try:
            play.up()
            Ledger(url).install_history()
            yield play
        finally:
            play.down()
            if self.server is not None:
                self.server.drop(url)
            shutil.rmtree(folder, ignore_errors=True)

    def discover(self) -> list[Cell]:
        """What an API and a worker hit that no cell without Temporal does."""
        found = []
        for role in ("api", "worker"):
            with self.playing() as play:
                record = play.folder / "hits"
                setting = {"ONCEBORN_FAILPOINTS_RECORD": str(record)}
                self._both(play, role, setting)
                task_id = self._create(play)
                play.wait_for_agent(task_id)
                hits = set(record.read_text().split())
                # The first hit of each: how often the others come depends on timing.
                for name in sorted(name for name in hits if name.startswith(ONLY_HERE)):
                    for action in ("kill", "stop"):
                        found.append(Cell(f"real {role}", name, 1, action))
        return found

    def run(self, cell: Cell) -> Result:
        """A process dies or pauses at the point; others go on; the paused one wakes up; check."""
        began = time.monotonic()
        result = Result(cell, self.backend, 0.0)
        role = cell.scene.removeprefix("real ")
        with self.playing() as play:
            others = plant(play.data)
            armed = {"ONCEBORN_FAILPOINTS": f"{cell.point}={cell.action}@{cell.nth}"}
            victim = self._both(play, role, armed)
            try:
                task_id = self._create(play)
                until(
                    "the point to be reached",
                    lambda: victim.poll() is not None or _stopped(victim.pid),
                    PATIENCE_S,
                )
                started = time.monotonic()
                if role == "worker":
                    play.start("other", "worker")
                else:
                    play.base = play.api("other")
                if self.server is None and cell.point.endswith(".commit") and cell.action == "stop":
                    # It holds SQLite's one write lock: nobody can go on before it does.
                    time.sleep(1)
                    victim.send_signal(signal.SIGCONT)
                task_id = task_id or self._create(play)
                play.settled(task_id)
                took = time.monotonic() - started
                result.notes.append(f"settled {took:.1f} s after the other began")
                play.wait_for_agent(task_id)
                if victim.poll() is None:
                    victim.send_signal(signal.SIGCONT)
                    play.end(victim)
            except AssertionError as error:
                result.problems.append(f"invariant 2: {error}")
            found = Checker(play.settings["DATABASE_URL"], play.data, others).check()
            result.problems += map(str, found)
        result.seconds = time.monotonic() - began
        return result

    def _both(self, play: Play, role: str, setting: dict[str, str]):  # type: ignore[no-untyped-def]
        """An API and a worker, the one in this role with the setting; returns that one."""
        if role == "worker":
            return play.start("doomed", "worker", **setting)
        play.worker()
        doomed = play.start("doomed", "api", "--port", "0", **setting)
        log = play.folder / "doomed.log"
        until("the API", lambda: doomed.poll() is not None or "api.listening" in log.read_text())
        if doomed.poll() is None:
            play.base = until("its address", lambda: play._address(doomed, "doomed"))
        return doomed

    def _create(self, play: Play) -> str:
        """The caller asks; whatever becomes of the answer, somebody holds the identity in time."""
        waiting = play.creating("E", **play.manifest())
        deadline = time.monotonic() + 5
        while time.monotonic() < deadline:
            rows = play.query("SELECT id FROM tasks WHERE external_id = 'E'")
            if rows:
                return str(rows[0]["id"])
            if waiting.done() and waiting.exception() is not None:
                return ""
            time.sleep(0.05)
        return ""


def _stopped(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "T"
    except OSError:
        return False


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--temporal", required=True)
    parser.add_argument("--postgresql")
    parser.add_argument("--only")
    given = parser.parse_args()
    server = PostgreSQL(given.postgresql) if given.postgresql else None
    folder = Path(tempfile.mkdtemp(prefix="crash-stack-")).resolve()
    try:
        stack = Stack(folder, given.temporal, server)
        with given.out.open("a") as out:
            for cell in stack.discover():
                if given.only and given.only not in str(cell):
                    continue
                result = stack.run(cell)
                out.write(json.dumps({**asdict(result), "log": ""}) + "\n")
                out.flush()
    finally:
        if server is not None:
            server.close()
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
