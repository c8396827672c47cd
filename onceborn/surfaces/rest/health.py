"""Is it alive, and can it serve creates?"""

from __future__ import annotations

from collections.abc import Callable

import structlog
from litestar import Response, get
from litestar.handlers import HTTPRouteHandler
from litestar.serialization import encode_json

from ...runtime.ledger import hosts, schema
from ...runtime.protocol.errors import NoHostAvailable, OncebornError
from .problems import public_message
from .schemas import Check, Readiness
from .services import Services

_log = structlog.get_logger("onceborn.rest")


def health_routes(services: Services) -> list[HTTPRouteHandler]:
    """``/healthz`` says that the process answers; ``/readyz`` what it needs and what is missing."""

    @get("/healthz")
    async def healthz() -> Response[bytes]:
        return Response(b'{"ok":true}', media_type="application/json")

    @get("/readyz")
    async def readyz() -> Response[bytes]:
        checks = await services.run(lambda: _ledger_checks(services))
        try:
            await services.engine.check()
            checks["engine"] = {"ok": True}
        except Exception as error:
            checks["engine"] = _failed(error)
        ready = all(check["ok"] for check in checks.values())
        document: Readiness = {"ready": ready, "checks": checks}
        return Response(
            encode_json(document),
            status_code=200 if ready else 503,
            media_type="application/json",
        )

    return [healthz, readyz]


def _ledger_checks(services: Services) -> dict[str, Check]:
    def reach() -> None:
        with services.database.reading() as connection:
            connection.exec_driver_sql("SELECT 1")

    def host() -> None:
        with services.database.reading() as connection:
            if hosts.place(connection) is None:
                raise NoHostAvailable

    return {
        "database": _check(reach),
        "migration": _check(lambda: schema.require_head(services.database)),
        "identities": _check(services.attestor.require),
        "host": _check(host),
    }


def _check(probe: Callable[[], object]) -> Check:
    try:
        probe()
    except Exception as error:
        return _failed(error)
    return {"ok": True}


def _failed(error: Exception) -> Check:
    # Only messages of ours are shown to whoever asks; anything else may hold an address.
    if isinstance(error, OncebornError):
        found = "; ".join(error.fields.get("findings", ()))
        message = public_message(error)
        return {"ok": False, "detail": f"{message} {found}".strip()}
    _log.warning("a readiness check failed", exc_info=error)
    return {"ok": False, "detail": "failed; the server's log says why"}
