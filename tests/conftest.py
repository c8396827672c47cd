"""Real parts for the tests: both databases, and Temporal's server.

- ``backend``: ``sqlite`` and then ``postgresql``; what a test on both databases is parametrised by
- ``database_url``, ``database``: a fresh database with the newest schema, dropped at the end
- ``empty_database_url``: the same without a schema
- ``temporal_address``: one server for the session; ``temporal_namespace``: one for the test

For one database only: ``@pytest.mark.parametrize("backend", ["postgresql"], indirect=True)``.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import sqlite
from support.postgresql import PostgreSQL, running_postgresql
from support.temporal import fresh_namespace, running_temporal

from onceborn.runtime.ledger.database import Database

pytest_plugins = ["proofs"]

# DATABASE_URL names the server that the PostgreSQL tests use; neither it nor any other setting of
# whoever runs the tests may reach the code under test, nor a child process of it.
_EXISTING_SERVER = os.environ.get("DATABASE_URL")
for _name in list(os.environ):
    if _name == "DATABASE_URL" or _name.startswith(("ONCEBORN_", "TEMPORAL_")):
        del os.environ[_name]


@pytest.fixture(params=["sqlite", "postgresql"])
def backend(request: pytest.FixtureRequest) -> str:
    """The kind of database that the test runs on."""
    return str(request.param)


@pytest.fixture(scope="session")
def postgresql() -> Iterator[PostgreSQL]:
    """A PostgreSQL server."""
    with running_postgresql(_EXISTING_SERVER) as server:
        yield server


@pytest.fixture(scope="session")
def _sqlite_template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sqlite.make_template(tmp_path_factory.mktemp("sqlite-template"))


@pytest.fixture
def database_url(backend: str, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """URL of a fresh database with the newest schema; a child process may use it too."""
    if backend == "sqlite":
        yield sqlite.fresh(request.getfixturevalue("_sqlite_template"), tmp_path)
        return
    server: PostgreSQL = request.getfixturevalue("postgresql")
    url = server.fresh()
    yield url
    server.drop(url)


@pytest.fixture
def empty_database_url(
    backend: str, request: pytest.FixtureRequest, tmp_path: Path
) -> Iterator[str]:
    """URL of a database with nothing in it."""
    if backend == "sqlite":
        yield sqlite.url(tmp_path / "empty.db")
        return
    server: PostgreSQL = request.getfixturevalue("postgresql")
    url = server.empty()
    yield url
    server.drop(url)


@pytest.fixture
def database(database_url: str) -> Iterator[Database]:
    """A fresh database with the newest schema."""
    opened = Database(database_url)
    yield opened
    opened.dispose()


@pytest.fixture(scope="session")
def temporal_address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """``host:port`` of a Temporal server; its namespace ``default`` has our search attributes."""
    with running_temporal(tmp_path_factory.mktemp("temporal")) as address:
        yield address


@pytest.fixture
def temporal_namespace(temporal_address: str) -> str:
    """A namespace that only this test uses."""
    return fresh_namespace(temporal_address)
