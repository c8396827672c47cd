"""Host locks: one per resource, held for as long as any process that acts on it is alive.

``flock`` on a file that is never unlinked, with a new descriptor per acquisition. A child that
inherits the descriptor (``pass_fds``) shares the lock, so a killed worker's live git child still
holds it. Source: design 2-steps, 'The host lock'.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..runtime.failpoints import failpoint


class HostLock:
    """One held lock. ``fd`` is what children inherit through ``pass_fds``."""

    def __init__(self, resource: str, fd: int) -> None:
        self.resource = resource
        self.fd = fd

    def release(self) -> None:
        """Let go. The lock stays taken while a child that inherited it lives; harmless twice."""
        if self.fd < 0:
            return
        # Closed, never LOCK_UN: unlocking would take the lock from our children as well.
        fd, self.fd = self.fd, -1
        os.close(fd)
        failpoint("lock.released")


class HostLocks:
    """The locks of one host, as files in ``folder`` (made if it is missing)."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def file(self, resource: str) -> Path:
        """The lock file of a resource. Names of resources are not always names of files."""
        return self.folder / f"{hashlib.sha256(resource.encode()).hexdigest()}.lock"

    @contextmanager
    def try_lock(self, resource: str) -> Iterator[HostLock | None]:
        """The lock, or ``None`` at once where another holder, or its child, is alive.

        Two threads of one process exclude each other too.
        """
        lock = self.acquire(resource)
        try:
            yield lock
        finally:
            if lock is not None:
                lock.release()

    def holder(self, resource: str) -> str:
        """For people: the resource and the process that took the lock last, or its child."""
        try:
            pid = self.file(resource).read_text().split(" ", 1)[0]
        except OSError:
            pid = ""
        return f"the lock of {resource}" + (f", taken by process {pid} or its child" if pid else "")

    def acquire(self, resource: str) -> HostLock | None:
        """The same for a holder that lets go by ``release``."""
        failpoint("lock.before")
        fd = os.open(self.file(resource), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # For people only; nothing reads it back.
            os.ftruncate(fd, 0)
            os.pwrite(fd, f"{os.getpid()} {resource}\n".encode(), 0)
        except OSError as error:
            os.close(fd)
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                return None
            raise
        lock = HostLock(resource, fd)
        try:
            failpoint("lock.acquired")
        except BaseException:
            lock.release()
            raise
        return lock
