"""Tokens, workspaces, and who may see what."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from sqlalchemy import update
from support.world import digest_of_everything, rows, workplace

from onceborn.runtime import access, workspaces
from onceborn.runtime.ledger import tables as t
from onceborn.runtime.ledger.database import Database
from onceborn.runtime.protocol.canonical import Domain, digest_bytes
from onceborn.runtime.protocol.errors import InvalidField, NotFound, Unauthenticated


def _token(database: Database, **options: str) -> tuple[str, access.NewToken]:
    workspace_id = workspaces.create_workspace(database, "w")
    return workspace_id, access.create_token(database, workspace_id, **options)


def test_a_token_authenticates_as_its_workspace_and_role(database: Database) -> None:
    workspace_id, made = _token(database, role="operator", name="ci")
    principal = access.authenticate(database, f"Bearer {made.token}")
    assert (principal.workspace_id, principal.role) == (workspace_id, "operator")
    assert (principal.token_id, principal.actor) == (made.id, f"token/{made.id}")
    access.authorize(principal, workspace_id)


def test_authenticating_writes_nothing(database: Database) -> None:
    _, made = _token(database)
    before = digest_of_everything(database)
    access.authenticate(database, f"bearer  {made.token}")
    assert digest_of_everything(database) == before


@pytest.mark.proves("U08")
def test_a_token_is_stored_as_a_hash_only_and_listed_without_it(database: Database) -> None:
    workspace_id, made = _token(database, name="ci")
    assert made.token not in repr(made)
    (stored,) = rows(database, t.tokens)
    assert stored["token_hash"] == digest_bytes(Domain.TOKEN, made.token.encode())
    assert made.token not in repr(stored)
    (listed,) = access.list_tokens(database, workspace_id)
    assert (listed.id, listed.name, listed.role, listed.revoked_at) == (
        made.id,
        "ci",
        "member",
        None,
    )
    fields = {repr(value) for value in dataclasses.astuple(listed)}
    assert not fields & {repr(made.token), repr(stored["token_hash"])}


@pytest.mark.parametrize(
    "header",
    [
        None,
        "",
        "Bearer",
        "Bearer ",
        "Basic abc",
        "Bearer onb_short",
        "Bearer onb_" + "A" * 43,
        "Bearer onb_" + "A" * 42 + "\x00",
        "Bearer onb_" + "Ä" * 43,
    ],
)
def test_anything_else_is_nobody(database: Database, header: str | None) -> None:
    _token(database)
    with pytest.raises(Unauthenticated):
        access.authenticate(database, header)


def test_a_revoked_token_is_nobody(database: Database) -> None:
    workspace_id, made = _token(database)
    assert access.revoke_token(database, made.id) is True
    with pytest.raises(Unauthenticated):
        access.authenticate(database, f"Bearer {made.token}")
    assert access.revoke_token(database, made.id) is False
    assert access.list_tokens(database, workspace_id)[0].revoked_at is not None
    with pytest.raises(NotFound):
        access.revoke_token(database, "tok_unheard_of")


def test_no_token_without_a_workspace_that_stands(database: Database) -> None:
    workspace_id, made = _token(database)
    with pytest.raises(NotFound):
        access.create_token(database, "wsp_unheard_of")
    with database.transaction("test") as connection:
        connection.execute(update(t.workspaces).values(deleted_at=1))
    with pytest.raises(NotFound):
        access.create_token(database, workspace_id)
    principal = access.authenticate(database, f"Bearer {made.token}")
    with pytest.raises(NotFound):
        access.authorize(principal, workspace_id)


@pytest.mark.parametrize(
    ("role", "name"), [("admin", ""), ("member", "\x00"), ("member", "n" * 201)]
)
def test_bad_input_names_the_field(database: Database, role: str, name: str) -> None:
    workspace_id = workspaces.create_workspace(database, "w")
    with pytest.raises(InvalidField) as refused:
        access.create_token(database, workspace_id, role=role, name=name)
    assert refused.value.field in ("role", "name")
    assert rows(database, t.tokens) == []


@pytest.mark.parametrize("capacity", [0, -1, 2**40])
def test_a_capacity_is_at_least_one(database: Database, capacity: int) -> None:
    with pytest.raises(InvalidField) as refused:
        workspaces.create_workspace(database, "w", capacity=capacity)
    assert refused.value.field == "capacity"
    assert rows(database, t.workspaces) == []


def test_a_workspace_has_its_counters_and_its_feed(database: Database, tmp_path: Path) -> None:
    place = workplace(database, tmp_path, capacity=3)
    assert [r["workspace_id"] for r in rows(database, t.event_feeds)] == [place.workspace_id]
    (counters,) = rows(database, t.workspace_counters)
    assert (counters["capacity"], counters["preparing"], counters["last_number"]) == (3, 0, 0)


def test_a_workspace_is_found_by_id_or_by_a_name_that_is_its_own(database: Database) -> None:
    one = workspaces.create_workspace(database, "one")
    twins = [workspaces.create_workspace(database, "twin") for _ in range(2)]
    assert workspaces.find_workspace(database, one) == one
    assert workspaces.find_workspace(database, "one") == one
    assert workspaces.find_workspace(database, twins[1]) == twins[1]
    with pytest.raises(InvalidField):
        workspaces.find_workspace(database, "twin")
    with pytest.raises(NotFound):
        workspaces.find_workspace(database, "three")
    assert [v.name for v in workspaces.list_workspaces(database)] == ["one", "twin", "twin"]
