"""Logs: JSON for machines, readable lines on a terminal; always to stderr, never a secret.

Every library's standard logging goes through the same chain.
"""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Mapping, MutableMapping
from typing import Any, Final

import structlog

from ..runtime.protocol.handle import CreationHandle
from ..runtime.settings import Settings

_SECRET_NAMES: Final = frozenset(
    {"token", "completion_token", "authorization", "handle", "password", "api_key", "secret"}
)
_SECRETS: Final = (
    re.compile(r"onb_[A-Za-z0-9_-]{20,}"),
    re.compile(r"(?i)bearer\s+[^\s'\"]+"),
    # Credentials in a URL of any kind: scheme://user:password@host
    re.compile(r"(?<=://)[^\s/@'\"]*:[^\s/@'\"]*(?=@)"),
)
_HIDDEN: Final = "[hidden]"
_QUIET: Final = ("httpx", "httpcore", "asyncio", "alembic", "temporalio.worker")


def configure(settings: Settings) -> None:
    """Set logging up for this process."""
    console = settings.log_format == "console" or (
        settings.log_format == "auto" and sys.stderr.isatty()
    )
    level = logging.getLevelNamesMapping()[settings.log_level]
    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            *shared,
            structlog.stdlib.PositionalArgumentsFormatter(),
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                structlog.processors.format_exc_info,
                hide_secrets,
                structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())
                if console
                else structlog.processors.JSONRenderer(default=str, ensure_ascii=False),
            ],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level)
    logging.captureWarnings(True)  # a library's warning is a line like any other
    for name in _QUIET:
        logging.getLogger(name).setLevel(max(level, logging.WARNING))


def hide_secrets(
    _logger: Any, _method: str, event: MutableMapping[str, Any]
) -> MutableMapping[str, Any]:
    """A processor: hide what is named like a secret or looks like one, at any depth."""
    for name, value in event.items():
        event[name] = _HIDDEN if name.lower() in _SECRET_NAMES else _clean(value)
    return event


def _clean(value: Any) -> Any:
    if isinstance(value, str):
        for pattern in _SECRETS:
            value = pattern.sub(_HIDDEN, value)
        return value
    if isinstance(value, CreationHandle | bytes):
        return _HIDDEN
    if isinstance(value, Mapping):
        return {
            k: _HIDDEN if str(k).lower() in _SECRET_NAMES else _clean(v) for k, v in value.items()
        }
    if isinstance(value, list | tuple | set | frozenset):
        return [_clean(item) for item in value]
    if value is None or isinstance(value, bool | int | float):
        return value
    return _clean(str(value))
