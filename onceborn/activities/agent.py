"""Launching an agent once, and looking at what became of it. Files and lock: see shim/__init__.py.

Whoever launches, however often and from wherever: the token under the run's lock and the file
``started.json`` let one agent process exist, ever. Everything else here only reads.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ..runtime.failpoints import failpoint
from ..runtime.protocol.errors import OncebornError
from . import shim
from .agent_look import Look, look, read_json
from .kind import Host
from .shim.files import sync_directory, write_durably

BASE_ENVIRONMENT: Final = (
    "PATH",
    "HOME",
    "USER",
    "LOGNAME",
    "SHELL",
    "LANG",
    "LC_ALL",
    "LC_CTYPE",
    "TZ",
    "TMPDIR",
)
"""What every agent gets from the worker's environment; a profile names what it needs beside it."""

LOG_LIMIT_BYTES: Final = 4 * 1024 * 1024
GRACE_S: Final = 10.0
SPAWN_PATIENCE_S: Final = 30.0
LOCK_PATIENCE_S: Final = 2.0

_SHIM: Final = Path(shim.__file__).parent / "__main__.py"
_RUN_ID: Final = re.compile(r"[A-Za-z0-9_]{1,64}")
_TO_SHIM: Final = ("ONCEBORN_FAILPOINTS", "ONCEBORN_FAILPOINTS_RECORD")
"""What is for the shim alone; no agent gets it."""


class NotLaunched(OncebornError):
    """The agent was not started; nothing of it exists."""

    code = "agent_not_launched"


@dataclass(frozen=True, slots=True)
class Launch:
    """What to start. ``argv`` may hold {prompt_file}, {task_id} and {run_id}."""

    run_id: str
    task_id: str
    token: str
    argv: tuple[str, ...]
    environment: tuple[str, ...]
    """Names that are passed on from this process's environment, beside the base ones."""
    working_directory: Path
    """Absolute, symbolic links resolved."""
    time_limit_s: float
    prompt: str
    grace_s: float = GRACE_S
    """Between SIGTERM and SIGKILL."""
    log_limit_bytes: int = LOG_LIMIT_BYTES


def run_directory(host: Host, run_id: str) -> Path:
    """The folder of a run's files on its host.

    Raises:
        NotLaunched: the ID could not be a folder's name.
    """
    if not _RUN_ID.fullmatch(run_id):
        raise NotLaunched(f"{run_id!r} is not a run's ID")
    return host.data / "runs" / run_id


def launch(host: Host, what: Launch, guard: Callable[[], None]) -> Look:
    """Start the agent unless it was started before, and see what came of it.

    ``guard`` raises where the launch is no longer the caller's: asked under the run's lock, before
    the files are written, and once more before the shim is started.
    Returns what is seen afterwards; ``absent`` means that a later launcher has taken over.

    Raises:
        NotLaunched: nothing was started, and why: it may be tried again.
    """
    directory = run_directory(host, what.run_id)
    try:
        _prepare_directory(directory)
        with locked(directory) as mine:
            guard()
            launched = read_json(directory / "started.json") is not None
            if mine and not launched:
                _write_launch(directory, what, guard)
        code = _spawn(directory, what, guard) if mine and not launched else None
    except OSError as error:
        raise NotLaunched(f"the agent's launch could not be written or spawned: {error}") from error
    seen = settle(directory)
    if code == shim.FAILED and seen.state == "absent":
        raise NotLaunched(f"the agent's shim failed: {_shim_complaint(directory)}")
    return seen


def bar(host: Host, run_id: str) -> Look:
    """Make sure that no shim which is still on its way can launch any more; see what there is.

    Raises:
        NotLaunched: the run's lock stayed busy, or its folder could not be written.
    """
    directory = run_directory(host, run_id)
    try:
        _prepare_directory(directory)
        with locked(directory) as mine:
            if mine and read_json(directory / "started.json") is None:
                failpoint("agent.bar")
                write_durably(str(directory), "launch.json", b'{"token":null}')
                failpoint("agent.barred")
    except OSError as error:
        raise NotLaunched(f"the run's folder could not be written: {error}") from error
    return settle(directory)


def settle(directory: Path) -> Look:
    """A look that waits, within a bound, for a shim that is just starting."""
    until = time.monotonic() + LOCK_PATIENCE_S
    while (seen := look(directory)).state == "starting" and time.monotonic() < until:
        time.sleep(0.02)
    return seen


@contextlib.contextmanager
def locked(directory: Path) -> Iterator[bool]:
    """The run's lock, on a descriptor of its own; False where it stays busy."""
    failpoint("agent.lock")
    descriptor = os.open(directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        until = time.monotonic() + LOCK_PATIENCE_S
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                # Held by an agent's shim it stays so; by a look or another launcher it does not.
                if time.monotonic() > until or read_json(directory / "started.json") is not None:
                    yield False
                    return
                time.sleep(0.01)
        failpoint("agent.locked")
        yield True
    finally:
        os.close(descriptor)


def _prepare_directory(directory: Path) -> None:
    if not directory.is_dir():
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        sync_directory(str(directory.parent))


def _write_launch(directory: Path, what: Launch, guard: Callable[[], None]) -> None:
    failpoint("agent.intent")
    guard()
    prompt = directory / "prompt.txt"
    write_durably(str(directory), prompt.name, what.prompt.encode("utf-8"))
    fill = {"{prompt_file}": str(prompt), "{task_id}": what.task_id, "{run_id}": what.run_id}
    document = {
        "run_id": what.run_id,
        "token": what.token,
        "argv": [_filled(argument, fill) for argument in what.argv],
        "working_directory": str(what.working_directory),
        "environment": [*BASE_ENVIRONMENT, *what.environment],
        "variables": {
            "ONCEBORN_RUN_ID": what.run_id,
            "ONCEBORN_TASK_ID": what.task_id,
            "ONCEBORN_PROMPT_FILE": str(prompt),
        },
        "time_limit_s": what.time_limit_s,
        "grace_s": what.grace_s,
        "log_limit_bytes": what.log_limit_bytes,
    }
    write_durably(str(directory), "launch.json", json.dumps(document).encode())
    failpoint("agent.intended")


def _filled(argument: str, fill: Mapping[str, str]) -> str:
    # One pass, so that what is filled in is never looked at again.
    return re.sub(r"\{(?:prompt_file|task_id|run_id)\}", lambda m: fill[m[0]], argument)


def _spawn(directory: Path, what: Launch, guard: Callable[[], None]) -> int | None:
    """Start the shim and wait until it has detached; its code, None where it takes too long."""
    names = (*BASE_ENVIRONMENT, *what.environment, *_TO_SHIM)
    environment = {name: os.environ[name] for name in names if name in os.environ}
    arguments = [sys.executable, "-I", "-S", str(_SHIM), str(directory), what.token]
    failpoint("agent.spawn")
    guard()
    with open(directory / "shim.log", "ab") as complaints:
        process = subprocess.Popen(
            arguments,
            cwd="/",
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=complaints,
        )
    failpoint("agent.spawned")
    try:
        return process.wait(SPAWN_PATIENCE_S)
    except subprocess.TimeoutExpired:
        return None  # what becomes of it is read from the files


def _shim_complaint(directory: Path) -> str:
    text = (directory / "shim.log").read_text(encoding="utf-8", errors="replace").strip()
    return text.splitlines()[-1] if text else "no message"
