"""A workspace with a host's hands and an operator: what tests of operators' means start from."""

from __future__ import annotations

import atexit
import ctypes
import functools
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from onceborn.activities.cleanup import CleanupDriver
from onceborn.activities.locks import HostLocks
from onceborn.activities.verify import Verified, Verifier
from onceborn.runtime import access
from onceborn.runtime.cleanup import Cleanup
from onceborn.runtime.ledger import tables as t
from onceborn.runtime.ledger.database import Database
from onceborn.runtime.operators import Operators
from onceborn.runtime.protocol import rules
from onceborn.runtime.protocol.errors import OncebornError
from onceborn.runtime.protocol.rules import StopReason
from onceborn.runtime.recovery import Owned

from .loop import Bench
from .world import HOST, rows, workplace


def git(where: Path, *arguments: str) -> str:
    """Git as somebody at a terminal runs it."""
    identity = ["-c", "user.name=t", "-c", "user.email=t@localhost"]
    done = subprocess.run(
        ["git", *identity, *arguments], cwd=where, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


class Office:
    """A repository, a second one whose branch ``release`` cannot be made, hands, an operator."""

    def __init__(self, database: Database, folder: Path, **settings: Any) -> None:
        self.database = database
        self.folder = folder
        self.data = folder / "data"
        self.data.mkdir(exist_ok=True)
        (self.data / "host-id").write_text(f"{HOST}\n")
        self.repository = _repository(folder / "repo")
        self.blocked = _repository(folder / "blocked")
        git(self.blocked, "branch", "release/1")
        self.place = workplace(database, self.data, roots=(folder,), **settings)
        self.bench = Bench(database, self.data, roots=(folder,), **settings)
        self.settings = self.bench.settings
        made = access.create_token(database, self.place.workspace_id, role="operator", name="o")
        self.operator_token = made.token
        self.operators = self.seat(made.token)

    def seat(self, token: str) -> Operators:
        """The operators' means, for the holder of a token."""
        principal = access.authenticate(self.database, f"Bearer {token}")
        return Operators(self.database, self.settings, principal)

    def cleaner(self, data: Path | None = None) -> CleanupDriver:
        """A host's hands for cleanup jobs."""
        host = self.bench.host if data is None else Bench(self.database, data).host
        cleanup = Cleanup(self.database, self.settings)
        return CleanupDriver(self.database, host, HostLocks(host.data / "locks"), cleanup)

    def verify(self, reference: str) -> dict[str, Verified]:
        verifier = Verifier(self.database, self.bench.host, self.bench.locks)
        verified = verifier.verify(self.operators.operation(reference))
        return {step.step: step for step in verified}

    # -- creations --------------------------------------------------------------------------------

    def begin(self, external_id: str | None = "E", *, fails: bool = False, **body: Any) -> Owned:
        sources: list[dict[str, Any]] = [{"source": str(self.repository)}]
        if fails:
            sources.append({"source": str(self.blocked), "branch": "release"})
        body.setdefault("repositories", sources)
        admitted = self.place.create(external_id, **body)
        assert admitted.handle is not None
        return self.bench.recovery.take(admitted.handle)

    def next_owner(self) -> Owned:
        """The sweep, after the lease has ended."""
        self.database.clock.advance(3_600_000)
        return self.swept()

    def swept(self) -> Owned:
        """The sweep, now."""
        (owned,) = self.bench.recovery.claim(self.bench.host.host_id, 9)
        return owned

    def aborted(self, work: Callable[[Path], None], **body: Any) -> dict[str, Any]:
        """A creation that is undone after ``work`` was done in its first worktree: its operation.

        ``work`` gets the worktree's path, just before anything is undone.
        """
        owned = self.begin(fails=True, **body)

        def watch(action: rules.Action) -> None:
            if isinstance(action, rules.RequireUndo):
                work(self.worktree(owned.operation_id))

        assert self.bench.run(owned, watch=watch) is StopReason.ABORTED
        return self.operation(owned.operation_id)

    def operation(self, operation_id: str) -> dict[str, Any]:
        (row,) = [r for r in rows(self.database, t.operations) if r["id"] == operation_id]
        return row

    def step(self, operation_id: str, key: str) -> dict[str, Any]:
        (row,) = [
            r
            for r in rows(self.database, t.steps)
            if (r["operation_id"], r["step_key"]) == (operation_id, key)
        ]
        return row

    def worktree(self, operation_id: str) -> Path:
        """Where the creation's first worktree is, or would be."""
        request = json.loads(self.step(operation_id, "worktree:0")["request"])
        return self.bench.host.path(request["path"])

    def clone(self, operation_id: str) -> Path:
        request = json.loads(self.step(operation_id, "worktree:0")["request"])
        return self.bench.host.path(request["clone"])

    def branch(self, operation_id: str) -> str:
        branch: str = json.loads(self.step(operation_id, "worktree:0")["request"])["branch"]
        return branch

    def branches(self, operation_id: str) -> list[str]:
        return git(
            self.clone(operation_id), "for-each-ref", "--format=%(refname:lstrip=2)", "refs/heads"
        ).split()

    # -- what is left -----------------------------------------------------------------------------

    def jobs(self) -> list[dict[str, Any]]:
        return rows(self.database, t.cleanup_jobs)

    def only_job(self) -> dict[str, Any]:
        (job,) = self.jobs()
        return job

    def digest_of(self, entry: str) -> str:
        return self.cleaner().look(entry).digest

    def purge(self, entry: str, digest: str, data: Path | None = None) -> dict[str, Any]:
        """What `onceborn ops quarantine purge` does."""
        job = self.operators.begin_purge(entry, digest)
        try:
            removed = self.cleaner(data).purge(job, digest)
        except OncebornError as error:
            self.operators.end_purge(job, None, refusal=error.message)
            raise
        self.operators.end_purge(job, removed)
        return dict(removed)

    def files(self) -> dict[str, bytes]:
        """Every file below the data folder but the ledger and the locks, with its content."""
        return {
            str(path): path.read_bytes()
            for path in sorted(self.data.rglob("*"))
            if path.is_file() and "ledger" not in path.name and path.parent.name != "locks"
        }


def _repository(folder: Path) -> Path:
    """A copy of one repository that is made once: a dozen git processes a test add up."""
    shutil.copytree(_template(), folder, symlinks=True)
    return folder


@functools.cache
def _template() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="onceborn-office-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    git(folder, "init", "-q", "-b", "trunk")
    (folder / "file.txt").write_text("content\n")
    (folder / "inner").mkdir()
    (folder / "inner" / "other.txt").write_text("other\n")
    git(folder, "add", ".")
    git(folder, "commit", "-q", "-m", "first")
    return folder


# -- a folder whose files cannot be removed -------------------------------------------------------

_CAPABILITY_VERSION_3 = 0x20080522
_CAP_DAC_OVERRIDE = 1 << 1
_PR_SET_SECUREBITS = 28
_SECBIT_NOROOT = 1


class _Header(ctypes.Structure):
    _fields_ = (("version", ctypes.c_uint32), ("pid", ctypes.c_int))


class _Data(ctypes.Structure):
    _fields_ = (
        ("effective", ctypes.c_uint32),
        ("permitted", ctypes.c_uint32),
        ("inheritable", ctypes.c_uint32),
    )


@contextmanager
def unremovable(folder: Path) -> Iterator[None]:
    """Nothing directly in ``folder`` can be removed meanwhile by this thread and what it starts.

    Root would not mind the folder's mode, so it gives the right to ignore modes up for the time.
    """
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)  # it may be moved meanwhile
    mode = os.fstat(fd).st_mode & 0o7777
    os.fchmod(fd, 0o555)
    libc = ctypes.CDLL(None, use_errno=True)
    header, data = _Header(_CAPABILITY_VERSION_3, 0), (_Data * 2)()
    assert libc.capget(ctypes.byref(header), data) == 0, os.strerror(ctypes.get_errno())
    before = data[0].effective
    data[0].effective = before & ~_CAP_DAC_OVERRIDE
    assert libc.capset(ctypes.byref(header), data) == 0, os.strerror(ctypes.get_errno())
    if os.geteuid() == 0:
        assert libc.prctl(_PR_SET_SECUREBITS, _SECBIT_NOROOT, 0, 0, 0) == 0
    try:
        yield
    finally:
        if os.geteuid() == 0:
            assert libc.prctl(_PR_SET_SECUREBITS, 0, 0, 0, 0) == 0
        data[0].effective = before
        assert libc.capset(ctypes.byref(header), data) == 0, os.strerror(ctypes.get_errno())
        os.fchmod(fd, mode)
        os.close(fd)
