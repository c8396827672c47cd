"""The durable memory as SQLAlchemy Core tables, for SQLite and PostgreSQL alike.

All times are integers: milliseconds since the Unix epoch, by the database's clock. JSON documents
are text in canonical form, so that their bytes, and with them their hashes, never change on the
way. Everything that is compared is ``COLLATE "C"`` on PostgreSQL and ``BINARY`` on SQLite: byte by
byte, whatever the database's own collation is.
"""

from __future__ import annotations

from sqlalchemy import (
    BigInteger,
    Boolean,
    CheckConstraint,
    Column,
    ForeignKey,
    Index,
    Integer,
    MetaData,
    Table,
    Text,
    false,
    text,
)

from ..protocol.states import CompensationState, OperationState, StepState

metadata = MetaData(
    naming_convention={
        "pk": "pk_%(table_name)s",
        "fk": "fk_%(table_name)s_%(column_0_name)s",
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "ck": "ck_%(table_name)s_%(constraint_name)s",
    }
)

KEY = Text(collation="C").with_variant(Text(collation="BINARY"), "sqlite")
"""Text that is compared byte by byte: identifiers, identities, states."""

SERIAL = BigInteger().with_variant(Integer, "sqlite")


def _one_of(
    column: str, values: type[OperationState | StepState | CompensationState]
) -> CheckConstraint:
    allowed = ", ".join(f"'{value}'" for value in values)
    return CheckConstraint(f"{column} IN ({allowed})", name=column)


workspaces = Table(
    "workspaces",
    metadata,
    Column("id", KEY, primary_key=True),
    Column("name", Text, nullable=False),
    Column("created_at", BigInteger, nullable=False),
    Column("deleted_at", BigInteger),
)

workspace_counters = Table(
    # The row that admission and Complete lock first. It carries what they count, so that
    # capacity, identifier and deletion generation are one statement.
    "workspace_counters",
    metadata,
    Column("workspace_id", KEY, ForeignKey(workspaces.c.id), primary_key=True),
    Column("deletion_generation", BigInteger, nullable=False, server_default="0"),
    Column("capacity", BigInteger),
    Column("preparing", BigInteger, nullable=False, server_default="0"),
    Column("last_number", BigInteger, nullable=False, server_default="0"),
    CheckConstraint("preparing >= 0", name="preparing"),
)

tokens = Table(
    "tokens",
    metadata,
    Column("id", KEY, primary_key=True),
    Column("workspace_id", KEY, ForeignKey(workspaces.c.id), nullable=False),
    Column("name", Text, nullable=False),
    Column("role", KEY, nullable=False),
    Column("token_hash", KEY, nullable=False),
    Column("created_at", BigInteger, nullable=False),
    Column("revoked_at", BigInteger),
    Index("uq_tokens_token_hash", "token_hash", unique=True),
    CheckConstraint("role IN ('member', 'operator')", name="role"),
)

hosts = Table(
    "hosts",
    metadata,
    Column("id", KEY, primary_key=True),
    Column("name", Text, nullable=False),
    Column("task_queue", KEY, nullable=False),
    Column("registered_at", BigInteger, nullable=False),
    Column("seen_at", BigInteger, nullable=False),
    Column("evicted_at", BigInteger),
)

tasks = Table(
    "tasks",
    metadata,
    Column("id", KEY, primary_key=True),
    Column("workspace_id", KEY, ForeignKey(workspaces.c.id), nullable=False),
    Column("operation_id", KEY, nullable=False),
    Column("number", BigInteger, nullable=False),
    Column("external_id", KEY),
    Column("title", Text, nullable=False),
    Column("description", Text, nullable=False),
    Column("metadata", Text, nullable=False),
    Column("revision", BigInteger, nullable=False, server_default="0"),
    Column("complete", Boolean, nullable=False, server_default=false()),
    Column("list_position", BigInteger),
    Column("created_at", BigInteger, nullable=False),
    Column("archived_at", BigInteger),
    Index("uq_tasks_workspace_number", "workspace_id", "number", unique=True),
    Index("uq_tasks_operation_id", "operation_id", unique=True),
)
EXTERNAL_ID_INDEX = Index(
    "uq_tasks_external_id",
    tasks.c.workspace_id,
    tasks.c.external_id,
    unique=True,
    postgresql_where=text("external_id IS NOT NULL"),
    sqlite_where=text("external_id IS NOT NULL"),
)
Index(
    "ix_tasks_list",
    tasks.c.workspace_id,
    tasks.c.list_position,
    postgresql_where=text("list_position IS NOT NULL"),
    sqlite_where=text("list_position IS NOT NULL"),
)

operations = Table(
    "operations",
    metadata,
    Column("id", KEY, primary_key=True),
    Column("workspace_id", KEY, ForeignKey(workspaces.c.id), nullable=False),
    Column("task_id", KEY, nullable=False),
    Column("host_id", KEY, nullable=False),
    Column("actor", Text, nullable=False),
    Column("actor_hash", KEY, nullable=False),
    Column("token_hash", KEY, nullable=False),
    Column("token_spent", Boolean, nullable=False, server_default=false()),
    Column("manifest", Text, nullable=False),
    Column("manifest_hash", KEY, nullable=False),
    Column("plan", Text, nullable=False),
    Column("plan_hash", KEY, nullable=False),
    Column("state", KEY, nullable=False),
    Column("fence", BigInteger, nullable=False, server_default="0"),
    Column("owner", Text),
    Column("lease_until", BigInteger, nullable=False),
    Column("driven_fence", BigInteger, nullable=False, server_default="0"),
    Column("claims_without_progress", Integer, nullable=False, server_default="0"),
    Column("busy_since", BigInteger),
    Column("busy_with", Text),
    Column("parked_reason", Text),
    Column("parked_at", BigInteger),
    Column("deleted", Boolean, nullable=False, server_default=false()),
    Column("identity_released", Boolean, nullable=False, server_default=false()),
    Column("outcome", KEY),
    Column("failure", Text),
    Column("created_at", BigInteger, nullable=False),
    Column("finished_at", BigInteger),
    _one_of("state", OperationState),
    Index("ix_operations_task_id", "task_id"),
)
OPEN_OPERATIONS = (
    "state IN ('preparing', 'preparing_release', 'completing') AND parked_reason IS NULL"
)
Index(
    # What the sweep scans: it holds open operations only, so its cost does not grow with history.
    "ix_operations_open",
    operations.c.host_id,
    operations.c.lease_until,
    postgresql_where=text(OPEN_OPERATIONS),
    sqlite_where=text(OPEN_OPERATIONS),
)

steps = Table(
    "steps",
    metadata,
    Column("operation_id", KEY, ForeignKey(operations.c.id), primary_key=True),
    Column("position", Integer, primary_key=True),
    Column("step_key", KEY, nullable=False),
    Column("kind", KEY, nullable=False),
    Column("request", Text, nullable=False),
    Column("request_hash", KEY, nullable=False),
    Column("idempotency_key", KEY, nullable=False),
    Column("state", KEY, nullable=False),
    Column("attempt", Integer, nullable=False, server_default="0"),
    Column("attempt_token", KEY),
    Column("attempt_fence", BigInteger),
    Column("lease_until", BigInteger),
    Column("due_at", BigInteger),
    Column("doubts", Integer, nullable=False, server_default="0"),
    Column("evidence", Text),
    Column("evidence_hash", KEY),
    Column("failure", Text),
    Column("compensation", KEY, nullable=False),
    Column("undo_attempt", Integer, nullable=False, server_default="0"),
    Column("undo_proof", Text),
    _one_of("state", StepState),
    _one_of("compensation", CompensationState),
    Index("uq_steps_operation_key", "operation_id", "step_key", unique=True),
)

attachments = Table(
    "repository_attachments",
    metadata,
    Column("id", KEY, primary_key=True),
    Column("operation_id", KEY, ForeignKey(operations.c.id), nullable=False),
    Column("task_id", KEY, nullable=False),
    Column("repository", KEY, nullable=False),
    Column("source", Text, nullable=False),
    Column("clone", Text, nullable=False),
    Column("base_ref", Text, nullable=False),
    Column("base_commit", KEY, nullable=False),
    Column("resolved_by", KEY, nullable=False),
    Column("ownership_key", KEY, nullable=False),
    Column("created_at", BigInteger, nullable=False),
    Index("uq_repository_attachments", "operation_id", "repository", unique=True),
)

sessions = Table(
    "sessions",
    metadata,
    Column("id", KEY, primary_key=True),
    Column("operation_id", KEY, ForeignKey(operations.c.id), nullable=False),
    Column("task_id", KEY, nullable=False),
    Column("workspace_id", KEY, ForeignKey(workspaces.c.id), nullable=False),
    Column("profile", KEY, nullable=False),
    Column("launch", Text, nullable=False),
    Column("launch_hash", KEY, nullable=False),
    Column("created_at", BigInteger, nullable=False),
    Index("ix_sessions_task_id", "task_id"),
)

runs = Table(
    "runs",
    metadata,
    Column("id", KEY, primary_key=True),
    Column("workspace_id", KEY, ForeignKey(workspaces.c.id), nullable=False),
    Column("dispatch_key", KEY),
    Column("workflow_ref", KEY, nullable=False),
    Column("workflow_version", KEY, nullable=False),
    Column("input", Text, nullable=False),
    Column("host_id", KEY, nullable=False),
    Column("task_id", KEY),
    Column("session_id", KEY),
    Column("state", KEY, nullable=False),
    Column("launch_token", KEY),
    Column("result", Text),
    Column("created_at", BigInteger, nullable=False),
    Column("started_at", BigInteger),
    Column("finished_at", BigInteger),
    CheckConstraint(
        "state IN ('admitted', 'started', 'running', 'succeeded', 'failed', 'cancelled', 'lost')",
        name="state",
    ),
    Index("ix_runs_task_id", "task_id"),
)
DISPATCH_KEY_INDEX = Index(
    "uq_runs_dispatch_key",
    runs.c.workspace_id,
    runs.c.dispatch_key,
    unique=True,
    postgresql_where=text("dispatch_key IS NOT NULL"),
    sqlite_where=text("dispatch_key IS NOT NULL"),
)
Index(
    "ix_runs_admitted",
    runs.c.host_id,
    runs.c.created_at,
    postgresql_where=text("state = 'admitted'"),
    sqlite_where=text("state = 'admitted'"),
)

Index(
    # What is to be supervised, in the order of admission: it holds unfinished runs only.
    "ix_runs_open",
    runs.c.host_id,
    runs.c.id,
    postgresql_where=text("state IN ('started', 'running')"),
    sqlite_where=text("state IN ('started', 'running')"),
)

event_feeds = Table(
    # Locked last in every transaction that appends an event: a number never appears after a higher.
    "event_feeds",
    metadata,
    Column("workspace_id", KEY, ForeignKey(workspaces.c.id), primary_key=True),
    Column("last_number", BigInteger, nullable=False, server_default="0"),
    Column("last_list_position", BigInteger, nullable=False, server_default="0"),
)

outbox = Table(
    "outbox",
    metadata,
    Column("id", KEY, primary_key=True),
    Column("workspace_id", KEY, ForeignKey(workspaces.c.id), nullable=False),
    Column("feed_number", BigInteger, nullable=False),
    Column("aggregate", KEY, nullable=False),
    Column("aggregate_id", KEY, nullable=False),
    Column("revision", BigInteger, nullable=False),
    Column("type", KEY, nullable=False),
    Column("payload", Text, nullable=False),
    Column("created_at", BigInteger, nullable=False),
    Index("uq_outbox_feed", "workspace_id", "feed_number", unique=True),
    Index("uq_outbox_aggregate", "aggregate", "aggregate_id", "revision", unique=True),
)

cleanup_jobs = Table(
    # What an undoing left: kept with its full proof until an operator purges it (quarantined), or
    # ours and clean but not removable then, and tried again by the sweep of its host (pending).
    "cleanup_jobs",
    metadata,
    Column("id", KEY, primary_key=True),
    Column("operation_id", KEY, ForeignKey(operations.c.id), nullable=False),
    Column("step_key", KEY, nullable=False),
    Column("host_id", KEY, nullable=False),
    Column("kind", KEY, nullable=False),
    Column("state", KEY, nullable=False),
    Column("proof", Text, nullable=False),
    Column("attempts", Integer, nullable=False, server_default="0"),
    Column("due_at", BigInteger),
    Column("last_error", Text),
    # Who works on it now: an attempt of the sweep, or an operator's purge.
    Column("claim_token", KEY),
    Column("lease_until", BigInteger),
    Column("result", Text),
    Column("created_at", BigInteger, nullable=False),
    Column("finished_at", BigInteger),
    CheckConstraint("state IN ('quarantined', 'pending', 'done', 'purged')", name="state"),
    Index("ix_cleanup_jobs_operation_id", "operation_id"),
)
PENDING_CLEANUP = "state = 'pending'"
Index(
    # What the sweep looks for: it holds pending jobs only.
    "ix_cleanup_jobs_pending",
    cleanup_jobs.c.host_id,
    cleanup_jobs.c.due_at,
    postgresql_where=text(PENDING_CLEANUP),
    sqlite_where=text(PENDING_CLEANUP),
)

operator_actions = Table(
    # What operators changed: written in the transaction that makes it true, never changed.
    "operator_actions",
    metadata,
    Column("id", KEY, primary_key=True),
    Column("workspace_id", KEY, ForeignKey(workspaces.c.id), nullable=False),
    Column("actor", Text, nullable=False),
    Column("action", KEY, nullable=False),
    Column("operation_id", KEY, ForeignKey(operations.c.id), nullable=False),
    Column("entry_id", KEY),
    Column("detail", Text, nullable=False),
    Column("created_at", BigInteger, nullable=False),
    Index("ix_operator_actions_operation_id", "operation_id"),
)
