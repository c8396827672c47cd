"""A small client of the REST API, for the command line and the demo."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import quote

import httpx

from .refusals import Refused, ServerUnavailable

_LOOPBACK: Final = frozenset({"127.0.0.1", "localhost", "::1"})


@dataclass(frozen=True, slots=True)
class Created:
    """What a create answered: the task's document and the request-match header."""

    document: dict[str, Any]
    request_match: str


class Client:
    """Calls one server as one token. A create waits however long the creation takes.

    Raises, from every call:
        Refused: carries the status and the problem document.
        ServerUnavailable: no connection, or it was lost; a create may have been admitted.
    """

    def __init__(self, url: str, token: str) -> None:
        self._url = url
        try:
            self._http = httpx.Client(
                base_url=url,
                headers={"Authorization": f"Bearer {token}"},
                timeout=httpx.Timeout(30.0, connect=5.0),
                # No proxy stands between us and our own machine, whatever the environment says.
                trust_env=httpx.URL(url).host not in _LOOPBACK,
            )
        except (httpx.InvalidURL, UnicodeEncodeError):
            raise ServerUnavailable(f"{url} is not the address of a server") from None

    def create(self, manifest: Mapping[str, Any]) -> Created:
        response = self._send(
            "POST",
            "/api/v1/tasks",
            json=manifest,
            timeout=httpx.Timeout(None, connect=5.0),
        )
        match = response.headers.get("Onceborn-Request-Match", "unknown")
        return Created(response.json(), match)

    def task(self, task_id: str) -> dict[str, Any]:
        return self._read(f"/api/v1/tasks/{quote(task_id, safe='')}")

    def creation(self, task_id: str) -> dict[str, Any]:
        return self._read(f"/api/v1/tasks/{quote(task_id, safe='')}/creation")

    def tasks(self, *, limit: int = 50, cursor: str | None = None) -> dict[str, Any]:
        parameters = {"limit": str(limit), **({"cursor": cursor} if cursor else {})}
        return self._read("/api/v1/tasks", parameters)

    def lookup(self, workspace_id: str, external_id: str) -> dict[str, Any]:
        path = f"/api/v1/workspaces/{quote(workspace_id, safe='')}/tasks/by-external-id"
        return self._read(path, {"external_id": external_id})

    def close(self) -> None:
        self._http.close()

    def _read(self, path: str, parameters: Mapping[str, str] | None = None) -> dict[str, Any]:
        document: dict[str, Any] = self._send("GET", path, params=parameters).json()
        return document

    def _send(self, method: str, path: str, **options: Any) -> httpx.Response:
        try:
            response = self._http.request(method, path, **options)
        except (httpx.ConnectError, httpx.ConnectTimeout, httpx.UnsupportedProtocol):
            raise ServerUnavailable(
                f"There is no Onceborn server at {self._url}. Start one with `onceborn up`, or set"
                " ONCEBORN_URL."
            ) from None
        except httpx.HTTPError as error:
            raise ServerUnavailable(
                f"The connection to {self._url} was lost ({type(error).__name__}). A creation that"
                " was admitted goes on: repeat the command with the same external ID, or look it"
                " up."
            ) from None
        if response.status_code == httpx.codes.OK:
            return response
        raise Refused(response.status_code, _problem(response))


def _problem(response: httpx.Response) -> dict[str, Any]:
    try:
        document = response.json()
    except ValueError:
        document = None
    if isinstance(document, dict):
        return document
    return {"detail": f"The server answered HTTP {response.status_code} and not as Onceborn does."}
