"""Every refusal has one base class, a stable code and its evidence in fields.

The class docstring is the default message. ``http_status`` is what the REST surface answers;
other surfaces map ``code``.
"""

from __future__ import annotations

from typing import Any, ClassVar


class OncebornError(Exception):
    """Something went wrong."""

    code: ClassVar[str] = "internal_error"
    http_status: ClassVar[int] = 500

    def __init__(self, message: str | None = None, **fields: Any) -> None:
        self.message = message or (self.__doc__ or "").strip().splitlines()[0]
        self.fields = fields
        super().__init__(self.message)


# -- what a caller sent ---------------------------------------------------------------------------


class InvalidField(OncebornError):
    """A field of the request is not valid."""

    code = "invalid_field"
    http_status = 400

    def __init__(self, field: str, message: str, **fields: Any) -> None:
        super().__init__(message, field=field, **fields)
        self.field = field


class InvalidExternalId(InvalidField):
    """The external ID is not valid."""

    code = "invalid_external_id"


class MalformedBody(OncebornError):
    """The request body is not JSON that can be read."""

    code = "malformed_body"
    http_status = 400


class BodyTooLarge(OncebornError):
    """The request body is larger than this server accepts."""

    code = "body_too_large"
    http_status = 413


class Unauthenticated(OncebornError):
    """A valid bearer token is required."""

    code = "unauthenticated"
    http_status = 401


class NotFound(OncebornError):
    """There is no such thing here."""

    code = "not_found"
    http_status = 404


class Forbidden(OncebornError):
    """This needs a token with the role operator; make one with `onceborn token create`."""

    code = "forbidden"
    http_status = 403


class CapacityReached(OncebornError):
    """The workspace prepares as many creations as its capacity allows; try again later."""

    code = "capacity_reached"
    http_status = 429


class CreationPreparing(OncebornError):
    """The task is still being prepared; the command is refused until its creation is complete."""

    code = "creation_preparing"
    http_status = 409


class CreationAborted(OncebornError):
    """The creation ended aborted; everything that it had made was undone."""

    code = "creation_aborted"
    http_status = 422


# -- what an operator asked for --------------------------------------------------------------------


class NotParked(OncebornError):
    """The operation is not parked; there is nothing to clear."""

    code = "not_parked"
    http_status = 409


class WrongHost(OncebornError):
    """What this names is on another host; run the command there."""

    code = "wrong_host"
    http_status = 409


class EntryChanged(OncebornError):
    """The entry does not hold what was listed; look again, and name it with its new digest."""

    code = "entry_changed"
    http_status = 409


class EntryRefused(OncebornError):
    """The entry cannot be purged now."""

    code = "entry_refused"
    http_status = 409


# -- what the runtime met -------------------------------------------------------------------------


class FenceLost(OncebornError):
    """Another owner has taken this operation over; nothing was written."""

    code = "fence_lost"
    http_status = 409


class StaleExpectation(OncebornError):
    """The ledger no longer holds what this action expected; read again."""

    code = "stale_expectation"
    http_status = 409


class HandleRejected(OncebornError):
    """The creation handle does not match the ledger."""

    code = "handle_rejected"
    http_status = 409


class CompletionRefused(OncebornError):
    """The Complete predicate does not hold."""

    code = "completion_refused"
    http_status = 409


class AbortRefused(OncebornError):
    """The Abort predicate does not hold."""

    code = "abort_refused"
    http_status = 409


class IdentityContended(OncebornError):
    """The identity kept changing hands while this request looked at it; try again."""

    code = "identity_contended"
    http_status = 503


class DispatchContended(OncebornError):
    """The dispatch key kept changing hands while this request looked at it; try again."""

    code = "dispatch_contended"
    http_status = 503


class SchemaUnattested(OncebornError):
    """The database schema does not prove that identities are unique; GET /readyz says why."""

    code = "identity_schema_unattested"
    http_status = 503


class NoHostAvailable(OncebornError):
    """No worker host is registered; start one with `onceborn worker`."""

    code = "no_host_available"
    http_status = 503


class EngineUnavailable(OncebornError):
    """Temporal cannot be reached; what was admitted is finished when it is back."""

    code = "engine_unavailable"
    http_status = 503


class ServerStopping(OncebornError):
    """This server is stopping and no longer waits; the creation goes on without it."""

    code = "server_stopping"
    http_status = 503


class DatabaseUnavailable(OncebornError):
    """The database cannot be reached; try again."""

    code = "database_unavailable"
    http_status = 503


class ConfigurationError(OncebornError):
    """The configuration is not usable."""

    code = "configuration_error"
    http_status = 503
