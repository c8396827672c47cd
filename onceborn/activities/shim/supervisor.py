"""Waiting for the agent's end, bringing it about, and leaving no process of it behind."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time

from .processes import children_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Final

    from .log import Log

STRAY_GRACE_S: Final = 2.0
"""What processes that outlive the agent have to end by themselves."""
KILL_BOUND_S: Final = 30.0
"""After so long a process that SIGKILL does not end (it hangs in the kernel) is reported."""
_ROUND_S: Final = 0.05


class Supervisor:
    """One agent's. Made before the agent is: from then on SIGTERM means "stop it".

    The end has one way: SIGTERM to the agent's group and to every child of ours, a grace, SIGKILL
    in rounds until none is left. As subreaper we inherit whatever the agent's processes leave
    behind, so each round reaches what the former one orphaned. Only children of ours are signalled,
    and only we can reap them: a process ID that was used again is never hit. The agent itself is
    reaped last, so its group's number is not used again either.
    """

    def __init__(self, time_limit_s: float, grace_s: float) -> None:
        self._limit = time.monotonic() + time_limit_s
        self._grace_s = grace_s
        self._reason = ""
        self._agent = 0
        self._end: tuple[int, int] | None = None
        self._kill_at: float | None = None
        self._wake = self._listen()

    def until_gone(self, agent: int, log: Log) -> dict[str, Any]:
        """Returns once no process of the agent is left: reason, exit code or signal, survivors."""
        self._agent = agent
        poll = select.poll()
        poll.register(self._wake, select.POLLIN)
        poll.register(log.source, select.POLLIN)
        while True:
            for descriptor, _ in poll.poll(self._patience_s() * 1000):
                if descriptor == self._wake:
                    with contextlib.suppress(BlockingIOError):
                        os.read(self._wake, 4096)
                elif not log.pump():
                    poll.unregister(log.source)
            self._note_end()
            children = self._living()
            if self._over(children):
                return self._document(children)

    def _listen(self) -> int:
        wake, bell = os.pipe()
        os.set_blocking(wake, False)
        os.set_blocking(bell, False)
        signal.set_wakeup_fd(bell, warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, lambda *_: self._because("stopped"))
        signal.signal(signal.SIGCHLD, lambda *_: None)
        return wake

    def _because(self, reason: str) -> None:
        self._reason = self._reason or reason

    def _patience_s(self) -> float:
        if self._reason:
            return _ROUND_S
        return min(max(0.0, self._limit - time.monotonic()), 3600.0)

    def _note_end(self) -> None:
        if self._end is None:
            options = os.WEXITED | os.WNOHANG | os.WNOWAIT
            found = os.waitid(os.P_PID, self._agent, options)
            if found is not None:
                self._end = (found.si_code, found.si_status)

    def _living(self) -> list[int]:
        living = []
        for pid, state in children_of(os.getpid()):
            if state not in "ZX":
                living.append(pid)
            elif pid != self._agent:
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, os.WNOHANG)
        return living

    def _over(self, children: list[int]) -> bool:
        now = time.monotonic()
        if self._end is not None:
            self._because("exited")
            if not children:
                return True
        elif now >= self._limit:
            self._because("time_limit")
        if not self._reason:
            return False
        if self._kill_at is None:
            strays = self._reason == "exited"
            self._kill_at = now + (min(self._grace_s, STRAY_GRACE_S) if strays else self._grace_s)
            self._signal(children, signal.SIGTERM)
        elif now >= self._kill_at:
            self._signal(children, signal.SIGKILL)
        return now >= self._kill_at + KILL_BOUND_S

    def _signal(self, children: list[int], number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._agent, number)
        for pid in children:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, number)

    def _document(self, survivors: list[int]) -> dict[str, Any]:
        code, status = self._end or (0, 0)
        exited = code == os.CLD_EXITED
        return {
            "reason": self._reason,
            "exit_code": status if exited else None,
            "signal": status if self._end and not exited else None,
            "survivors": survivors,
        }
