"""Canonical bytes (RFC 8785) and domain-separated hashes."""

from __future__ import annotations

import hashlib
from enum import StrEnum
from typing import Any

import rfc8785


class Domain(StrEnum):
    """What a hash is of. Each kind of document has its own, so no two can be confused."""

    MANIFEST = "onceborn.manifest.v1"
    PLAN = "onceborn.plan.v1"
    REQUEST = "onceborn.step-request.v1"
    EVIDENCE = "onceborn.evidence.v1"
    ACTOR = "onceborn.actor.v1"
    IDEMPOTENCY = "onceborn.step-key.v1"
    TOKEN = "onceborn.token.v1"  # noqa: S105 - a domain name, no secret
    RUN_INPUT = "onceborn.run-input.v1"
    LAUNCH = "onceborn.launch.v1"


def canonical_bytes(document: Any) -> bytes:
    """The RFC 8785 form of a JSON document.

    Raises:
        ValueError: the document holds something that JSON cannot, or an integer beyond 2**53 - 1.
    """
    return rfc8785.dumps(document)


def canonical_text(document: Any) -> str:
    """The same as text, as the ledger stores it."""
    return canonical_bytes(document).decode("utf-8")


def digest(domain: Domain, document: Any) -> str:
    """SHA-256, in hex, over the domain's ASCII name, a zero byte and the canonical bytes."""
    return digest_bytes(domain, canonical_bytes(document))


def digest_bytes(domain: Domain, payload: bytes) -> str:
    """The same over bytes that are canonical already (or a secret)."""
    return hashlib.sha256(domain.value.encode("ascii") + b"\x00" + payload).hexdigest()
