"""Two ways to write that the ledger needs everywhere."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Connection, Index, Insert, Table
from sqlalchemy.dialects import postgresql, sqlite

from .database import Database


def insert_unless_held(database: Database, table: Table, index: Index) -> Insert:
    """An insert that does nothing on conflict with this partial unique index, and only with it.

    Every other collision (a primary key's, say) stays an error: it would not mean "found".
    """
    dialect: Any = sqlite if database.is_sqlite else postgresql
    options = index.dialect_options["sqlite" if database.is_sqlite else "postgresql"]
    insert: Insert = dialect.insert(table).on_conflict_do_nothing(
        index_elements=list(index.columns), index_where=options["where"]
    )
    return insert


def changed(connection: Connection, statement: Any, parameters: Any = None) -> int:
    """Execute a write and say how many rows it changed: the count that decides."""
    # An insert's count is kept only if asked for; without it PostgreSQL's is lost.
    options = {"preserve_rowcount": True}
    return int(connection.execute(statement, parameters, execution_options=options).rowcount)
