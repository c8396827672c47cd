"""The host: a durable ID and the folders below its data folder."""

from __future__ import annotations

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
