"""A run on its host: what the ledger says, what the host shows, and the one launch between them.

Every step may be cut off anywhere and done again, by anybody: it looks before it acts. A launcher
claims the run in the ledger with a fresh token; the token is checked again under the run's lock on
the host, and by the shim.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import structlog

from ..runtime.ledger import runs, sessions
from ..runtime.ledger.database import Database
from ..runtime.ledger.runs import Ending, RunRow
from ..runtime.protocol.canonical import canonical_text
from ..runtime.protocol.errors import (
    DatabaseUnavailable,
    NotFound,
    OncebornError,
    StaleExpectation,
)
from ..runtime.protocol.plan import LaunchConfiguration
from . import agent, agent_look
from .agent import Launch
from .agent_look import Look
from .kind import Host

log = structlog.get_logger(__name__)

CLOSED: Final = "closed"


class LaunchRefused(OncebornError):
    """The run cannot be launched, whatever is tried."""

    code = "launch_refused"


@dataclass(frozen=True, slots=True)
class Seen:
    """``state``: a look's, or ``closed`` where the ledger has an end, then named by ``reason``."""

    state: str
    reason: str = ""


class RunSteps:
    """The steps of the runs of one host."""

    def __init__(self, database: Database, host: Host, *, grace_s: float = agent.GRACE_S) -> None:
        self._database = database
        self._host = host
        self._grace_s = grace_s

    def look(self, run_id: str) -> Look:
        """What the host shows."""
        return agent_look.look(agent.run_directory(self._host, run_id))

    # -- launch -------------------------------------------------------------------------------

    def launch(self, run_id: str) -> Seen:
        """Launch the run's agent unless it was launched before.

        ``absent`` says that nothing was started, and why.

        Raises:
            NotFound, LaunchRefused: no such run, or not one of this host.
            DatabaseUnavailable: it may have been launched; calling again finds out.
        """
        run = self._started(run_id)
        if run.ended:
            return Seen(CLOSED, run.state)
        seen = self.look(run_id)
        if run.state == "running":
            return Seen(seen.state)  # absent too: launched once is launched for ever
        token = self._claim(run)
        if token is None:
            return Seen("absent", "another launcher claimed the run at the same instant")
        if seen.state in ("absent", "starting"):
            try:
                what = self._launch_of(run, token)
                seen = agent.launch(self._host, what, self._guard(run_id, token))
            except DatabaseUnavailable:
                raise
            except OncebornError as error:
                return Seen("absent", error.message)
        if seen.state in ("running", "ended"):
            with self._database.transaction("run.running") as connection:
                runs.mark_running(connection, run_id, token)
        return Seen(seen.state)

    def _started(self, run_id: str) -> RunRow:
        with self._database.reading() as connection:
            run = runs.get(connection, run_id)
        if run is None:
            raise NotFound(f"there is no run {run_id}", run_id=run_id)
        if run.host_id != self._host.host_id:
            raise LaunchRefused(f"run {run_id} belongs to host {run.host_id}", run_id=run_id)
        if run.state == "admitted":
            # That we are here shows that Temporal has accepted it; whoever started it may not have
            # noted it yet.
            with self._database.transaction("run.started") as connection:
                runs.mark_started(connection, self._database, run_id)
        return run

    def _claim(self, run: RunRow) -> str | None:
        token = secrets.token_hex(16)
        with self._database.transaction("run.claim") as connection:
            mine = runs.claim_launch(connection, run.id, seen=run.launch_token, token=token)
        return token if mine else None

    def _guard(self, run_id: str, token: str) -> Callable[[], None]:
        def guard() -> None:
            with self._database.reading() as connection:
                if not runs.holds_launch(connection, run_id, token):
                    raise StaleExpectation("another launcher has claimed the run")

        return guard

    def _launch_of(self, run: RunRow, token: str) -> Launch:
        with self._database.reading() as connection:
            session = sessions.get(connection, run.session_id) if run.session_id else None
        if session is None:
            raise LaunchRefused(f"run {run.id} has no session to launch")
        if sessions.launch_hash(session.launch) != session.launch_hash:
            raise LaunchRefused(f"the launch configuration of session {session.id} was altered")
        try:
            configuration = LaunchConfiguration.model_validate_json(session.launch)
        except ValueError as error:
            raise LaunchRefused(f"session {session.id} cannot be read: {error}") from None
        return Launch(
            run_id=run.id,
            task_id=session.task_id,
            token=token,
            argv=configuration.argv,
            environment=configuration.environment,
            working_directory=self._host.path(configuration.working_directory),
            time_limit_s=configuration.time_limit_s,
            prompt=configuration.prompt,
            grace_s=self._grace_s,
        )

    # -- the end ------------------------------------------------------------------------------

    def finish(self, run_id: str, reason: str) -> Seen:
        """Record how the run ended; with what the host shows as its result.

        Returns the look's state where the agent still runs. ``reason`` is why nothing was launched.

        Raises:
            DatabaseUnavailable: it may have been recorded; calling again finds out.
        """
        run = self._started(run_id)
        if run.ended:
            return Seen(CLOSED, run.state)
        seen = self.look(run_id)
        if seen.state == "absent" and run.state != "running":
            return self._never_launched(run, reason)
        if seen.state in ("starting", "running"):
            return Seen(seen.state)
        if seen.state != "ended":
            # Its shim was killed, or its folder removed below it: what lives is ended first.
            self._clear_strays(run_id)
        return self._record(run_id, ("started", "running"), *_result(seen))

    def _never_launched(self, run: RunRow, reason: str) -> Seen:
        # In this order nothing can start afterwards: the claim takes the launch from every other
        # launcher, the bar from every shim that is still on its way, and then we look again.
        if self._claim(run) is None:
            return Seen("starting", reason)
        seen = agent.bar(self._host, run.id)
        if seen.state != "absent":
            return Seen("running")  # it was on its way, and is to be supervised like any other
        result = {"reason": "not_launched", "detail": reason, "evidence": seen.evidence()}
        return self._record(run.id, ("started",), "failed", result)

    def _record(
        self, run_id: str, expected: tuple[str, ...], ending: Ending, result: dict[str, Any]
    ) -> Seen:
        with self._database.transaction("run.finish") as connection:
            runs.finish(
                connection,
                self._database,
                run_id,
                expected=expected,
                ending=ending,
                result=canonical_text(result),
            )
            run = runs.get(connection, run_id)
        assert run is not None
        log.info("run.ended", run=run_id, state=run.state, reason=result["reason"])
        return Seen(CLOSED, run.state)

    def _clear_strays(self, run_id: str) -> None:
        ended, left = agent_look.clear_strays(run_id)
        if ended or left:
            log.warning("run.strays", run=run_id, ended=ended, still_there=left)

    def stop_if_unwanted(self, run_id: str) -> bool:
        """Ask the agent to stop where the ledger has closed its run already (a deletion, say)."""
        with self._database.reading() as connection:
            run = runs.get(connection, run_id)
        if run is not None and not run.ended:
            return False
        return agent_look.stop(agent.run_directory(self._host, run_id))


def _result(seen: Look) -> tuple[Ending, dict[str, Any]]:
    evidence = seen.evidence()
    if seen.exit is None:
        reason = "shim_killed" if seen.started else "folder_gone"
        return "lost", {"reason": reason, "evidence": evidence}
    reason = seen.exit["reason"]
    result = {
        "reason": reason,
        "exit_code": seen.exit["exit_code"],
        "signal": seen.exit["signal"],
        "evidence": evidence,
    }
    if reason == "stopped":
        return "cancelled", result
    return ("succeeded" if reason == "exited" and result["exit_code"] == 0 else "failed"), result
