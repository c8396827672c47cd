"""When a server is ready: its health by gRPC, its namespace and its search attributes are there."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Final

from temporalio.api.operatorservice.v1 import ListSearchAttributesRequest
from temporalio.api.workflowservice.v1 import DescribeNamespaceRequest
from temporalio.service import ConnectConfig, RPCError, ServiceClient

from ..runtime.failpoints import failpoint
from .address import SEARCH_ATTRIBUTES

_ATTEMPT: Final = timedelta(seconds=2)
_PAUSE_S: Final = 0.02


def wait_ready(address: str, namespace: str, *, limit_s: float, gone: Callable[[], bool]) -> bool:
    """Block until the server answers for all of it; False once ``gone()`` or the time is over."""
    found: list[bool] = []

    # A thread, so that this also works where an event loop runs already.
    def look() -> None:
        found.append(asyncio.run(_ready(address, namespace, limit_s, gone)))

    thread = threading.Thread(target=look, name="temporal-ready")
    thread.start()
    thread.join()
    return bool(found and found[0])


async def _ready(address: str, namespace: str, limit_s: float, gone: Callable[[], bool]) -> bool:
    loop = asyncio.get_running_loop()
    until = loop.time() + limit_s
    while not gone() and loop.time() < until:
        try:
            if await _answers(address, namespace):
                return True
        except (RPCError, RuntimeError):
            pass  # not yet: refused, not serving, no such namespace
        await asyncio.sleep(_PAUSE_S)
    return False


async def _answers(address: str, namespace: str) -> bool:
    failpoint("temporal.ask")
    service = await ServiceClient.connect(
        ConnectConfig(target_host=address, connect_timeout=_ATTEMPT)
    )
    if not await service.check_health(timeout=_ATTEMPT):
        return False
    await service.workflow_service.describe_namespace(
        DescribeNamespaceRequest(namespace=namespace), timeout=_ATTEMPT
    )
    listed = await service.operator_service.list_search_attributes(
        ListSearchAttributesRequest(namespace=namespace), timeout=_ATTEMPT
    )
    return all(key.name in listed.custom_attributes for key in SEARCH_ATTRIBUTES)
