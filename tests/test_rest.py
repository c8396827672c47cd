"""The REST surface over a real server: the order, the refusals, reading. No worker is needed."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from pydantic import TypeAdapter
from sqlalchemy import text, update
from support.server import Caller, calling, closed_port, create_app, services_for, serving
from support.settle import settle
from support.world import Workplace, digest_of_everything, rows, workplace

from onceborn.runtime import access, workspaces
from onceborn.runtime.ledger import tables as t
from onceborn.runtime.ledger.database import Database
from onceborn.runtime.settings import Settings
from onceborn.surfaces.rest import schemas
from onceborn.surfaces.rest.openapi import document

RESULT = TypeAdapter(schemas.CreationResult)
TASK = TypeAdapter(schemas.Task)
LIST = TypeAdapter(schemas.TaskList)
CREATION = TypeAdapter(schemas.Creation)
PROBLEM = TypeAdapter(schemas.Problem)


@dataclass
class Api:
    """A server, a workspace on it, and a caller of that workspace."""

    url: str
    place: Workplace
    caller: Caller


@pytest.fixture
def api(database: Database, tmp_path: Path) -> Iterator[Api]:
    place = workplace(
        database,
        tmp_path,
        roots=(tmp_path,),
        temporal_address=f"127.0.0.1:{closed_port()}",
        max_body_bytes=64 * 1024,
    )
    with (
        serving(create_app(services_for(place.settings, database))) as url,
        calling(url, database, place.workspace_id) as caller,
    ):
        yield Api(url, place, caller)


def problem(response: httpx.Response, status: int, code: str, field: str | None = None) -> Any:
    """The response is exactly this refusal; returns the document."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"].startswith("application/problem+json")
    found = response.json()
    PROBLEM.validate_python(found)
    assert (found["code"], found["status"]) == (code, status)
    assert found["type"] == f"urn:onceborn:problem:{code}"
    if field is not None:
        assert found["field"] == field
    return found


# -- found ----------------------------------------------------------------------------------------


@pytest.mark.proves("C02", "C03", "F01")
def test_found_settled_is_the_task_and_writes_nothing(api: Api) -> None:
    made = settle(api.place, api.place.create("E", title="first"))
    before = digest_of_everything(api.place.database)
    same, other = api.caller.create(" E ", title="first"), api.caller.create("E", title="second")
    unknown = api.caller.create("E", title=5, nonsense=True)
    for response, match in ((same, "same"), (other, "differs"), (unknown, "unknown")):
        assert response.status_code == 200, response.text
        assert response.headers["Onceborn-Request-Match"] == match
        body = RESULT.validate_json(response.content)
        assert (body["id"], body["title"], body["external_id"]) == (made.task_id, "first", "E")
        assert (body["deduplicated"], body["creation_complete"]) == (True, True)
    assert digest_of_everything(api.place.database) == before


@pytest.mark.proves("F03", "F06", "F09", "S02")
def test_found_unsettled_says_so_the_same_every_time(api: Api) -> None:
    made = api.place.create("E")
    before = digest_of_everything(api.place.database)
    answers = {api.caller.create("E", start_agent=True, profile="marker").content for _ in range(5)}
    answers.add(api.caller.lookup("E").content)
    (answer,) = answers
    body = RESULT.validate_json(answer)
    assert (body["id"], body["external_id"]) == (made.task_id, "E")
    assert (body["deduplicated"], body["creation_complete"]) == (True, False)
    assert digest_of_everything(api.place.database) == before


@pytest.mark.proves("F04", "F08")
@pytest.mark.parametrize(
    "wrong",
    [
        {"title": None},
        {"title": 7},
        {"unknown": 1},
        {"repositories": [{"source": "/nowhere"}]},
        {"repositories": 3},
        {"profile": "off"},
        {"workspace_id": 7},
        {"metadata": {"deep": "\ud800"}},
    ],
)
def test_a_held_identity_comes_before_everything_else(api: Api, wrong: dict[str, Any]) -> None:
    settle(api.place, api.place.create("E"))
    before = digest_of_everything(api.place.database)
    response = api.caller.raw(json.dumps({"title": "t", "external_id": "E", **wrong}).encode())
    assert response.status_code == 200, response.text
    body = RESULT.validate_json(response.content)
    assert (body["deduplicated"], body["creation_complete"]) == (True, True)
    found = problem(
        api.caller.raw(json.dumps({"title": "t", "external_id": "F", **wrong}).encode()),
        400,
        "invalid_field",
    )
    assert found["field"].split(".")[0] == next(iter(wrong))
    assert digest_of_everything(api.place.database) == before


@pytest.mark.proves("F07")
def test_an_archived_holder_stays_archived(api: Api) -> None:
    settle(api.place, api.place.create("E"))
    with api.place.database.transaction("test") as connection:
        connection.execute(update(t.tasks).values(archived_at=1_700_000_000_123))
    body = RESULT.validate_json(api.caller.create("E").content)
    assert body["archived_at"] == "2023-11-14T22:13:20.123Z"


@pytest.mark.proves("F05")
def test_full_is_refused_only_where_nobody_holds_the_identity(
    database: Database, tmp_path: Path
) -> None:
    place = workplace(database, tmp_path, capacity=1, temporal_address="127.0.0.1:1")
    with (
        serving(create_app(services_for(place.settings, database))) as url,
        calling(url, database, place.workspace_id) as caller,
    ):
        place.create("E")
        assert caller.create("E").json()["deduplicated"] is True
        refused = caller.create("F")
        problem(refused, 429, "capacity_reached")
        assert "Retry-After" in refused.headers


# -- the identity ---------------------------------------------------------------------------------


@pytest.mark.proves("V01", "SB06")
def test_255_bytes_of_identity_and_no_more(api: Api) -> None:
    longest = "é" * 127 + "x"
    settle(api.place, api.place.create(longest))
    assert api.caller.create(f" {longest}\u3000").json()["external_id"] == longest
    assert api.caller.lookup(longest).status_code == 200
    for too_long in (longest + "x", "é" * 128, "x" * 10_000):
        assert (
            problem(api.caller.create(too_long), 400, "invalid_external_id", "external_id")["limit"]
            == 255
        )
        problem(api.caller.lookup(too_long), 400, "invalid_external_id", "external_id")


@pytest.mark.proves("V02")
@pytest.mark.parametrize(
    "body",
    [
        b'{"title":"t","external_id":"e\\n"}',
        b'{"title":"t","external_id":"\\t"}',
        b'{"title":"t","external_id":"e\\u0000e"}',
        b'{"title":"t","external_id":"e\\u007f"}',
        b'{"title":"t","external_id":"\\ud800"}',
        b'{"title":"t","external_id":7}',
        b'{"title":"t","external_id":{"a":1}}',
        b'{"title":"t","external_id":["e"]}',
        b'{"title":"t","external_id":true}',
    ],
)
def test_an_identity_that_is_none_is_refused(api: Api, body: bytes) -> None:
    problem(api.caller.raw(body), 400, "invalid_external_id", "external_id")
    assert rows(api.place.database, t.operations) == []


@pytest.mark.proves("V02", "SB07")
def test_the_lookup_reads_the_query_strictly(api: Api) -> None:
    base = f"/api/v1/workspaces/{api.place.workspace_id}/tasks/by-external-id"
    settle(api.place, api.place.create("a b+\ufffdé"))
    for query in ("external_id=%20a+b%2B%EF%BF%BD%C3%A9%20", "external_id=a%20b%2B%EF%BF%BDé"):
        response = api.caller.http.get(f"{base}?{query}")
        assert response.status_code == 200, response.text
        assert response.json()["external_id"] == "a b+\ufffdé"
    # Not UTF-8: must not be read as U+FFFD, which is another identity.
    problem(api.caller.http.get(f"{base}?external_id=a%20b%2B%FF%C3%A9"), 400, "invalid_field")
    for query in ("", "?external_id=", "?external_id=%20%E2%80%83", "?external_id=a&external_id=b"):
        problem(api.caller.http.get(base + query), 400, "invalid_field", "external_id")
    problem(api.caller.http.get(f"{base}?externalId=a"), 400, "invalid_field", "externalId")
    problem(api.caller.http.get(f"{base}?external_id=a%00"), 400, "invalid_external_id")
    problem(api.caller.lookup("A B+\ufffdé"), 404, "not_found")


# -- strangers ------------------------------------------------------------------------------------


def _seen(response: httpx.Response) -> tuple[int, bytes, list[tuple[str, str]]]:
    headers = [(k, v) for k, v in response.headers.items() if k != "date"]
    return response.status_code, response.content, headers


@pytest.mark.proves("V03")
def test_a_stranger_gets_the_same_bytes_whatever_is_there(api: Api) -> None:
    database, theirs = api.place.database, api.place.workspace_id
    settle(api.place, api.place.create("held"))
    api.place.create("preparing")
    task_id = rows(database, t.tasks)[0]["id"]
    deleted = workspaces.create_workspace(database, "deleted")
    with database.transaction("test") as connection:
        connection.execute(
            update(t.workspaces).where(t.workspaces.c.id == deleted).values(deleted_at=1)
        )
    stranger_home = workspaces.create_workspace(database, "stranger")
    before = digest_of_everything(database)
    with calling(api.url, database, stranger_home) as stranger:
        answers = [
            stranger.create(identity, workspace_id=workspace)
            for workspace in (theirs, deleted, "wsp_unheard_of", "a\x00b", "")
            for identity in ("held", "preparing", "unheld", "x" * 300, "\x00", 7, None)
        ]
        answers += [
            stranger.lookup(identity, theirs)
            for identity in ("held", "preparing", "unheld", "x" * 300, "\x00")
        ]
        answers += [stranger.lookup("held", w) for w in (deleted, "wsp_unheard_of", "a\x00b")]
        base = f"/workspaces/{theirs}/tasks/by-external-id"
        answers += [stranger.get(base), stranger.get(base, nonsense="1")]
        answers += [
            stranger.get(f"/tasks/{i}{s}") for i in (task_id, "x") for s in ("", "/creation")
        ]
    assert len({str(_seen(answer)) for answer in answers}) == 1
    problem(answers[0], 404, "not_found")
    with database.transaction("test") as connection:
        # The stranger's own token is the only thing that came to be.
        connection.execute(t.tokens.delete().where(t.tokens.c.workspace_id == stranger_home))
    assert digest_of_everything(database) == before


@pytest.mark.proves("V03")
def test_without_a_token_nothing_is_looked_at(api: Api) -> None:
    api.place.create("held")
    revoked = access.create_token(api.place.database, api.place.workspace_id)
    access.revoke_token(api.place.database, revoked.id)
    answers = []
    for header in ({}, {"Authorization": "Bearer x"}, {"Authorization": f"Bearer {revoked.token}"}):
        with httpx.Client(base_url=api.url, headers=header, trust_env=False) as http:
            for body in (b"", b"{", b'{"external_id":"held"}', b"x" * 70_000):
                answers.append(http.post("/api/v1/tasks", content=body))
            answers.append(http.get("/api/v1/tasks"))
            answers.append(http.get("/api/v1/tasks/tsk_x"))
    assert len({str(_seen(answer)) for answer in answers}) == 1
    problem(answers[0], 401, "unauthenticated")
    assert answers[0].headers["www-authenticate"] == "Bearer"


# -- bad input ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"null",
        b"[]",
        b'"text"',
        b"7",
        b'{"title":NaN}',
        b'{"title":"t","metadata":{"a":-Infinity}}',
        b"{'title':'t'}",
        b'{"title":"t"}}',
        b'{"title":"\xff"}',
        b'\xef\xbb\xbf{"title":"t"}',
        '{"title":"t"}'.encode("utf-16"),
        b'{"title":"\x01"}',
        b'{"title":"t","metadata":{"a":' + b"[" * 20_000 + b"]" * 20_000 + b"}}",
    ],
)
def test_a_body_that_is_not_a_json_object_is_malformed(api: Api, body: bytes) -> None:
    problem(api.caller.raw(body), 400, "malformed_body")
    assert rows(api.place.database, t.operations) == []


@pytest.mark.proves("F04")
@pytest.mark.parametrize(
    ("field", "body"),
    [
        ("metadata.a", b'"title":"t","metadata":{"a":1e999}'),
        ("metadata.a", b'"title":"t","metadata":{"a":1,"a":1}'),
        ("metadata.a", b'"title":"t","metadata":{"a":' + b"9" * 5_000 + b"}"),
        ("title", b'"title":"t","title":"u"'),
    ],
)
def test_json_that_nobody_can_hold_is_refused_by_name_but_not_before_the_look_up(
    api: Api, field: str, body: bytes
) -> None:
    refusal = problem(api.caller.raw(b'{"external_id":"E",' + body + b"}"), 400, "invalid_field")
    assert refusal["field"] == field
    assert rows(api.place.database, t.operations) == []
    api.place.create("E")
    found = api.caller.raw(b'{"external_id":"E",' + body + b"}")
    assert (found.status_code, found.json()["deduplicated"]) == (200, True)
    twice = problem(
        api.caller.raw(b'{"external_id":"E","external_id":"F","title":"t"}'),
        400,
        "invalid_external_id",
    )
    assert twice["field"] == "external_id"


@pytest.mark.proves("SC08")
@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_too_large_is_refused(api: Api, chunked: bool) -> None:
    body = b'{"title":"t","external_id":"E","prompt":"' + b"x" * 3_000_000 + b'"}'

    def chunks() -> Iterator[bytes]:
        for start in range(0, len(body), 65_536):
            yield body[start : start + 65_536]

    response = api.caller.http.post("/api/v1/tasks", content=chunks() if chunked else body)
    assert problem(response, 413, "body_too_large")["limit"] == 64 * 1024
    assert rows(api.place.database, t.operations) == []


@pytest.mark.proves("SA13")
@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        ({"title": ""}, "title"),
        ({"title": None}, "title"),
        ({"title": "x" * 501}, "title"),
        ({"title": "a\x00b"}, "title"),
        ({"description": 7}, "description"),
        ({"description": "a\x00b"}, "description"),
        ({"prompt": "a\x00b"}, "prompt"),
        ({"prompt": ["x"]}, "prompt"),
        ({"start_agent": "true"}, "start_agent"),
        ({"start_agent": True}, "profile"),
        ({"profile": "no-such-profile"}, "profile"),
        ({"profile": "off"}, "profile"),
        ({"profile": "../x"}, "profile"),
        ({"profile": "marker"}, "repositories"),
        ({"metadata": []}, "metadata"),
        ({"metadata": {"a": 2**60}}, "metadata"),
        ({"metadata": {"a": "x" * 60_000}, "description": "y" * 100, "zz": 1}, "zz"),
        ({"externalId": "E"}, "externalId"),
        ({"external-id": "E"}, "external-id"),
        ({"repositories": {}}, "repositories"),
        ({"repositories": [{}]}, "repositories.0.source"),
        ({"repositories": [{"source": "/etc"}]}, "repositories.0.source"),
        ({"repositories": [{"source": "relative"}]}, "repositories.0.source"),
        ({"repositories": [{"source": "--upload-pack=x"}]}, "repositories.0.source"),
        ({"repositories": [{"source": "ext::sh -c x"}]}, "repositories.0.source"),
        ({"repositories": [{"source": "https://u:p@example.org/r"}]}, "repositories.0.source"),
        (
            {"repositories": [{"source": "git@h:r", "base_ref": "--orphan"}]},
            "repositories.0.base_ref",
        ),
        (
            {"repositories": [{"source": "git@h:r", "base_ref": "--lock"}]},
            "repositories.0.base_ref",
        ),
        ({"repositories": [{"source": "git@h:r", "branch": "-x"}]}, "repositories.0.branch"),
        ({"repositories": [{"source": "git@h:r", "branch": "a..b"}]}, "repositories.0.branch"),
        ({"repositories": [{"source": "git@h:r", "path": "/x"}]}, "repositories.0.path"),
        ({"repositories": [{"source": "git@h:r"}] * 2}, "repositories.1.source"),
        ({"repositories": [{"source": f"git@h:r{n}"} for n in range(17)]}, "repositories"),
        ({"workspace_id": 7}, "workspace_id"),
    ],
)
def test_bad_input_is_refused_by_name_before_anything_is_written(
    api: Api, wrong: dict[str, Any], field: str
) -> None:
    before = digest_of_everything(api.place.database)
    found = problem(api.caller.create("E", **wrong), 400, "invalid_field", field)
    assert field in found["detail"]
    assert "p@example" not in found["detail"]
    assert digest_of_everything(api.place.database) == before


def test_unknown_routes_and_methods_are_problems_too(api: Api) -> None:
    problem(api.caller.get("/nothing"), 404, "not_found")
    problem(api.caller.http.get("/"), 404, "not_found")
    refused = api.caller.http.delete("/api/v1/tasks")
    problem(refused, 405, "method_not_allowed")
    assert "POST" in refused.headers["allow"]
    for path in ("/tasks/%00", "/tasks/%FF", "/tasks/" + "x" * 5_000, "/tasks/..%2F.."):
        problem(api.caller.get(path), 404, "not_found")


@pytest.mark.parametrize("limit", ["0", "201", "x", "-1", "1.0", "", "9" * 40, "²"])
def test_a_list_limit_is_named(api: Api, limit: str) -> None:
    problem(api.caller.get("/tasks", limit=limit), 400, "invalid_field", "limit")


def test_list_fields_are_named(api: Api) -> None:
    problem(api.caller.get("/tasks", cursor="zzz"), 400, "invalid_field", "cursor")
    problem(api.caller.get("/tasks", offset="1"), 400, "invalid_field", "offset")


# -- reading --------------------------------------------------------------------------------------


@pytest.mark.proves("S06", "F09")
def test_the_identity_is_on_tasks_only_and_completeness_on_no_read(api: Api) -> None:
    done = settle(api.place, api.place.create("secret-identity", title="done"))
    bare = settle(api.place, api.place.create(title="bare"))
    preparing = api.place.create("other-identity")
    listed = LIST.validate_json(api.caller.get("/tasks").content)
    assert [task["id"] for task in listed["tasks"]] == [bare.task_id, done.task_id]
    assert [task.get("external_id") for task in listed["tasks"]] == [None, "secret-identity"]
    assert "external_id" not in listed["tasks"][0]
    for made, identity in ((done, "secret-identity"), (preparing, "other-identity")):
        task = TASK.validate_json(api.caller.get(f"/tasks/{made.task_id}").content)
        assert task["external_id"] == identity
        creation = api.caller.get(f"/tasks/{made.task_id}/creation")
        CREATION.validate_json(creation.content)
        assert identity not in creation.text
    everything = api.caller.get("/tasks").text + api.caller.get(f"/tasks/{done.task_id}").text
    assert "creation_complete" not in everything
    assert "null" not in everything


def test_lists_are_paged_by_an_opaque_cursor(api: Api) -> None:
    made = [settle(api.place, api.place.create(title=f"t{n}")).task_id for n in range(5)]
    seen: list[str] = []
    cursor: dict[str, str] = {}
    while True:
        page = LIST.validate_json(api.caller.get("/tasks", limit=2, **cursor).content)
        seen += [task["id"] for task in page["tasks"]]
        if "next_cursor" not in page:
            break
        cursor = {"cursor": page["next_cursor"]}
    assert seen == made[::-1]


# -- what is down ---------------------------------------------------------------------------------


@pytest.mark.proves("SC04")
def test_temporal_down_tells_the_task_and_loses_nothing(api: Api) -> None:
    response = api.caller.create("E")
    found = problem(response, 503, "engine_unavailable")
    assert "Retry-After" in response.headers
    assert "finished when Temporal is back" in found["detail"]
    body = RESULT.validate_json(api.caller.create("E").content)
    assert (body["id"], body["creation_complete"]) == (found["task_id"], False)
    (operation,) = rows(api.place.database, t.operations)
    assert operation["state"] == "preparing"


def test_readiness_says_what_is_missing(api: Api) -> None:
    assert api.caller.http.get("/healthz").json() == {"ok": True}
    response = api.caller.http.get("/readyz")
    assert response.status_code == 503
    body = TypeAdapter(schemas.Readiness).validate_json(response.content)
    assert {name for name, check in body["checks"].items() if not check["ok"]} == {"engine"}
    assert body["checks"]["engine"]["detail"]
    with api.place.database.transaction("test") as connection:
        connection.execute(text("DROP INDEX uq_tasks_external_id"))
        connection.execute(text("DELETE FROM hosts"))
        connection.execute(text("UPDATE alembic_version SET version_num = 'other'"))
    with serving(create_app(services_for(api.place.settings, api.place.database))) as url:
        checks = httpx.get(f"{url}/readyz", trust_env=False).json()["checks"]
    assert {name for name, check in checks.items() if not check["ok"]} == {
        "engine",
        "identities",
        "host",
        "migration",
    }


def test_an_unattested_schema_serves_everything_but_identities(api: Api) -> None:
    with api.place.database.transaction("test") as connection:
        connection.execute(text("DROP INDEX uq_tasks_external_id"))
    with (
        serving(create_app(services_for(api.place.settings, api.place.database))) as url,
        calling(url, api.place.database, api.place.workspace_id) as caller,
    ):
        problem(caller.create("E"), 503, "identity_schema_unattested")
        problem(caller.lookup("E"), 503, "identity_schema_unattested")
        problem(caller.lookup("E", "wsp_other"), 404, "not_found")
        assert caller.get("/tasks").status_code == 200
        problem(caller.create(title=""), 400, "invalid_field", "title")


def test_the_database_down_is_a_clear_503(tmp_path: Path) -> None:
    gone = Database(f"postgresql://nobody:secret-word@127.0.0.1:{closed_port()}/gone")
    place_settings = Settings(data=tmp_path, temporal_address=f"127.0.0.1:{closed_port()}")
    header = {"Authorization": "Bearer onb_" + "A" * 43}
    with (
        serving(create_app(services_for(place_settings, gone))) as url,
        httpx.Client(base_url=url, headers=header, timeout=60, trust_env=False) as http,
    ):
        for response in (
            http.post("/api/v1/tasks", json={"title": "t"}),
            http.get("/api/v1/tasks"),
            http.get("/api/v1/tasks/tsk_x"),
        ):
            problem(response, 503, "database_unavailable")
            assert "secret-word" not in response.text
            assert "Traceback" not in response.text
        ready = http.get("/readyz")
        assert ready.status_code == 503
        assert ready.json()["checks"]["database"]["ok"] is False
        assert "secret-word" not in ready.text
    gone.dispose()


# -- the document ---------------------------------------------------------------------------------


def test_the_openapi_document_is_served_and_the_file_is_current(api: Api) -> None:
    path = Path(__file__).parent.parent / "tools" / "openapi.py"
    spec = importlib.util.spec_from_file_location("openapi_tool", path)
    assert spec is not None
    assert spec.loader is not None
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    assert tool.TARGET.read_text(encoding="utf-8") == tool.rendered(), "run tools/openapi.py"
    assert httpx.get(f"{api.url}/openapi.json", trust_env=False).json() == document()


@pytest.mark.proves("X06")
def test_the_document_offers_no_way_to_take_a_creation_over() -> None:
    described = json.dumps(document()["paths"])
    operations = {
        operation["operationId"]
        for path in document()["paths"].values()
        for operation in path.values()
    }
    assert operations == {
        "create_task",
        "list_tasks",
        "get_task",
        "get_creation",
        "get_task_by_external_id",
        "healthz",
        "readyz",
    }
    for word in ("resume", "adopt", "repair", "expire"):
        assert word not in described.lower()


def test_every_reference_in_the_document_resolves_and_every_route_is_in_it(api: Api) -> None:
    whole = document()

    def references(node: Any) -> Iterator[str]:
        if isinstance(node, dict):
            for name, value in node.items():
                if name == "$ref":
                    yield value
                else:
                    yield from references(value)
        elif isinstance(node, list):
            for item in node:
                yield from references(item)

    for reference in references(whole):
        found: Any = whole
        for part in reference.removeprefix("#/").split("/"):
            found = found[part]
    app = create_app(services_for(api.place.settings, api.place.database))
    served = {
        (route.path_format, method.lower())
        for route in app.routes
        for method in getattr(route, "methods", ())
        if method != "OPTIONS"
    }
    described = {(path, method) for path, methods in whole["paths"].items() for method in methods}
    assert served - {("/openapi.json", "get")} == described
