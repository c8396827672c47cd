"""What a repository's own files say, without starting git: references, reflogs, worktrees.

Only formats that gitrepository-layout(5) documents, and only reading. A loose reference is looked
for before ``packed-refs``: git packs in that order, so nothing can slip through between.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_PLAIN_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")
_OBJECT_ID: Final = re.compile(r"[0-9a-f]{40}(?:[0-9a-f]{24})?")


@dataclass(frozen=True, slots=True)
class ReflogEntry:
    """One line of a reflog. ``old`` is all zeros where the reference was new."""

    old: str
    new: str
    message: str

    @property
    def is_birth(self) -> bool:
        return not self.old.strip("0")


@dataclass(frozen=True, slots=True)
class Registration:
    """A worktree as its repository has it registered."""

    admin: Path
    """``<repository>/worktrees/<name>``."""
    worktree: Path
    head: str
    """What HEAD says: the full name of a branch, or a commit ID."""
    locked: str | None
    """The reason of its lock, "" where none was given; ``None`` where it is not locked."""

    @property
    def unfinished(self) -> bool:
        """Git's own mark of a worktree that it has not finished making."""
        return self.locked == "initializing" or not self.head.strip("0")


def _read(path: Path) -> str | None:
    try:
        return path.read_bytes().decode("utf-8", "surrogateescape")
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        return None


# -- references -----------------------------------------------------------------------------------


def read_ref(common: Path, name: str) -> str | None:
    """The object that a full reference name points to directly; ``None`` where there is none."""
    loose = (_read(common / name) or "").strip()
    if _OBJECT_ID.fullmatch(loose):
        return loose
    packed = _packed(common)
    end = packed.find(f" {name}\n".encode("utf-8", "surrogateescape"))
    return packed[:end].rsplit(b"\n", 1)[-1].decode() if end >= 0 else None


def taken_name(common: Path, namespaces: Sequence[str], branch: str) -> str | None:
    """The full name of a reference that stands in the way of ``branch``, in any of ``namespaces``.

    That is the same name, a shorter one that is a leading part of it, or a longer one below it:
    git keeps references as files in folders, so ``a`` and ``a/b`` exclude each other.
    """
    parts = branch.split("/")
    names = [branch, *("/".join(parts[:count]) for count in range(1, len(parts)))]
    candidates = [(f"{namespace}/{name}") for namespace in namespaces for name in names]
    for full in candidates:
        if (common / full).is_file():
            return full
    prefixes = [f"{namespace}/{branch}/" for namespace in namespaces]
    for prefix in prefixes:
        for file in (common / prefix).rglob("*"):
            if file.is_file() and file.suffix != ".lock":
                return file.relative_to(common).as_posix()
    packed = _packed(common)
    for wanted in (*(f" {full}\n" for full in candidates), *(f" {prefix}" for prefix in prefixes)):
        start = packed.find(wanted.encode("utf-8", "surrogateescape"))
        if start >= 0:
            return packed[start + 1 :].split(b"\n", 1)[0].decode("utf-8", "surrogateescape")
    return None


def _packed(common: Path) -> bytes:
    try:
        return (common / "packed-refs").read_bytes()
    except FileNotFoundError:
        return b""


# -- reflogs --------------------------------------------------------------------------------------


def reflog(file: Path) -> Iterator[ReflogEntry]:
    """The entries of a reflog file, oldest first; nothing where there is none."""
    for line in (_read(file) or "").split("\n"):
        head, _, message = line.partition("\t")
        fields = head.split(" ", 2)
        if len(fields) == 3:
            yield ReflogEntry(fields[0], fields[1], message)


def branch_reflog(common: Path, branch: str) -> Path:
    """The reflog file of a branch."""
    return common / "logs" / "refs" / "heads" / branch


# -- worktrees ------------------------------------------------------------------------------------


def registrations(common: Path) -> Iterator[Registration]:
    """Every linked worktree of a repository, whether or not its folder still exists."""
    for admin in _admins(common):
        registration = read_registration(admin)
        if registration is not None:
            yield registration


def read_registration(admin: Path) -> Registration | None:
    """One linked worktree by its administrative folder; ``None`` where that names no path."""
    gitdir = (_read(admin / "gitdir") or "").rstrip("\n")
    if not gitdir:
        return None
    head = (_read(admin / "HEAD") or "").strip().removeprefix("ref: ")
    locked = _read(admin / "locked")
    return Registration(
        admin=admin,
        # Newer git may write it relative to the administrative folder; joining covers both.
        worktree=(admin / gitdir).parent,
        head=head,
        locked=None if locked is None else locked.strip(),
    )


def registration_of(common: Path, worktree: Path) -> Registration | None:
    """The registration that names this path (symbolic links resolved)."""
    if (linked := linked_admin(worktree)) is not None and linked.parent == common / "worktrees":
        found = read_registration(linked)
        if found is not None and found.worktree == worktree:
            return found
    for admin in _admins(common, worktree.name):
        found = read_registration(admin)
        if found is not None and found.worktree == worktree:
            return found
    return None


def nameless_entries(common: Path, worktree: Path) -> list[Path]:
    """Administrative folders, named as git would for this path, that name no path (yet)."""
    named = re.compile(re.escape(worktree.name) + r"\d*")
    return [
        admin
        for admin in _admins(common, worktree.name)
        if named.fullmatch(admin.name) and not _read(admin / "gitdir")
    ]


def linked_admin(worktree: Path) -> Path | None:
    """Where the ``.git`` file of a linked worktree points to, symbolic links resolved."""
    text = _read(worktree / ".git") or ""
    if not text.startswith("gitdir: "):
        return None
    return (worktree / text.removeprefix("gitdir: ").rstrip("\n")).resolve()


def _admins(common: Path, basename: str | None = None) -> list[Path]:
    # Git names the folder after the path's last part, with a number where that is taken, and
    # changes it only where it would not do as part of a reference.
    narrow = basename is not None and _PLAIN_NAME.fullmatch(basename) is not None
    try:
        return sorted(
            entry
            for entry in (common / "worktrees").iterdir()
            if not narrow or entry.name.startswith(basename or "")
        )
    except (FileNotFoundError, NotADirectoryError):
        return []


def git_folders(repository: Path) -> tuple[Path, Path] | None:
    """(git directory, common directory) of a repository on disk: bare, ordinary or a worktree.

    ``None`` where it is no repository. Symbolic links are resolved, so that a caller can check
    where they are.
    """
    for candidate in (linked_admin(repository), repository / ".git", repository):
        if candidate is not None and (candidate / "HEAD").is_file():
            git_dir = candidate.resolve()
            common = git_dir / (_read(git_dir / "commondir") or "").strip()
            return git_dir, common.resolve()
    return None


def checked_out(git_dir_of_main: Path, main: Path, branch: str) -> Path | None:
    """The path at which ``branch`` is checked out: the main working tree, or a linked one.

    Args:
        git_dir_of_main: the repository's common directory.
        main: what is reported where its own HEAD is on the branch; a bare one has no such.
    """
    full = f"refs/heads/{branch}"
    config = _read(git_dir_of_main / "config") or ""
    bare = re.search(r"^\s*bare\s*=\s*true", config, re.MULTILINE | re.IGNORECASE) is not None
    head = (_read(git_dir_of_main / "HEAD") or "").strip()
    if not bare and head == f"ref: {full}":
        return main
    for registration in registrations(git_dir_of_main):
        if registration.head == full:
            return registration.worktree
    return None
