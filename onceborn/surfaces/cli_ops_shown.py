"""What people read of `onceborn ops`."""

from __future__ import annotations

import json
from typing import Any

from .cli_output import show_fields


def show_operation(document: dict[str, Any]) -> None:
    """The operation with its next action."""
    operation, after = document["operation"], document["after_unpark"]
    failure = operation["failure"] or {}
    show_fields(
        f"operation {operation['id']}: {operation['state']}",
        {
            "task": operation["task_id"],
            "asked for by": operation["actor"],
            "host": operation["host_id"],
            "owner": owner(operation),
            "claims without progress": operation["claims_without_progress"],
            "plan": operation["plan_hash"],
            "parked": operation["parked_reason"],
            "outcome": operation["outcome"],
            "failure": failure.get("reason"),
            "next": next_line(document["next"]),
            "after un-park": next_line(after) if after else None,
        },
    )


def show_step(step: dict[str, Any]) -> None:
    """One step with its documents."""
    undone = "" if step["compensation"] == "none" else f", undo {step['compensation']}"
    failure, proof = step["failure"] or {}, step["undo_proof"]
    evidence = step["evidence"] and _compact(step["evidence"])
    hashed = step["evidence_hash"] and (
        step["evidence_hash"] + ("" if step["evidence_hash_matches"] else " DOES NOT MATCH")
    )
    show_fields(
        f"  step {step['key']}: {step['state']}, attempt {step['attempt']}{undone}",
        {
            "fence": step["attempt_fence"],
            "doubts": step["doubts"] or None,
            "due in": f"{step['due_in_ms']} ms" if step["due_in_ms"] else None,
            "failure": failure.get("reason"),
            "request": step["request_hash"],
            "evidence": evidence,
            "evidence hash": hashed,
            "undo proof": proof and _compact(proof),
        },
    )


def job_fields(job: dict[str, Any]) -> dict[str, Any]:
    """A cleanup job's fields."""
    proof = job["proof"]
    return {
        "task": job["task_id"],
        "step": job["step"],
        "host": job["host_id"],
        "path": proof.get("path"),
        "found in it": proof.get("findings_total"),
        "attempts": job["attempts"] or None,
        "due in": None if job["due_in_ms"] is None else f"{job['due_in_ms']} ms",
        "last error": job["last_error"],
        "stuck": "yes, tried rarely" if job["stuck"] else None,
    }


def next_line(told: dict[str, Any]) -> str:
    """The next action in a line."""
    step = f" {told['step']}" if told["step"] else ""
    return f"{told['action']}{step}: {told['why']}"


def owner(line: dict[str, Any]) -> str:
    """Who owns the operation, and for how long."""
    return f"{line['owner']} (fence {line['fence']}, {lease(line['lease_ms'])})"


def lease(lease_ms: int) -> str:
    """A lease in words."""
    return f"lease {lease_ms} ms" if lease_ms > 0 else f"lease expired {-lease_ms} ms ago"


def _compact(document: Any) -> str:
    return json.dumps(document, ensure_ascii=False, sort_keys=True)
