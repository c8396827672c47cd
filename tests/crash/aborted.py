"""Invariant 4: of what is aborted nothing is left untracked, and nothing lies about as nobody's."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from . import world
from .seen import Seen


def aborted(seen: Seen, operation: dict[str, Any]) -> Iterator[str]:
    """What does not hold of an aborted operation."""
    for table, column, value in (
        ("tasks", "id", operation["task_id"]),
        ("repository_attachments", "operation_id", operation["id"]),
        ("sessions", "operation_id", operation["id"]),
        ("runs", "task_id", operation["task_id"]),
        ("outbox", "aggregate_id", operation["task_id"]),
    ):
        left = seen.ledger.rows(f"SELECT * FROM {table} WHERE {column} = ?", value)
        if left:
            yield f"{len(left)} rows of it are left in {table}"
    for step in seen.steps[operation["id"]]:
        for what in _not_undone(seen, operation, step):
            yield f"step {step['step_key']}: {what}"
        for what in _untracked(seen, operation, step):
            yield f"step {step['step_key']}: {what} is left and not tracked"
    for process in world.processes():
        if f"ONCEBORN_TASK_ID={operation['task_id']}" in process.environment:
            yield f"process {process.pid} of it is alive"
    for job in seen.jobs[operation["id"]]:
        for what in _kept(job):
            if not Path(what).exists():
                yield f"{what} is in cleanup job {job['id']}, but gone"


def _not_undone(seen: Seen, operation: dict[str, Any], step: dict[str, Any]) -> Iterator[str]:
    made = step["state"] in ("succeeded", "cancelled", "armed")
    undone = step["compensation"] in ("compensated", "transferred")
    if step["state"] in ("running", "unknown", "armed"):
        yield f"it is {step['state']}"
    if made and not undone:
        yield f"it {step['state']}, and its undoing is {step['compensation']}"
    if undone and not step["undo_proof"]:
        yield "it was undone without a proof"
    if step["state"] == "failed" and not step["failure"]:
        yield "it failed without a reason"
    jobs = [j for j in seen.jobs[operation["id"]] if j["step_key"] == step["step_key"]]
    if step["compensation"] == "transferred" and not jobs:
        yield "it was transferred, and no cleanup job has it"


def _untracked(seen: Seen, operation: dict[str, Any], step: dict[str, Any]) -> Iterator[str]:
    key = step["idempotency_key"]
    tracked = "\n".join(job["proof"] for job in seen.jobs[operation["id"]])
    has_job = any(j["step_key"] == step["step_key"] for j in seen.jobs[operation["id"]])
    for branch in seen.branches:
        if branch.key == key and json.dumps(branch.name) not in tracked:
            yield f"branch {branch.name} in {branch.clone}"
    request = json.loads(step["request"])
    if step["kind"] == "worktree":
        path = seen.data / request["path"]
        ours = step["state"] != "failed"
        if ours and path.exists() and str(path) not in tracked:
            yield f"worktree {path}"
        for clone in world.clones(seen.data):
            if ours and path in world.worktrees(clone) and str(path) not in tracked:
                yield f"git's record of {path}"
    for folder in (f"trash/{key}", f"quarantine/{key}", f"intents/{key}.json"):
        if (seen.data / folder).exists() and not has_job:
            yield folder


def leftovers(seen: Seen) -> Iterator[str]:
    """With every operation ended, whatever is there belongs to one, or to somebody else."""
    known = _known(seen)
    others = seen.bystanders
    for branch in seen.branches:
        theirs = (branch.clone, branch.name) in others.branches
        if not theirs and branch.key not in known["keys"]:
            yield f"branch {branch.name} belongs to nobody"
    for folder in sorted((seen.data / "worktrees").glob("*/*")):
        theirs = any(p.is_relative_to(folder) for p in [*others.files, *others.worktrees])
        if not theirs and str(folder) not in known["paths"]:
            yield f"worktree {folder} belongs to nobody"
    for top in ("trash", "quarantine"):
        for folder in sorted((seen.data / top).glob("*")):
            theirs = any(p.is_relative_to(folder) for p in others.files)
            if not theirs and folder.name not in known["jobs"]:
                yield f"{top}/{folder.name} belongs to nobody"
    for clone in world.clones(seen.data):
        for lock in clone.rglob("*.lock"):
            if seen.at_rest:
                yield f"git's lock file {lock} has no owner"
        for entry in (clone / "worktrees").glob("*"):
            link = entry / "gitdir"
            if not link.is_file() or not Path(link.read_text().strip()).exists():
                yield f"git's record {entry} has no worktree"
    if seen.at_rest:
        for process in world.at_work(seen.data):
            if "git" in process.command.split(" ")[0]:
                yield f"{process.command!r} still runs"


def _known(seen: Seen) -> dict[str, set[str]]:
    """Keys, paths and cleanup jobs of what may be there."""
    keys, paths, jobs = set(), set(), set()
    for operation in seen.operations:
        for step in seen.steps[operation["id"]]:
            mine = [j for j in seen.jobs[operation["id"]] if j["step_key"] == step["step_key"]]
            if operation["state"] == "completed" or mine:
                keys.add(step["idempotency_key"])
                request = json.loads(step["request"])
                paths.add(str(seen.data / request.get("path", "")))
            if mine:
                jobs.add(step["idempotency_key"])
    return {"keys": keys, "paths": paths, "jobs": jobs}


def _kept(job: dict[str, Any]) -> list[str]:
    """The paths that a cleanup job says are kept."""
    if job["state"] not in ("quarantined", "pending"):
        return []
    proof = json.loads(job["proof"])
    kept = [str(path) for path in proof.get("quarantined", [])]
    if proof.get("path_exists"):
        kept.append(str(proof["path"]))
    return kept
