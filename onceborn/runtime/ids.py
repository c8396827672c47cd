"""Identifiers: a kind, 12 hex digits of time and 20 random ones. They sort by creation."""

from __future__ import annotations

import secrets
import time


def new_id(kind: str) -> str:
    """A new identifier such as ``tsk_0199c2...``; 80 random bits, so never one that exists."""
    return f"{kind}_{time.time_ns() // 1_000_000:012x}{secrets.token_hex(10)}"
