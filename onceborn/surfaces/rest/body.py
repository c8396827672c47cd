"""Reading what a caller sent, strictly as JSON and UTF-8, before anyone looks at its meaning."""

from __future__ import annotations

import json
import math
from typing import Any, Final
from urllib.parse import parse_qsl

from litestar import Request

from ...runtime.protocol.errors import BodyTooLarge, InvalidField, MalformedBody
from ...runtime.protocol.unreadable import Unreadable

AnyRequest = Request[Any, Any, Any]
_MAX_QUERY_FIELDS: Final = 20
_MAX_DIGITS: Final = 400


class ClientGone(Exception):
    """The client closed the connection before its request was read."""


async def read_body(request: AnyRequest, limit: int) -> bytes | None:
    """The body, or ``None`` where it is larger than ``limit`` bytes.

    Too large is a value and not an error: an unauthenticated caller gets 401 first.

    Raises:
        ClientGone: the connection closed in the middle.
    """
    announced = request.headers.get("content-length", "")
    if announced.isascii() and announced.isdigit() and int(announced) > limit:
        return None
    chunks: list[bytes] = []
    size = 0
    while True:
        event = await request.receive()
        if event["type"] != "http.request":
            raise ClientGone
        chunks.append(event["body"])
        size += len(event["body"])
        if size > limit:
            return None
        if not event["more_body"]:
            return b"".join(chunks)


def parse_object(raw: bytes | None, limit: int) -> dict[str, Any]:
    """The JSON object (RFC 8259) in a body.

    A name that occurs twice, a number beyond a double and the like become ``Unreadable``: the
    request is refused for them, but not before its identity was looked up.

    Raises:
        BodyTooLarge: the body was not read for its size.
        MalformedBody: not UTF-8, not JSON, or not an object.
    """
    if raw is None:
        raise BodyTooLarge(
            f"The request body is larger than the {limit} bytes that this server accepts.",
            limit=limit,
        )
    try:
        document = json.loads(
            raw.decode("utf-8"),
            parse_constant=_no_constant,
            parse_float=_finite,
            parse_int=_integer,
            object_pairs_hook=_distinct,
        )
    except UnicodeDecodeError:
        raise MalformedBody("The request body is not UTF-8.") from None
    except RecursionError:
        raise MalformedBody("The request body is nested too deeply.") from None
    except ValueError as error:
        raise MalformedBody(f"The request body is not JSON that can be read: {error}") from None
    if not isinstance(document, dict):
        raise MalformedBody("The request body must be a JSON object.")
    return document


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _finite(text: str) -> float | Unreadable:
    number = float(text)
    return number if math.isfinite(number) else Unreadable("is beyond what a double can hold")


def _integer(text: str) -> int | Unreadable:
    if len(text) > _MAX_DIGITS:
        return Unreadable("has too many digits")
    return int(text)


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    document = dict(pairs)
    if len(document) != len(pairs):
        names = [name for name, _ in pairs]
        for name in {name for name in names if names.count(name) > 1}:
            document[name] = Unreadable("occurs twice in one object")
    return document


def query(request: AnyRequest, allowed: frozenset[str]) -> dict[str, str]:
    """The query's fields, each at most once, percent-decoded as strict UTF-8.

    Raises:
        InvalidField: names a field that is unknown, repeated or not UTF-8.
    """
    fields: dict[str, str] = {}
    try:
        text = bytes(request.scope["query_string"]).decode("ascii")
        pairs = parse_qsl(
            text, keep_blank_values=True, errors="strict", max_num_fields=_MAX_QUERY_FIELDS
        )
    except ValueError:
        blame = next(iter(sorted(allowed)), "query")
        raise InvalidField(
            blame, "the query is not percent-encoded UTF-8, or has too many fields"
        ) from None
    for name, value in pairs:
        if name not in allowed:
            raise InvalidField(name, f"{name} is not a field of this query")
        if name in fields:
            raise InvalidField(name, f"{name} must be given once")
        fields[name] = value
    return fields
