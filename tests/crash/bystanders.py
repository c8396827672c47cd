"""What others have in the same places: planted beforehand, and still there afterwards."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from pathlib import Path

from .world import clones, git, worktrees


@dataclass
class Bystanders:
    """Files, branches and worktrees that no creation made."""

    files: dict[Path, str] = field(default_factory=dict)
    branches: dict[tuple[Path, str], str] = field(default_factory=dict)
    worktrees: dict[Path, Path] = field(default_factory=dict)
    """Worktree -> its clone."""

    def missing(self) -> list[str]:
        """What is gone or changed, named."""
        found = [
            f"file {path} of somebody else is gone or changed"
            for path, digest in self.files.items()
            if not path.is_file() or _digest(path) != digest
        ]
        for (clone, name), commit in self.branches.items():
            at = git("rev-parse", "--verify", "-q", f"refs/heads/{name}", cwd=clone, check=False)
            if at != commit:
                found.append(f"branch {name} of somebody else in {clone} is gone or moved")
        for path, clone in self.worktrees.items():
            if path not in worktrees(clone) or not path.is_dir():
                found.append(f"worktree {path} of somebody else is gone")
        return found

    def add_file(self, path: Path, text: str = "somebody's\n") -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        self.files[path] = _digest(path)


def plant(data: Path) -> Bystanders:
    """Plant things of somebody else beside everything that a creation makes."""
    others = Bystanders()
    for place in ("worktrees/other/work", "trash/other", "quarantine/other", "runs/other"):
        others.add_file(data / place / "notes.txt")
    others.add_file(data / "intents" / "other.json", "{}")
    others.add_file(data / "repositories" / "other.unfinished" / "HEAD", "not a clone\n")
    for clone in clones(data):
        head = git("for-each-ref", "--count=1", "--format=%(objectname)", cwd=clone)
        git("branch", "someone/idle", head, cwd=clone)
        path = data / "worktrees" / "by-hand" / clone.stem[:8]
        git("worktree", "add", "-q", "-b", "someone/busy", path, head, cwd=clone)
        (path / "committed.txt").write_text("work\n")
        git("add", ".", cwd=path)
        git("commit", "-q", "-m", "somebody's work", cwd=path)
        others.add_file(path / "untracked.txt", "not saved anywhere\n")
        others.worktrees[path] = clone
        for name in ("someone/idle", "someone/busy"):
            others.branches[(clone, name)] = git("rev-parse", f"refs/heads/{name}", cwd=clone)
    return others


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
