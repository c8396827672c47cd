"""The first schema.

Revision ID: 0001
Revises:
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

# Written out and never imported from the models: a revision is a fact of the past.
KEY = sa.Text(collation="C").with_variant(sa.Text(collation="BINARY"), "sqlite")


def _index(
    name: str, table: str, *columns: str, unique: bool = False, where: str | None = None
) -> None:
    predicate = None if where is None else sa.text(where)
    op.create_index(
        name,
        table,
        list(columns),
        unique=unique,
        postgresql_where=predicate,
        sqlite_where=predicate,
    )


def upgrade() -> None:
    op.create_table(
        "workspaces",
        sa.Column("id", KEY, nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.Column("deleted_at", sa.BigInteger(), nullable=True),
        sa.PrimaryKeyConstraint("id", name="pk_workspaces"),
    )

    op.create_table(
        "workspace_counters",
        sa.Column("workspace_id", KEY, nullable=False),
        sa.Column("deletion_generation", sa.BigInteger(), nullable=False, server_default="0"),
        sa.Column("capacity", sa.BigInteger(), nullable=True),
        sa.Column("preparing", sa.BigInteger(), nullable=False, server_default="0"),
        sa.Column("last_number", sa.BigInteger(), nullable=False, server_default="0"),
        sa.PrimaryKeyConstraint("workspace_id", name="pk_workspace_counters"),
        sa.ForeignKeyConstraint(
            ["workspace_id"], ["workspaces.id"], name="fk_workspace_counters_workspace_id"
        ),
        sa.CheckConstraint("preparing >= 0", name="ck_workspace_counters_preparing"),
    )

    op.create_table(
        "tokens",
        sa.Column("id", KEY, nullable=False),
        sa.Column("workspace_id", KEY, nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("role", KEY, nullable=False),
        sa.Column("token_hash", KEY, nullable=False),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.Column("revoked_at", sa.BigInteger(), nullable=True),
        sa.PrimaryKeyConstraint("id", name="pk_tokens"),
        sa.ForeignKeyConstraint(["workspace_id"], ["workspaces.id"], name="fk_tokens_workspace_id"),
        sa.CheckConstraint("role IN ('member', 'operator')", name="ck_tokens_role"),
    )
    _index("uq_tokens_token_hash", "tokens", "token_hash", unique=True)

    op.create_table(
        "hosts",
        sa.Column("id", KEY, nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("task_queue", KEY, nullable=False),
        sa.Column("registered_at", sa.BigInteger(), nullable=False),
        sa.Column("seen_at", sa.BigInteger(), nullable=False),
        sa.Column("evicted_at", sa.BigInteger(), nullable=True),
        sa.PrimaryKeyConstraint("id", name="pk_hosts"),
    )

    op.create_table(
        "tasks",
        sa.Column("id", KEY, nullable=False),
        sa.Column("workspace_id", KEY, nullable=False),
        sa.Column("operation_id", KEY, nullable=False),
        sa.Column("number", sa.BigInteger(), nullable=False),
        sa.Column("external_id", KEY, nullable=True),
        sa.Column("title", sa.Text(), nullable=False),
        sa.Column("description", sa.Text(), nullable=False),
        sa.Column("metadata", sa.Text(), nullable=False),
        sa.Column("revision", sa.BigInteger(), nullable=False, server_default="0"),
        sa.Column("complete", sa.Boolean(), nullable=False, server_default=sa.false()),
        sa.Column("list_position", sa.BigInteger(), nullable=True),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.Column("archived_at", sa.BigInteger(), nullable=True),
        sa.PrimaryKeyConstraint("id", name="pk_tasks"),
        sa.ForeignKeyConstraint(["workspace_id"], ["workspaces.id"], name="fk_tasks_workspace_id"),
    )
    _index(
        "ix_tasks_list", "tasks", "workspace_id", "list_position", where="list_position IS NOT NULL"
    )
    _index(
        "uq_tasks_external_id",
        "tasks",
        "workspace_id",
        "external_id",
        unique=True,
        where="external_id IS NOT NULL",
    )
    _index("uq_tasks_operation_id", "tasks", "operation_id", unique=True)
    _index("uq_tasks_workspace_number", "tasks", "workspace_id", "number", unique=True)

    op.create_table(
        "operations",
        sa.Column("id", KEY, nullable=False),
        sa.Column("workspace_id", KEY, nullable=False),
        sa.Column("task_id", KEY, nullable=False),
        sa.Column("host_id", KEY, nullable=False),
        sa.Column("actor", sa.Text(), nullable=False),
        sa.Column("actor_hash", KEY, nullable=False),
        sa.Column("token_hash", KEY, nullable=False),
        sa.Column("token_spent", sa.Boolean(), nullable=False, server_default=sa.false()),
        sa.Column("manifest", sa.Text(), nullable=False),
        sa.Column("manifest_hash", KEY, nullable=False),
        sa.Column("plan", sa.Text(), nullable=False),
        sa.Column("plan_hash", KEY, nullable=False),
        sa.Column("state", KEY, nullable=False),
        sa.Column("fence", sa.BigInteger(), nullable=False, server_default="0"),
        sa.Column("owner", sa.Text(), nullable=True),
        sa.Column("lease_until", sa.BigInteger(), nullable=False),
        sa.Column("driven_fence", sa.BigInteger(), nullable=False, server_default="0"),
        sa.Column("claims_without_progress", sa.Integer(), nullable=False, server_default="0"),
        sa.Column("busy_since", sa.BigInteger()),
        sa.Column("busy_with", sa.Text()),
        sa.Column("parked_reason", sa.Text(), nullable=True),
        sa.Column("parked_at", sa.BigInteger(), nullable=True),
        sa.Column("deleted", sa.Boolean(), nullable=False, server_default=sa.false()),
        sa.Column("identity_released", sa.Boolean(), nullable=False, server_default=sa.false()),
        sa.Column("outcome", KEY, nullable=True),
        sa.Column("failure", sa.Text(), nullable=True),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.Column("finished_at", sa.BigInteger(), nullable=True),
        sa.PrimaryKeyConstraint("id", name="pk_operations"),
        sa.ForeignKeyConstraint(
            ["workspace_id"], ["workspaces.id"], name="fk_operations_workspace_id"
        ),
        sa.CheckConstraint(
            "state IN ('preparing', 'preparing_release', 'completing', 'completed', 'aborted')",
            name="ck_operations_state",
        ),
    )
    _index(
        "ix_operations_open",
        "operations",
        "host_id",
        "lease_until",
        where="state IN ('preparing', 'preparing_release', 'completing') AND parked_reason IS NULL",
    )
    _index("ix_operations_task_id", "operations", "task_id")

    op.create_table(
        "steps",
        sa.Column("operation_id", KEY, nullable=False),
        sa.Column("position", sa.Integer(), nullable=False),
        sa.Column("step_key", KEY, nullable=False),
        sa.Column("kind", KEY, nullable=False),
        sa.Column("request", sa.Text(), nullable=False),
        sa.Column("request_hash", KEY, nullable=False),
        sa.Column("idempotency_key", KEY, nullable=False),
        sa.Column("state", KEY, nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False, server_default="0"),
        sa.Column("attempt_token", KEY, nullable=True),
        sa.Column("attempt_fence", sa.BigInteger(), nullable=True),
        sa.Column("lease_until", sa.BigInteger(), nullable=True),
        sa.Column("due_at", sa.BigInteger(), nullable=True),
        sa.Column("doubts", sa.Integer(), nullable=False, server_default="0"),
        sa.Column("evidence", sa.Text(), nullable=True),
        sa.Column("evidence_hash", KEY, nullable=True),
        sa.Column("failure", sa.Text(), nullable=True),
        sa.Column("compensation", KEY, nullable=False),
        sa.Column("undo_attempt", sa.Integer(), nullable=False, server_default="0"),
        sa.Column("undo_proof", sa.Text(), nullable=True),
        sa.PrimaryKeyConstraint("operation_id", "position", name="pk_steps"),
        sa.ForeignKeyConstraint(["operation_id"], ["operations.id"], name="fk_steps_operation_id"),
        sa.CheckConstraint(
            "compensation IN ('none', 'required', 'running', 'retry_wait', "
            "'unknown', 'compensated', 'transferred')",
            name="ck_steps_compensation",
        ),
        sa.CheckConstraint(
            "state IN ('planned', 'running', 'retry_wait', 'unknown', 'failed', "
            "'succeeded', 'armed', 'cancelled')",
            name="ck_steps_state",
        ),
    )
    _index("uq_steps_operation_key", "steps", "operation_id", "step_key", unique=True)

    op.create_table(
        "repository_attachments",
        sa.Column("id", KEY, nullable=False),
        sa.Column("operation_id", KEY, nullable=False),
        sa.Column("task_id", KEY, nullable=False),
        sa.Column("repository", KEY, nullable=False),
        sa.Column("source", sa.Text(), nullable=False),
        sa.Column("clone", sa.Text(), nullable=False),
        sa.Column("base_ref", sa.Text(), nullable=False),
        sa.Column("base_commit", KEY, nullable=False),
        sa.Column("resolved_by", KEY, nullable=False),
        sa.Column("ownership_key", KEY, nullable=False),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_repository_attachments"),
        sa.ForeignKeyConstraint(
            ["operation_id"], ["operations.id"], name="fk_repository_attachments_operation_id"
        ),
    )
    _index(
        "uq_repository_attachments",
        "repository_attachments",
        "operation_id",
        "repository",
        unique=True,
    )

    op.create_table(
        "sessions",
        sa.Column("id", KEY, nullable=False),
        sa.Column("operation_id", KEY, nullable=False),
        sa.Column("task_id", KEY, nullable=False),
        sa.Column("workspace_id", KEY, nullable=False),
        sa.Column("profile", KEY, nullable=False),
        sa.Column("launch", sa.Text(), nullable=False),
        sa.Column("launch_hash", KEY, nullable=False),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_sessions"),
        sa.ForeignKeyConstraint(
            ["operation_id"], ["operations.id"], name="fk_sessions_operation_id"
        ),
        sa.ForeignKeyConstraint(
            ["workspace_id"], ["workspaces.id"], name="fk_sessions_workspace_id"
        ),
    )
    _index("ix_sessions_task_id", "sessions", "task_id")

    op.create_table(
        "runs",
        sa.Column("id", KEY, nullable=False),
        sa.Column("workspace_id", KEY, nullable=False),
        sa.Column("dispatch_key", KEY, nullable=True),
        sa.Column("workflow_ref", KEY, nullable=False),
        sa.Column("workflow_version", KEY, nullable=False),
        sa.Column("input", sa.Text(), nullable=False),
        sa.Column("host_id", KEY, nullable=False),
        sa.Column("task_id", KEY, nullable=True),
        sa.Column("session_id", KEY, nullable=True),
        sa.Column("state", KEY, nullable=False),
        sa.Column("launch_token", KEY, nullable=True),
        sa.Column("result", sa.Text(), nullable=True),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.Column("started_at", sa.BigInteger(), nullable=True),
        sa.Column("finished_at", sa.BigInteger(), nullable=True),
        sa.PrimaryKeyConstraint("id", name="pk_runs"),
        sa.ForeignKeyConstraint(["workspace_id"], ["workspaces.id"], name="fk_runs_workspace_id"),
        sa.CheckConstraint(
            "state IN ('admitted', 'started', 'running', 'succeeded', 'failed', "
            "'cancelled', 'lost')",
            name="ck_runs_state",
        ),
    )
    _index("ix_runs_admitted", "runs", "host_id", "created_at", where="state = 'admitted'")
    _index("ix_runs_open", "runs", "host_id", "id", where="state IN ('started', 'running')")
    _index("ix_runs_task_id", "runs", "task_id")
    _index(
        "uq_runs_dispatch_key",
        "runs",
        "workspace_id",
        "dispatch_key",
        unique=True,
        where="dispatch_key IS NOT NULL",
    )

    op.create_table(
        "event_feeds",
        sa.Column("workspace_id", KEY, nullable=False),
        sa.Column("last_number", sa.BigInteger(), nullable=False, server_default="0"),
        sa.Column("last_list_position", sa.BigInteger(), nullable=False, server_default="0"),
        sa.PrimaryKeyConstraint("workspace_id", name="pk_event_feeds"),
        sa.ForeignKeyConstraint(
            ["workspace_id"], ["workspaces.id"], name="fk_event_feeds_workspace_id"
        ),
    )

    op.create_table(
        "outbox",
        sa.Column("id", KEY, nullable=False),
        sa.Column("workspace_id", KEY, nullable=False),
        sa.Column("feed_number", sa.BigInteger(), nullable=False),
        sa.Column("aggregate", KEY, nullable=False),
        sa.Column("aggregate_id", KEY, nullable=False),
        sa.Column("revision", sa.BigInteger(), nullable=False),
        sa.Column("type", KEY, nullable=False),
        sa.Column("payload", sa.Text(), nullable=False),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_outbox"),
        sa.ForeignKeyConstraint(["workspace_id"], ["workspaces.id"], name="fk_outbox_workspace_id"),
    )
    _index("uq_outbox_aggregate", "outbox", "aggregate", "aggregate_id", "revision", unique=True)
    _index("uq_outbox_feed", "outbox", "workspace_id", "feed_number", unique=True)

    op.create_table(
        "cleanup_jobs",
        sa.Column("id", KEY, nullable=False),
        sa.Column("operation_id", KEY, nullable=False),
        sa.Column("step_key", KEY, nullable=False),
        sa.Column("host_id", KEY, nullable=False),
        sa.Column("kind", KEY, nullable=False),
        sa.Column("state", KEY, nullable=False),
        sa.Column("proof", sa.Text(), nullable=False),
        sa.Column("attempts", sa.Integer(), nullable=False, server_default="0"),
        sa.Column("due_at", sa.BigInteger(), nullable=True),
        sa.Column("last_error", sa.Text(), nullable=True),
        sa.Column("claim_token", KEY, nullable=True),
        sa.Column("lease_until", sa.BigInteger(), nullable=True),
        sa.Column("result", sa.Text(), nullable=True),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.Column("finished_at", sa.BigInteger(), nullable=True),
        sa.PrimaryKeyConstraint("id", name="pk_cleanup_jobs"),
        sa.ForeignKeyConstraint(
            ["operation_id"], ["operations.id"], name="fk_cleanup_jobs_operation_id"
        ),
        sa.CheckConstraint(
            "state IN ('quarantined', 'pending', 'done', 'purged')", name="ck_cleanup_jobs_state"
        ),
    )
    _index("ix_cleanup_jobs_operation_id", "cleanup_jobs", "operation_id")
    _index(
        "ix_cleanup_jobs_pending", "cleanup_jobs", "host_id", "due_at", where="state = 'pending'"
    )

    op.create_table(
        "operator_actions",
        sa.Column("id", KEY, nullable=False),
        sa.Column("workspace_id", KEY, nullable=False),
        sa.Column("actor", sa.Text(), nullable=False),
        sa.Column("action", KEY, nullable=False),
        sa.Column("operation_id", KEY, nullable=False),
        sa.Column("entry_id", KEY, nullable=True),
        sa.Column("detail", sa.Text(), nullable=False),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_operator_actions"),
        sa.ForeignKeyConstraint(
            ["workspace_id"], ["workspaces.id"], name="fk_operator_actions_workspace_id"
        ),
        sa.ForeignKeyConstraint(
            ["operation_id"], ["operations.id"], name="fk_operator_actions_operation_id"
        ),
    )
    _index("ix_operator_actions_operation_id", "operator_actions", "operation_id")


def downgrade() -> None:
    raise NotImplementedError("the ledger is never downgraded: restore a backup instead")
