"""The five invariants of design 6-quality, looked at by plain SQL and in the world.

Independent of the engine: nothing here asks ``next_action`` or any code of the ledger's.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from onceborn.runtime.protocol.states import (
    COMPENSATION_TRANSITIONS,
    OPERATION_TRANSITIONS,
    STEP_TRANSITIONS,
)

if TYPE_CHECKING:
    from .stage import Stage


def findings(stage: Stage) -> list[str]:
    """Every invariant that does not hold."""
    ledger = stage.ledger
    operations = ledger.ask("SELECT * FROM operations ORDER BY rowid")
    steps = ledger.ask("SELECT * FROM steps ORDER BY operation_id, position")
    wrong = [*_one_of_each(stage), *_witnessed(stage), *_answers(stage), *_others(stage)]
    for operation in operations:
        mine = [step for step in steps if step["operation_id"] == operation["id"]]
        match operation["state"]:
            case "completed":
                wrong += _completed(stage, operation, mine)
            case "aborted":
                wrong += _aborted(stage, operation, mine)
    counters = ledger.ask("SELECT preparing FROM workspace_counters")
    still = [o for o in operations if o["state"] not in ("completed", "aborted")]
    if counters[0]["preparing"] != len(still):
        wrong.append(f"{counters[0]['preparing']} are counted as preparing, {len(still)} are")
    return wrong


# -- 1: one of each -------------------------------------------------------------------------------


def _one_of_each(stage: Stage) -> list[str]:
    wrong = []
    for what, sql in {
        "tasks with one identity": "SELECT external_id AS v FROM tasks WHERE external_id"
        " IS NOT NULL GROUP BY workspace_id, external_id HAVING count(*) > 1",
        "runs with one dispatch key": "SELECT dispatch_key AS v FROM runs"
        " GROUP BY workspace_id, dispatch_key HAVING count(*) > 1",
        "events of one kind for a task": "SELECT aggregate_id AS v FROM outbox"
        " GROUP BY aggregate_id HAVING count(*) > 1",
        "attachments of one repository": "SELECT operation_id AS v FROM repository_attachments"
        " GROUP BY operation_id, repository HAVING count(*) > 1",
    }.items():
        wrong += [f"two {what}: {row['v']}" for row in stage.ledger.ask(sql)]
    return wrong


# -- 3: completed ---------------------------------------------------------------------------------


def _completed(stage: Stage, operation: dict[str, Any], steps: list[dict[str, Any]]) -> list[str]:
    wrong = []
    ask, of = stage.ledger.ask, {"id": operation["id"], "task": operation["task_id"]}
    for step in steps:
        if step["state"] != "succeeded" or step["compensation"] != "none":
            wrong.append(f"completed with {step['step_key']} {step['state']}")
        elif not _as_evidence_says(stage, operation, step):
            wrong.append(f"completed, but {step['step_key']} is not as its evidence says")
    events = ask("SELECT type, revision, payload FROM outbox WHERE aggregate_id = :task", **of)
    if [(e["type"], e["revision"]) for e in events] != [("task.created", 1)]:
        wrong.append(f"completed with {len(events)} events")
    lost = operation["identity_released"]
    if lost != (operation["outcome"] == "created_identity_lost"):
        wrong.append(f"completed as {operation['outcome']} with identity_released {lost}")
    if events and lost == ("external_id" in json.loads(events[0]["payload"])):
        wrong.append("the event tells of the identity wrongly")
    tasks = ask("SELECT complete, external_id FROM tasks WHERE id = :task", **of)
    if [bool(row["complete"]) for row in tasks] != [True]:
        wrong.append("completed without a complete task")
    elif lost != (tasks[0]["external_id"] is None):
        wrong.append("the identity was released and is held, or the other way round")
    admitted = ask("SELECT id FROM runs WHERE task_id = :task", **of)
    agents = sum(stage.world.agents.get(run["id"], 0) for run in admitted)
    wanted = int(stage.schedule.agent == "start")
    if (len(admitted), agents) != (wanted, wanted):
        wrong.append(f"completed with {len(admitted)} runs and {agents} agents, not {wanted}")
    return wrong


def _as_evidence_says(stage: Stage, operation: dict[str, Any], step: dict[str, Any]) -> bool:
    evidence, request = json.loads(step["evidence"]), json.loads(step["request"])
    key = step["idempotency_key"]
    ask = stage.ledger.ask
    match step["kind"]:
        case "worktree":
            place = stage.world.places[request["path"]]
            there = place.branch == place.folder == key and place.full
            return evidence["ownership_key"] == key and (there or key in stage.world.spoilt)
        case "repo_attach":
            row = ask(
                "SELECT id, ownership_key FROM repository_attachments WHERE operation_id = :id"
                " AND repository = :repository",
                id=operation["id"],
                repository=request["repository"],
            )
            whole = stage.world.clones.get(request["clone"], False)
            return whole and [(r["id"], r["ownership_key"]) for r in row] == [
                (evidence["attachment_id"], key)
            ]
        case "session_prepare":
            row = ask(
                "SELECT launch_hash FROM sessions WHERE operation_id = :id", id=operation["id"]
            )
            return [r["launch_hash"] for r in row] == [evidence["launch_hash"]]
        case _:
            row = ask("SELECT id FROM runs WHERE task_id = :id", id=operation["task_id"])
            return [r["id"] for r in row] == [evidence["run_id"]]


# -- 4: aborted -----------------------------------------------------------------------------------


def _aborted(stage: Stage, operation: dict[str, Any], steps: list[dict[str, Any]]) -> list[str]:
    wrong = []
    ask, of = stage.ledger.ask, {"id": operation["id"], "task": operation["task_id"]}
    for table, column, value in (
        ("tasks", "id", "task"),
        ("outbox", "aggregate_id", "task"),
        ("runs", "task_id", "task"),
        ("sessions", "operation_id", "id"),
        ("repository_attachments", "operation_id", "id"),
    ):
        if ask(f"SELECT 1 FROM {table} WHERE {column} = :{value}", **of):
            wrong.append(f"aborted, and {table} still has a row of it")
    for step in steps:
        if step["kind"] != "worktree":
            continue
        jobs = ask(
            "SELECT proof FROM cleanup_jobs WHERE operation_id = :id AND step_key = :key",
            id=operation["id"],
            key=step["step_key"],
        )
        proofs = " ".join(job["proof"] for job in jobs)
        key, path = step["idempotency_key"], json.loads(step["request"])["path"]
        place = stage.world.places[path]
        if key in (place.branch, place.folder) and path not in proofs:
            wrong.append(f"aborted, and {place} is left untracked")
        kept = stage.world.quarantine.get(key, [])
        if any(entry not in proofs for entry in kept):
            wrong.append("aborted, and a quarantine entry is tracked nowhere")
        if step["compensation"] == "compensated" and (key in (place.branch, place.folder)):
            wrong.append("compensated, and it is still there")
    failed = [step for step in steps if step["state"] == "failed"]
    if not failed and not operation["deleted"]:
        wrong.append("aborted for no reason")
    return wrong


def _others(stage: Stage) -> list[str]:
    """Nothing that was not ours is gone."""
    wrong = []
    for path, planted in stage.world.planted.items():
        place = stage.world.places[path]
        if (planted.branch and place.branch != planted.branch) or (
            planted.folder and place.folder != planted.folder
        ):
            wrong.append(f"what somebody else put at {path} is gone")
    return wrong


# -- 5: who wrote what ----------------------------------------------------------------------------


def _witnessed(stage: Stage) -> list[str]:
    wrong = []
    tokens: dict[tuple[str, str, str], str | None] = {}
    for row in stage.ledger.ask("SELECT * FROM witness ORDER BY seq"):
        actor = str(row["actor"])
        kind = actor.rstrip("0123456789")
        if kind == "outside":
            continue
        if row["tbl"] == "operation":
            wrong += _operation_write(kind, row)
            continue
        if row["owned_by"] != row["actor_fence"]:
            wrong.append(
                f"{kind} wrote {row['tbl']} {row['key']} under fence {row['actor_fence']}"
                f" of {row['owned_by']}"
            )
        if row["tbl"] == "step":
            wrong += _step_write(kind, row, tokens)
    return wrong


def _operation_write(kind: str, row: dict[str, Any]) -> list[str]:
    wrong = []
    before, after = row["state0"], row["state1"]
    if before != after and after not in OPERATION_TRANSITIONS[before]:
        wrong.append(f"operation went from {before} to {after}")
    if kind == "sweep":
        if row["lease0"] > row["now"]:
            wrong.append("a sweep took what had an owner")
        if row["fence1"] != row["fence0"] + 1:
            wrong.append("a sweep did not raise the fence by one")
    elif row["actor_fence"] < 0:
        if (row["fence0"], row["fence1"]) != (0, 1):
            wrong.append(f"a hand-off from fence {row['fence0']} to {row['fence1']}")
    elif row["fence0"] != row["actor_fence"]:
        wrong.append(f"{kind} wrote under fence {row['actor_fence']} of {row['fence0']}")
    if before != after and after in ("completed", "aborted") and row["fence1"] <= row["fence0"]:
        wrong.append(f"{after} without raising the fence")
    return wrong


def _step_write(
    kind: str, row: dict[str, Any], tokens: dict[tuple[str, str, str], str | None]
) -> list[str]:
    wrong = []
    me = (row["actor"], row["operation"], row["key"])
    for before, after, table in (
        (row["state0"], row["state1"], STEP_TRANSITIONS),
        (row["undo0"], row["undo1"], COMPENSATION_TRANSITIONS),
    ):
        if before != after and after not in table[before]:
            wrong.append(f"{row['key']} went from {before} to {after}")
    if row["token0"] != row["token1"]:
        tokens[me] = row["token1"]
        return wrong
    running = row["token0"] is not None and "running" in (row["state0"], row["undo0"])
    if running and tokens.get(me) != row["token0"]:
        wrong.append(f"{kind} wrote {row['key']} with another attempt's token")
    return wrong


# -- what callers were told -----------------------------------------------------------------------


def _answers(stage: Stage) -> list[str]:
    wrong = []
    for admitted in stage.answers:
        outcome = admitted.outcome
        if outcome is not None and not outcome.deduplicated:
            wrong.append(f"admission answered {outcome} for a found task")
        if outcome is not None and admitted.handle is not None:
            wrong.append("a found task came with a handle")
    for name in ("E", "F"):
        held = stage.ledger.ask("SELECT id, complete FROM tasks WHERE external_id = :e", e=name)
        found = stage.ledger.place.admission.lookup(stage.ledger.place.workspace_id, name)
        if (found.task_id if found else None) != (held[0]["id"] if held else None):
            wrong.append(f"the lookup of {name} does not tell its holder")
        elif found is not None and found.outcome is not None:
            told = (found.outcome.deduplicated, found.outcome.creation_complete)
            if told != (True, bool(held[0]["complete"])):
                wrong.append(f"the lookup of {name} tells {told}")
    return wrong
