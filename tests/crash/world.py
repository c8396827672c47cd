"""The world by plain git, ``/proc`` and the file system; no code of the product."""

from __future__ import annotations

import contextlib
import hashlib
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

FOLDERS = ("repositories", "worktrees", "runs", "intents", "trash", "quarantine")
"""What a creation can touch below the data folder; locks hold process IDs and are left out."""


def git(*arguments: str | Path, cwd: Path, check: bool = True) -> str:
    """Plain git, as a person would use it."""
    identity = ["-c", "user.name=t", "-c", "user.email=t@localhost"]
    allowed = ["-c", "protocol.file.allow=always", "-c", "gc.auto=0"]
    done = subprocess.run(
        ["git", *identity, *allowed, *map(str, arguments)],
        cwd=cwd,
        capture_output=True,
        text=True,
        check=check,
    )
    return done.stdout.strip()


def succeeds(*arguments: str | Path, cwd: Path) -> bool:
    return (
        subprocess.run(
            ["git", *map(str, arguments)], cwd=cwd, capture_output=True, check=False
        ).returncode
        == 0
    )


def clones(data: Path) -> list[Path]:
    """The managed clones that are published."""
    return sorted(
        p for p in (data / "repositories").glob("*.git") if (p / "HEAD").exists() and p.is_dir()
    )


@dataclass(frozen=True)
class Branch:
    clone: Path
    name: str
    commit: str
    births: tuple[str, ...]
    """The messages of its reflog, oldest first."""

    @property
    def key(self) -> str | None:
        """What its first reflog entry says."""
        return self.births[0] if self.births else None


def branches(clone: Path) -> list[Branch]:
    """The local branches of a clone with their reflogs, as git tells them."""
    found = []
    what = ("for-each-ref", "--format=%(refname) %(objectname)", "refs/heads")
    listed = git(*what, cwd=clone, check=False)  # a ruined clone has none
    for line in listed.splitlines():
        ref, commit = line.split()
        log = git("log", "-g", "--format=%gs", ref, "--", cwd=clone, check=False).splitlines()
        name = ref.removeprefix("refs/heads/")
        found.append(Branch(clone, name, commit, tuple(reversed(log))))
    return found


def worktrees(clone: Path) -> dict[Path, str | None]:
    """The registered worktrees of a clone, each with its branch (None: detached)."""
    found: dict[Path, str | None] = {}
    path: Path | None = None
    listed = git("worktree", "list", "--porcelain", cwd=clone, check=False)
    for line in listed.splitlines():
        word, _, rest = line.partition(" ")
        if word == "worktree":
            path = Path(rest)
            found[path] = None
        elif word == "branch" and path is not None:
            found[path] = rest.removeprefix("refs/heads/")
    found.pop(clone, None)  # the bare repository itself
    return found


def digest(folder: Path) -> str:
    """A digest of every name and content below the folders that a creation can touch."""
    whole = hashlib.sha256()
    for name, content in sorted(_contents(folder)):
        whole.update(f"{name}\0{content}\0".encode())
    return whole.hexdigest()


def contents(data: Path) -> dict[str, str]:
    """Name and digest of every file below, to tell what differs."""
    return dict(_contents(data))


def _contents(data: Path) -> Iterator[tuple[str, str]]:
    for top in FOLDERS:
        for parent, folders, files in os.walk(data / top):
            for name in folders:
                yield f"{parent}/{name}", "folder"
            for name in files:
                path = Path(parent) / name
                with contextlib.suppress(OSError):
                    if path.is_symlink():
                        yield str(path), f"link {path.readlink()}"
                    else:
                        yield str(path), hashlib.sha256(path.read_bytes()).hexdigest()


# -- processes ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Process:
    pid: int
    parent: int
    state: str
    command: str
    environment: str
    folder: str


def processes() -> list[Process]:
    """Every process that is not a zombie."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with contextlib.suppress(OSError, ValueError, IndexError):
            state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
            if state in "ZX":
                continue
            command = (entry / "cmdline").read_bytes().decode(errors="replace").replace("\0", " ")
            environment = (entry / "environ").read_bytes().decode(errors="replace")
            folder = str((entry / "cwd").readlink())
            found.append(Process(int(entry.name), int(parent), state, command, environment, folder))
    return found


def at_work(data: Path) -> list[Process]:
    """Processes of git, shim or agent that name the data folder, or work in it."""
    below = str(data)
    return [
        p
        for p in processes()
        if below in p.command or p.folder.startswith(below) or f"={below}" in p.environment
        if not p.command.startswith(("python -m pytest", "pytest")) and p.pid != os.getpid()
    ]


def kill(pid: int, number: int = signal.SIGKILL) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def descendants(pid: int) -> set[int]:
    parents = {p.pid: p.parent for p in processes()}
    found: set[int] = set()
    front = {pid}
    while front:
        front = {child for child, parent in parents.items() if parent in front}
        found |= front
    return found


def wait_until_idle(data: Path, seconds: float = 20, *, but: frozenset[int] = frozenset()) -> bool:
    """Wait until no git, shim or agent works on the data folder any more."""
    deadline = time.monotonic() + seconds
    while any(p.pid not in but for p in at_work(data)):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True
