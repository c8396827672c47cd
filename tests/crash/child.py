"""A forked process that plays a part: how it ended, and what it told."""

from __future__ import annotations

import os
import pickle
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from . import world

LIMIT_S: Final = 90.0


@dataclass(frozen=True)
class Ended:
    """How a child ended. ``result``: what it returned; None where it died."""

    status: int
    result: Any = None

    @property
    def killed(self) -> bool:
        return os.WIFSIGNALED(self.status) and os.WTERMSIG(self.status) == signal.SIGKILL


class Child:
    """A forked process that plays a part."""

    def __init__(self, work: Callable[[], Any], log: Path) -> None:
        answer = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(answer[0])
            _play(work, log, answer[1])
        os.close(answer[1])
        self._answer = answer[0]

    def wait_stopped_or_ended(self) -> Ended | None:
        """None: it has stopped itself."""
        pid, status = self._waited(os.WUNTRACED)
        assert pid == self.pid
        return None if os.WIFSTOPPED(status) else self._ended(status)

    def wait(self) -> Ended:
        return self._ended(self._waited(0)[1])

    def _waited(self, options: int) -> tuple[int, int]:
        deadline = time.monotonic() + LIMIT_S
        pause = 0.001
        while True:
            pid, status = os.waitpid(self.pid, options | os.WNOHANG)
            if pid:
                return pid, status
            if time.monotonic() > deadline:
                world.kill(self.pid)
                os.waitpid(self.pid, 0)
                os.close(self._answer)
                raise TimeoutError(f"a process of the cell did not end within {LIMIT_S:.0f} s")
            time.sleep(pause)
            pause = min(pause * 1.5, 0.02)

    def _ended(self, status: int) -> Ended:
        parts = []
        while part := os.read(self._answer, 65536):
            parts.append(part)
        os.close(self._answer)
        whole = b"".join(parts)
        return Ended(status, pickle.loads(whole) if whole else None)


def _play(work: Callable[[], Any], log: Path, answer: int) -> None:
    code = 1
    try:
        out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(out, 1)
        os.dup2(out, 2)
        told = pickle.dumps(work())
        os.write(answer, told)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
