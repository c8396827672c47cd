"""The REST application."""

from __future__ import annotations

from functools import cache

from litestar import Litestar, Response, get
from litestar.exceptions import HTTPException
from litestar.serialization import encode_json

from ...runtime.protocol.errors import OncebornError
from .health import health_routes
from .openapi import document
from .problems import on_http, on_refusal, on_surprise
from .services import Services
from .tasks import task_routes


@cache
def _openapi() -> bytes:
    return encode_json(document())


@get("/openapi.json")
async def openapi_json() -> Response[bytes]:
    return Response(_openapi(), media_type="application/json")


def create_app(services: Services) -> Litestar:
    """The application over the given services. It starts whatever is down, and says so."""

    def close() -> None:
        services.threads.shutdown(wait=False, cancel_futures=True)

    return Litestar(
        route_handlers=[*task_routes(services), *health_routes(services), openapi_json],
        exception_handlers={
            OncebornError: on_refusal,
            HTTPException: on_http,
            Exception: on_surprise,
        },
        # Described and limited by us: the framework must not look at a body before the identity.
        openapi_config=None,
        request_max_body_size=None,
        logging_config=None,
        on_shutdown=[close],
    )
