"""SQLite files with the newest schema, copied from one that was migrated once."""

from __future__ import annotations

import shutil
from pathlib import Path

from onceborn.runtime.ledger import schema
from onceborn.runtime.ledger.database import Database


def make_template(folder: Path) -> Path:
    """A migrated file that nothing has open, with no write-ahead log beside it."""
    path = folder / "template.db"
    database = Database(url(path))
    schema.upgrade(database)
    database.dispose()
    return path


def fresh(template: Path, folder: Path) -> str:
    """The URL of a new copy in ``folder``."""
    path = folder / "ledger.db"
    shutil.copyfile(template, path)
    return url(path)


def url(path: Path) -> str:
    return f"sqlite:///{path}"
