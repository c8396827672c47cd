"""Which schema a database has, and bringing it to the newest: the only place that runs Alembic."""

from __future__ import annotations

from typing import Final

from alembic import command
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from alembic.util import CommandError
from sqlalchemy import Connection, text

from ..protocol.errors import ConfigurationError
from .database import Database

MIGRATIONS: Final = "onceborn:migrations"
"""Package and folder, so that a wheel finds them too."""

_UPGRADE_LOCK: Final = 0x0_0CEB_0124
"""Key of the advisory lock that upgrades of one PostgreSQL database exclude each other with."""


def upgrade(database: Database) -> str:
    """Bring the schema to the newest revision, and return that revision.

    One transaction: all of it or nothing. Processes that start at once do it one after the other,
    and the later ones find nothing to do: on PostgreSQL behind an advisory lock, on SQLite behind
    the write lock that ``transaction`` takes.

    Raises:
        ConfigurationError: the schema is newer than this program.
        DatabaseUnavailable: the database cannot be reached.
    """
    with database.transaction("schema.upgrade") as connection:
        if not database.is_sqlite:
            connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _UPGRADE_LOCK})
        _refuse_unknown(_revision(connection))
        command.upgrade(_config(connection), "head")
    return head()


def head() -> str:
    """The newest revision that this program knows."""
    revision = ScriptDirectory.from_config(_config()).get_current_head()
    if revision is None:
        raise ConfigurationError("this installation holds no migrations; install it again")
    return revision


def current(database: Database) -> str | None:
    """The revision of the database's schema; ``None`` where there is none yet.

    Raises:
        DatabaseUnavailable: the database cannot be reached.
    """
    with database.reading() as connection:
        return _revision(connection)


def require_head(database: Database) -> None:
    """Refuse to work on a schema that is not the newest one.

    Raises:
        ConfigurationError: says which revision was found and what to run.
        DatabaseUnavailable: the database cannot be reached.
    """
    found, wanted = current(database), head()
    if found == wanted:
        return
    _refuse_unknown(found)
    state = "has no schema yet" if found is None else f"has schema {found}, not {wanted}"
    raise ConfigurationError(
        f"the database {state}; run `onceborn db upgrade`", found=found, wanted=wanted
    )


def _refuse_unknown(found: str | None) -> None:
    if found is None:
        return
    try:
        ScriptDirectory.from_config(_config()).get_revision(found)
    except CommandError:
        raise ConfigurationError(
            f"the database has schema {found}, which this version of Onceborn does not know; "
            "run a newer version",
            found=found,
            wanted=head(),
        ) from None


def _revision(connection: Connection) -> str | None:
    return MigrationContext.configure(connection).get_current_revision()


def _config(connection: Connection | None = None) -> Config:
    config = Config()
    config.set_main_option("script_location", MIGRATIONS)
    config.set_main_option("path_separator", "os")
    config.attributes["connection"] = connection
    return config
