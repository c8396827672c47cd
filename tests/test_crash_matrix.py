"""The crash matrix, a representative part; and late, doubled and mistimed owners.

The whole of it is ``make crash-matrix``; docs/crash-matrix.md tells what it came to. A cell is
described in tests/crash/lane.py.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from crash.lane import ACTIONS

HERE = Path(__file__).resolve().parent
SEED = 3
SCENES = ["fresh", "half a worktree", "a branch is taken"]
DRAWN = 10
NAMED = [
    "fresh / admission.committed@1 / kill",
    "fresh / clone.whole@1 / kill",
    "fresh / step.claim.committed@1 / kill",
    "fresh / step.record.commit@1 / kill",
    "fresh / worktree.branch_made@1 / kill",
    "fresh / git.spawned@3 / kill",
    "fresh / worktree.claimed@1 / stop, twin",
    "fresh / complete.enter.committed@1 / kill",
    "fresh / complete.commit.committed@1 / raise",
    "half a worktree / worktree.moved_away@1 / kill",
    "a branch is taken / worktree.undone@1 / kill",
    "a branch is taken / undo.record.commit@1 / stop",
]
"""What the test's IDs name is always played; the others are drawn, once."""


def lane(folder: Path, server: str | None, *arguments: str) -> list[dict[str, Any]]:
    """A lane as a process of its own: it forks, which a process with threads must not."""
    out = folder / "cells.jsonl"
    command = [sys.executable, "-m", "crash", "--folder", str(folder / "lane"), "--out", str(out)]
    if server is not None:
        command += ["--postgresql", server]
    done = subprocess.run(
        [*command, *arguments],
        env={**os.environ, "PYTHONPATH": f"{HERE}:{HERE.parent}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(line) for line in out.read_text().splitlines()]


@pytest.fixture
def folder() -> Iterator[Path]:
    """In memory, where there is some: processes die here, not disks."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(
        prefix="crash-", dir=memory if memory.is_dir() else None
    ) as name:
        yield Path(name)


@pytest.fixture
def server(backend: str, request: pytest.FixtureRequest) -> str | None:
    if backend == "sqlite":
        return None
    return str(request.getfixturevalue("postgresql").url("postgres"))


@pytest.mark.proves("X01", "X02", "X03", "X04", "X11", "X12")
@pytest.mark.proves("S03", "S04", "SA03", "SA14", "SH01", "SH04")
def test_a_sample_of_the_matrix_holds(folder: Path, server: str | None) -> None:
    scenes = [part for scene in SCENES for part in ("--scene", scene)]
    named = [part for name in NAMED for part in ("--also", name)]
    results = lane(folder, server, *scenes, *named, "--sample", str(DRAWN), "--seed", str(SEED))
    assert len(results) == len(NAMED) + DRAWN
    assert {result["cell"]["action"] for result in results} >= set(ACTIONS)
    told = [(r["cell"], r["problems"], r["log"]) for r in results if r["problems"]]
    assert told == []
    assert [r["cell"] for r in results if "not reached" in r["notes"]] == []


@pytest.mark.parametrize("backend", ["sqlite"], indirect=True)
@pytest.mark.parametrize(
    ("sabotage", "cell"),
    [
        # Both times an owner of the next fence waits for the paused one's lock.
        ("guard", "intent.before@1 / stop"),
        ("fence", "step.claim.begin@2 / stop"),
    ],
)
def test_a_runtime_without_one_of_its_laws_is_caught(
    folder: Path, server: str | None, sabotage: str, cell: str
) -> None:
    results = lane(folder, server, "--scene", "fresh", "--only", cell, "--sabotage", sabotage)
    assert [result["cell"]["action"] for result in results] == ["stop", "stop, twin"]
    for result in results:
        assert "not reached" not in result["notes"]
        assert any("invariant 5" in problem for problem in result["problems"]), result


FOUND = {
    # An undoing that died between the trash and its folder left that folder for ever; paused there,
    # it removed it under another owner.
    "half a worktree": ["trash.removed@1", "trash.drop@1", "intent.forgotten@1"],
    # Paused before it wrote its intent or started the agent, it did both when it woke up, although
    # another owner, or another launcher, had claimed the step or the run.
    "fresh": ["intent.before@1", "agent.intent@1", "agent.intended@1", "agent.spawn@1"],
}


@pytest.mark.proves("X11", "X03")
@pytest.mark.parametrize("backend", ["sqlite"], indirect=True)
@pytest.mark.parametrize("scene", FOUND)
def test_what_the_matrix_found_does_not_come_back(
    folder: Path, server: str | None, scene: str
) -> None:
    points = [part for point in FOUND[scene] for part in ("--only", f"/ {point} /")]
    results = lane(folder, server, "--scene", scene, *points)
    assert {r["cell"]["point"] for r in results} == {p.split("@")[0] for p in FOUND[scene]}
    assert [(r["cell"], r["problems"]) for r in results if r["problems"]] == []
    assert [r["cell"] for r in results if "not reached" in r["notes"]] == []
