"""The OpenAPI 3.1 document, as data. Schemas come from the models, so they cannot drift.

Written by hand because the handlers take the raw request (nothing may validate a body before its
identity was looked up), which no generator can describe.
"""

from __future__ import annotations

from typing import Any, Final

from pydantic import TypeAdapter
from pydantic.json_schema import JsonSchemaMode

from ... import __version__
from .schemas import (
    CreateTask,
    Creation,
    CreationResult,
    Problem,
    Readiness,
    Task,
    TaskList,
)

_REF: Final = "#/components/schemas/{model}"
_MODELS: Final[tuple[tuple[Any, JsonSchemaMode], ...]] = (
    (CreateTask, "validation"),
    (CreationResult, "serialization"),
    (Task, "serialization"),
    (TaskList, "serialization"),
    (Creation, "serialization"),
    (Readiness, "serialization"),
    (Problem, "serialization"),
)

_PROBLEMS: Final = {
    "400": "Malformed, or a field is not valid: `field` names it. Nothing was written.",
    "401": "A valid bearer token is required.",
    "404": "There is no such thing here, or not for this token: the answers are the same.",
    "413": "The body is larger than this server accepts.",
    "422": (
        "The creation was aborted (`creation_aborted`): `step`, `reason_code` and `reason` say why,"
        " `undone` what was undone. The identity is free again."
    ),
    "429": "The workspace prepares as many creations as its capacity allows.",
    "500": "Something went wrong; the server's log says what.",
    "503": (
        "Something that the server needs is not there now (`code` says what). Where `task_id` is"
        " present the task was admitted, and the runtime finishes its creation alone."
    ),
}

_MATCH_HEADER: Final = {
    "Onceborn-Request-Match": {
        "description": (
            "Whether this request asks for what the returned task was created from: `same`,"
            " `differs`, or `unknown` where it does not parse."
        ),
        "required": True,
        "schema": {"type": "string", "enum": ["same", "differs", "unknown"]},
    }
}

_FOUR_OUTCOMES: Final = (
    "One of four outcomes, told apart by `deduplicated` and `creation_complete`. A held identity"
    " is found before anything else of the request is looked at, however wrong the rest is, and"
    " finding it has no effect at all."
)


def _schema(model: str) -> dict[str, str]:
    return {"$ref": _REF.format(model=model)}


def _json(model: str, description: str, headers: dict[str, Any] | None = None) -> dict[str, Any]:
    answer: dict[str, Any] = {
        "description": description,
        "content": {"application/json": {"schema": _schema(model)}},
    }
    return {**answer, "headers": headers} if headers else answer


def _refusals(*statuses: str) -> dict[str, Any]:
    return {status: {"$ref": f"#/components/responses/Problem{status}"} for status in statuses}


def _parameter(place: str, name: str, schema: dict[str, Any], description: str) -> dict[str, Any]:
    required = place == "path" or name == "external_id"
    return {
        "in": place,
        "name": name,
        "required": required,
        "description": description,
        "schema": schema,
    }


_TASK_ID: Final = _parameter("path", "task_id", {"type": "string"}, "ID of the task.")

_PATHS: Final[dict[str, Any]] = {
    "/api/v1/tasks": {
        "post": {
            "operationId": "create_task",
            "summary": "Create a task once",
            "description": (
                "Waits until the creation is complete, however long, and answers with "
                + _FOUR_OUTCOMES[0].lower()
                + _FOUR_OUTCOMES[1:]
                + " If the connection is lost, the creation goes on: the same request, or the"
                " lookup, tells how it ended."
            ),
            "requestBody": {
                "required": True,
                "content": {"application/json": {"schema": _schema("CreateTask")}},
            },
            "responses": {
                "200": _json("CreationResult", _FOUR_OUTCOMES, _MATCH_HEADER),
                **_refusals("400", "401", "404", "413", "422", "429", "500", "503"),
            },
        },
        "get": {
            "operationId": "list_tasks",
            "summary": "List the complete tasks of the token's workspace, the latest first",
            "parameters": [
                _parameter(
                    "query",
                    "limit",
                    {"type": "integer", "minimum": 1, "maximum": 200, "default": 50},
                    "How many at most.",
                ),
                _parameter(
                    "query",
                    "cursor",
                    {"type": "string"},
                    "`next_cursor` of the page before.",
                ),
            ],
            "responses": {
                "200": _json("TaskList", "Tasks whose creation is complete."),
                **_refusals("400", "401", "404", "500", "503"),
            },
        },
    },
    "/api/v1/tasks/{task_id}": {
        "get": {
            "operationId": "get_task",
            "summary": "Read a task, also one that is still being prepared",
            "parameters": [_TASK_ID],
            "responses": {
                "200": _json("Task", "The task."),
                **_refusals("401", "404", "500", "503"),
            },
        }
    },
    "/api/v1/tasks/{task_id}/creation": {
        "get": {
            "operationId": "get_creation",
            "summary": "Read how a task's creation stands, or how it ended",
            "description": "Also of a creation that was aborted, whose task is gone.",
            "parameters": [_TASK_ID],
            "responses": {
                "200": _json("Creation", "The creation with its steps in order."),
                **_refusals("401", "404", "500", "503"),
            },
        }
    },
    "/api/v1/workspaces/{workspace_id}/tasks/by-external-id": {
        "get": {
            "operationId": "get_task_by_external_id",
            "summary": "Ask which task holds an identity, without any effect",
            "parameters": [
                _parameter("path", "workspace_id", {"type": "string"}, "ID of the workspace."),
                _parameter(
                    "query", "external_id", {"type": "string"}, "The identity, as in a create."
                ),
            ],
            "responses": {
                "200": _json("CreationResult", "The holder; `deduplicated` is true."),
                **_refusals("400", "401", "404", "500", "503"),
            },
        }
    },
    "/healthz": {
        "get": {
            "operationId": "healthz",
            "summary": "Whether the process answers",
            "security": [],
            "responses": {
                "200": {
                    "description": "It does.",
                    "content": {
                        "application/json": {
                            "schema": {
                                "type": "object",
                                "properties": {"ok": {"const": True}},
                                "required": ["ok"],
                                "additionalProperties": False,
                            }
                        }
                    },
                }
            },
        }
    },
    "/readyz": {
        "get": {
            "operationId": "readyz",
            "summary": "Whether creates can be served, and if not, why",
            "security": [],
            "responses": {
                "200": _json("Readiness", "Ready."),
                "503": _json("Readiness", "Not ready; the failed checks say why."),
            },
        }
    },
}


def document() -> dict[str, Any]:
    """The whole document."""
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Onceborn",
            "version": __version__,
            "summary": "One identity, one creation, finished or undone by the runtime alone.",
        },
        "security": [{"bearer": []}],
        "paths": _PATHS,
        "components": {
            "schemas": _schemas(),
            "responses": {f"Problem{status}": _problem(status) for status in _PROBLEMS},
            "securitySchemes": {
                "bearer": {
                    "type": "http",
                    "scheme": "bearer",
                    "description": "A token of `onceborn token create`, bound to one workspace.",
                }
            },
        },
    }


def _schemas() -> dict[str, Any]:
    adapters = [(model, mode, TypeAdapter(model)) for model, mode in _MODELS]
    _, definitions = TypeAdapter.json_schemas(adapters, ref_template=_REF)
    schemas: dict[str, Any] = definitions["$defs"]
    return dict(sorted(schemas.items()))


def _problem(status: str) -> dict[str, Any]:
    answer: dict[str, Any] = {
        "description": _PROBLEMS[status],
        "content": {"application/problem+json": {"schema": _schema("Problem")}},
    }
    if status in ("429", "503"):
        answer["headers"] = {"Retry-After": {"schema": {"type": "integer"}}}
    if status == "401":
        answer["headers"] = {"WWW-Authenticate": {"schema": {"type": "string"}}}
    return answer
