"""Refusals as problem documents (RFC 9457)."""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus
from typing import Any, Final

import structlog
from litestar import Request, Response
from litestar.exceptions import HTTPException
from litestar.serialization import encode_json

from ...runtime.protocol.errors import (
    ConfigurationError,
    DatabaseUnavailable,
    EngineUnavailable,
    InvalidField,
    OncebornError,
    Unauthenticated,
)

MEDIA_TYPE: Final = "application/problem+json"
_RETRY_AFTER: Final = {429: "5", 503: "2"}
_RESERVED: Final = frozenset({"type", "title", "status", "detail", "code"})
_OF_STATUS: Final = {404: "not_found", 405: "method_not_allowed", 413: "body_too_large"}
_INSIDE: Final = (ConfigurationError, DatabaseUnavailable, EngineUnavailable)
"""Their messages name places that only an operator may know; they are in the log."""
_log = structlog.get_logger("onceborn.rest")


def problem(
    status: int,
    code: str,
    title: str,
    detail: str,
    fields: Mapping[str, Any] | None = None,
    headers: Mapping[str, str] | None = None,
) -> Response[bytes]:
    """A problem document. It never holds the path or a time: equal refusals are equal bytes."""
    document = {
        "type": f"urn:onceborn:problem:{code}",
        "title": title,
        "status": status,
        "detail": detail,
        "code": code,
        **{name: value for name, value in (fields or {}).items() if name not in _RESERVED},
    }
    extra = dict(headers or {})
    if status in _RETRY_AFTER:
        extra.setdefault("Retry-After", _RETRY_AFTER[status])
    return Response(encode_json(document), status_code=status, media_type=MEDIA_TYPE, headers=extra)


def refused(error: OncebornError, **fields: Any) -> Response[bytes]:
    """An error of ours as a problem. A 5xx without a remedy says nothing of its inside."""
    status = error.http_status
    title = (type(error).__doc__ or "").strip().splitlines()[0]
    if status == HTTPStatus.INTERNAL_SERVER_ERROR:
        return internal(error)
    if isinstance(error, InvalidField):
        title = "A field of the request is not valid."
    if isinstance(error, _INSIDE) and (error.fields or isinstance(error, ConfigurationError)):
        _log.warning("not available", code=error.code, reason=error.message)
        error = type(error)(public_message(error))
    headers = {"WWW-Authenticate": "Bearer"} if isinstance(error, Unauthenticated) else {}
    return problem(status, error.code, title, error.message, {**error.fields, **fields}, headers)


def public_message(error: OncebornError) -> str:
    """The message without what only an operator may know (where Temporal or the database is)."""
    if isinstance(error, _INSIDE):
        return (type(error).__doc__ or "").strip().splitlines()[0]
    return error.message


def internal(error: Exception) -> Response[bytes]:
    """What went wrong is for the log; the caller learns that it did."""
    _log.error("request failed", exc_info=error)
    return problem(
        500,
        "internal_error",
        "Something went wrong.",
        "Something went wrong here; the server's log says what. Nothing is lost: try again.",
    )


def on_refusal(_: Request[Any, Any, Any], error: OncebornError) -> Response[bytes]:
    return refused(error)


def on_http(_: Request[Any, Any, Any], error: HTTPException) -> Response[bytes]:
    """The framework's own refusals: no such route, no such method."""
    status = error.status_code
    if status >= HTTPStatus.INTERNAL_SERVER_ERROR:
        return internal(error)
    code = _OF_STATUS.get(status, "bad_request")
    if status == HTTPStatus.NOT_FOUND:
        text = "There is no such thing here."
        return problem(status, code, text, text)
    phrase = f"{HTTPStatus(status).phrase}."
    allowed = {k: v for k, v in (error.headers or {}).items() if k.lower() == "allow"}
    return problem(status, code, phrase, phrase, headers=allowed)


def on_surprise(_: Request[Any, Any, Any], error: Exception) -> Response[bytes]:
    return internal(error)
