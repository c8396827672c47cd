"""The creation loop without Temporal: the same ``next_action`` and the same activities, in line.

A test that needs no engine drives creations with it; waits move the database's clock instead of
passing.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from temporalio import activity

from onceborn.activities.drive import Driver
from onceborn.activities.kind import Host
from onceborn.activities.locks import HostLocks
from onceborn.runtime.ledger.database import Database
from onceborn.runtime.protocol import rules
from onceborn.runtime.protocol.orders import Looked, OperationRef, order_of
from onceborn.runtime.recovery import Owned, Recovery
from onceborn.runtime.settings import Settings
from onceborn.workflows.creation_activities import CreationActivities
from onceborn.workflows.engine import Engine

from .world import HOST


class Bench:
    """One host's hands, to be driven by a test."""

    def __init__(
        self,
        database: Database,
        data: Path,
        *,
        roots: tuple[Path, ...] = (),
        host_id: str = HOST,
        **settings: Any,
    ) -> None:
        self.database = database
        self.settings = Settings(data=data, repository_roots=roots, **settings)
        self.host = Host(
            host_id=host_id,
            data=data.resolve(),
            repository_roots=tuple(root.resolve() for root in roots),
            git_time_limit_s=self.settings.git_time_limit_s,
        )
        limits = self.settings.limits
        self.limits = limits
        self.locks = HostLocks(self.host.data / "locks")
        self.recovery = Recovery(database, limits, "test")
        self.driver = Driver(database, self.host, self.locks, limits, self.settings)
        engine = cast("Engine", None)  # dispatching a run is the one thing that needs it
        activities = CreationActivities(
            database, self.driver, self.recovery, engine, limits, host_id
        )
        self._by_name = {_name(a): a for a in (*activities.short(), *activities.long())}

    def call(self, name: str, argument: Any) -> Looked:
        """One activity, in line."""
        return cast("Looked", self._by_name[name](argument))

    def run(
        self,
        owned: Owned | OperationRef,
        *,
        watch: Callable[[rules.Action], None] = lambda action: None,
        most: int = 200,
    ) -> rules.StopReason:
        """The loop, to its end. ``watch`` sees each action before it is done.

        A run to be dispatched counts as the end: the creation itself is complete.
        """
        ref = OperationRef(owned.operation_id, owned.fence)
        looked = self.call("begin", ref)
        for _ in range(most):
            action = rules.next_action(looked.snapshot)
            watch(action)
            if isinstance(action, rules.Stop):
                return action.reason
            if isinstance(action, rules.DispatchRun):
                return rules.StopReason.COMPLETED
            if isinstance(action, rules.Wait):
                self.database.clock.advance(action.wait_ms)
                looked = self.call("look", ref)
                continue
            named = order_of(action, ref)
            assert named is not None
            looked = self.call(*named)
            assert not looked.busy, "nobody else works here"
        raise AssertionError(f"no end after {most} actions")


def _name(function: Callable[..., Any]) -> str:
    definition = activity._Definition.must_from_callable(function)
    assert definition.name is not None
    return definition.name
