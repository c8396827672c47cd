"""The kind ``repo_attach``: the repository's clone is on the host, and the base is a commit.

It makes or refreshes the shared clone, resolves the base from what the remote says now, and writes
our attachment row. Undoing it deletes the row; the clone stays, others use it.
"""

from __future__ import annotations

from typing import Final

from ..runtime.ids import new_id
from ..runtime.ledger import attachments
from ..runtime.ledger.attachments import Attachment
from ..runtime.protocol.evidence import RepoAttached
from ..runtime.protocol.plan import RepoAttachRequest
from . import sources
from .clones import Clone
from .git import Git
from .kind import (
    Absent,
    Compensated,
    Conflict,
    Observation,
    OursHalfMade,
    Present,
    Step,
    Undone,
    World,
)
from .sources import Base


class RepoAttach:
    """See the module."""

    name: Final = "repo_attach"

    def resource(self, step: Step[RepoAttachRequest]) -> str:
        return f"clone/{step.request.clone}"

    def observe(self, step: Step[RepoAttachRequest], world: World) -> Observation:
        row = _row(step, world)
        path = world.host.path(step.request.clone)
        if row is None and Clone(path, world).unfinished.exists():
            # Only who holds the clone's lock makes one, and that is us now: nobody is at it.
            return OursHalfMade({"attachment": None, "unfinished": str(path)})
        if row is None:
            return Absent({"attachment": None, "clone": str(path)})
        if row.ownership_key != step.idempotency_key:
            return Conflict(
                "repository.attached_otherwise",
                f"the attachment {row.id} of this repository was written by another step",
            )
        exact = row == _attachment(step, row.id, _base(row))
        if not exact or not Clone(path, world).holds(row.base_commit):
            return OursHalfMade({"attachment": row.id, "row_exact": exact, "clone": str(path)})
        return Present(
            RepoAttached.model_validate(
                {
                    "repository": row.repository,
                    "clone": str(path),
                    "base_ref": row.base_ref,
                    "base_commit": row.base_commit,
                    "resolved_by": row.resolved_by,
                    "attachment_id": row.id,
                }
            )
        )

    def perform(self, step: Step[RepoAttachRequest], world: World) -> None:
        """Raises StepFailed or StepRetry with a code ``repository.*``, or StepRetry ``git.locked``.

        The whole list: sources.py and clones.py.
        """
        request = step.request
        address = sources.readable_address(request.source, world.host)
        listing = sources.list_remote(Git.of(world), address)
        base = sources.resolve_base(listing, request.base_ref, address)
        clone = Clone(world.host.path(request.clone), world)
        clone.bring_up_to_date(address, listing)
        clone.have(base, address)
        with world.transaction() as connection:
            # An earlier try of this very step may have left a row that is no longer exact.
            attachments.remove(
                connection, step.operation_id, request.repository, step.idempotency_key
            )
            attachments.add(connection, world.database, _attachment(step, new_id("att"), base))

    def compensate(self, step: Step[RepoAttachRequest], world: World) -> Undone:
        clone = Clone(world.host.path(step.request.clone), world)
        clone.drop_unfinished()
        row = _row(step, world)
        removed = False
        if row is not None and row.ownership_key == step.idempotency_key:
            with world.transaction() as connection:
                removed = attachments.remove(
                    connection, step.operation_id, step.request.repository, step.idempotency_key
                )
        return Compensated({"attachment": None, "removed": removed, "clone_kept": str(clone.path)})


def _row(step: Step[RepoAttachRequest], world: World) -> Attachment | None:
    with world.database.reading() as connection:
        return attachments.find(connection, step.operation_id, step.request.repository)


def _base(row: Attachment) -> Base:
    # What the row itself says of the base; whether it is in the clone is looked at there.
    return Base(row.base_ref, row.base_commit, row.resolved_by)  # type: ignore[arg-type]


def _attachment(step: Step[RepoAttachRequest], attachment_id: str, base: Base) -> Attachment:
    return Attachment(
        id=attachment_id,
        operation_id=step.operation_id,
        task_id=step.task_id,
        repository=step.request.repository,
        source=step.request.source,
        clone=step.request.clone,
        base_ref=base.ref,
        base_commit=base.commit,
        resolved_by=base.resolved_by,
        ownership_key=step.idempotency_key,
    )
