"""Connecting to Temporal: a cluster of your own, or the data folder's embedded server."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from pathlib import Path
from typing import Final

from temporalio.client import Client
from temporalio.service import RetryConfig, RPCError, TLSConfig

from ..runtime.failpoints import failpoint
from ..runtime.protocol.errors import ConfigurationError, EngineUnavailable
from ..runtime.settings import Settings
from ..temporal_dev import recorded_address

CONNECT_LIMIT_S: Final = 5.0

RETRIES: Final = RetryConfig(
    # A call is tried again for about as long as somebody at the other end of an HTTP request
    # waits; the sweep is there for the rest.
    initial_interval_millis=50,
    max_interval_millis=500,
    max_elapsed_time_millis=3000,
    max_retries=8,
)


async def connect(settings: Settings) -> Client:
    """A connected client.

    Raises:
        ConfigurationError: a TLS file cannot be read.
        EngineUnavailable: nothing answers at the address, or there is none yet.
    """
    address = settings.temporal_address or recorded_address(settings.resolved_data)
    if address is None:
        raise EngineUnavailable(
            "TEMPORAL_ADDRESS is not set, and no embedded Temporal server was started in"
            f" {settings.resolved_data}; run `onceborn up`"
        )
    key = settings.temporal_api_key
    tls = _tls(settings)
    try:
        failpoint("engine.connect.before")
        async with asyncio.timeout(CONNECT_LIMIT_S):
            client = await Client.connect(
                address,
                namespace=settings.temporal_namespace,
                api_key=key.get_secret_value() if key is not None else None,
                tls=tls,
                retry_config=RETRIES,
                connect_timeout=timedelta(seconds=CONNECT_LIMIT_S),
            )
        failpoint("engine.connect.after")
        return client
    except (RPCError, RuntimeError, TimeoutError) as error:
        # The text of the error may hold the address, never the key.
        raise EngineUnavailable(
            f"Temporal cannot be reached at {address}; what was admitted is finished when it is"
            " back",
            address=address,
        ) from error


def _tls(settings: Settings) -> TLSConfig | bool | None:
    files = (
        settings.temporal_tls_server_ca,
        settings.temporal_tls_cert,
        settings.temporal_tls_key,
    )
    if not any(files):
        # None: on with an API key, off without one.
        return True if settings.temporal_tls else None
    ca, certificate, key = (_read(path) for path in files)
    if (certificate is None) is not (key is None):
        raise ConfigurationError(
            "TEMPORAL_TLS_CLIENT_CERT_PATH and TEMPORAL_TLS_CLIENT_KEY_PATH belong together;"
            " set both or neither"
        )
    return TLSConfig(server_root_ca_cert=ca, client_cert=certificate, client_private_key=key)


def _read(path: Path | None) -> bytes | None:
    if path is None:
        return None
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigurationError(f"TLS file {path} cannot be read: {error.strerror}") from None
