"""A database's schema as its own catalog tells it, in a form that two can be compared in."""

from __future__ import annotations

import re
from typing import Any

from sqlalchemy import Connection

from onceborn.runtime.ledger.database import Database

Dump = dict[str, list[Any]]

_COLUMNS = """
SELECT c.relname, a.attnum, a.attname, format_type(a.atttypid, a.atttypmod), a.attnotnull,
       k.collname, a.attidentity, pg_get_expr(d.adbin, d.adrelid)
FROM pg_attribute a
JOIN pg_class c ON c.oid = a.attrelid
LEFT JOIN pg_collation k ON k.oid = a.attcollation
LEFT JOIN pg_attrdef d ON d.adrelid = a.attrelid AND d.adnum = a.attnum
WHERE c.relnamespace = current_schema()::regnamespace AND c.relkind = 'r' AND a.attnum > 0
  AND NOT a.attisdropped AND c.relname <> 'alembic_version'
ORDER BY c.relname, a.attnum
"""
_INDEXES = """
SELECT tablename, indexname, indexdef FROM pg_indexes
WHERE schemaname = current_schema() AND tablename <> 'alembic_version' ORDER BY 1, 2
"""
_CONSTRAINTS = """
SELECT conrelid::regclass::text, conname, contype::text, pg_get_constraintdef(oid)
FROM pg_constraint
WHERE connamespace = current_schema()::regnamespace
  AND conrelid <> coalesce(to_regclass('alembic_version')::oid, 0) ORDER BY 1, 2
"""
_OTHERS = """
SELECT relkind::text, relname FROM pg_class
WHERE relnamespace = current_schema()::regnamespace AND relkind NOT IN ('r', 'i') ORDER BY 1, 2
"""


def dump(database: Database) -> Dump:
    """Tables, columns, types, collations, defaults, indexes with predicates, constraints."""
    with database.reading() as connection:
        return _sqlite(connection) if database.is_sqlite else _postgresql(connection)


def _rows(connection: Connection, statement: str) -> list[Any]:
    return [tuple(row) for row in connection.exec_driver_sql(statement)]


def _postgresql(connection: Connection) -> Dump:
    return {
        "columns": _rows(connection, _COLUMNS),
        "indexes": _rows(connection, _INDEXES),
        "constraints": _rows(connection, _CONSTRAINTS),
        "others": _rows(connection, _OTHERS),
    }


def _sqlite(connection: Connection) -> Dump:
    listed = _rows(
        connection,
        "SELECT type, name, tbl_name, sql FROM sqlite_master "
        "WHERE tbl_name <> 'alembic_version' ORDER BY type, name",
    )
    result: Dump = {"objects": [(*row[:3], _clauses(row[3])) for row in listed]}
    for kind, name, *_ in listed:
        pragmas = (
            ("table_xinfo", "foreign_key_list", "index_list")
            if kind == "table"
            else ("index_xinfo",)
        )
        for pragma in pragmas:
            rows = _rows(connection, f"PRAGMA {pragma}({name})")
            # The order in which indexes and foreign keys were made says nothing.
            numbered = pragma in ("index_list", "foreign_key_list")
            result[f"{pragma} {name}"] = (
                sorted((row[1:] for row in rows), key=repr) if numbered else rows
            )
    return result


def _clauses(statement: str | None) -> list[str]:
    # A table's columns keep their order (table_xinfo); its constraints need not.
    return sorted(re.sub(r"\s+", " ", part).strip(" ,") for part in (statement or "").split("\n"))
