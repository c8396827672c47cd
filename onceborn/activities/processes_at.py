"""Which processes work in a folder, as far as this host lets us see."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def users_below(folder: Path) -> list[int] | None:
    """Processes whose working folder or an open file is in or below ``folder``.

    ``None`` where it cannot be told, for want of ``/proc``. Another user's process whose files may
    not be looked at counts by what can be seen of it.
    """
    proc = Path("/proc")
    if not (proc / "self" / "fd").is_dir():
        return None
    where = str(folder.resolve())
    return sorted(
        int(process.name)
        for process in proc.glob("[0-9]*")
        if any(_is_below(place, where) for place in _places(process))
    )


def _places(process: Path) -> list[str]:
    links = [process / "cwd", process / "root"]
    with contextlib.suppress(OSError):  # It ended, or it is another user's.
        links += (process / "fd").iterdir()
    places = []
    for link in links:
        try:
            places.append(os.readlink(link))  # noqa: PTH115 - may end in " (deleted)"
        except OSError:
            continue
    return places


def _is_below(place: str, folder: str) -> bool:
    return place == folder or place.startswith(f"{folder}/")
