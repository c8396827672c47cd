"""The embedded Temporal server: one per data folder, started and stopped with its owner."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Final, Self

from ..runtime.failpoints import failpoint
from ..runtime.protocol.errors import ConfigurationError
from .address import temporal_folder
from .program import find_program, server_arguments, server_environment
from .ready import wait_ready

LOOPBACK: Final = "127.0.0.1"
START_LIMIT_S: Final = 60.0
STOP_LIMIT_S: Final = 15.0
LOG_KEPT_BYTES: Final = 8 * 1024 * 1024

_CHILD: Final = Path(__file__).with_name("child.py")


class EmbeddedTemporal:
    """Temporal's own server as a child process, on loopback, with a persistent file.

    Everything is in ``<data>/temporal``: the database, the log, the address (kept, so that a
    restart has the same port), and a lock that lets one server at a time use them. ``ui`` opens the
    web interface on the port 1000 above.
    """

    def __init__(
        self,
        data_folder: Path,
        port: int | None = None,
        ui: bool = False,
        *,
        namespace: str = "default",
    ) -> None:
        self._folder = temporal_folder(data_folder.resolve())
        self._asked_port = port
        self._ui = ui
        self._namespace = namespace
        self._process: subprocess.Popen[bytes] | None = None
        self._keeper: threading.Thread | None = None
        self._exited = threading.Event()
        self._port = port or 0

    @property
    def address(self) -> str:
        """``host:port``, once started."""
        return f"{LOOPBACK}:{self._port}"

    @property
    def pid(self) -> int | None:
        """The server's process ID while it runs."""
        return self._process.pid if self._process is not None and self.running else None

    @property
    def running(self) -> bool:
        """Whether the server's process is there."""
        return self._process is not None and not self._exited.is_set()

    @property
    def log_file(self) -> Path:
        """What the server prints."""
        return self._folder / "server.log"

    def start(self) -> Self:
        """Start the server and block until it answers. May be called again after it has ended.

        Raises:
            ConfigurationError: no program, a port that is taken, a folder that cannot be used or
                has a server already, or a server that does not come up; with the log's end.
        """
        if self.running:
            return self
        program = find_program()
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            lock = self._lock()
        except OSError as error:
            raise ConfigurationError(
                f"folder {self._folder} cannot be used: {error.strerror}; set ONCEBORN_DATA"
            ) from None
        try:
            self._port = self._choose_port()
            self._spawn(program, lock)
        finally:
            os.close(lock)  # the server keeps its own
        ready = wait_ready(
            self.address, self._namespace, limit_s=START_LIMIT_S, gone=self._exited.is_set
        )
        if not ready or self._exited.is_set():
            self.stop()
            raise ConfigurationError(
                f"the embedded Temporal server did not start on {self.address};"
                f" the end of {self.log_file}:\n{self._log_tail()}"
            )
        self._record()
        return self

    def stop(self) -> None:
        """End the server: SIGTERM, and SIGKILL if it does not follow. Harmless where none runs."""
        if self._process is None or self._keeper is None:
            return
        for number in (signal.SIGTERM, signal.SIGKILL):
            if self._exited.is_set():
                break
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)
            self._exited.wait(STOP_LIMIT_S)
        self._keeper.join(STOP_LIMIT_S)
        self._process = None

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    # -- parts --------------------------------------------------------------------------------

    def _lock(self) -> int:
        # Inherited by the server: it is held for as long as one lives, whoever started it.
        failpoint("temporal.lock")
        lock = os.open(self._folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            raise ConfigurationError(
                f"an embedded Temporal server runs in {self._folder} already"
            ) from None
        failpoint("temporal.locked")
        return lock

    def _choose_port(self) -> int:
        if self._asked_port is None:
            return self._recorded_port() or _free_port()
        # Looked at first: what answers on a taken port must not be taken for our server.
        if not _is_free(self._asked_port):
            raise ConfigurationError(
                f"port {self._asked_port} for the embedded Temporal server is taken by another"
                " program; choose another"
            )
        return self._asked_port

    def _recorded_port(self) -> int | None:
        try:
            text = (self._folder / "address").read_text(encoding="ascii")
            port = int(text.strip().rpartition(":")[2])
        except (FileNotFoundError, ValueError):
            return None
        # Another program may have it now; a server of ours cannot, we hold the lock.
        return port if _is_free(port) else None

    def _record(self) -> None:
        draft = self._folder / f"address.{os.getpid()}"
        failpoint("temporal.publish")
        draft.write_text(self.address + "\n", encoding="ascii")
        draft.replace(self._folder / "address")
        failpoint("temporal.published")

    def _spawn(self, program: Path, lock: int) -> None:
        _bound(self.log_file)
        self._exited.clear()
        began = threading.Event()
        failure: list[OSError] = []
        arguments = [
            str(program),
            *server_arguments(LOOPBACK, self._port, self._namespace, self._folder, self._ui),
        ]

        # The kernel ends the server with the *thread* that started it: one that lives as long.
        def keep() -> None:
            try:
                self._process = self._popen(arguments, lock)
            except OSError as error:
                failure.append(error)
                began.set()
                return
            began.set()
            self._process.wait()
            self._exited.set()

        self._keeper = threading.Thread(target=keep, name="temporal-keeper", daemon=True)
        self._keeper.start()
        began.wait()
        if failure:
            self._process = None
            raise ConfigurationError(f"{program} cannot be executed: {failure[0].strerror}")

    def _popen(self, arguments: list[str], lock: int) -> subprocess.Popen[bytes]:
        failpoint("temporal.spawn")
        with open(self.log_file, "ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-I", "-S", str(_CHILD), str(os.getpid()), *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=server_environment(),
                pass_fds=(lock,),
                start_new_session=True,  # a terminal's Ctrl-C is for its owner, who stops it
            )
        failpoint("temporal.spawned")
        return process

    def _log_tail(self, size: int = 2000) -> str:
        try:
            return self.log_file.read_bytes()[-size:].decode("utf-8", errors="replace").strip()
        except FileNotFoundError:
            return "(empty)"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        return int(probe.getsockname()[1])


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((LOOPBACK, port))
        except OSError:
            return False
        return True


def _bound(log: Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        if log.stat().st_size > LOG_KEPT_BYTES:
            log.replace(log.with_name("server.log.previous"))
