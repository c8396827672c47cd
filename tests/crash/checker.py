"""The independent checker: the five invariants of the runtime, for every operation that it finds.

Nothing of the product is imported here: the rules are written down a second time, and looked up in
the ledger by SQL, in repositories by git, in ``/proc`` and in the outbox.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import world
from .bystanders import Bystanders
from .history import foreign_writes
from .ledger import Ledger

MARK = "AGENT-WAS-HERE"
"""The agents of the tests append one line to this file in their working directory."""

ENDED = ("completed", "aborted")
RUN_ENDED = ("succeeded", "failed", "cancelled", "lost")


@dataclass(frozen=True)
class Violation:
    """``invariant``: its number in design/6-quality."""

    invariant: int
    operation: str
    what: str

    def __str__(self) -> str:
        return f"invariant {self.invariant}: {self.operation}: {self.what}"


class Checker:
    """Checks one data folder and its ledger. ``at_rest``: nobody works on them any more."""

    def __init__(
        self,
        url: str,
        data: Path,
        bystanders: Bystanders | None = None,
        *,
        at_rest: bool = True,
    ) -> None:
        self.ledger = Ledger(url)
        self.data = data.resolve()
        self.bystanders = bystanders or Bystanders()
        self.at_rest = at_rest
        self._operations: list[dict[str, Any]] = []
        self._steps: dict[str, list[dict[str, Any]]] = {}
        self._jobs: dict[str, list[dict[str, Any]]] = {}
        self._branches: list[world.Branch] = []

    def check(self) -> list[Violation]:
        """Every violation; empty where all five hold."""
        self._read()
        found = [*self._single(), *self._settled(), *foreign(self.ledger)]
        for operation in self._operations:
            if operation["state"] == "completed":
                found += self._completed(operation)
            elif operation["state"] == "aborted":
                found += self._aborted(operation)
        if all(operation["state"] in ENDED for operation in self._operations):
            found += self._leftovers()
        found += [Violation(4, "others", what) for what in self.bystanders.missing()]
        return found

    def _read(self) -> None:
        self._operations = self.ledger.rows("SELECT * FROM operations ORDER BY created_at, id")
        for operation in self._operations:
            name = operation["id"]
            self._steps[name] = self.ledger.rows(
                "SELECT * FROM steps WHERE operation_id = ? ORDER BY position", name
            )
            self._jobs[name] = self.ledger.rows(
                "SELECT * FROM cleanup_jobs WHERE operation_id = ?", name
            )
        self._branches = [b for clone in world.clones(self.data) for b in world.branches(clone)]

    # -- 1: one of each -----------------------------------------------------------------------

    def _single(self) -> Iterator[Violation]:
        for row in self._twice("tasks", "external_id"):
            yield Violation(1, "tasks", f"{row['n']} tasks hold the identity {row['what']!r}")
        for row in self._twice("runs", "dispatch_key"):
            yield Violation(1, "runs", f"{row['n']} runs have the dispatch key {row['what']!r}")

    def _twice(self, table: str, column: str) -> list[dict[str, Any]]:
        return self.ledger.rows(
            f"SELECT workspace_id, {column} AS what, count(*) AS n FROM {table}"
            f" WHERE {column} IS NOT NULL GROUP BY workspace_id, {column} HAVING count(*) > 1"
        )

    # -- 2: every operation ends, or is parked with a reason ----------------------------------

    def _settled(self) -> Iterator[Violation]:
        for operation in self._operations:
            if operation["state"] in ENDED:
                if operation["finished_at"] is None:
                    yield Violation(2, operation["id"], "ended, but nobody knows when")
            elif not (operation["parked_reason"] or "").strip():
                state = operation["state"]
                yield Violation(2, operation["id"], f"is {state}, and not parked with a reason")

    # -- 3: completed means that all of it is there --------------------------------------------

    def _completed(self, operation: dict[str, Any]) -> Iterator[Violation]:
        def wrong(what: str) -> Violation:
            return Violation(3, operation["id"], what)

        for step in self._steps[operation["id"]]:
            if step["state"] != "succeeded" or step["compensation"] != "none":
                state = f"{step['state']}/{step['compensation']}"
                yield wrong(f"step {step['step_key']} is {state}")
                continue
            for what in self._unlike_world(operation, step):
                yield wrong(f"step {step['step_key']}: {what}")
        tasks = self.ledger.rows("SELECT * FROM tasks WHERE id = ?", operation["task_id"])
        if [bool(task["complete"]) for task in tasks] != [True]:
            yield wrong(f"{len(tasks)} task rows, complete: {[t['complete'] for t in tasks]}")
        events = [event["type"] for event in self._events(operation)]
        if events.count("task.created") != 1:
            yield wrong(f"{events.count('task.created')} events task.created")
        for what in self._agents(operation):
            yield wrong(what)

    def _unlike_world(self, operation: dict[str, Any], step: dict[str, Any]) -> Iterator[str]:
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
            "repo_attach": self._attachment,
            "worktree": self._worktree,
            "session_prepare": self._session,
            "agent_launch": self._launch,
        }
        yield from looks[evidence["kind"]](operation, step, evidence)

    def _attachment(
        self, operation: dict[str, Any], step: dict[str, Any], evidence: dict[str, Any]
    ) -> Iterator[str]:
        rows = self.ledger.rows(
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
        self, _operation: dict[str, Any], step: dict[str, Any], evidence: dict[str, Any]
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
            seen = world.git(*command, cwd=path, check=False)
            if seen != meant:
                yield f"{what} is {seen!r}, not {meant!r}"
        clone = Path(evidence["registration"]).parent.parent
        if world.worktrees(clone).get(path) != evidence["branch"]:
            yield f"git does not list {path} on {evidence['branch']}"
        born = [b for b in self._branches if (b.clone, b.name) == (clone, evidence["branch"])]
        if [b.key for b in born] != [step["idempotency_key"]]:
            yield f"the branch {evidence['branch']} does not carry our key"
        ours = [b.name for b in self._branches if b.key == step["idempotency_key"]]
        if len(ours) != 1:
            yield f"{len(ours)} branches carry our key: {ours}"

    def _session(
        self, operation: dict[str, Any], _step: dict[str, Any], evidence: dict[str, Any]
    ) -> Iterator[str]:
        rows = self.ledger.rows("SELECT * FROM sessions WHERE operation_id = ?", operation["id"])
        told = [(row["id"], row["launch_hash"]) for row in rows]
        if told != [(evidence["session_id"], evidence["launch_hash"])]:
            yield f"sessions {told}"

    def _launch(
        self, operation: dict[str, Any], _step: dict[str, Any], evidence: dict[str, Any]
    ) -> Iterator[str]:
        rows = self.ledger.rows(
            "SELECT id FROM runs WHERE workspace_id = ? AND dispatch_key = ?",
            operation["workspace_id"],
            evidence["dispatch_key"],
        )
        if [row["id"] for row in rows] != [evidence["run_id"]]:
            yield f"runs {rows} instead of {evidence['run_id']}"

    def _agents(self, operation: dict[str, Any]) -> Iterator[str]:
        asked = json.loads(operation["plan"])["run"] is not None
        runs = self.ledger.rows("SELECT * FROM runs WHERE task_id = ?", operation["task_id"])
        if len(runs) != int(asked):
            yield f"{len(runs)} runs where {int(asked)} was asked for"
        marks = 0
        for step in self._steps[operation["id"]]:
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
        if asked and self.at_rest and states and states[0] not in RUN_ENDED:
            yield f"its run is {states[0]} for good"
        if marks > int(asked):
            yield f"{marks} agents ran where {int(asked)} was asked for"
        if states == ["succeeded"] and marks != 1:
            yield f"its run succeeded, but {marks} agents ran"

    def _events(self, operation: dict[str, Any]) -> list[dict[str, Any]]:
        return self.ledger.rows(
            "SELECT * FROM outbox WHERE aggregate_id = ? ORDER BY feed_number",
            operation["task_id"],
        )

    # -- 4: aborted means that nothing of ours is left untracked --------------------------------

    def _aborted(self, operation: dict[str, Any]) -> Iterator[Violation]:
        def wrong(what: str) -> Violation:
            return Violation(4, operation["id"], what)

        for table, column, value in (
            ("tasks", "id", operation["task_id"]),
            ("repository_attachments", "operation_id", operation["id"]),
            ("sessions", "operation_id", operation["id"]),
            ("runs", "task_id", operation["task_id"]),
            ("outbox", "aggregate_id", operation["task_id"]),
        ):
            left = self.ledger.rows(f"SELECT * FROM {table} WHERE {column} = ?", value)
            if left:
                yield wrong(f"{len(left)} rows of it are left in {table}")
        for step in self._steps[operation["id"]]:
            for what in self._not_undone(operation, step):
                yield wrong(f"step {step['step_key']}: {what}")
            for what in self._untracked(operation, step):
                yield wrong(f"step {step['step_key']}: {what} is left and not tracked")
        for process in world.processes():
            if f"ONCEBORN_TASK_ID={operation['task_id']}" in process.environment:
                yield wrong(f"process {process.pid} of it is alive")
        for job in self._jobs[operation["id"]]:
            for what in _kept(job):
                if not Path(what).exists():
                    yield wrong(f"{what} is in cleanup job {job['id']}, but gone")

    def _not_undone(self, operation: dict[str, Any], step: dict[str, Any]) -> Iterator[str]:
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
        jobs = [j for j in self._jobs[operation["id"]] if j["step_key"] == step["step_key"]]
        if step["compensation"] == "transferred" and not jobs:
            yield "it was transferred, and no cleanup job has it"

    def _untracked(self, operation: dict[str, Any], step: dict[str, Any]) -> Iterator[str]:
        key = step["idempotency_key"]
        tracked = "\n".join(job["proof"] for job in self._jobs[operation["id"]])
        has_job = any(j["step_key"] == step["step_key"] for j in self._jobs[operation["id"]])
        for branch in self._branches:
            if branch.key == key and json.dumps(branch.name) not in tracked:
                yield f"branch {branch.name} in {branch.clone}"
        request = json.loads(step["request"])
        if step["kind"] == "worktree":
            path = self.data / request["path"]
            ours = step["state"] != "failed"
            if ours and path.exists() and str(path) not in tracked:
                yield f"worktree {path}"
            for clone in world.clones(self.data):
                if ours and path in world.worktrees(clone) and str(path) not in tracked:
                    yield f"git's record of {path}"
        for folder in (f"trash/{key}", f"quarantine/{key}", f"intents/{key}.json"):
            if (self.data / folder).exists() and not has_job:
                yield folder

    # -- 4 too: nothing lies about that belongs to nobody --------------------------------------

    def _leftovers(self) -> Iterator[Violation]:
        """With every operation ended, whatever is there belongs to one, or to somebody else."""
        known = self._known()
        others = self.bystanders
        for branch in self._branches:
            theirs = (branch.clone, branch.name) in others.branches
            if not theirs and branch.key not in known["keys"]:
                yield Violation(4, "leftovers", f"branch {branch.name} belongs to nobody")
        for folder in sorted((self.data / "worktrees").glob("*/*")):
            theirs = any(p.is_relative_to(folder) for p in [*others.files, *others.worktrees])
            if not theirs and str(folder) not in known["paths"]:
                yield Violation(4, "leftovers", f"worktree {folder} belongs to nobody")
        for top in ("trash", "quarantine"):
            for folder in sorted((self.data / top).glob("*")):
                theirs = any(p.is_relative_to(folder) for p in others.files)
                if not theirs and folder.name not in known["jobs"]:
                    yield Violation(4, "leftovers", f"{top}/{folder.name} belongs to nobody")
        for clone in world.clones(self.data):
            for lock in clone.rglob("*.lock"):
                if self.at_rest:
                    yield Violation(4, "leftovers", f"git's lock file {lock} has no owner")
            for entry in (clone / "worktrees").glob("*"):
                link = entry / "gitdir"
                if not link.is_file() or not Path(link.read_text().strip()).exists():
                    yield Violation(4, "leftovers", f"git's record {entry} has no worktree")
        if self.at_rest:
            for process in world.at_work(self.data):
                if "git" in process.command.split(" ")[0]:
                    yield Violation(4, "leftovers", f"{process.command!r} still runs")

    def _known(self) -> dict[str, set[str]]:
        """Keys, paths and cleanup jobs of what may be there."""
        keys, paths, jobs = set(), set(), set()
        for operation in self._operations:
            for step in self._steps[operation["id"]]:
                mine = [j for j in self._jobs[operation["id"]] if j["step_key"] == step["step_key"]]
                if operation["state"] == "completed" or mine:
                    keys.add(step["idempotency_key"])
                    request = json.loads(step["request"])
                    paths.add(str(self.data / request.get("path", "")))
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


def foreign(ledger: Ledger) -> list[Violation]:
    """5: no write of an older fence or of another attempt's token took place."""
    return [Violation(5, operation, what) for operation, what in foreign_writes(ledger)]


def counts(violations: list[Violation]) -> Counter[int]:
    """How many violations of each invariant."""
    return Counter(violation.invariant for violation in violations)
