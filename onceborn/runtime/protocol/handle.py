"""The private proof that this process was given ``Created``."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NoReturn


@dataclass(frozen=True, slots=True)
class CreationHandle:
    """Exchanged once for fence 1. Never logged, serialized, pickled or returned by a surface.

    ``completion_token`` is 32 random bytes; the ledger stores only its SHA-256. Hashes are hex.
    """

    operation_id: str
    task_id: str
    workspace_id: str
    completion_token: bytes = field(repr=False)
    actor_hash: str
    manifest_hash: str
    plan_hash: str

    def __reduce__(self) -> NoReturn:
        raise TypeError("a creation handle never leaves its process")
