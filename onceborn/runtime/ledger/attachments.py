"""Which commit of which repository a task starts from. Rows belong to the step that wrote them."""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import Connection, delete, insert, select

from .database import Database
from .tables import attachments


@dataclass(frozen=True, slots=True)
class Attachment:
    """One repository of one task, resolved to a commit."""

    id: str
    operation_id: str
    task_id: str
    repository: str
    """Key of the repository within the task."""
    source: str
    clone: str
    """Relative to the host's data folder."""
    base_ref: str
    base_commit: str
    resolved_by: str
    ownership_key: str
    """Idempotency key of the step that wrote it."""


_FIELDS = tuple(attachments.c[name] for name in Attachment.__slots__)


def find(connection: Connection, operation_id: str, repository: str) -> Attachment | None:
    """The attachment of one repository of an operation."""
    row = connection.execute(
        select(*_FIELDS).where(
            attachments.c.operation_id == operation_id, attachments.c.repository == repository
        )
    ).one_or_none()
    return None if row is None else Attachment(**row._mapping)


def add(connection: Connection, database: Database, attachment: Attachment) -> None:
    """Write it, in a transaction that holds the step.

    Raises:
        IntegrityError: the operation has an attachment of this repository already.
    """
    connection.execute(
        insert(attachments).values(
            **{name: getattr(attachment, name) for name in Attachment.__slots__},
            created_at=database.clock.now(),
        )
    )


def remove(connection: Connection, operation_id: str, repository: str, ownership_key: str) -> bool:
    """Delete the row that the step with this key wrote; false where there is none."""
    done = connection.execute(
        delete(attachments).where(
            attachments.c.operation_id == operation_id,
            attachments.c.repository == repository,
            attachments.c.ownership_key == ownership_key,
        )
    )
    return done.rowcount == 1
