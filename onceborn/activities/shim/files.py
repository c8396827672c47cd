"""Files of a run's directory that are there whole, or not, after any crash."""

from __future__ import annotations

import os


def write_durably(directory: str, name: str, content: bytes) -> None:
    """Write to a temporary name, sync, rename, sync the directory. Mode 0600."""
    temporary = f"{directory}/.{name}.{os.getpid()}"
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        with open(descriptor, "wb", closefd=False) as file:
            file.write(content)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    os.replace(temporary, f"{directory}/{name}")  # noqa: PTH105 - pathlib costs start-up time
    sync_directory(directory)


def sync_directory(directory: str) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
