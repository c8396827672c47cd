"""Child processes of `onceborn up`: started, watched, started again, ended in order."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import sys
from collections.abc import Mapping
from typing import Final

import structlog

from ..runtime.failpoints import failpoint
from ..runtime.protocol.errors import ConfigurationError, OncebornError
from .cli_output import USAGE

_PARENT: Final = "ONCEBORN_SUPERVISOR_PID"
_PR_SET_PDEATHSIG: Final = 1
_STOP_S: Final = 20.0
_HEALTHY_S: Final = 30.0
_DEATHS: Final = 5
_LONGEST_BACKOFF_S: Final = 15.0
_log = structlog.get_logger("onceborn.up")


class ChildFailed(OncebornError):
    """A part of the server keeps dying."""

    code = "child_failed"
    http_status = 503


class Child:
    """One of our own commands as a child process, restarted with backoff when it dies."""

    def __init__(
        self, name: str, arguments: list[str], environment: Mapping[str, str], fds: tuple[int, ...]
    ) -> None:
        self.name = name
        self._command = [sys.executable, "-m", "onceborn", *arguments]
        self._environment = {**environment, _PARENT: str(os.getpid())}
        self._fds = fds
        self._process: asyncio.subprocess.Process | None = None
        self._stopping = asyncio.Event()

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    async def supervise(self) -> None:
        """Keep it running until ``stop``.

        Raises:
            ConfigurationError: it cannot run as configured.
            ChildFailed: it died too often in a row.
        """
        loop = asyncio.get_running_loop()
        deaths = 0
        while not self._stopping.is_set():
            began = loop.time()
            failpoint("child.spawn")
            self._process = await asyncio.create_subprocess_exec(
                *self._command,
                env=self._environment,
                stdin=asyncio.subprocess.DEVNULL,
                pass_fds=self._fds,
                # A Ctrl-C at the terminal is for the supervisor, which ends children in order.
                start_new_session=True,
            )
            failpoint("child.spawned")
            _log.info("started", child=self.name, pid=self._process.pid)
            code = await self._process.wait()
            if self._stopping.is_set():
                return
            deaths = 1 if loop.time() - began > _HEALTHY_S else deaths + 1
            if code == USAGE:
                raise ConfigurationError(f"the {self.name} cannot run as configured (see above)")
            if deaths >= _DEATHS:
                raise ChildFailed(
                    f"the {self.name} died {deaths} times in a row; its messages above say why"
                )
            pause = min(0.5 * 2 ** (deaths - 1), _LONGEST_BACKOFF_S)
            _log.warning("died; starting it again", child=self.name, exit=code, pause_s=pause)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), pause)

    async def stop(self) -> None:
        """SIGTERM, and SIGKILL for one that does not end in time. Returns once it is gone."""
        self._stopping.set()
        process = self._process
        if process is None or process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM)
        try:
            await asyncio.wait_for(process.wait(), _STOP_S)
        except TimeoutError:
            _log.warning("does not stop; killing it", child=self.name, pid=process.pid)
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
        _log.info("stopped", child=self.name, exit=process.returncode)


def end_with_parent() -> None:
    """In a child: end (by SIGTERM) when the supervisor that started us is gone, even by SIGKILL."""
    parent = os.environ.pop(_PARENT, None)
    if parent is None or not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != int(parent):
        raise SystemExit(0)
