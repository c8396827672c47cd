"""Each law broken on purpose: ``make mutations`` shows for each that a test notices.

The list is tools/mutations/*.toml. An entry changes exact text of one or more files, in a copy of
the tree, and names the tests that must fail then. It is an error if a mutation survives, if its
text is not there exactly once, or if its tests do not pass without it.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
LANES = 2
LIMIT_S = 300
_LEFT_OUT = shutil.ignore_patterns(
    ".git", ".venv", "__pycache__", ".*_cache", ".demo", ".hypothesis", "*.egg-info"
)


@dataclass(frozen=True)
class Change:
    """``old``, which is in ``file`` exactly once, becomes ``new``."""

    file: str
    old: str
    new: str


@dataclass(frozen=True)
class Mutation:
    """One law, broken. Each of ``tests`` is a node ID without parameters, or with them."""

    name: str
    law: str
    changes: tuple[Change, ...]
    tests: tuple[str, ...]
    database: str
    """``sqlite`` or ``postgresql``: the one that the tests run on, where they have a choice."""


def listed() -> list[Mutation]:
    """The list, in the order of its files."""
    entries: list[Mutation] = []
    for file in sorted((ROOT / "tools" / "mutations").glob("*.toml")):
        for entry in tomllib.loads(file.read_text())["mutation"]:
            entries.append(_mutation(entry))
    return entries


def _mutation(entry: dict[str, Any]) -> Mutation:
    changes = entry.get("change") or [entry]
    return Mutation(
        name=entry["name"],
        law=entry["law"],
        changes=tuple(
            Change(c.get("file", entry.get("file")), c["old"], c["new"]) for c in changes
        ),
        tests=tuple(entry["tests"]),
        database=entry.get("database", "sqlite"),
    )


def mutated(root: Path, mutation: Mutation) -> dict[Path, str]:
    """The changed files' new texts.

    Raises:
        ValueError: a text is not there exactly once.
    """
    texts: dict[Path, str] = {}
    for change in mutation.changes:
        path = root / change.file
        text = texts.get(path) or path.read_text()
        count = text.count(change.old)
        if count != 1:
            raise ValueError(f"{mutation.name}: its text is {count} times in {change.file}")
        texts[path] = text.replace(change.old, change.new)
    return texts


@contextmanager
def applied(root: Path, mutation: Mutation) -> Iterator[None]:
    """The mutation in a copy of the tree, for as long as this lasts."""
    texts = mutated(root, mutation)
    before = {path: path.read_text() for path in texts}
    for path, text in texts.items():
        path.write_text(text)
    try:
        yield
    finally:
        for path, text in before.items():
            path.write_text(text)


# -- running --------------------------------------------------------------------------------------


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("only", nargs="*", help="parts of names; default: all")
    only = parser.parse_args().only
    chosen = [m for m in listed() if not only or any(part in m.name for part in only)]
    lanes: SimpleQueue[Path] = SimpleQueue()
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="onceborn-mutations-") as folder:
        for number in range(LANES):
            lanes.put(_copy(Path(folder) / f"lane{number}"))
        wrong = _baseline(lanes, chosen)
        if wrong:
            print(wrong)
            return 1

        def one(mutation: Mutation) -> tuple[Mutation, str, bool]:
            lane = lanes.get()
            try:
                return mutation, *_judge(lane, mutation)
            finally:
                lanes.put(lane)

        survivors = 0
        with ThreadPoolExecutor(LANES) as pool:
            for mutation, told, killed in pool.map(one, chosen):
                survivors += not killed
                print(
                    f"{'killed  ' if killed else 'SURVIVES'}  {mutation.name}: {told}", flush=True
                )
    print(f"{len(chosen)} mutations, {survivors} survive, {time.monotonic() - began:.0f} s")
    return 1 if survivors else 0


def _copy(lane: Path) -> Path:
    shutil.copytree(ROOT, lane, ignore=_LEFT_OUT, symlinks=True)
    (lane / ".venv").symlink_to(ROOT / ".venv")
    return lane


def _baseline(lanes: SimpleQueue[Path], chosen: list[Mutation]) -> str | None:
    """What is wrong before anything is mutated: a test that fails anyway shows nothing."""
    lane = lanes.get()
    for database in sorted({mutation.database for mutation in chosen}):
        tests = sorted({test for m in chosen if m.database == database for test in m.tests})
        done = _pytest(lane, tests, database, f"-n{LANES}")
        if done.returncode != 0:
            return f"without any mutation the tests do not pass:\n{done.stdout[-4000:]}"
    lanes.put(lane)
    return None


def _judge(lane: Path, mutation: Mutation) -> tuple[str, bool]:
    try:
        with applied(lane, mutation):
            done = _pytest(lane, list(mutation.tests), mutation.database, "-x", "-rfE")
    except ValueError as error:
        return str(error), False
    failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
    if done.returncode == 1 and failed:
        return f"{mutation.law} ({failed[0].rpartition('/')[2]})", True
    if done.returncode == 0:
        return f"{mutation.law}: no test notices", False
    return f"the tests did not run (code {done.returncode}):\n{done.stdout[-2000:]}", False


def _pytest(
    lane: Path, tests: list[str], database: str, *options: str
) -> subprocess.CompletedProcess[str]:
    other = {"sqlite": "postgresql", "postgresql": "sqlite"}[database]
    # Compiled files are told apart by time and size, which a mutation may leave as they are.
    environment = os.environ | {"PYTHONPATH": str(lane), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"-knot {other}"]
    if not any(option.startswith("-n") for option in options):
        command.append("-n0")
    return subprocess.run(
        [*command, *options, *tests],
        cwd=lane,
        env=environment,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )


if __name__ == "__main__":
    sys.exit(main())
