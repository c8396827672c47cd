"""Invariant 3: of what is completed, all is there, exactly as its evidence says, and once."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from . import world
from .seen import Seen

MARK = "AGENT-WAS-HERE"
"""The agents of the tests append one line to this file in their working directory."""

RUN_ENDED = ("succeeded", "failed", "cancelled", "lost")


def completed(seen: Seen, operation: dict[str, Any]) -> Iterator[str]:
    """What does not hold of a completed operation."""
    for step in seen.steps[operation["id"]]:
        if step["state"] != "succeeded" or step["compensation"] != "none":
            state = f"{step['state']}/{step['compensation']}"
            yield f"step {step['step_key']} is {state}"
            continue
        for what in _unlike_world(seen, operation, step):
            yield f"step {step['step_key']}: {what}"
    tasks = seen.ledger.rows("SELECT * FROM tasks WHERE id = ?", operation["task_id"])
    if [bool(task["complete"]) for task in tasks] != [True]:
        yield f"{len(tasks)} task rows, complete: {[t['complete'] for t in tasks]}"
    events = [event["type"] for event in _events(seen, operation)]
    if events.count("task.created") != 1:
        yield f"{events.count('task.created')} events task.created"
    yield from _agents(seen, operation)


def _unlike_world(seen: Seen, operation: dict[str, Any], step: dict[str, Any]) -> Iterator[str]:
    """How the evidence of a step differs from a fresh look."""
    if step["evidence"] is None:
        yield "it has no evidence"
        return
    for column, domain in (
        ("evidence", "onceborn.evidence.v1"),
        ("request", "onceborn.step-request.v1"),
    ):
        text = step[column].encode()
        if hashlib.sha256(domain.encode() + b"\0" + text).hexdigest() != step[f"{column}_hash"]:
            yield f"its {column} is not what was hashed"
    evidence = json.loads(step["evidence"])
    looks = {
        "repo_attach": _attachment,
        "worktree": _worktree,
        "session_prepare": _session,
        "agent_launch": _launch,
    }
    yield from looks[evidence["kind"]](seen, operation, step, evidence)


def _attachment(
    seen: Seen, operation: dict[str, Any], step: dict[str, Any], evidence: dict[str, Any]
) -> Iterator[str]:
    rows = seen.ledger.rows(
        "SELECT * FROM repository_attachments WHERE operation_id = ? AND repository = ?",
        operation["id"],
        evidence["repository"],
    )
    told = [(row["id"], row["base_commit"], row["ownership_key"]) for row in rows]
    meant = (evidence["attachment_id"], evidence["base_commit"], step["idempotency_key"])
    if told != [meant]:
        yield f"attachments {told} instead of {meant}"
    clone = Path(evidence["clone"])
    if not clone.is_dir() or not world.succeeds(
        "cat-file", "-e", f"{evidence['base_commit']}^{{commit}}", cwd=clone
    ):
        yield f"the clone {clone} does not hold {evidence['base_commit']}"


def _worktree(
    seen: Seen, _operation: dict[str, Any], step: dict[str, Any], evidence: dict[str, Any]
) -> Iterator[str]:
    path = Path(evidence["path"])
    if not path.is_dir():
        yield f"{path} is not there"
        return
    for what, command, meant in (
        ("commit", ("rev-parse", "HEAD"), evidence["base_commit"]),
        ("HEAD", ("symbolic-ref", "HEAD"), evidence["head"]),
        ("content", ("status", "--porcelain", "--untracked-files=no"), ""),
    ):
        found = world.git(*command, cwd=path, check=False)
        if found != meant:
            yield f"{what} is {found!r}, not {meant!r}"
    clone = Path(evidence["registration"]).parent.parent
    if world.worktrees(clone).get(path) != evidence["branch"]:
        yield f"git does not list {path} on {evidence['branch']}"
    born = [b for b in seen.branches if (b.clone, b.name) == (clone, evidence["branch"])]
    if [b.key for b in born] != [step["idempotency_key"]]:
        yield f"the branch {evidence['branch']} does not carry our key"
    ours = [b.name for b in seen.branches if b.key == step["idempotency_key"]]
    if len(ours) != 1:
        yield f"{len(ours)} branches carry our key: {ours}"


def _session(
    seen: Seen, operation: dict[str, Any], _step: dict[str, Any], evidence: dict[str, Any]
) -> Iterator[str]:
    rows = seen.ledger.rows("SELECT * FROM sessions WHERE operation_id = ?", operation["id"])
    told = [(row["id"], row["launch_hash"]) for row in rows]
    if told != [(evidence["session_id"], evidence["launch_hash"])]:
        yield f"sessions {told}"


def _launch(
    seen: Seen, operation: dict[str, Any], _step: dict[str, Any], evidence: dict[str, Any]
) -> Iterator[str]:
    rows = seen.ledger.rows(
        "SELECT id FROM runs WHERE workspace_id = ? AND dispatch_key = ?",
        operation["workspace_id"],
        evidence["dispatch_key"],
    )
    if [row["id"] for row in rows] != [evidence["run_id"]]:
        yield f"runs {rows} instead of {evidence['run_id']}"


def _agents(seen: Seen, operation: dict[str, Any]) -> Iterator[str]:
    asked = json.loads(operation["plan"])["run"] is not None
    runs = seen.ledger.rows("SELECT * FROM runs WHERE task_id = ?", operation["task_id"])
    if len(runs) != int(asked):
        yield f"{len(runs)} runs where {int(asked)} was asked for"
    marks = 0
    for step in seen.steps[operation["id"]]:
        if step["kind"] == "worktree" and step["evidence"]:
            mark = Path(json.loads(step["evidence"])["path"]) / MARK
            marks += len(mark.read_text().splitlines()) if mark.is_file() else 0
    living = sum(
        f"ONCEBORN_RUN_ID={run['id']}" in p.environment
        for run in runs
        if run["state"] in RUN_ENDED
        for p in world.processes()
    )
    if living:
        yield f"{living} processes of an ended run are alive"
    states = [run["state"] for run in runs]
    if asked and seen.at_rest and states and states[0] not in RUN_ENDED:
        yield f"its run is {states[0]} for good"
    if marks > int(asked):
        yield f"{marks} agents ran where {int(asked)} was asked for"
    if states == ["succeeded"] and marks != 1:
        yield f"its run succeeded, but {marks} agents ran"


def _events(seen: Seen, operation: dict[str, Any]) -> list[dict[str, Any]]:
    return seen.ledger.rows(
        "SELECT * FROM outbox WHERE aggregate_id = ? ORDER BY feed_number",
        operation["task_id"],
    )
