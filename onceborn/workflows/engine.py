"""Temporal as the runtime uses it: every client call of ours is here, and none anywhere else.

A start is idempotent by its workflow ID, and its answer may be lost: then the ID is looked up.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from datetime import timedelta
from enum import StrEnum
from typing import Any, Final

import structlog
from temporalio.client import Client, WorkflowExecutionStatus, WorkflowFailureError
from temporalio.common import (
    SearchAttributePair,
    TypedSearchAttributes,
    WorkflowIDConflictPolicy,
    WorkflowIDReusePolicy,
)
from temporalio.exceptions import WorkflowAlreadyStartedError
from temporalio.service import RPCError, RPCStatusCode

from ..runtime.failpoints import failpoint
from ..runtime.protocol.errors import ConfigurationError, EngineUnavailable
from ..runtime.protocol.orders import OperationRef
from ..runtime.settings import Settings
from ..temporal_dev.address import OPERATION, TASK, WORKSPACE
from .connection import connect

log = structlog.get_logger(__name__)

WORKFLOW_TASK_TIMEOUT: Final = timedelta(seconds=3)
"""What bounds the noticing of a dead worker in a short step (design 7-performance)."""
RPC_TIMEOUT: Final = timedelta(seconds=5)
CALL_LIMIT_S: Final = 8.0
"""Over all attempts of one call."""

CREATION_WORKFLOW: Final = "creation"
RUN_WORKFLOW: Final = "agent_run"

_KEYS: Final = {"operation_id": OPERATION, "task_id": TASK, "workspace_id": WORKSPACE}


class Started(StrEnum):
    """What a start found. Only ``NEW`` says that this call started it."""

    NEW = "new"
    RUNNING = "running"
    CLOSED = "closed"


def host_queue(host_id: str) -> str:
    """The task queue that the host's workers poll."""
    return f"onceborn.host.{host_id}"


def agents_queue(host_id: str) -> str:
    """The task queue of the host's agent runs: each is supervised for as long as it lives, and
    none of them may take the place of a creation's work."""
    return f"{host_queue(host_id)}.agents"


def creation_id(operation_id: str, fence: int) -> str:
    """Workflow ID of one operation under one fence."""
    return f"creation/{operation_id}/{fence}"


def run_workflow_id(run_id: str) -> str:
    """Workflow ID of a run."""
    return f"run/{run_id}"


class Engine:
    """One process's access to Temporal. Connects when first asked, and again after it was lost."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._client: Client | None = None
        self._connecting: asyncio.Task[Client] | None = None

    async def client(self) -> Client:
        """The connected client; once there it heals its connection by itself.

        Raises:
            EngineUnavailable: Temporal cannot be reached.
        """
        if self._client is not None:
            return self._client
        # One attempt at a time, which all who ask meanwhile share: nobody queues behind another's.
        if self._connecting is None or self._connecting.done():
            self._connecting = asyncio.create_task(connect(self._settings))
        self._client = await asyncio.shield(self._connecting)
        return self._client

    async def check(self) -> None:
        """Ask for a sign of life.

        Raises:
            EngineUnavailable: there is none.
        """
        client = await self.client()
        try:
            failpoint("engine.check.before")
            async with asyncio.timeout(CALL_LIMIT_S):
                healthy = await client.service_client.check_health(timeout=RPC_TIMEOUT)
            failpoint("engine.check.after")
        except (RPCError, RuntimeError, TimeoutError) as error:
            raise EngineUnavailable() from error
        if not healthy:
            raise EngineUnavailable()

    async def start_creation(
        self, operation_id: str, fence: int, task_queue: str, **search: str
    ) -> Started:
        """Start the workflow that drives one operation under one fence.

        ``search``: ``task_id`` and ``workspace_id``, to find it by in Temporal's interface.
        Duplicates are rejected for ever: what ended under this fence is not driven again under it.

        Raises:
            EngineUnavailable: not started, or not known; the sweep starts it.
        """
        return await self._start(
            CREATION_WORKFLOW,
            OperationRef(operation_id, fence),
            workflow_id=creation_id(operation_id, fence),
            task_queue=task_queue,
            reuse=WorkflowIDReusePolicy.REJECT_DUPLICATE,
            search={"operation_id": operation_id, **search},
        )

    async def start_run(self, run_id: str, task_queue: str, **search: str) -> Started:
        """Start the workflow that launches and supervises a run's agent.

        One that failed, was terminated or was lost may be started again: it looks before it
        launches, so it adopts what lives and never launches a second agent.

        Raises:
            EngineUnavailable: not started, or not known; the sweep starts it.
        """
        return await self._start(
            RUN_WORKFLOW,
            run_id,
            workflow_id=run_workflow_id(run_id),
            task_queue=task_queue,
            reuse=WorkflowIDReusePolicy.ALLOW_DUPLICATE_FAILED_ONLY,
            search=search,
        )

    async def wait_for(self, workflow_id: str, timeout: float) -> bool:
        """Wait for a workflow's end, whatever it is; False if it has not ended within ``timeout``
        seconds or is not known.

        Raises:
            EngineUnavailable: Temporal cannot be reached.
        """
        client = await self.client()
        try:
            failpoint("engine.wait.before")
            async with asyncio.timeout(timeout):
                await client.get_workflow_handle(workflow_id).result()
            failpoint("engine.wait.after")
        except WorkflowFailureError:
            return True  # failed, terminated or cancelled: the ledger says what that means
        except TimeoutError:
            return False
        except (RPCError, RuntimeError) as error:
            if isinstance(error, RPCError) and error.status is RPCStatusCode.NOT_FOUND:
                return False
            raise EngineUnavailable() from error
        return True

    # -- starting -----------------------------------------------------------------------------

    async def _start(
        self,
        workflow: str,
        argument: Any,
        *,
        workflow_id: str,
        task_queue: str,
        reuse: WorkflowIDReusePolicy,
        search: Mapping[str, str],
    ) -> Started:
        client = await self.client()
        try:
            failpoint("engine.start.before")
            async with asyncio.timeout(CALL_LIMIT_S):
                handle = await client.start_workflow(
                    workflow,
                    argument,
                    id=workflow_id,
                    task_queue=task_queue,
                    id_reuse_policy=reuse,
                    id_conflict_policy=WorkflowIDConflictPolicy.USE_EXISTING,
                    task_timeout=WORKFLOW_TASK_TIMEOUT,
                    rpc_timeout=RPC_TIMEOUT,
                    search_attributes=_attributes(search),
                    request_eager_start=True,
                )
            failpoint("engine.start.after")
        except WorkflowAlreadyStartedError:
            return Started.CLOSED
        except (RPCError, RuntimeError, TimeoutError) as error:
            return await self._look_up(client, workflow_id, error)
        # The client's interface does not tell a start from an existing one; the answer does.
        response = getattr(handle, "_start_workflow_response", None)
        return Started.NEW if response is None or response.started else Started.RUNNING

    async def _look_up(self, client: Client, workflow_id: str, lost: Exception) -> Started:
        # The request may have been accepted: unknown is not "failed". Who started it cannot be
        # told any more, so nobody claims to have.
        if isinstance(lost, RPCError) and lost.status in _REFUSED:
            raise _refused(lost) from lost
        log.info("engine.answer_lost", workflow=workflow_id, error=str(lost))
        try:
            failpoint("engine.look_up.before")
            async with asyncio.timeout(CALL_LIMIT_S):
                seen = await client.get_workflow_handle(workflow_id).describe(
                    rpc_timeout=RPC_TIMEOUT
                )
            failpoint("engine.look_up.after")
        except (RPCError, RuntimeError, TimeoutError) as error:
            raise EngineUnavailable() from error
        running = seen.status is WorkflowExecutionStatus.RUNNING
        return Started.RUNNING if running else Started.CLOSED


_REFUSED: Final = (
    RPCStatusCode.INVALID_ARGUMENT,
    RPCStatusCode.NOT_FOUND,
    RPCStatusCode.PERMISSION_DENIED,
    RPCStatusCode.UNAUTHENTICATED,
)
"""Answers that say for certain that nothing was started."""


def _refused(error: RPCError) -> Exception:
    if error.status is RPCStatusCode.INVALID_ARGUMENT and "search attribute" in str(error).lower():
        names = ", ".join(key.name for key in _KEYS.values())
        return ConfigurationError(
            f"Temporal does not know the search attributes {names}; register each with"
            " `temporal operator search-attribute create --type Keyword --name NAME`"
        )
    return EngineUnavailable(f"Temporal refused the call: {error.message}")


def _attributes(search: Mapping[str, str]) -> TypedSearchAttributes:
    pairs = [SearchAttributePair(_KEYS[name], value) for name, value in search.items()]
    return TypedSearchAttributes(pairs)
