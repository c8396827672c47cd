"""The step kinds. A new kind is one file and one line here."""

from __future__ import annotations

from typing import Any, Final

from .agent_launch import AgentLaunch
from .kind import HostKind, RowKind
from .repo_attach import RepoAttach
from .session_prepare import SessionPrepare
from .worktree import Worktree

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
