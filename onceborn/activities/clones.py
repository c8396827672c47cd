"""A managed clone: bare, one per source and host, shared by tasks; theirs are ``refs/heads/*``.

It is made beside its place and published by rename when it is whole, so an unfinished one is never
used. A refresh writes and prunes ``refs/remotes/origin/*`` and adds tags that are new; it never
touches a branch of a task, nor a tag that exists. Everything here runs under the clone's host lock.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from ..runtime.failpoints import failpoint
from . import gitlocks
from .git import Git, GitError, redact
from .kind import StepFailed, StepRetry, World
from .ownership import sync_folder
from .sources import Base, Listing, remote_failure

_REFSPEC: Final = "+refs/heads/*:refs/remotes/origin/*"
_FETCHED: Final = "refs/onceborn/fetched"
"""Commits that a caller named and the remote gave: what makes them ours to use, and keeps them."""

# Agents' own git in the worktrees reads this too: none of it may clean up what others use.
_CONFIG: Final = """\
[gc]
	auto = 0
	reflogExpire = never
	reflogExpireUnreachable = never
	worktreePruneExpire = never
[maintenance]
	auto = false
[remote "origin"]
	url = {url}
	fetch = +refs/heads/*:refs/remotes/origin/*
"""
_REFUSALS: Final = (
    "not our ref",
    "couldn't find remote ref",
    "unadvertised object",
    "not a valid",
)
_LOCKS: Final = ("config.lock", "packed-refs.lock", "HEAD.lock", "shallow.lock")


class Clone:
    """The managed clone at one path, for one attempt."""

    def __init__(self, path: Path, world: World) -> None:
        self.path = path
        self._world = world
        self._git = Git.of(world)

    @property
    def unfinished(self) -> Path:
        """Where it is made. Who holds the clone's lock may replace what a dead maker left."""
        return self.path.with_name(f"{self.path.name}.unfinished")

    def bring_up_to_date(self, address: str, listing: Listing) -> None:
        """Have the clone, with what the remote listed.

        Raises:
            StepFailed, StepRetry: as ``remote_failure`` says; ``git.locked``;
                ``repository.clone_damaged``.
        """
        if not self.path.exists():
            self._make(address, listing)
            return
        if not (self.path / "HEAD").is_file() or not (self.path / "objects").is_dir():
            raise StepRetry(
                "repository.clone_damaged",
                f"{self.path} is not a git repository any more; move it away to have it made anew",
                clone=str(self.path),
            )
        gitlocks.settle((self.path / name for name in _LOCKS), self.path, self._world)
        if self._tracked() != listing.branches:
            self._fetch(self.path, address, ["--prune", _REFSPEC])

    def have(self, base: Base, address: str) -> None:
        """Make sure that the base is a commit which the remote has and the clone holds.

        Raises:
            StepFailed: ``repository.base_not_found``.
            StepRetry: the remote could not be asked, or the base moved meanwhile.
        """
        held = self.holds(base.commit)
        if base.resolved_by == "commit" and held and not self._reached_from_remote(base, address):
            raise self._no_base(base, address, "is not on any of its branches")
        if not held and base.resolved_by not in ("commit", "tag"):
            raise StepRetry(
                "repository.moved",
                f"{base.ref} of {redact(address)} moved while it was fetched",
                source=redact(address),
            )
        if not held:
            name = base.commit if base.resolved_by == "commit" else base.ref
            try:
                self._fetch(self.path, address, [f"+{name}:{_FETCHED}/{base.commit}"])
            except StepRetry as failure:
                said = str(failure.fields.get("stderr", "")).lower()
                if any(words in said for words in _REFUSALS):
                    raise self._no_base(base, address, "does not exist there") from failure
                raise
        if not self.holds(base.commit):
            raise self._no_base(base, address, "is not a commit")

    def holds(self, commit: str) -> bool:
        """Whether the commit is in the clone."""
        if not (self.path / "HEAD").is_file():
            return False
        probe = ["cat-file", "-e", f"{commit}^{{commit}}"]
        return self._git.run(probe, git_dir=self.path, check=False).code == 0

    def drop_unfinished(self) -> None:
        """Remove what a dead maker left beside the clone's place."""
        if self.unfinished.exists():
            failpoint("clone.drop")
            self._world.guard()
            shutil.rmtree(self.unfinished)
            failpoint("clone.dropped")

    # -- parts ----------------------------------------------------------------------------------

    def _make(self, address: str, listing: Listing) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.drop_unfinished()
        making = self.unfinished
        self._git.run(
            [
                "init",
                "--quiet",
                "--bare",
                "--template=",
                f"--object-format={listing.object_format}",
                "--",
                str(making),
            ],
            mutates=True,
        )
        self._world.guard()
        with (making / "config").open("a") as config:
            config.write(_CONFIG.format(url=_quoted(redact(address))))
        failpoint("clone.begun")
        self._fetch(making, address, ["--prune", _REFSPEC])
        # One file instead of one for each branch of the remote.
        self._git.run(["pack-refs", "--all"], git_dir=making, mutates=True)
        failpoint("clone.whole")
        self._world.guard()
        making.rename(self.path)
        sync_folder(self.path.parent)
        failpoint("clone.published")

    def _fetch(self, clone: Path, address: str, what: Sequence[str]) -> None:
        command = [
            "fetch",
            "--quiet",
            "--no-write-fetch-head",
            "--no-recurse-submodules",
            "--update-shallow",
        ]
        command += [part for part in what if part.startswith("--")]
        command += ["--", address, *(part for part in what if not part.startswith("--"))]
        try:
            self._run_unlocked(command, clone)
        except GitError as error:
            raise remote_failure(error, address) from error

    def _run_unlocked(self, command: list[str], clone: Path) -> None:
        try:
            self._git.run(command, git_dir=clone, mutates=True)
        except GitError as error:
            lock = gitlocks.lock_in(error)
            if lock is None:
                raise
            gitlocks.settle([lock], clone, self._world)
            self._git.run(command, git_dir=clone, mutates=True)

    def _tracked(self) -> dict[str, str]:
        """The remote's branches as of the last refresh, under the names that they have there."""
        listed = self._git.run(
            ["for-each-ref", "--format=%(objectname)%09%(refname:lstrip=3)", "refs/remotes/origin"],
            git_dir=self.path,
            stdout_limit=256 * 1024 * 1024,
        )
        lines = (line.partition("\t") for line in listed.text.splitlines())
        return {f"refs/heads/{name}": commit for commit, _, name in lines}

    def _reached_from_remote(self, base: Base, address: str) -> bool:
        if self._came_from_remote(base.commit):
            return True
        if not (self.path / "shallow").exists():
            return False
        # Somebody's git has cut the history that all tasks share (`fetch --depth` in a worktree):
        # what leads to the commit is there again after this, where the remote itself has it.
        self._fetch(self.path, address, ["--unshallow", "--prune", _REFSPEC])
        return self._came_from_remote(base.commit)

    def _came_from_remote(self, commit: str) -> bool:
        found = self._git.run(
            ["for-each-ref", "--count=1", f"--contains={commit}", "refs/remotes/origin", _FETCHED],
            git_dir=self.path,
        )
        return bool(found.stdout.strip())

    def _no_base(self, base: Base, address: str, why: str) -> StepFailed:
        shallow = "; its history here is shallow" if (self.path / "shallow").exists() else ""
        where = redact(address)
        return StepFailed(
            "repository.base_not_found",
            f"the base {base.ref} of {where} {why}{shallow}",
            source=where,
            base_ref=base.ref,
            shallow=bool(shallow),
        )


def _quoted(value: str) -> str:
    """A value for a git configuration file."""
    escaped = value.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'
