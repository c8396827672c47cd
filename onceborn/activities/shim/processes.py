"""Processes as /proc shows them. A process is (process ID, start time, boot), never an ID alone."""

from __future__ import annotations

import ctypes
import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Final

_libc: Final = ctypes.CDLL(None, use_errno=True)
_PR_SET_PDEATHSIG: Final = 1
_PR_SET_CHILD_SUBREAPER: Final = 36


def boot_id() -> str:
    """Which boot of the machine this is: IDs and start times mean nothing across boots."""
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return file.read().strip()


def start_time(pid: int) -> int | None:
    """When the process started, in clock ticks since boot; None where there is no such process."""
    fields = _stat(str(pid))
    return int(fields[19]) if fields else None


def is_process(pid: int, started: int | None, boot: str) -> bool:
    """Whether the process with this ID is still the recorded one (SE05), and not a zombie."""
    fields = _stat(str(pid))
    return (
        bool(fields) and int(fields[19]) == started and boot == boot_id() and fields[0] not in "ZX"
    )


def children_of(parent: int) -> list[tuple[int, str]]:
    """The process's children: (process ID, state letter)."""
    found = []
    for name in os.listdir("/proc"):  # noqa: PTH208 - pathlib costs start-up time
        if name.isdecimal():
            fields = _stat(name)
            if fields and int(fields[1]) == parent:
                found.append((int(name), fields[0]))
    return found


def _stat(pid: str) -> list[str]:
    # The fields after the command's name, which is in parentheses and may itself hold some.
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b") ")[2].decode("ascii").split()
    except (FileNotFoundError, ProcessLookupError):
        return []


def die_with_parent(signal_number: int) -> None:
    """Have the kernel send this signal to the calling process when its parent thread ends."""
    _prctl(_PR_SET_PDEATHSIG, signal_number)


def become_subreaper() -> None:
    """Have orphans among our descendants become our children."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _prctl(option: int, value: int) -> None:
    if _libc.prctl(option, value, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
