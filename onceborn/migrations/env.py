"""Alembic's entry: runs on the connection, and in the transaction, that schema.py hands over.

There is no alembic.ini and no logging set-up here: a migration must not disable the loggers of the
process that runs it.
"""

from __future__ import annotations

from alembic import context
from sqlalchemy import Connection

connection: Connection | None = context.config.attributes.get("connection")
if connection is None:
    raise RuntimeError("run migrations with `onceborn db upgrade`, not with alembic's own command")

context.configure(connection=connection)
with context.begin_transaction():
    context.run_migrations()
