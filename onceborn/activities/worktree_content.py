"""What is in a worktree beyond the commit that it was made of. Asks; changes nothing."""

from __future__ import annotations

import hashlib
import os
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from .git import Git
from .gitfiles import Registration

LISTED: Final = 200
"""So many findings are listed at most; the rest is counted."""
_LISTING_LIMIT: Final = 256 * 1024 * 1024
_PARTIAL_LIMIT: Final = 512 * 1024 * 1024
_CHUNK: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is not of the commit."""

    path: str
    what: str


def bounded(findings: Sequence[Finding]) -> dict[str, Any]:
    """Findings for a proof. JSON."""
    listed = [
        {"path": _printable(finding.path), "what": finding.what} for finding in findings[:LISTED]
    ]
    return {"findings": listed, "findings_total": len(findings)}


def _printable(path: str) -> str:
    return path.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


def uncommitted(git: Git, registration: Registration, path: Path) -> list[Finding]:
    """Changed, staged, untracked and ignored files, and the same in submodules.

    Raises:
        GitError: it cannot be told.
    """
    status = git.run(
        [
            "status",
            "--porcelain=v1",
            "-z",
            "--no-renames",
            "--untracked-files=all",
            "--ignored=traditional",
            "--ignore-submodules=none",
        ],
        git_dir=registration.admin,
        work_tree=path,
        cwd=path,
        stdout_limit=_LISTING_LIMIT,
    )
    return [Finding(line[3:], line[:2]) for line in status.text.split("\0") if line]


def hidden_work(git: Git, registration: Registration, path: Path) -> list[Finding]:
    """Files that git was told not to look at, and commits that only a submodule here has.

    Raises:
        GitError: it cannot be told.
    """
    listed = git.run(
        ["ls-files", "-v", "-z"],
        git_dir=registration.admin,
        work_tree=path,
        cwd=path,
        stdout_limit=_LISTING_LIMIT,
    )
    found = [
        Finding(line[2:], "hidden from git's status")
        for line in listed.text.split("\0")
        if line and (line[0].islower() or line[0] == "S")
    ]
    for head in (registration.admin / "modules").rglob("HEAD"):
        module = head.parent
        if not (module / "objects").is_dir() or not (module / "refs").is_dir():
            continue
        unpushed = git.run(
            ["rev-list", "--max-count=1", "--branches", "--tags", "HEAD", "--not", "--remotes"],
            git_dir=module,
            check=False,
        )
        if unpushed.stdout.strip() or (module / "refs" / "stash").exists() or unpushed.code:
            name = str(module.relative_to(registration.admin / "modules"))
            found.append(Finding(name, "a submodule with commits of its own"))
    return found


# -- a folder that was moved out of the way -------------------------------------------------------


def unlike_commit(
    git: Git, clone: Path, commit: str, folder: Path, beat: Callable[[], None]
) -> list[Finding]:
    """What in ``folder`` is not a file of the commit.

    Missing files are fine, and so is a file that is a beginning of its blob: a checkout that was
    cut off. A file that a filter or line-ending rule has changed counts as different, so it is
    kept.

    Raises:
        GitError: the commit cannot be read.
    """
    tree = _tree(git, clone, commit)
    found: list[Finding] = []
    beat_at = time.monotonic() + 1
    for path in _walk(folder):
        if time.monotonic() > beat_at:
            beat()
            beat_at = time.monotonic() + 1
        name = path.relative_to(folder).as_posix()
        if name == ".git":
            if not _is_link_to(path, clone):
                found.append(Finding(name, "not the link that git makes"))
            continue
        mode, object_id = tree.get(os.fsencode(name), ("", ""))
        what = _difference(git, clone, path, mode, object_id)
        if what is not None:
            found.append(Finding(name, what))
    found += _index_findings(folder, git, clone, commit)
    return found


def _tree(git: Git, clone: Path, commit: str) -> dict[bytes, tuple[str, str]]:
    listed = git.run(
        ["ls-tree", "-r", "-z", "--full-tree", commit], git_dir=clone, stdout_limit=_LISTING_LIMIT
    )
    entries: dict[bytes, tuple[str, str]] = {}
    for line in listed.stdout.split(b"\0"):
        if line:
            head, _, name = line.partition(b"\t")
            mode, _kind, object_id = head.decode().split(" ")
            entries[name] = (mode, object_id)
    return entries


RECORDS: Final = ".onceborn-records"
"""Beside the files of a moved folder: the copy of git's record of it."""


def _walk(folder: Path) -> Iterator[Path]:
    """Every file, link and special file below a folder, but for our copy of git's record."""
    for place, folders, files in os.walk(folder):
        if Path(place) == folder and RECORDS in folders:
            folders.remove(RECORDS)
        for name in folders:
            if (Path(place) / name).is_symlink():
                yield Path(place) / name
        for name in files:
            yield Path(place) / name


def _is_link_to(path: Path, clone: Path) -> bool:
    """Whether it is git's link into the clone, or a beginning of one."""
    if path.is_symlink() or not path.is_file():
        return False
    start, text = f"gitdir: {clone}/worktrees/", path.read_bytes().decode("utf-8", "replace")
    return start.startswith(text) or (text.startswith(start) and text.count("\n") <= 1)


def _difference(git: Git, clone: Path, path: Path, mode: str, object_id: str) -> str | None:
    status = path.lstat()
    if not object_id:
        return "not in the commit"
    if stat.S_ISLNK(status.st_mode):
        same = mode == "120000" and _hash_of(os.fsencode(path.readlink()), object_id) == object_id
        return None if same else "a changed link"
    if not stat.S_ISREG(status.st_mode) or mode not in ("100644", "100755"):
        return "of another kind"
    if bool(status.st_mode & stat.S_IXUSR) != (mode == "100755"):
        return "with other permissions"
    if _file_hash(path, status.st_size, object_id) == object_id:
        return None
    return None if _is_beginning(git, clone, path, status.st_size, object_id) else "changed"


def _new_hash(size: int, object_id: str) -> Any:
    algorithm = "sha256" if len(object_id) == 64 else "sha1"
    return hashlib.new(algorithm, b"blob %d\0" % size, usedforsecurity=False)


def _hash_of(content: bytes, object_id: str) -> str:
    digest = _new_hash(len(content), object_id)
    digest.update(content)
    return str(digest.hexdigest())


def _file_hash(path: Path, size: int, object_id: str) -> str:
    digest = _new_hash(size, object_id)
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return str(digest.hexdigest())


def _is_beginning(git: Git, clone: Path, path: Path, size: int, object_id: str) -> bool:
    if size == 0:
        return True
    blob = git.run(
        ["cat-file", "blob", object_id], git_dir=clone, stdout_limit=min(size + 1, _PARTIAL_LIMIT)
    ).stdout
    if size >= len(blob) or size >= _PARTIAL_LIMIT:
        return False
    return path.read_bytes() == blob[:size]


def _index_findings(folder: Path, git: Git, clone: Path, commit: str) -> list[Finding]:
    """What the copied index holds that the commit does not: staged, and perhaps nowhere else."""
    index = folder / RECORDS / "index"
    if not index.is_file():
        return []
    staged = git.run(
        ["diff-index", "--cached", "--name-only", "--no-renames", "-z", "--diff-filter=d", commit],
        git_dir=clone,
        index=index,
        stdout_limit=_LISTING_LIMIT,
    )
    return [Finding(name, "staged") for name in staged.text.split("\0") if name]
