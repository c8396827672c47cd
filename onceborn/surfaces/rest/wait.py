"""Waiting for a new creation's end, however long. The wait owns nothing: the creation goes on
whether the client, this process or the engine goes away.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, Final

import structlog
from litestar import Response

from ...runtime.admission import Admitted
from ...runtime.protocol.errors import (
    ConfigurationError,
    CreationAborted,
    DatabaseUnavailable,
    EngineUnavailable,
    OncebornError,
    ServerStopping,
)
from ...runtime.protocol.states import Outcome
from .body import AnyRequest
from .problems import public_message, refused
from .services import Services

_log = structlog.get_logger("onceborn.rest")
_HOW_TO_GO_ON: Final = (
    "The task was admitted: its creation is finished when {what} is back, without another create."
    " Read /api/v1/tasks/{task_id}/creation to see how it ends."
)
_handing_off: set[asyncio.Task[None]] = set()


async def finish(
    services: Services, request: AnyRequest, admitted: Admitted
) -> Outcome | Response[bytes]:
    """Hand the creation off and wait for its end; a problem where it was not created."""
    try:
        await _hand_off(services, admitted)
        settled = await _first(
            services.handoff.settled(admitted.operation_id),
            _disconnected(request),
            services.stopping.wait(),
        )
    except (EngineUnavailable, DatabaseUnavailable, ConfigurationError) as error:
        what = "the database" if isinstance(error, DatabaseUnavailable) else "Temporal"
        how = _HOW_TO_GO_ON.format(what=what, task_id=admitted.task_id)
        return _with_ids(type(error)(f"{public_message(error).rstrip('.')}. {how}"), admitted)
    if settled is None:
        return _with_ids(ServerStopping(), admitted)
    if settled.outcome is not None:
        outcome: Outcome = settled.outcome
        return outcome
    return _aborted(admitted, settled.failure or {})


def _aborted(admitted: Admitted, failure: dict[str, Any]) -> Response[bytes]:
    reason = str(failure.get("reason") or "a step failed")
    step = failure.get("step")
    error = CreationAborted(
        f"The creation was aborted in step {step}: {reason}" if step else reason,
        reason_code=failure.get("code", "aborted"),
        reason=reason,
        undone=failure.get("undone", []),
        **({"step": step} if step else {}),
    )
    return _with_ids(error, admitted)


def _with_ids(error: OncebornError, admitted: Admitted) -> Response[bytes]:
    return refused(error, task_id=admitted.task_id, operation_id=admitted.operation_id)


async def _hand_off(services: Services, admitted: Admitted) -> None:
    # A task of its own: if this request is cancelled, the hand-off is not.
    assert admitted.handle is not None
    begin = asyncio.create_task(services.handoff.begin(admitted.handle))
    _handing_off.add(begin)
    begin.add_done_callback(_handed_off)
    await asyncio.shield(begin)


def _handed_off(task: asyncio.Task[None]) -> None:
    _handing_off.discard(task)
    if not task.cancelled() and task.exception() is not None:
        _log.warning("hand-off failed; the sweep takes over", error=str(task.exception()))


async def _first(wanted: Coroutine[Any, Any, Any], *interrupts: Coroutine[Any, Any, Any]) -> Any:
    """The result of ``wanted``, or ``None`` when an interrupt came first."""
    main = asyncio.create_task(wanted)
    others = [asyncio.create_task(interrupt) for interrupt in interrupts]
    try:
        await asyncio.wait([main, *others], return_when=asyncio.FIRST_COMPLETED)
        return main.result() if main.done() else None
    finally:
        for task in (main, *others):
            task.cancel()
        await asyncio.gather(main, *others, return_exceptions=True)


async def _disconnected(request: AnyRequest) -> None:
    """Return once the client has gone: nobody is left to wait for."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
