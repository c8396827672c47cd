"""The task routes. Handlers take the raw request: nothing is validated before the identity.

The order, on every route: authenticate, size limit, parse, authorize the workspace, look the
identity up, and only then everything else (design 1-protocol, 'Admission').
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from litestar import Response, get, post
from litestar.handlers import HTTPRouteHandler
from litestar.serialization import encode_json

from ...runtime import tasks
from ...runtime.access import Principal, authenticate, authorize
from ...runtime.admission import Admitted, RequestMatch
from ...runtime.protocol.errors import IdentityContended, InvalidField, NotFound
from ...runtime.protocol.identity import normalize_external_id
from ...runtime.protocol.states import Outcome
from . import represent
from .body import AnyRequest, ClientGone, parse_object, query, read_body
from .services import Services
from .wait import finish

MATCH_HEADER: Final = "Onceborn-Request-Match"
_ROUNDS: Final = 5


@dataclass(frozen=True, slots=True)
class Answer:
    """A settled answer, ready to be written."""

    view: tasks.TaskView
    outcome: Outcome
    external_id: str | None
    request_match: RequestMatch


def task_routes(services: Services) -> list[HTTPRouteHandler]:
    """The handlers, bound to one process's services."""

    @post("/api/v1/tasks", status_code=200)
    async def create_task(request: AnyRequest) -> Response[bytes]:
        limit = services.settings.max_body_bytes
        header = request.headers.get("authorization")
        try:
            raw = await read_body(request, limit)
        except ClientGone:
            return Response(b"", status_code=400)
        answer = await services.run(lambda: _create(services, header, raw, limit))
        if isinstance(answer, Answer):
            return _answered(answer)
        admitted, workspace_id, external_id = answer
        outcome = await finish(services, request, admitted)
        if isinstance(outcome, Response):
            return outcome
        view = await services.run(
            lambda: tasks.get(services.database, workspace_id, admitted.task_id)
        )
        return _answered(Answer(view, outcome, external_id, admitted.request_match))

    @get("/api/v1/tasks")
    async def list_tasks(request: AnyRequest) -> Response[bytes]:
        def work(principal: Principal) -> Any:
            authorize(principal, principal.workspace_id)
            fields = query(request, frozenset({"limit", "cursor"}))
            page = tasks.page(
                services.database,
                principal.workspace_id,
                limit=_limit(fields.get("limit")),
                cursor=fields.get("cursor"),
            )
            return represent.list_document(page)

        return await _read(services, request, work)

    @get("/api/v1/tasks/{task_id:str}")
    async def get_task(request: AnyRequest) -> Response[bytes]:
        def work(principal: Principal) -> Any:
            authorize(principal, principal.workspace_id)
            return represent.task_document(
                tasks.get(services.database, principal.workspace_id, _task_id(request))
            )

        return await _read(services, request, work)

    @get("/api/v1/tasks/{task_id:str}/creation")
    async def get_creation(request: AnyRequest) -> Response[bytes]:
        def work(principal: Principal) -> Any:
            authorize(principal, principal.workspace_id)
            return represent.creation_document(
                tasks.progress(services.database, principal.workspace_id, _task_id(request))
            )

        return await _read(services, request, work)

    @get("/api/v1/workspaces/{workspace_id:str}/tasks/by-external-id")
    async def get_by_external_id(request: AnyRequest) -> Response[bytes]:
        workspace_id = str(request.path_params["workspace_id"])

        def work(principal: Principal) -> Any:
            authorize(principal, workspace_id)
            raw = query(request, frozenset({"external_id"})).get("external_id")
            for _ in range(_ROUNDS):
                found = services.admission.lookup(workspace_id, raw)
                if found is None:
                    raise NotFound
                answer = _found(services, workspace_id, raw, found)
                if answer is not None:
                    return represent.result_document(
                        answer.view, answer.outcome, answer.external_id
                    )
            raise IdentityContended

        return await _read(services, request, work)

    return [create_task, list_tasks, get_task, get_creation, get_by_external_id]


def _create(
    services: Services, header: str | None, raw: bytes | None, limit: int
) -> Answer | tuple[Admitted, str, str | None]:
    """Everything up to the decision, in one thread: a Found answer costs one hop."""
    principal = authenticate(services.database, header)
    body = parse_object(raw, limit)
    workspace_id = _workspace(principal, body)
    authorize(principal, workspace_id)
    given = body.get("external_id")
    for _ in range(_ROUNDS):
        if _workspace_is_wrong(body):
            admitted = _held_or_refused(services, workspace_id, given)
        else:
            admitted = services.admission.admit(principal, workspace_id, body)
        if admitted.outcome is None:
            return admitted, workspace_id, normalize_external_id(given)
        answer = _found(services, workspace_id, given, admitted)
        if answer is not None:
            return answer
        # The holder went (aborted, deleted) between the lookup and the read: look again.
    raise IdentityContended


def _found(
    services: Services, workspace_id: str, raw_external_id: object, found: Admitted
) -> Answer | None:
    assert found.outcome is not None
    try:
        view = tasks.get(services.database, workspace_id, found.task_id)
    except NotFound:
        return None
    identity = normalize_external_id(raw_external_id)
    return Answer(view, found.outcome, identity, found.request_match)


def _task_id(request: AnyRequest) -> str:
    return str(request.path_params["task_id"])


def _workspace(principal: Principal, body: dict[str, Any]) -> str:
    """The workspace that the request is for, read leniently; default: the token's own."""
    named = body.get("workspace_id")
    return named if isinstance(named, str) else principal.workspace_id


def _workspace_is_wrong(body: dict[str, Any]) -> bool:
    named = body.get("workspace_id")
    return named is not None and not isinstance(named, str)


def _held_or_refused(services: Services, workspace_id: str, raw_external_id: object) -> Admitted:
    """A ``workspace_id`` of the wrong type is refused, but only after the identity's lookup."""
    if normalize_external_id(raw_external_id) is not None:
        found = services.admission.lookup(workspace_id, raw_external_id)
        if found is not None:
            return found
    raise InvalidField("workspace_id", "workspace_id must be a string")


def _limit(text: str | None) -> int:
    if text is None:
        return tasks.DEFAULT_PAGE
    if not (text.isascii() and text.isdigit() and len(text) <= 4):
        raise InvalidField("limit", f"limit must be a whole number from 1 to {tasks.MAX_PAGE}")
    return int(text)


async def _read(
    services: Services, request: AnyRequest, work: Callable[[Principal], Any]
) -> Response[bytes]:
    header = request.headers.get("authorization")

    def read() -> bytes:
        return encode_json(work(authenticate(services.database, header)))

    return Response(await services.run(read), media_type="application/json")


def _answered(answer: Answer) -> Response[bytes]:
    document = represent.result_document(answer.view, answer.outcome, answer.external_id)
    return Response(
        encode_json(document),
        status_code=200,
        media_type="application/json",
        headers={MATCH_HEADER: answer.request_match},
    )
