"""The step kinds. A new kind is one file and one line here."""

from __future__ import annotations

from typing import Any, Final

from .agent_launch import AgentLaunch
from .kind import HostKind, KeptKind, RowKind
from .repo_attach import RepoAttach
from .session_prepare import SessionPrepare
from .worktree import Worktree
from .worktree_kept import WorktreeKept

HOST_KINDS: Final[dict[str, HostKind[Any]]] = {
    kind.name: kind
    for kind in (
        RepoAttach(),
        Worktree(),
    )
}

ROW_KINDS: Final[dict[str, RowKind[Any]]] = {
    kind.name: kind
    for kind in (
        SessionPrepare(),
        AgentLaunch(),
    )
}

KEPT_KINDS: Final[dict[str, KeptKind]] = {Worktree.name: WorktreeKept()}
"""The kinds that may leave something in quarantine, and how it is purged."""
