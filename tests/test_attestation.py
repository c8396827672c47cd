"""Identities are served only where the schema proves that they are unique, byte by byte."""

from __future__ import annotations

import pytest
from sqlalchemy import text

from onceborn.runtime.ledger.attestation import ATTESTED, Attestor, attest
from onceborn.runtime.ledger.database import Database
from onceborn.runtime.ledger.tables import metadata
from onceborn.runtime.protocol.errors import SchemaUnattested

TASKS = "uq_tasks_external_id"
RUNS = "uq_runs_dispatch_key"
SHAPES = {
    TASKS: ("tasks", "external_id"),
    RUNS: ("runs", "dispatch_key"),
}
# What replaces the index -> what the finding says. {t} is the table and {k} its key column.
HOSTILE = {
    "dropped": (None, "missing"),
    "not unique": ("CREATE INDEX {n} ON {t} (workspace_id, {k}) WHERE {k} IS NOT NULL", "unique"),
    "not partial": ("CREATE UNIQUE INDEX {n} ON {t} (workspace_id, {k})", "predicate"),
    "another predicate": (
        "CREATE UNIQUE INDEX {n} ON {t} (workspace_id, {k}) WHERE {k} IS NOT NULL AND id <> 'x'",
        "predicate",
    ),
    "another order": (
        "CREATE UNIQUE INDEX {n} ON {t} ({k}, workspace_id) WHERE {k} IS NOT NULL",
        "is on",
    ),
    "a column more": (
        "CREATE UNIQUE INDEX {n} ON {t} (workspace_id, {k}, id) WHERE {k} IS NOT NULL",
        "is on",
    ),
    "an expression": (
        "CREATE UNIQUE INDEX {n} ON {t} (workspace_id, lower({k})) WHERE {k} IS NOT NULL",
        "is on",
    ),
    "another collation": (
        'CREATE UNIQUE INDEX {n} ON {t} (workspace_id, {k} COLLATE "{other}") '
        "WHERE {k} IS NOT NULL",
        "collation",
    ),
}


def _change(database: Database, *statements: str) -> None:
    with database.transaction("test.change") as connection:
        for statement in statements:
            connection.exec_driver_sql(statement)


def _rows(database: Database) -> int:
    with database.reading() as connection:
        return sum(
            connection.execute(text(f"SELECT count(*) FROM {name}")).scalar_one()
            for name in metadata.tables
        )


def test_a_good_schema_is_attested_and_nothing_stays(database: Database) -> None:
    assert {entry.index.name for entry in ATTESTED} == {TASKS, RUNS}
    assert attest(database).findings == ()
    assert _rows(database) == 0


@pytest.mark.parametrize("index", [TASKS, RUNS])
@pytest.mark.parametrize("how", HOSTILE)
def test_a_hostile_index_is_refused(database: Database, index: str, how: str) -> None:
    statement, says = HOSTILE[how]
    table, key = SHAPES[index]
    other = "NOCASE" if database.is_sqlite else "en_US.utf8"
    if not database.is_sqlite:
        _change(database, f"CREATE COLLATION \"{other}\" (provider = builtin, locale = 'C.UTF-8')")
    _change(database, f"DROP INDEX {index}")
    if statement is not None:
        _change(database, statement.format(n=index, t=table, k=key, other=other))

    attestation = attest(database)

    assert not attestation.ok
    assert {finding.index for finding in attestation.findings} == {index}
    assert any(says in finding.wrong for finding in attestation.findings)
    assert all(finding.mend for finding in attestation.findings)
    assert _rows(database) == 0


@pytest.mark.parametrize("how", ["dropped", "not unique", "not partial"])
def test_the_named_mending_mends(database: Database, how: str) -> None:
    _change(database, f"DROP INDEX {TASKS}")
    statement, _ = HOSTILE[how]
    if statement is not None:
        _change(database, statement.format(n=TASKS, t="tasks", k="external_id", other=""))
    (finding,) = attest(database).findings
    _change(database, *finding.mend.split(";"))
    assert attest(database).ok


@pytest.mark.parametrize("backend", ["postgresql"], indirect=True)
@pytest.mark.parametrize("flag", ["indisvalid", "indisready", "indislive"])
def test_an_index_that_is_not_enforced_is_refused(database: Database, flag: str) -> None:
    _change(
        database,
        f"UPDATE pg_index SET {flag} = false WHERE indexrelid = '{TASKS}'::regclass",
    )
    (finding,) = attest(database).findings
    assert "valid" in finding.wrong
    assert "REINDEX" in finding.mend


@pytest.mark.parametrize("backend", ["postgresql"], indirect=True)
def test_a_column_with_the_databases_own_collation_is_refused(database: Database) -> None:
    _change(database, 'ALTER TABLE tasks ALTER COLUMN external_id TYPE text COLLATE "default"')
    wrong = [finding.wrong for finding in attest(database).findings]
    assert any("column tasks.external_id has collation default" in each for each in wrong)


@pytest.mark.parametrize("backend", ["sqlite"], indirect=True)
def test_a_column_that_ignores_case_is_refused(database: Database) -> None:
    # The index itself compares bytes: only the column is wrong.
    with database.reading() as connection:
        table = connection.exec_driver_sql(
            "SELECT sql FROM sqlite_master WHERE type = 'table' AND name = 'tasks'"
        ).scalar_one()
    key = 'external_id TEXT COLLATE "BINARY"'
    assert key in table
    _change(
        database,
        "DROP TABLE tasks",
        table.replace(key, "external_id TEXT COLLATE NOCASE"),
        f"CREATE UNIQUE INDEX {TASKS} ON tasks (workspace_id, external_id COLLATE BINARY) "
        "WHERE external_id IS NOT NULL",
    )
    wrong = [finding.wrong for finding in attest(database).findings]
    assert wrong == ["column tasks.external_id has collation NOCASE, not BINARY"]


@pytest.mark.parametrize("law", ["second", "case", "workspace"])
def test_what_only_the_behaviour_shows_is_refused(database: Database, law: str) -> None:
    # Catalog and index are exact; something else in the schema changes what an insert does.
    if law == "case":
        extra = "CREATE UNIQUE INDEX another ON tasks (workspace_id, lower(external_id))"
        says = "'a' and 'A' are one"
    elif law == "workspace":
        extra = "CREATE UNIQUE INDEX another ON tasks (external_id)"
        says = "two workspaces"
    else:
        extra = _renaming_trigger(database)
        says = "twice"
    _change(database, *extra.split(";;"))
    wrong = [finding.wrong for finding in attest(database).findings]
    assert any(says in each for each in wrong), wrong
    assert _rows(database) == 0


def _renaming_trigger(database: Database) -> str:
    if database.is_sqlite:
        return (
            "CREATE TRIGGER forgets AFTER INSERT ON tasks BEGIN "
            "UPDATE tasks SET external_id = NULL WHERE id = NEW.id; END"
        )
    return (
        "CREATE FUNCTION forgets() RETURNS trigger LANGUAGE plpgsql AS "
        "$$ BEGIN NEW.external_id := NULL; RETURN NEW; END $$;;"
        "CREATE TRIGGER forgets BEFORE INSERT ON tasks FOR EACH ROW EXECUTE FUNCTION forgets()"
    )


def test_no_schema_at_all_is_refused(empty_database_url: str) -> None:
    database = Database(empty_database_url)
    findings = attest(database).findings
    database.dispose()
    assert {finding.index for finding in findings} == {TASKS, RUNS}
    assert all("onceborn db upgrade" in finding.mend for finding in findings)


def test_the_attestor_refuses_until_the_schema_is_mended(database: Database) -> None:
    patient, eager = Attestor(database, again_after_s=3600), Attestor(database, again_after_s=0)
    _change(database, f"DROP INDEX {TASKS}")
    for attestor in (patient, eager):
        with pytest.raises(SchemaUnattested) as caught:
            attestor.require()
        assert caught.value.fields["findings"] == [f"index {TASKS} is missing"]
        assert caught.value.code == "identity_schema_unattested"
    _change(
        database,
        f"CREATE UNIQUE INDEX {TASKS} ON tasks (workspace_id, external_id) "
        "WHERE external_id IS NOT NULL",
    )
    eager.require()
    with pytest.raises(SchemaUnattested):
        patient.require()
    patient.forget()
    patient.require()


def test_the_attestor_keeps_what_it_saw_until_told_to_forget(database: Database) -> None:
    attestor = Attestor(database)
    attestor.require()
    _change(database, f"DROP INDEX {RUNS}")
    attestor.require()
    attestor.forget()
    with pytest.raises(SchemaUnattested):
        attestor.require()


@pytest.mark.parametrize("backend", ["postgresql"], indirect=True)
def test_a_lost_connection_makes_the_attestor_look_again(database: Database) -> None:
    attestor = Attestor(database)
    attestor.require()
    _change(database, f"DROP INDEX {RUNS}")
    other = Database(database.url.render_as_string(hide_password=False))
    with other.reading() as connection:
        connection.exec_driver_sql(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
            "WHERE datname = current_database() AND pid <> pg_backend_pid()"
        )
    other.dispose()
    with database.reading() as connection:  # the pool finds out, and connects anew
        connection.exec_driver_sql("SELECT 1")
    with pytest.raises(SchemaUnattested):
        attestor.require()
