"""Admission: one identity, one creation. The order is the contract (design 1-protocol).

The identity is looked up before anything else of the request is looked at, and once more before
any failure is reported; the race between two lookups is closed by the unique index alone.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from pydantic import ValidationError

from . import planning
from .access import Principal
from .failpoints import FailpointError, armed, failpoint
from .ledger import creations, hosts, identities
from .ledger.attestation import Attestor
from .ledger.database import Database
from .profiles import Profile
from .protocol.canonical import Domain, digest, digest_bytes
from .protocol.errors import (
    CapacityReached,
    DatabaseUnavailable,
    IdentityContended,
    InvalidField,
    NoHostAvailable,
)
from .protocol.handle import CreationHandle
from .protocol.identity import normalize_external_id
from .protocol.plan import InvalidManifest, Manifest
from .protocol.states import Outcome
from .protocol.unreadable import refuse_unreadable
from .settings import Settings

RequestMatch = Literal["same", "differs", "unknown"]

ENVELOPE: Final = frozenset({"external_id", "workspace_id"})
"""Fields of a create that are not part of the manifest."""

_ROUNDS: Final = 5
_SETTLING_PAUSES_S: Final = (0.05, 0.2, 0.5, 1.0, 2.0)
"""How long a commit in doubt is asked after, while the database is away."""
_HANDOFF_LEASE_MS: Final = 5_000
"""How long the admitting process has to hand off before the sweep takes the creation."""


@dataclass(frozen=True, slots=True)
class Admitted:
    """What a create met. ``outcome`` is None for a new creation: how it ends is read later."""

    outcome: Outcome | None
    task_id: str
    operation_id: str
    request_match: RequestMatch
    handle: CreationHandle | None = None


class _Held(Exception):
    """Another task holds the identity; the transaction is rolled back, nothing is consumed."""


class Admission:
    """Admits creates. One per process; safe to share between threads."""

    def __init__(
        self,
        database: Database,
        attestor: Attestor,
        profiles: Callable[[], Mapping[str, Profile]],
        settings: Settings,
    ) -> None:
        self._database = database
        self._attestor = attestor
        self._profiles = profiles
        self._settings = settings

    def admit(self, principal: Principal, workspace_id: str, body: Mapping[str, Any]) -> Admitted:
        """Steps 2 to 8 of the protocol's order; the caller has authorized the workspace.

        ``body`` is the parsed request, not validated.

        Raises:
            InvalidExternalId, SchemaUnattested: before anything else was looked at.
            InvalidField, CapacityReached, NoHostAvailable, IdentityContended: nothing was written,
                and nobody held the identity when this was decided.
            DatabaseUnavailable: what was written, if anything, is finished by the runtime.
        """
        external_id = normalize_external_id(body.get("external_id"))
        if external_id is not None:
            self._attestor.require()
            if not armed("admission.miss_lookup"):
                found = self._find(workspace_id, external_id, body)
                if found is not None:
                    return found
        failpoint("admission.missed")
        try:
            return self._create(principal, workspace_id, external_id, body)
        except Exception:
            # The failure may be a consequence of the creation that won meanwhile (a full
            # workspace, say): held now means Found.
            if external_id is not None:
                found = self._find_again(workspace_id, external_id, body)
                if found is not None:
                    return found
            raise

    def lookup(self, workspace_id: str, raw_external_id: object) -> Admitted | None:
        """Who holds the identity, without any side effect. ``None``: nobody.

        Raises:
            InvalidExternalId, SchemaUnattested: as for a create.
            InvalidField: the external ID is absent or only white space.
        """
        external_id = normalize_external_id(raw_external_id)
        if external_id is None:
            raise InvalidField("external_id", "external_id is required")
        self._attestor.require()
        return self._find(workspace_id, external_id, None)

    # -- found --------------------------------------------------------------------------------

    def _find(
        self, workspace_id: str, external_id: str, body: Mapping[str, Any] | None
    ) -> Admitted | None:
        with self._database.reading() as connection:
            holder = identities.holder(connection, workspace_id, external_id)
        if holder is None:
            return None
        return Admitted(
            outcome=Outcome.FOUND_SETTLED if holder.complete else Outcome.FOUND_UNSETTLED,
            task_id=holder.task_id,
            operation_id=holder.operation_id,
            request_match=_match(body, holder.manifest_hash),
        )

    def _find_again(
        self, workspace_id: str, external_id: str, body: Mapping[str, Any]
    ) -> Admitted | None:
        try:
            return self._find(workspace_id, external_id, body)
        except DatabaseUnavailable:
            return None  # the first failure is the one to report

    # -- created ------------------------------------------------------------------------------

    def _create(
        self,
        principal: Principal,
        workspace_id: str,
        external_id: str | None,
        body: Mapping[str, Any],
    ) -> Admitted:
        manifest = parse_manifest(body)
        token = secrets.token_bytes(32)
        new = self._resolve(principal, workspace_id, external_id, manifest, token)
        for _ in range(_ROUNDS):
            try:
                self._insert(new)
            except _Held:
                # A second statement: the one that met the conflict saw an older state.
                found = self._find(workspace_id, external_id or "", body)
                if found is not None:
                    return found
                continue
            return _created(new, token)
        raise IdentityContended()

    def _resolve(
        self,
        principal: Principal,
        workspace_id: str,
        external_id: str | None,
        manifest: Manifest,
        token: bytes,
    ) -> creations.NewCreation:
        with self._database.reading() as connection:
            host_id = hosts.place(connection)
        if host_id is None:
            raise NoHostAvailable()
        plan = planning.resolve(
            manifest,
            host_id=host_id,
            profiles=self._profiles,
            repository_roots=self._settings.repository_roots,
        )
        return creations.NewCreation(
            workspace_id=workspace_id,
            external_id=external_id,
            manifest=manifest,
            manifest_hash=manifest.digest(),
            plan=plan,
            plan_hash=plan.digest(),
            actor=principal.actor,
            actor_hash=digest(Domain.ACTOR, principal.actor),
            token_hash=digest_bytes(Domain.TOKEN, token),
            lease_ms=_HANDOFF_LEASE_MS,
        )

    def _insert(self, new: creations.NewCreation) -> None:
        try:
            with self._database.transaction("admission") as connection:
                number = creations.take_place(connection, new.workspace_id)
                if number is None:
                    raise CapacityReached()
                if not creations.insert_task(connection, self._database, new, number):
                    raise _Held()
                creations.insert_operation(connection, self._database, new)
        except (DatabaseUnavailable, FailpointError):
            # The commit's answer may have been lost: our own operation ID settles it, and it must
            # be settled here, or the look-up after a failure would find our own task.
            if not self._happened(new.plan.operation_id):
                raise

    def _happened(self, operation_id: str) -> bool:
        for pause_s in _SETTLING_PAUSES_S:
            try:
                with self._database.reading() as connection:
                    return creations.operation_exists(connection, operation_id)
            except DatabaseUnavailable:
                time.sleep(pause_s)
        with self._database.reading() as connection:
            return creations.operation_exists(connection, operation_id)


def _created(new: creations.NewCreation, token: bytes) -> Admitted:
    return Admitted(
        outcome=None,
        task_id=new.plan.task_id,
        operation_id=new.plan.operation_id,
        request_match="same",
        handle=CreationHandle(
            operation_id=new.plan.operation_id,
            task_id=new.plan.task_id,
            workspace_id=new.workspace_id,
            completion_token=token,
            actor_hash=new.actor_hash,
            manifest_hash=new.manifest_hash,
            plan_hash=new.plan_hash,
        ),
    )


def parse_manifest(body: Mapping[str, Any]) -> Manifest:
    """The request as a closed model.

    Raises:
        InvalidField: the first thing that is wrong, in the order of the model's fields.
    """
    refuse_unreadable(dict(body))
    try:
        return Manifest.model_validate({k: v for k, v in body.items() if k not in ENVELOPE})
    except ValidationError as error:
        raise _first_problem(error) from None


def _first_problem(error: ValidationError) -> InvalidField:
    first = error.errors(include_input=False, include_url=False)[0]
    cause = first.get("ctx", {}).get("error")
    if isinstance(cause, InvalidManifest):
        return InvalidField(cause.field, str(cause))
    field = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        return InvalidField(field, f"{field} is not a field of this request")
    return InvalidField(field, f"{field}: {first['msg'].removeprefix('Value error, ')}")


def _match(body: Mapping[str, Any] | None, manifest_hash: str) -> RequestMatch:
    if body is None:
        return "unknown"
    try:
        return "same" if parse_manifest(body).digest() == manifest_hash else "differs"
    except InvalidField:
        return "unknown"
