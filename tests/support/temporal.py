"""A real Temporal server for the tests, from the wheel, and names that no two tests share."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from google.protobuf.duration_pb2 import Duration
from temporalio.api.enums.v1 import IndexedValueType
from temporalio.api.operatorservice.v1 import AddSearchAttributesRequest
from temporalio.api.workflowservice.v1 import RegisterNamespaceRequest
from temporalio.client import Client
from temporalio.common import SearchAttributePair, TypedSearchAttributes
from temporalio.service import RPCError, RPCStatusCode

from onceborn.temporal_dev import SEARCH_ATTRIBUTES, EmbeddedTemporal

_READY_WITHIN_S = 60.0


@contextmanager
def running_temporal(folder: Path) -> Iterator[str]:
    """Start a server as the product does; yields its ``host:port``. It is stopped at the end."""
    with EmbeddedTemporal(folder) as server:
        yield server.address


def unique(prefix: str) -> str:
    """A name that nothing else in this session has (task queues, workflow IDs, namespaces)."""
    return f"{prefix}-{secrets.token_hex(6)}"


def fresh_namespace(address: str) -> str:
    """Register a namespace that only the caller uses, ready for work, and return its name."""
    return asyncio.run(_register(address, unique("test")))


async def _register(address: str, name: str) -> str:
    client = await Client.connect(address, namespace=name)
    await client.workflow_service.register_namespace(
        RegisterNamespaceRequest(
            namespace=name,
            workflow_execution_retention_period=Duration(seconds=86_400),
        )
    )
    keyword = IndexedValueType.INDEXED_VALUE_TYPE_KEYWORD
    attributes = {key.name: keyword for key in SEARCH_ATTRIBUTES}
    request = AddSearchAttributesRequest(namespace=name, search_attributes=attributes)
    until = time.monotonic() + _READY_WITHIN_S
    while not await _accepted(client, request) and time.monotonic() < until:
        await asyncio.sleep(0.1)
    return name


async def _accepted(client: Client, request: AddSearchAttributesRequest) -> bool:
    """Whether the server takes a workflow with every search attribute."""
    try:
        await client.operator_service.add_search_attributes(request)
        handle = await client.start_workflow(
            "Ready",
            id=unique("ready"),
            task_queue=unique("nobody"),
            search_attributes=TypedSearchAttributes(
                [SearchAttributePair(key, "x") for key in SEARCH_ATTRIBUTES]
            ),
        )
        await handle.terminate()
    except RPCError as error:
        if error.status in (RPCStatusCode.NOT_FOUND, RPCStatusCode.INVALID_ARGUMENT):
            return False
        raise
    return True
