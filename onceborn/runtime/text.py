"""Short names that people give to things, as both databases can store them."""

from __future__ import annotations

from typing import Final

from .protocol.errors import InvalidField

MAX_LABEL: Final = 200


def check_label(value: str, field: str, *, minimum: int = 1) -> str:
    """A name of at most 200 characters without control characters.

    Raises:
        InvalidField: names ``field``.
    """
    if not minimum <= len(value) <= MAX_LABEL:
        raise InvalidField(field, f"{field} must be {minimum} to {MAX_LABEL} characters long")
    if any(c < " " or c == "\x7f" for c in value):
        raise InvalidField(field, f"{field} must not contain control characters")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        raise InvalidField(field, f"{field} cannot be encoded as UTF-8") from None
    return value
