"""Values that JSON allows and nobody here can hold."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .errors import InvalidField


@dataclass(frozen=True, slots=True)
class Unreadable:
    """Stands where such a value was; no field takes it.

    A held identity is found however wrong the rest of the request is, so a surface puts this in
    the value's place, and the request is refused for it only after the look-up.
    """

    what: str


def refuse_unreadable(document: Any, field: str = "") -> None:
    """Refuse a document that holds one.

    Raises:
        InvalidField: names the first one, e.g. ``repositories.0.branch``.
    """
    if isinstance(document, Unreadable):
        raise InvalidField(field, f"{field} {document.what}")
    items: Any = ()
    if isinstance(document, dict):
        items = document.items()
    elif isinstance(document, list):
        items = enumerate(document)
    for name, value in items:
        refuse_unreadable(value, f"{field}.{name}" if field else str(name))
