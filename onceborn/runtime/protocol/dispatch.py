"""The dispatch key: a caller's own name for one intended spawn.

Source of the rule: design 3-runs-and-decisions; seed idempotent-run-admission.
"""

from __future__ import annotations

from typing import Final

from .errors import InvalidField

MAX_DISPATCH_KEY_BYTES: Final = 255


class InvalidDispatchKey(InvalidField):
    """The dispatch key is not valid."""

    code = "invalid_dispatch_key"


def check_dispatch_key(value: object, *, field: str = "dispatch_key") -> str | None:
    """Return the key as it is, or ``None`` where there is none.

    Opaque: no trimming, no folding, no normalization. Unlike an external ID an empty key is not
    "absent" but refused: a caller that sends one believes that it is protected.

    Raises:
        InvalidDispatchKey: not a string, empty, a NUL, a lone surrogate, or more than 255 UTF-8
            bytes. Names ``field``.
    """
    if value is None:
        return None
    if not isinstance(value, str):
        raise InvalidDispatchKey(field, f"{field} must be a string")
    if "\x00" in value:
        raise InvalidDispatchKey(field, f"{field} must not contain a NUL character")
    try:
        size = len(value.encode("utf-8"))
    except UnicodeEncodeError:
        raise InvalidDispatchKey(field, f"{field} cannot be encoded as UTF-8") from None
    if not 1 <= size <= MAX_DISPATCH_KEY_BYTES:
        raise InvalidDispatchKey(
            field,
            f"{field} is {size} bytes of UTF-8; 1 to {MAX_DISPATCH_KEY_BYTES} are allowed",
            limit=MAX_DISPATCH_KEY_BYTES,
        )
    return value
