"""The test parts themselves: what the fixtures promise."""

from __future__ import annotations

import asyncio

from support.temporal import unique
from temporalio.client import Client
from temporalio.common import SearchAttributePair, TypedSearchAttributes

from onceborn.runtime.ledger.database import Database
from onceborn.temporal_dev import SEARCH_ATTRIBUTES


def test_each_test_has_a_database_of_its_own(database: Database) -> None:
    with database.transaction("test.insert") as connection:
        found = connection.exec_driver_sql("SELECT count(*) FROM workspaces").scalar_one()
        assert found == 0
        connection.exec_driver_sql(
            "INSERT INTO workspaces (id, name, created_at) VALUES ('w', 'w', 1)"
        )


def test_the_same_again_sees_nothing_of_the_other(database: Database) -> None:
    test_each_test_has_a_database_of_its_own(database)


def test_a_fresh_namespace_takes_a_workflow_at_once(
    temporal_address: str, temporal_namespace: str
) -> None:
    async def start() -> str:
        client = await Client.connect(temporal_address, namespace=temporal_namespace)
        handle = await client.start_workflow(
            "Nothing",
            id=unique("workflow"),
            task_queue=unique("queue"),
            search_attributes=TypedSearchAttributes(
                [SearchAttributePair(key, "x") for key in SEARCH_ATTRIBUTES]
            ),
        )
        await handle.terminate()
        return (await handle.describe()).namespace

    assert asyncio.run(start()) == temporal_namespace
