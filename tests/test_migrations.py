"""The schema: what the models say and what the migrations make are the same, on both databases."""

from __future__ import annotations

import logging
import multiprocessing
from typing import Any

import pytest
from support.catalog import dump

from onceborn.runtime.ledger import schema
from onceborn.runtime.ledger.database import Database
from onceborn.runtime.ledger.tables import metadata
from onceborn.runtime.protocol.errors import ConfigurationError


@pytest.fixture
def empty(empty_database_url: str) -> Any:
    database = Database(empty_database_url)
    yield database
    database.dispose()


def test_models_and_migrations_agree(empty: Database, database: Database) -> None:
    with empty.transaction("test.create_all") as connection:
        metadata.create_all(connection)
    by_models, by_migrations = dump(empty), dump(database)
    assert by_models, "the dump is empty"
    assert by_migrations == by_models


@pytest.mark.parametrize(
    "change",
    [
        "CREATE UNIQUE INDEX uq_tasks_external_id ON tasks (workspace_id, external_id)",
        "CREATE INDEX uq_tasks_external_id ON tasks (workspace_id, external_id) "
        "WHERE external_id IS NOT NULL",
        "CREATE UNIQUE INDEX uq_tasks_external_id ON tasks (external_id, workspace_id) "
        "WHERE external_id IS NOT NULL",
    ],
)
def test_the_dump_sees_a_changed_index(database: Database, change: str) -> None:
    before = dump(database)
    with database.transaction("test.change") as connection:
        connection.exec_driver_sql("DROP INDEX uq_tasks_external_id")
        connection.exec_driver_sql(change)
    assert dump(database) != before


def test_upgrade_reaches_the_head_and_may_be_repeated(empty: Database) -> None:
    assert schema.current(empty) is None
    with pytest.raises(ConfigurationError, match="onceborn db upgrade"):
        schema.require_head(empty)
    head = schema.upgrade(empty)
    assert schema.current(empty) == head == schema.head()
    schema.require_head(empty)
    before = dump(empty)
    schema.upgrade(empty)
    assert dump(empty) == before


def test_a_newer_schema_is_refused(database: Database) -> None:
    with database.transaction("test.newer") as connection:
        connection.exec_driver_sql("UPDATE alembic_version SET version_num = '9999'")
    for refused in (schema.upgrade, schema.require_head):
        with pytest.raises(ConfigurationError, match="newer version") as caught:
            refused(database)
        assert caught.value.fields["found"] == "9999"
    assert schema.current(database) == "9999"


def test_upgrade_leaves_the_loggers_alone(empty: Database) -> None:
    logger = logging.getLogger("onceborn.somebody")
    root = list(logging.getLogger().handlers)
    schema.upgrade(empty)
    assert not logger.disabled
    assert logging.getLogger().handlers == root


def _upgrade_in_child(url: str, barrier: Any, answers: Any) -> None:
    database = Database(url)
    barrier.wait()
    try:
        answers.put(schema.upgrade(database))
    except Exception as error:
        answers.put(repr(error))
    finally:
        database.dispose()


def test_processes_that_upgrade_at_once_all_succeed(empty: Database) -> None:
    context = multiprocessing.get_context("spawn")
    barrier, answers = context.Barrier(3), context.Queue()
    url = empty.url.render_as_string(hide_password=False)
    children = [
        context.Process(target=_upgrade_in_child, args=(url, barrier, answers)) for _ in range(3)
    ]
    for child in children:
        child.start()
    seen = [answers.get(timeout=60) for _ in children]
    for child in children:
        child.join()
    assert seen == [schema.head()] * 3
    schema.require_head(empty)
