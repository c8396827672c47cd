"""Where a data folder's embedded server is, and what it registers."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from temporalio.common import SearchAttributeKey

OPERATION: Final = SearchAttributeKey.for_keyword("OncebornOperation")
TASK: Final = SearchAttributeKey.for_keyword("OncebornTask")
WORKSPACE: Final = SearchAttributeKey.for_keyword("OncebornWorkspace")

SEARCH_ATTRIBUTES: Final = (OPERATION, TASK, WORKSPACE)
"""What workflows can be searched by. A cluster of your own needs them registered, as keywords."""


def temporal_folder(data: Path) -> Path:
    """Everything of the embedded server is in here."""
    return data / "temporal"


def recorded_address(data: Path) -> str | None:
    """``host:port`` of the embedded server that was started last in the data folder."""
    try:
        return (temporal_folder(data) / "address").read_text(encoding="ascii").strip() or None
    except (FileNotFoundError, NotADirectoryError):
        return None
