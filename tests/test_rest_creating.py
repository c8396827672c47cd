"""Creating over REST with the whole runtime behind it: the answer, and callers that go away."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from gitrepos import Repository
from pydantic import TypeAdapter
from support.server import Caller, calling, create_app, services_for, serving
from support.waiting import until
from support.world import Workplace, rows, workplace

from onceborn.runtime.ledger import tables as t
from onceborn.runtime.ledger.database import Database
from onceborn.surfaces.rest import schemas
from onceborn.surfaces.rest.services import Services
from onceborn.workflows.handoff import Handoff, Settled

RESULT = TypeAdapter(schemas.CreationResult)
CREATION = TypeAdapter(schemas.Creation)


class Watched(Handoff):
    """The real hand-off, which also tells how many callers wait, and on which loop."""

    loop: asyncio.AbstractEventLoop | None = None
    waiting = 0

    async def settled(self, operation_id: str) -> Settled:
        self.loop = asyncio.get_running_loop()
        self.waiting += 1
        try:
            return await super().settled(operation_id)
        finally:
            self.waiting -= 1


@dataclass
class Api:
    """A server, its workspace, its caller, and how to start its worker."""

    url: str
    place: Workplace
    caller: Caller
    services: Services
    worker: Callable[[], Any]

    @property
    def handoff(self) -> Watched:
        assert isinstance(self.services.handoff, Watched)
        return self.services.handoff

    def at_once(self, call: Callable[[], Any]) -> Any:
        """Start a call in a thread; returns its future."""
        pool = ThreadPoolExecutor(1)
        future = pool.submit(call)
        pool.shutdown(wait=False)
        return future


@pytest.fixture
def api(
    database: Database,
    database_url: str,
    tmp_path: Path,
    temporal_address: str,
    temporal_namespace: str,
) -> Iterator[Api]:
    data = tmp_path / "data"
    data.mkdir()
    host = "hst_" + os.urandom(16).hex()
    (data / "host-id").write_text(host + "\n")
    temporal = {"temporal_address": temporal_address, "temporal_namespace": temporal_namespace}
    place = workplace(database, data, roots=(tmp_path,), host_id=host, **temporal)
    services = services_for(place.settings, database)
    services.handoff.__class__ = Watched
    environment = {
        **os.environ,
        "ONCEBORN_DATA": str(data),
        "DATABASE_URL": database_url,
        "ONCEBORN_REPOSITORY_ROOTS": str(tmp_path),
        "TEMPORAL_ADDRESS": temporal_address,
        "TEMPORAL_NAMESPACE": temporal_namespace,
    }

    @contextmanager
    def worker() -> Iterator[subprocess.Popen[bytes]]:
        process = subprocess.Popen([sys.executable, "-m", "onceborn", "worker"], env=environment)
        try:
            yield process
        finally:
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0

    with (
        serving(create_app(services)) as url,
        calling(url, database, place.workspace_id) as caller,
    ):
        yield Api(url, place, caller, services, worker)


@pytest.mark.proves("C01", "C04", "C07", "S02", "S06")
def test_a_create_waits_and_answers_with_the_task(api: Api, tmp_path: Path) -> None:
    repositories = [Repository(tmp_path / f"r{n}") for n in range(3)]
    heads = [repository.commit() for repository in repositories]
    with api.worker():
        made = api.caller.create(
            "  E ",
            repositories=[{"source": str(r.path), "branch": "b"} for r in repositories],
            metadata={"ticket": 7},
        )
        bare = [api.caller.create(title="no repository") for _ in range(2)]
    assert made.status_code == 200, made.text
    assert made.headers["Onceborn-Request-Match"] == "same"
    body = RESULT.validate_json(made.content)
    assert (body["deduplicated"], body["creation_complete"]) == (False, True)
    assert (body["external_id"], body["metadata"], body["revision"]) == ("E", {"ticket": 7}, 1)
    assert [r["base_commit"] for r in body["repositories"]] == heads
    assert [r["source"] for r in body["repositories"]] == [str(r.path) for r in repositories]
    for repository in body["repositories"]:
        assert (Path(repository["path"]) / "README").exists()
    creation = CREATION.validate_json(api.caller.get(f"/tasks/{body['id']}/creation").content)
    assert (creation["state"], creation["outcome"]) == ("completed", "created")
    assert {step["state"] for step in creation["steps"]} == {"succeeded"}
    assert len({RESULT.validate_json(answer.content)["id"] for answer in bare}) == 2
    assert all("external_id" not in answer.json() for answer in bare)
    assert api.handoff.waiting == 0


@pytest.mark.proves("X02", "SB05")
def test_an_aborted_create_is_a_problem_and_frees_the_identity(api: Api, tmp_path: Path) -> None:
    repository = Repository(tmp_path / "r")
    repository.commit()
    with api.worker():
        refused = api.caller.create(
            "E", repositories=[{"source": str(repository.path), "branch": "trunk"}]
        )
        problem = refused.json()
        assert (refused.status_code, problem["code"]) == (422, "creation_aborted")
        assert (problem["step"], problem["reason_code"]) == ("worktree:0", "worktree.branch_in_use")
        assert [entry["step"] for entry in problem["undone"]] == ["repo_attach:0"]
        assert api.caller.lookup("E").status_code == 404
        assert api.caller.get(f"/tasks/{problem['task_id']}").status_code == 404
        creation = CREATION.validate_json(
            api.caller.get(f"/tasks/{problem['task_id']}/creation").content
        )
        assert creation["state"] == "aborted"
        assert api.caller.create("E").json()["deduplicated"] is False


@pytest.mark.proves("U06", "SB15")
def test_a_client_that_goes_away_is_not_waited_for_and_the_creation_goes_on(api: Api) -> None:
    for number in range(5):
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(
                f"{api.url}/api/v1/tasks",
                json={"title": "t", "external_id": f"E{number}"},
                headers=api.caller.http.headers,
                timeout=httpx.Timeout(30, read=0.5),
                trust_env=False,
            )
    until(lambda: api.handoff.waiting == 0)
    assert api.place.database.engine.pool.checkedout() == 0  # type: ignore[attr-defined]
    with api.worker():
        until(lambda: api.caller.lookup("E4").json()["creation_complete"])
        answers = [api.caller.create(f"E{number}").json() for number in range(5)]
    assert {answer["deduplicated"] for answer in answers} == {True}
    assert len(rows(api.place.database, t.operations)) == 5


@pytest.mark.proves("SC04")
def test_a_server_that_stops_answers_whoever_waits(api: Api) -> None:
    waiting = api.at_once(lambda: api.caller.create("E"))
    until(lambda: api.handoff.waiting == 1)
    assert api.handoff.loop is not None
    api.handoff.loop.call_soon_threadsafe(api.services.stopping.set)
    answer = waiting.result(30)
    assert (answer.status_code, answer.json()["code"]) == (503, "server_stopping")
    assert "Retry-After" in answer.headers
    task_id = answer.json()["task_id"]
    with api.worker():
        until(lambda: api.caller.lookup("E").json()["creation_complete"])
    assert api.caller.get(f"/tasks/{task_id}").json()["external_id"] == "E"


@pytest.mark.proves("R01", "S02", "SB10")
def test_twenty_racers_get_one_task_and_no_error(api: Api) -> None:
    barrier = threading.Barrier(20)

    def race(_: int) -> httpx.Response:
        barrier.wait()
        return api.caller.create("E")

    with api.worker(), ThreadPoolExecutor(20) as pool:
        answers = list(pool.map(race, range(20)))
    bodies = [RESULT.validate_json(answer.content) for answer in answers]
    assert [b["deduplicated"] for b in bodies].count(False) == 1
    assert len({b["id"] for b in bodies}) == 1
    assert all(b["deduplicated"] for b in bodies if not b["creation_complete"])
    assert len(rows(api.place.database, t.operations)) == 1
    (counters,) = rows(api.place.database, t.workspace_counters)
    assert (counters["preparing"], counters["last_number"]) == (0, 1)


def test_an_identity_that_was_released_meanwhile_is_not_in_the_answer(api: Api) -> None:
    waiting = api.at_once(lambda: api.caller.create("E"))
    until(lambda: api.handoff.waiting == 1)
    with api.place.database.transaction("test") as connection:
        # A release that was claimed: the runtime finishes it and goes on.
        connection.execute(t.operations.update().values(state="preparing_release"))
    with api.worker():
        body = RESULT.validate_json(waiting.result(60).content)
    assert (body["deduplicated"], body["creation_complete"]) == (False, True)
    assert "external_id" not in body
    creation = api.caller.get(f"/tasks/{body['id']}/creation").json()
    assert creation["outcome"] == "created_identity_lost"
    assert api.caller.lookup("E").status_code == 404
