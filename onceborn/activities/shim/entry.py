"""The shim's life: detach, lock, launch, supervise, record."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import sys
import time

from . import ALREADY_LAUNCHED, BUSY, FAILED, LAUNCHED, NOT_OURS
from .child import become_agent
from .files import write_durably
from .log import Log
from .processes import become_subreaper, boot_id, start_time
from .supervisor import Supervisor

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, Final, NoReturn

LOCK_PATIENCE_S: Final = 1.0
"""A look at a run (../agent.py) holds its lock for an instant; another shim holds it for long."""


class Refused(Exception):
    """This shim may not launch; ``code`` is its exit code."""

    def __init__(self, code: int) -> None:
        self.code = code


def main(arguments: list[str]) -> NoReturn:
    directory, token = arguments
    os.umask(0o077)
    report = _detach()
    try:
        _run(directory, token, report)
    except Refused as refusal:
        report(refusal.code)
    except BaseException:
        report(FAILED)
        raise
    sys.exit(0)


def _detach() -> Callable[[int], None]:
    """Go on in a child of a session of its own; the parent exits with the code that we report."""
    answer, question = os.pipe()
    if os.fork():
        os.close(question)
        code = os.read(answer, 1)
        os._exit(code[0] if code else FAILED)
    os.close(answer)
    os.setsid()
    os.chdir("/")

    asked = True

    def report(code: int) -> None:
        nonlocal asked
        if asked:
            asked = False
            with contextlib.suppress(OSError):  # nobody waits any more
                os.write(question, bytes([code]))
            os.close(question)

    return report


def _run(directory: str, token: str, report: Callable[[int], None]) -> None:
    failpoint = _failpoints()
    failpoint("shim.lock")
    lock = _lock(directory)
    try:
        launch = _permission(directory, token)
    except BaseException:
        os.close(lock)  # before anybody is told: nobody shall take us for an agent's shim
        raise
    failpoint("shim.locked")
    become_subreaper()
    source, output = os.pipe()
    os.set_blocking(source, False)
    log = Log(f"{directory}/log", launch["log_limit_bytes"], source)
    supervisor = Supervisor(launch["time_limit_s"], launch["grace_s"])
    agent, error = _launch(directory, launch, output, failpoint)
    os.close(output)
    if error is None:
        report(LAUNCHED)
    failpoint("shim.launched")
    end = supervisor.until_gone(agent, log)
    log.drain()
    failpoint("shim.exited")
    if error is not None:
        end |= {"reason": "not_executed", "exit_code": None}
    end |= {"run_id": launch["run_id"], "error": error, "ended_at_ms": int(time.time() * 1000)}
    end |= {"log_bytes": log.total, "log_bytes_lost": log.lost}
    write_durably(directory, "exit.json", json.dumps(end).encode())
    failpoint("shim.ended")
    report(LAUNCHED)  # what could not be executed is told when its end is recorded


def _lock(directory: str) -> int:
    """Take the run's lock; after the launch it is let go by the end of this process alone."""
    descriptor = os.open(f"{directory}/lock", os.O_RDWR | os.O_CREAT, 0o600)
    until = time.monotonic() + LOCK_PATIENCE_S
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return descriptor
        except BlockingIOError:
            if time.monotonic() > until:
                raise Refused(BUSY) from None
            time.sleep(0.01)


def _permission(directory: str, token: str) -> dict[str, Any]:
    if os.path.exists(f"{directory}/started.json"):  # noqa: PTH110
        raise Refused(ALREADY_LAUNCHED)
    with open(f"{directory}/launch.json", encoding="utf-8") as file:
        launch: dict[str, Any] = json.load(file)
    if launch["token"] != token:
        raise Refused(NOT_OURS)
    return launch


def _launch(
    directory: str, launch: dict[str, Any], output: int, failpoint: Callable[[str], None]
) -> tuple[int, dict[str, Any] | None]:
    """Start the agent: its process ID, and what went wrong if the program was not executed."""
    held, go = os.pipe()
    answers, errors = os.pipe()
    shim = os.getpid()
    failpoint("shim.fork")
    agent = os.fork()
    if agent == 0:
        os.close(go)
        become_agent(launch, shim=shim, go=held, errors=errors, output=output)
    os.close(held)
    os.close(errors)
    failpoint("shim.forked")
    # Recorded before the agent runs its first instruction. If we die before this line there was no
    # agent (``go`` closes, and the child exits); after it there is never another.
    started = {
        "run_id": launch["run_id"],
        "pid": agent,
        "start_time": start_time(agent),
        "shim_pid": shim,
        "shim_start_time": start_time(shim),
        "boot_id": boot_id(),
        "started_at_ms": int(time.time() * 1000),
    }
    write_durably(directory, "started.json", json.dumps(started).encode())
    failpoint("shim.started")
    with contextlib.suppress(BrokenPipeError):  # killed already: its end is seen in a moment
        os.write(go, b"g")
    os.close(go)
    with open(answers, "rb") as file:
        answer = file.read()
    return agent, json.loads(answer) if answer else None


def _failpoints() -> Callable[[str], None]:
    if not any(name.startswith("ONCEBORN_FAILPOINTS") for name in os.environ):
        return lambda _name: None
    from ...runtime.failpoints import failpoint

    return failpoint
