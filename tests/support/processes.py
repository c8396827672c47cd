"""Looking at processes as the kernel tells of them."""

from __future__ import annotations

from pathlib import Path


def living() -> dict[int, int]:
    """The parent of every process that is there and not a zombie."""
    found: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                state, parent = (entry / "stat").read_text().rsplit(")", 1)[1].split()[:2]
            except (OSError, ValueError):
                continue  # it ended while we looked
            if state != "Z":
                found[int(entry.name)] = int(parent)
    return found


def descendants(pid: int) -> set[int]:
    """The living children of a process, and theirs."""
    parents = living()
    found: set[int] = set()
    front = {pid}
    while front:
        front = {child for child, parent in parents.items() if parent in front}
        found |= front
    return found


def arguments(pid: int) -> list[str]:
    """The command line of a process; empty where it is gone."""
    try:
        return (Path("/proc") / str(pid) / "cmdline").read_bytes().decode().split("\0")[:-1]
    except OSError:
        return []
