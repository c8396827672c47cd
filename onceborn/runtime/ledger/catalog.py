"""What a database's own catalog says of a table's columns and indexes."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from sqlalchemy import Connection, text


@dataclass(frozen=True, slots=True)
class IndexFacts:
    """One index as the catalog has it. An expression stands as ``<expression>``."""

    unique: bool
    columns: tuple[str, ...]
    collations: tuple[str, ...]
    predicate: str | None
    usable: bool
    """Enforced for every row: valid, ready, live and checked at once. Always so on SQLite."""


_PG_COLUMNS: Final = text("""
SELECT a.attname, k.collname
FROM pg_attribute a LEFT JOIN pg_collation k ON k.oid = a.attcollation
WHERE a.attrelid = to_regclass(:table) AND a.attnum > 0 AND NOT a.attisdropped
""")

# Columns with the collation that the index itself compares by, in the index's order.
_PG_INDEX: Final = text("""
SELECT i.indisunique AS unique, pg_get_expr(i.indpred, i.indrelid) AS predicate,
       i.indisvalid AND i.indisready AND i.indislive AND i.indimmediate AS usable,
       array_agg(coalesce(a.attname::text, '<expression>') ORDER BY n.position) AS columns,
       array_agg(coalesce(k.collname::text, 'none') ORDER BY n.position) AS collations
FROM pg_index i
JOIN pg_class c ON c.oid = i.indexrelid
CROSS JOIN LATERAL generate_series(0, i.indnkeyatts - 1) AS n(position)
LEFT JOIN pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = i.indkey[n.position]
LEFT JOIN pg_collation k ON k.oid = i.indcollation[n.position]
WHERE i.indrelid = to_regclass(:table) AND c.relname = :name
GROUP BY i.indexrelid, i.indisunique, i.indpred, i.indrelid, i.indisvalid, i.indisready,
         i.indislive, i.indimmediate
""")


def column_collations(connection: Connection, table: str) -> dict[str, str] | None:
    """Each column's collation (``none`` where it has none); ``None`` if there is no such table."""
    if connection.dialect.name == "sqlite":
        return _sqlite_columns(connection, table)
    rows = connection.execute(_PG_COLUMNS, {"table": table}).all()
    return {name: collation or "none" for name, collation in rows} or None


def index(connection: Connection, table: str, name: str) -> IndexFacts | None:
    """The facts of one index of ``table``; ``None`` if it has none of that name."""
    if connection.dialect.name == "sqlite":
        return _sqlite_index(connection, table, name)
    row = connection.execute(_PG_INDEX, {"table": table, "name": name}).one_or_none()
    if row is None:
        return None
    return IndexFacts(
        row.unique, tuple(row.columns), tuple(row.collations), row.predicate, row.usable
    )


def plain(expression: str | None) -> str | None:
    """An expression without the brackets, quotes and spaces that databases add in their own way."""
    return None if expression is None else re.sub(r'[()"\s]+', " ", expression).strip().lower()


def _sqlite_columns(connection: Connection, table: str) -> dict[str, str] | None:
    statement = connection.execute(
        text("SELECT sql FROM sqlite_master WHERE type = 'table' AND name = :name"),
        {"name": table},
    ).scalar_one_or_none()
    if statement is None:
        return None
    # No pragma tells a column's collation, so it is read where it was declared.
    names = connection.exec_driver_sql(f'PRAGMA table_info("{table}")').all()
    return {row.name: _declared_collation(statement, row.name) for row in names}


def _declared_collation(statement: str, column: str) -> str:
    declared = re.search(rf'[(,]\s*"?{re.escape(column)}"?\s+([^,]*)', statement, re.IGNORECASE)
    if declared is None:
        return "unreadable"
    collation = re.search(r'\bCOLLATE\s+"?(\w+)"?', declared.group(1), re.IGNORECASE)
    return collation.group(1).upper() if collation else "BINARY"


def _sqlite_index(connection: Connection, table: str, name: str) -> IndexFacts | None:
    listed = connection.exec_driver_sql(f'PRAGMA index_list("{table}")').all()
    row = next((row for row in listed if row.name == name), None)
    if row is None:
        return None
    parts = [
        part for part in connection.exec_driver_sql(f'PRAGMA index_xinfo("{name}")') if part.key
    ]
    statement = connection.execute(
        text("SELECT sql FROM sqlite_master WHERE type = 'index' AND name = :name"), {"name": name}
    ).scalar_one_or_none()
    where = re.search(r"\bWHERE\b(.*)", statement or "", re.IGNORECASE | re.DOTALL)
    return IndexFacts(
        unique=bool(row.unique),
        columns=tuple(part.name or "<expression>" for part in parts),
        collations=tuple(str(part.coll).upper() for part in parts),
        predicate=where.group(1) if where else None,
        usable=True,
    )
