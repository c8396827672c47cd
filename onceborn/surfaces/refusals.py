"""How a call to the server can fail, as the client sees it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from ..runtime.protocol.errors import OncebornError


class Refused(OncebornError):
    """The server refused the request."""

    def __init__(self, status: int, problem: Mapping[str, Any]) -> None:
        super().__init__(str(problem.get("detail") or problem.get("title") or f"HTTP {status}"))
        self.status = status
        self.problem = dict(problem)


class ServerUnavailable(OncebornError):
    """The server cannot be reached."""

    code: ClassVar[str] = "server_unavailable"
    http_status: ClassVar[int] = 503
