"""The whole crash matrix (``make crash-matrix``): runs it and writes docs/crash-matrix.md.

Two lanes without Temporal, one for each database, and then the cells that need Temporal. Ends with
1 if any cell did not hold; the page is written all the same.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import time
import timeit
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
TESTS = ROOT / "tests"
sys.path[:0] = [str(ROOT), str(TESTS)]

from support.postgresql import embedded  # noqa: E402
from support.temporal import running_temporal  # noqa: E402

from onceborn.runtime import failpoints  # noqa: E402

PAGE = ROOT / "docs" / "crash-matrix.md"
ACTIONS = {
    "kill": "killed",
    "kill with children": "killed with its git",
    "stop": "paused",
    "stop, twin": "paused, twin first",
    "raise": "error, lost answer",
}
PHASES = {
    "fresh": "first run",
    "half a clone": "recovery",
    "half a worktree": "recovery",
    "between A and B": "recovery",
    "before the launch": "recovery",
    "a branch is taken": "compensation",
    "deleted": "compensation",
    "deleted, with work": "compensation",
    "deleted, with submodule": "compensation",
    "real api": "with Temporal: API",
    "real worker": "with Temporal: worker",
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sample", type=int, help="so many cells of each database")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-stack", action="store_true", help="without the cells with Temporal")
    parser.add_argument("--page", type=Path, default=PAGE)
    given = parser.parse_args()
    began = time.monotonic()
    # Memory, where there is some: what is tried is death of processes, not of disks.
    memory = Path("/dev/shm")  # noqa: S108
    folder = Path(tempfile.mkdtemp(prefix="crash-", dir=memory if memory.is_dir() else None))
    try:
        results, version = run(folder, given)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    given.page.write_text(page(results, version, time.monotonic() - began, given), "utf-8")
    bad = [r for r in results if r["problems"]]
    missed = [r for r in results if "not reached" in r["notes"]]
    print(f"{len(results)} cells, {len(bad)} failed, {len(missed)} not reached; {given.page}")
    for result in bad:
        print(_name(result), *result["problems"], result["log"], sep="\n    ")
    return 1 if bad or not results else 0


def run(folder: Path, given: argparse.Namespace) -> tuple[list[dict[str, Any]], str]:
    """Every result, and PostgreSQL's version."""
    with embedded() as server:
        version = _postgresql_version(server.url)
        lanes = {"sqlite": [], "postgresql": ["--postgresql", server.url]}
        sample = ["--sample", str(given.sample), "--seed", str(given.seed)] if given.sample else []
        _all(
            [
                _module(
                    "crash", folder / f"{name}.jsonl", "--folder", folder / name, *more, *sample
                )
                for name, more in lanes.items()
            ]
        )
        if not given.no_stack:
            with running_temporal(folder / "temporal") as address:
                more = ["--temporal", address]
                _all(
                    [
                        _module("crash.stack", folder / f"{name}-stack.jsonl", *more, *where)
                        for name, where in lanes.items()
                    ]
                )
    files = sorted(folder.glob("*.jsonl"))
    return [json.loads(line) for file in files for line in file.read_text().splitlines()], version


def _module(module: str, out: Path, *arguments: object) -> list[str]:
    return [sys.executable, "-m", module, "--out", str(out), *map(str, arguments)]


def _all(commands: list[list[str]]) -> None:
    environment = {**os.environ, "PYTHONPATH": f"{TESTS}:{ROOT}"}
    running = [subprocess.Popen(command, env=environment, cwd=ROOT) for command in commands]
    codes = [process.wait() for process in running]
    if any(codes):
        raise SystemExit(f"a lane ended with {codes}; see its messages above")


def _postgresql_version(url: str) -> str:
    import psycopg

    with psycopg.connect(url) as connection:
        return str(connection.execute("SHOW server_version").fetchone()[0])  # type: ignore[index]


# -- the page -------------------------------------------------------------------------------------


def page(
    results: list[dict[str, Any]], postgresql: str, seconds: float, given: argparse.Namespace
) -> str:
    bad = [r for r in results if r["problems"]]
    missed = [r for r in results if "not reached" in r["notes"]]
    sample = f" --sample {given.sample} --seed {given.seed}" if given.sample else ""
    now = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")
    lines = [
        "# The crash matrix",
        "",
        "Generated by `make crash-matrix` (tools/crash_matrix.py); do not edit.",
        "",
        f"- {now}, commit {_commit()}, in {seconds / 60:.0f} minutes on {os.cpu_count()} cores;"
        f" command: `python tools/crash_matrix.py{sample}`",
        f"- Python {platform.python_version()}, SQLite {sqlite3.sqlite_version}, PostgreSQL"
        f" {postgresql}, {_git_version()}, Linux {platform.release()}",
        f"- **{len(results)} cells, {len(bad)} failed, {len(missed)} not reached**",
        f"- an inert failpoint costs {inert_ns():.0f} ns",
        "",
        "A cell: a creation is driven by a real process until it reaches the n-th hit of one"
        " boundary, in one phase, on one database. There the process is killed (SIGKILL), killed"
        " with all its git children, paused (SIGSTOP; the next owner, a lease later, goes on beside"
        " it; then it wakes up), or gets an error (after a commit: the lost answer). Then fresh"
        " processes recover, and tests/crash/checker.py, which shares no code with the product,"
        " checks the five invariants by SQL, git and `/proc`. Who was paused must have changed"
        " neither a row nor a file after it woke up, where another owner had taken over.",
        "",
        "The boundaries are not listed by hand: each phase is run once and records what it hits.",
        "",
        "## By phase",
        "",
        "| phase | from | database | " + " | ".join(ACTIONS.values()) + " |",
        "| --- | --- | --- |" + " --- |" * len(ACTIONS),
    ]
    lines += _by_phase(results)
    lines += ["", "## By boundary", ""]
    lines += ["Cells that held, of all: SQLite, PostgreSQL.", ""]
    lines += [
        "| boundary | phase | " + " | ".join(ACTIONS.values()) + " |",
        "| --- | --- |" + " --- |" * len(ACTIONS),
        *_by_boundary(results),
    ]
    if bad:
        lines += ["", "## Failed", ""]
        lines += [
            f"- {_name(r)}: {'; '.join(p.splitlines()[0] for p in r['problems'])}" for r in bad
        ]
    if missed:
        lines += ["", "## Not reached", ""]
        lines += ["The process ended before the hit: how often these come depends on timing.", ""]
        lines += [f"- {_name(r)}" for r in missed]
    return "\n".join(lines) + "\n"


def _by_phase(results: list[dict[str, Any]]) -> list[str]:
    table: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)
    for result in results:
        cell = result["cell"]
        count = table[(cell["scene"], result["backend"])]
        count[cell["action"]] += 1
        count["held " + cell["action"]] += not result["problems"]
    return [
        f"| {PHASES[scene]} | {scene} | {backend} | "
        + " | ".join(_share(table[(scene, backend)], action) for action in ACTIONS)
        + " |"
        for scene in PHASES
        for backend in ("sqlite", "postgresql")
        if (scene, backend) in table
    ]


def _by_boundary(results: list[dict[str, Any]]) -> list[str]:
    table: dict[tuple[str, str], dict[str, Counter[str]]] = {}
    for result in results:
        cell = result["cell"]
        row = table.setdefault((cell["point"], PHASES[cell["scene"]]), defaultdict(Counter))
        count = row[result["backend"]]
        count[cell["action"]] += 1
        count["held " + cell["action"]] += not result["problems"]
    return [
        f"| `{point}` | {phase} | "
        + " | ".join(
            ", ".join(_share(row[backend], action) for backend in ("sqlite", "postgresql"))
            for action in ACTIONS
        )
        + " |"
        for (point, phase), row in sorted(table.items())
    ]


def _share(count: Counter[str], action: str) -> str:
    return f"{count['held ' + action]}/{count[action]}" if count[action] else "-"


def _name(result: dict[str, Any]) -> str:
    cell = result["cell"]
    return (
        f"{result['backend']}: {cell['scene']} / {cell['point']}@{cell['nth']} / {cell['action']}"
    )


def inert_ns() -> float:
    """Nanoseconds of one call of an inert failpoint, the loop's own cost taken off."""
    failpoints.configure("")
    rounds = 2_000_000
    call = min(timeit.repeat(lambda: failpoints.failpoint("x"), number=rounds, repeat=3))
    bare = min(timeit.repeat(lambda: None, number=rounds, repeat=3))
    return (call - bare) / rounds * 1e9


def _commit() -> str:
    done = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True
    )
    return done.stdout.strip() or "unknown"


def _git_version() -> str:
    return subprocess.run(["git", "--version"], capture_output=True, text=True).stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
