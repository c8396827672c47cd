"""The step that arms an agent's launch. Nothing is started here: Complete admits the run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sqlalchemy import Connection

from ..runtime.ledger import runs
from ..runtime.ledger.database import Database
from ..runtime.protocol.evidence import LaunchArmed
from ..runtime.protocol.plan import AgentLaunchRequest
from .kind import Step, StepRetry


class AgentLaunch:
    """The kind ``agent_launch``. Its success is the state ``armed``, which the driver sets."""

    name = "agent_launch"

    def apply(
        self,
        step: Step[AgentLaunchRequest],
        connection: Connection,  # noqa: ARG002
        database: Database,  # noqa: ARG002
    ) -> LaunchArmed:
        """The intent itself is the effect: session and dispatch key of the run to admit."""
        return LaunchArmed(
            session_id=step.request.session_id, dispatch_key=step.request.dispatch_key
        )

    def retract(
        self,
        step: Step[AgentLaunchRequest],
        connection: Connection,
        database: Database,  # noqa: ARG002
    ) -> Mapping[str, Any]:
        """Prove that no run of the dispatch key exists; an armed intent has made nothing else."""
        key = step.request.dispatch_key
        holder = runs.held_by(connection, step.workspace_id, key)
        if holder is not None:
            raise StepRetry(
                "launch.run_exists", f"run {holder} was admitted for this launch", run_id=holder
            )
        return {"dispatch_key": key, "runs": 0}
