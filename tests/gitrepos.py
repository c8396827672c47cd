"""Real repositories, and the world as one attempt of a step sees it, for the tests of git."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, insert

from onceborn.activities.kind import Host, Present, Step, World
from onceborn.activities.repo_attach import RepoAttach
from onceborn.activities.worktree import Worktree
from onceborn.runtime.ids import new_id
from onceborn.runtime.ledger import tables
from onceborn.runtime.ledger.database import Database
from onceborn.runtime.protocol.plan import (
    RepoAttachRequest,
    StepRequest,
    WorktreeRequest,
    idempotency_key,
    request_hash,
)

ENVIRONMENT = {
    "PATH": os.environ["PATH"],
    "LC_ALL": "C.UTF-8",
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_CONFIG_GLOBAL": "/dev/null",
    "GIT_AUTHOR_NAME": "A Person",
    "GIT_AUTHOR_EMAIL": "person@example.invalid",
    "GIT_COMMITTER_NAME": "A Person",
    "GIT_COMMITTER_EMAIL": "person@example.invalid",
    "GIT_ALLOW_PROTOCOL": "file",
}


def git(folder: Path, *args: str, check: bool = True) -> str:
    """Run git as a person would, in ``folder``; returns stdout without the last newline."""
    done = subprocess.run(
        ["git", *args], cwd=folder, env=ENVIRONMENT, check=check, capture_output=True, text=True
    )
    return done.stdout.rstrip("\n")


class Repository:
    """A repository on disk that a test may do anything to."""

    def __init__(self, path: Path, *, branch: str = "trunk", bare: bool = False) -> None:
        self.path = path
        path.mkdir(parents=True)
        git(path, "init", "--quiet", "--initial-branch", branch, *(["--bare"] if bare else []))

    def git(self, *args: str) -> str:
        return git(self.path, *args)

    def commit(self, files: dict[str, str | bytes] | None = None, message: str = "a commit") -> str:
        """Write files and commit them; returns the commit ID."""
        for name, content in (files or {"README": message}).items():
            file = self.path / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(content.encode() if isinstance(content, str) else content)
        self.git("add", "--all")
        self.git("commit", "--quiet", "--allow-empty", "-m", message)
        return self.head

    @property
    def head(self) -> str:
        return self.git("rev-parse", "HEAD")


@dataclass
class Rig:
    """One host with its ledger. Steps are made for operations that exist in it."""

    host: Host
    database: Database
    guarded: int = 0
    beats: int = 0
    lock_fds: tuple[int, ...] = ()
    before_mutation: Callable[[], None] = field(default=lambda: None)

    @property
    def data(self) -> Path:
        return self.host.data

    def world(self) -> World:
        return World(
            host=self.host,
            database=self.database,
            guard=self._guard,
            heartbeat=self._beat,
            transaction=self._transaction,
            lock_fds=self.lock_fds,
        )

    def _guard(self) -> None:
        self.before_mutation()
        self.guarded += 1

    def _beat(self) -> None:
        self.beats += 1

    @contextmanager
    def _transaction(self) -> Iterator[Connection]:
        with self.database.transaction("test") as connection:
            yield connection

    def operation(self) -> str:
        """A new operation's ID."""
        operation = new_id("op")
        with self.database.transaction("test") as connection:
            now = self.database.clock.now()
            workspace = new_id("wsp")
            connection.execute(
                insert(tables.workspaces).values(id=workspace, name="w", created_at=now)
            )
            connection.execute(
                insert(tables.operations).values(
                    id=operation, workspace_id=workspace, task_id=new_id("tsk"), host_id="host",
                    actor="{}", actor_hash="", token_hash="", manifest="{}", manifest_hash="",
                    plan="{}", plan_hash="", state="preparing", lease_until=0, created_at=now,
                )
            )  # fmt: skip
        return operation

    def attach_step(
        self, source: Path | str, *, base_ref: str | None = None, operation: str | None = None
    ) -> Step[RepoAttachRequest]:
        request = RepoAttachRequest(
            repository="0", source=str(source), clone=clone_name(source), base_ref=base_ref
        )
        return _step(operation or self.operation(), "repo_attach:0", request)

    def worktree_step(
        self, attached: Step[RepoAttachRequest], branch: str, *, path: str | None = None
    ) -> Step[WorktreeRequest]:
        request = WorktreeRequest(
            repository="0",
            source=attached.request.source,
            clone=attached.request.clone,
            path=path or f"worktrees/{attached.operation_id}/0-source",
            branch=branch,
        )
        return _step(attached.operation_id, "worktree:0", request)

    def attached(self, source: Path | str, **kwargs: Any) -> Step[RepoAttachRequest]:
        """Attach a repository, and see that it is."""
        step = self.attach_step(source, **kwargs)
        kind = RepoAttach()
        kind.perform(step, self.world())
        assert isinstance(kind.observe(step, self.world()), Present)
        return step

    def ready(self, source: Path | str, branch: str, **kwargs: Any) -> Step[WorktreeRequest]:
        """A worktree step whose repository is attached."""
        return self.worktree_step(self.attached(source), branch, **kwargs)

    def made(self, source: Path | str, branch: str, **kwargs: Any) -> Step[WorktreeRequest]:
        """Make a worktree, and see that it is there."""
        step = self.ready(source, branch, **kwargs)
        kind = Worktree()
        kind.perform(step, self.world())
        assert isinstance(kind.observe(step, self.world()), Present)
        return step

    def path(self, step: Step[Any]) -> Path:
        return self.host.path(step.request.path)

    def clone(self, step: Step[Any]) -> Path:
        return self.host.path(step.request.clone)


def clone_name(source: Path | str) -> str:
    name = "".join(c if c.isalnum() and c.isascii() else "-" for c in str(source))
    return f"repositories/{name[-80:]}.git"


def _step(operation: str, key: str, request: StepRequest) -> Step[Any]:
    digest = request_hash(request)
    return Step(
        operation_id=operation,
        task_id=f"tsk_{operation}",
        workspace_id="wsp",
        key=key,
        request=request,
        idempotency_key=idempotency_key(operation, request.kind, key, digest),
    )


def new_rig(folder: Path, database: Database, *, roots: Sequence[Path] = ()) -> Rig:
    data = (folder / "data").resolve()
    data.mkdir(exist_ok=True)
    return Rig(
        Host(
            host_id="host",
            data=data,
            repository_roots=tuple(roots) or (folder.resolve(),),
            git_time_limit_s=60,
        ),
        database,
    )
