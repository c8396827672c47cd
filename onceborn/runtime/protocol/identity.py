"""The external ID: a caller's own name for the entity behind a task.

Source of the rule: design 1-protocol, 'Identity'; seed external-task-id-idempotency, AC-001.1.
"""

from __future__ import annotations

from typing import Final

from .errors import InvalidExternalId

MAX_EXTERNAL_ID_BYTES: Final = 255

# Unicode's White_Space property, spelt out: str.strip() also takes U+001C..U+001F, which are
# control characters here and refused before any trimming.
_WHITE_SPACE: Final = (
    "\u0020\u0085\u00a0\u1680\u2000\u2001\u2002\u2003\u2004\u2005\u2006\u2007"
    "\u2008\u2009\u200a\u2028\u2029\u202f\u205f\u3000"
)


def normalize_external_id(value: object, *, field: str = "external_id") -> str | None:
    """Return the identity that ``value`` names, or ``None`` where it names none.

    ``None``, ``""`` and white space alone mean "absent". What survives is kept verbatim: no case
    folding and no Unicode normalization.

    Raises:
        InvalidExternalId: not a string, a control character anywhere (U+0000..U+001F, U+007F), a
            lone surrogate, or more than 255 UTF-8 bytes after trimming. Names ``field``.
    """
    if value is None:
        return None
    if not isinstance(value, str):
        raise InvalidExternalId(field, f"{field} must be a string")
    if any(c < " " or c == "\x7f" for c in value):
        raise InvalidExternalId(field, f"{field} must not contain ASCII control characters")
    trimmed = value.strip(_WHITE_SPACE)
    if not trimmed:
        return None
    try:
        size = len(trimmed.encode("utf-8"))
    except UnicodeEncodeError:
        raise InvalidExternalId(field, f"{field} cannot be encoded as UTF-8") from None
    if size > MAX_EXTERNAL_ID_BYTES:
        raise InvalidExternalId(
            field,
            f"{field} is {size} bytes of UTF-8; at most {MAX_EXTERNAL_ID_BYTES} are allowed",
            limit=MAX_EXTERNAL_ID_BYTES,
        )
    return trimmed
