"""The host: a durable ID and the folders below its data folder."""

from __future__ import annotations

import fcntl
import os
import re
from pathlib import Path
from typing import Final

from ..runtime.failpoints import failpoint
from ..runtime.ids import new_id
from ..runtime.protocol.errors import ConfigurationError
from ..runtime.settings import Settings
from .kind import Host

_HOST_ID: Final = re.compile(r"hst_[0-9a-f]{32}")
_FOLDERS: Final = ("repositories", "worktrees", "locks", "intents", "runs", "trash", "quarantine")


def open_host(settings: Settings) -> Host:
    """The host that the data folder is. Its ID is drawn once, when the folder is new.

    Raises:
        ConfigurationError: the folder cannot be used, or holds an ID that is not one.
    """
    data = settings.resolved_data
    try:
        for folder in _FOLDERS:
            (data / folder).mkdir(parents=True, exist_ok=True)
        host_id = _host_id(data / "host-id")
    except OSError as error:
        raise ConfigurationError(
            f"data folder {data} cannot be used: {error.strerror}; set ONCEBORN_DATA"
        ) from None
    return Host(
        host_id=host_id,
        data=data,
        repository_roots=tuple(root.resolve() for root in settings.repository_roots),
        git_time_limit_s=settings.git_time_limit_s,
    )


def join_host(host: Host) -> int:
    """Join the workers that share this data folder; returns the descriptor that says so.

    They must see each other's processes: that a lock file's owner is dead is told by looking. The
    descriptor is kept for as long as the process works.

    Raises:
        ConfigurationError: a worker of another PID namespace (a container, say) is at work here.
    """
    ours = _namespace()
    failpoint("host.join")
    fd = os.open(host.data / "workers.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.ftruncate(fd, 0)  # nobody else is here: this folder is ours to name
        os.pwrite(fd, ours.encode(), 0)
    except BlockingIOError:
        pass
    fcntl.flock(fd, fcntl.LOCK_SH)
    theirs = os.pread(fd, 256, 0).decode()
    if theirs != ours:
        os.close(fd)
        raise ConfigurationError(
            f"another worker on {host.data} runs in another PID namespace; give each container a"
            " data folder of its own, or let them share the namespace",
            host=host.host_id,
        )
    failpoint("host.joined")
    return fd


def _namespace() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return "unknown"


def _host_id(path: Path) -> str:
    draft = path.with_name(f"{path.name}.{os.getpid()}")
    if not path.exists():
        failpoint("host.name")
        draft.write_text(new_id("hst") + "\n")
        try:
            os.link(draft, path)  # of two workers that start at once, one draws the ID
        except FileExistsError:
            pass
        finally:
            draft.unlink()
        failpoint("host.named")
    host_id = path.read_text().strip()
    if not _HOST_ID.fullmatch(host_id):
        raise ConfigurationError(f"{path} does not hold a host ID; restore it or use a new folder")
    return host_id
