"""Names that reach git and the file system: what a caller may send, and what we derive.

Pure text rules; whether a thing exists is asked on the host. The branch rules are those of
git-check-ref-format(1), made a little stricter: no leading dash anywhere, no control characters.
"""

from __future__ import annotations

import re
import unicodedata
from typing import Final
from urllib.parse import urlsplit

from .errors import InvalidField

MAX_REF_BYTES: Final = 200
MAX_SOURCE_BYTES: Final = 2048
_FORBIDDEN_IN_REF: Final = re.compile(r"[\x00-\x20\x7f~^:?*\[\\]|\.\.|@\{|//")
_COMMIT: Final = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
_SCP_LIKE: Final = re.compile(
    r"(?:[A-Za-z0-9._][A-Za-z0-9._-]*@)?[A-Za-z0-9][A-Za-z0-9.-]*:(?!/)[^\s]+"
)
_SCHEMES: Final = frozenset({"https", "http", "ssh", "git"})
_SLUG_LENGTH: Final = 40


def is_commit(ref: str) -> bool:
    """Whether ``ref`` is a full commit ID."""
    return _COMMIT.fullmatch(ref) is not None


def check_ref(value: str, field: str) -> str:
    """A branch or tag name, or a full commit ID, that is safe to hand to git.

    Raises:
        InvalidField: names ``field`` and says which rule was broken.
    """
    try:
        size = len(value.encode("utf-8"))
    except UnicodeEncodeError:
        raise InvalidField(field, f"{field} cannot be encoded as UTF-8") from None
    if not 1 <= size <= MAX_REF_BYTES:
        raise InvalidField(field, f"{field} must be 1 to {MAX_REF_BYTES} bytes long")
    if value.startswith("-") or "/-" in value:
        raise InvalidField(field, f"{field} must not have a part that starts with '-'")
    if (
        _FORBIDDEN_IN_REF.search(value)
        or value.startswith("/")
        or value.endswith(("/", "."))
        or value == "@"
        or any(p.startswith(".") or p.endswith(".lock") for p in value.split("/"))
    ):
        raise InvalidField(field, f"{field} is not a valid git reference name")
    return value


def check_branch(value: str, field: str) -> str:
    """A name for a fresh branch: a reference that is neither a commit ID nor a reserved name."""
    check_ref(value, field)
    if is_commit(value) or value == "HEAD" or value.startswith("refs/"):
        raise InvalidField(field, f"{field} must be a plain branch name")
    return value


def is_local_source(source: str) -> bool:
    """Whether a source names a directory on the host."""
    return source.startswith("/")


def check_source(value: str, field: str) -> str:
    """A repository's address: an absolute path, an https, http, ssh or git URL, or ``host:path``.

    Credentials in an address are refused: what is never accepted can never leak.

    Raises:
        InvalidField: names ``field``; the message never repeats the value.
    """
    try:
        size = len(value.encode("utf-8"))
    except UnicodeEncodeError:
        raise InvalidField(field, f"{field} cannot be encoded as UTF-8") from None
    if not 1 <= size <= MAX_SOURCE_BYTES:
        raise InvalidField(field, f"{field} must be 1 to {MAX_SOURCE_BYTES} bytes long")
    if value.startswith("-") or "::" in value or any(c < " " or c == "\x7f" for c in value):
        raise InvalidField(field, f"{field} is not an address that this server accepts")
    if is_local_source(value):
        if ".." in value.split("/"):
            raise InvalidField(field, f"{field} must not contain '..'")
        return value
    if "://" not in value:
        if _SCP_LIKE.fullmatch(value):
            return value
        raise InvalidField(field, f"{field} must be an absolute path or a URL")
    try:
        parts = urlsplit(value)
        host, password = parts.hostname, parts.password
    except ValueError:
        raise InvalidField(field, f"{field} is not a URL") from None
    if parts.scheme not in _SCHEMES:
        allowed = ", ".join(sorted(_SCHEMES))
        raise InvalidField(field, f"{field} must use one of these schemes: {allowed}")
    if not host or host.startswith("-") or (parts.username or "").startswith("-"):
        raise InvalidField(field, f"{field} must name a host")
    if password is not None or (parts.username and parts.scheme != "ssh"):
        raise InvalidField(
            field, f"{field} must not carry credentials; set up a git credential helper on the host"
        )
    if parts.query or parts.fragment:
        raise InvalidField(field, f"{field} must not have a query or a fragment")
    return value


def slug(title: str) -> str:
    """A short, readable part of a name: lower-case ASCII letters, digits and single dashes.

    Never empty and never relied on to be distinct: whoever uses it appends a part that is.
    """
    ascii_text = unicodedata.normalize("NFKD", title).encode("ascii", "ignore").decode().lower()
    words = re.sub(r"[^a-z0-9]+", "-", ascii_text).strip("-")
    return words[:_SLUG_LENGTH].rstrip("-") or "task"


def default_branch_name(title: str, task_id: str) -> str:
    """The branch of a task that asked for none; distinct for distinct tasks."""
    return f"onceborn/{slug(title)}-{short_id(task_id)}"


def short_id(identifier: str) -> str:
    """The random tail of an ID: 16 hex digits, distinct for distinct IDs."""
    return identifier[-16:]
