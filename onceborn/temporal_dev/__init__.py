"""The embedded Temporal server. See README.md here for what is set and why."""

from .address import SEARCH_ATTRIBUTES, recorded_address
from .server import EmbeddedTemporal

__all__ = ["EmbeddedTemporal", "SEARCH_ATTRIBUTES", "recorded_address"]
