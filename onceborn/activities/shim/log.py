"""The agent's output, bounded."""

from __future__ import annotations

import contextlib
import os


class Log:
    """Copies a pipe into ``path``; never more than three files of ``limit`` bytes.

    ``path`` is always the newest part, so that it can be followed by name. A part that is full
    becomes ``path.head`` (the first one, kept for ever) or ``path.previous``.
    """

    def __init__(self, path: str, limit: int, source: int) -> None:
        self.path = path
        self.limit = limit
        self.source = source
        self.total = 0
        self.lost = 0
        self._size = 0
        self._file = self._open()

    def pump(self) -> bool:
        """Copy what is there; False at the end of the output. ``source`` does not block."""
        try:
            part = os.read(self.source, 65536)
        except BlockingIOError:
            return True
        if part:
            self._write(part)
        return bool(part)

    def drain(self) -> None:
        """Copy what is left in the pipe, and sync."""
        with contextlib.suppress(BlockingIOError):
            while part := os.read(self.source, 65536):
                self._write(part)
        with contextlib.suppress(OSError):
            os.fsync(self._file)

    def _write(self, part: bytes) -> None:
        self.total += len(part)
        while part:
            try:
                if self._size >= self.limit:
                    self._rotate()
                written = os.write(self._file, part[: self.limit - self._size])
            except OSError:  # a full disk must stop neither the agent nor its supervision
                self.lost += len(part)
                return
            self._size += written
            part = part[written:]

    def _rotate(self) -> None:
        head, previous = self.path + ".head", self.path + ".previous"
        if os.path.exists(previous):  # noqa: PTH110 - pathlib costs start-up time
            self.lost += os.path.getsize(previous)  # noqa: PTH202
        os.replace(self.path, previous if os.path.exists(head) else head)  # noqa: PTH105, PTH110
        full, self._file = self._file, self._open()
        os.close(full)
        self._size = 0

    def _open(self) -> int:
        return os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o600)
