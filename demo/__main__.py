"""``make demo``: the main job, end to end, on real processes. Exits 0 only if all of it holds."""

from __future__ import annotations

import json
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx

from .stage import LEASE_S, Stage, Unexpected, git, until

Seen = dict[str, Any]


def expect(holds: object, what: str, **seen: object) -> None:
    """Go on only if it holds."""
    if not holds:
        raise Unexpected(f"{what}: {json.dumps(seen, default=str)}")


def say(line: str) -> None:
    """Tell the person who watches."""
    print(f"   {line}", flush=True)


def outcome(response: httpx.Response) -> str:
    """The outcome that a response stands for, by its two booleans."""
    expect(response.status_code == 200, "the create was not answered with 200", body=response.text)
    body = response.json()
    pair = (body["deduplicated"], body["creation_complete"])
    if pair == (False, True):
        return "created" if "external_id" in body else "created_identity_lost"
    return {(True, True): "found_settled", (True, False): "found_unsettled"}[pair]


def created_with_evidence(stage: Stage) -> Seen:
    """1: created, with worktree, branch, commit and the evidence of each step; the agent ran."""
    response = stage.create("demo:1", **stage.manifest())
    expect(outcome(response) == "created", "demo:1 was not created", body=response.json())
    task = response.json()
    made = task["repositories"][0]
    say(f"created {task['id']}: {made['path']} on {made['branch']} at {made['base_commit'][:12]}")
    steps = stage.progress(task["id"])["steps"]
    for step in steps:
        expect(step["state"] == "succeeded" and step["evidence"], "a step lacks evidence", **step)
        say(f"{step['key']}: {step['state']}, {json.dumps(step['evidence'])[:120]}")
    worktree = Path(made["path"])
    expect(git("rev-parse", "HEAD", cwd=worktree) == made["base_commit"], "HEAD is elsewhere")
    expect(git("branch", "--show-current", cwd=worktree) == made["branch"], "branch is another")
    run = stage.wait_for_agent(task["id"])
    mark = (worktree / "AGENT-WAS-HERE").read_text().splitlines()
    expect(len(mark) == 1 and str(worktree) in mark[0], "not exactly one agent", mark=mark)
    say(f"the agent ran as {run['id']} ({run['state']}) and wrote: {mark[0]}")
    return {
        "outcome": "created",
        "task": task["id"],
        "worktree": made["path"],
        "branch": made["branch"],
        "commit": made["base_commit"],
        "evidence": {step["key"]: step["evidence"] for step in steps},
        "agent_mark": mark[0],
    }


def found_without_effect(stage: Stage) -> Seen:
    """2: the same create: found_settled, and nothing else changed."""
    before = stage.digest()
    response = stage.create("demo:1", **stage.manifest())
    after = stage.digest()
    expect(outcome(response) == "found_settled", "not found settled", body=response.json())
    expect(before == after, "something was written", before=before, after=after)
    say(f"found_settled {response.json()['id']}; digest before and after {after[:16]}")
    return {"outcome": "found_settled", "digest_before": before, "digest_after": after}


def wrong_but_held(stage: Stage) -> Seen:
    """3: all of the rest wrong: found where held, a named refusal where not."""
    wrong = {
        "title": 42,
        "repositories": [{"source": "/no/such/place"}],
        "profile": "no-such-profile",
        "unknown": True,
    }
    before = stage.digest()
    held = stage.create("demo:1", **wrong)
    expect(outcome(held) == "found_settled", "not found settled", body=held.json())
    refused = stage.create("demo:2", **wrong)
    problem = refused.json()
    expect(400 <= refused.status_code < 500, "not refused", body=problem)
    expect(problem["field"] == "title", "another field was named", body=problem)
    expect(stage.digest() == before, "something was written")
    say(f"demo:1 is found_settled; demo:2 is refused, {refused.status_code}: {problem['detail']}")
    return {"held": "found_settled", "problem": problem, "wrote": False}


def twenty_at_once(stage: Stage) -> Seen:
    """4: twenty concurrent creates: one created, nineteen found, one worktree, one agent."""
    with ThreadPoolExecutor(20) as pool:
        creates = [pool.submit(stage.create, "demo:3", **stage.manifest()) for _ in range(20)]
        responses = [create.result() for create in creates]
    outcomes = sorted(map(outcome, responses))
    expect(outcomes.count("created") == 1, "not exactly one was created", outcomes=outcomes)
    ids = {response.json()["id"] for response in responses}
    expect(len(ids) == 1, "more than one task", ids=ids)
    task_id = ids.pop()
    facts = _alone(stage, task_id)
    counts = {name: outcomes.count(name) for name in sorted(set(outcomes))}
    say(f"{counts}, one task {task_id}, {facts}")
    return {"outcomes": counts, "task": task_id, **facts}


def killed_in_a_step(stage: Stage) -> Seen:
    """5: the worker is killed in the middle of a step; the runtime finishes the creation."""
    gate = stage.folder / "gate-5"
    stage.end_workers()
    worker = stage.worker(f"worktree.performed=wait:{gate}")
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(stage.create, "demo:4", **stage.manifest())
        until("the worker to be inside the step", gate.with_name("gate-5.reached").exists)
        worker.send_signal(signal.SIGKILL)
        worker.wait()
        say(f"worker {worker.pid} was killed between making the worktree and recording it")
        again = stage.create("demo:4", **stage.manifest())
        expect(outcome(again) == "found_unsettled", "not unsettled", body=again.json())
        say("meanwhile the create answers found_unsettled")
        task_id = again.json()["id"]
        until("the dead owner's lease to end", lambda: _lease_ended(stage, task_id))
        stage.worker()
        expect(outcome(first.result()) == "created", "the first caller was not told created")
    settled = stage.create("demo:4", **stage.manifest())
    expect(outcome(settled) == "found_settled", "not settled", body=settled.json())
    facts = _alone(stage, task_id)
    statement = "SELECT fence FROM operations WHERE task_id = :t"
    fence = stage.query(statement, t=task_id)[0]["fence"]
    expect(fence >= 2, "the fence was not raised", fence=fence)
    say(f"a new worker's sweep finished it: found_settled, fence {fence}, {facts}")
    return {"meanwhile": "found_unsettled", "then": "found_settled", "fence": fence, **facts}


def branch_in_use(stage: Stage) -> Seen:
    """6: a branch that is checked out elsewhere: aborted, undone, the identity free."""
    elsewhere = stage.folder / "somebody's worktree"
    git("worktree", "add", "-q", "-b", "busy", str(elsewhere), cwd=stage.repository)
    sources = [{"source": str(stage.repository), "branch": "busy"}]
    before = git("rev-parse", "busy", cwd=stage.repository)
    response = stage.create("demo:5", **stage.manifest(repositories=sources))
    problem = response.json()
    expect(response.status_code == 422, "not aborted", status=response.status_code, body=problem)
    expect(problem["code"] == "creation_aborted", "another code", body=problem)
    expect("busy" in problem["reason"], "the reason does not name the branch", body=problem)
    say(f"aborted in {problem['step']}: {problem['reason']}")
    say(f"undone: {[(u['step'], u['how']) for u in problem['undone']]}")
    with stage.client() as client:
        path = f"/api/v1/workspaces/{stage.workspace_id}/tasks/by-external-id"
        lookup = client.get(path, params={"external_id": "demo:5"})
    expect(lookup.status_code == 404, "the identity is not free", body=lookup.text)
    expect(git("rev-parse", "busy", cwd=stage.repository) == before, "the branch was touched")
    expect(not stage.worktrees("busy"), "a worktree of ours was left")
    left = stage.query("SELECT count(*) AS n FROM tasks WHERE external_id = 'demo:5'")[0]["n"]
    expect(left == 0, "a task was left")
    say("the branch and the other worktree are untouched, and the identity is free")
    return {"problem": problem, "identity_free": True}


def paused_and_late(stage: Stage) -> Seen:
    """7: a worker is paused until another has finished, and then continued: it changes nothing."""
    gate = stage.folder / "gate-7"
    stage.end_workers()
    slow = stage.worker(f"worktree.lock=wait:{gate}")
    slow_name = f"worker-{stage.workers_started}"
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(stage.create, "demo:6", **stage.manifest())
        until("the worker to be inside the step", gate.with_name("gate-7.reached").exists)
        stage.pause(slow)
        say(f"worker {slow.pid} is paused in the middle of demo:6")
        stage.worker()
        response = first.result()
        expect(outcome(response) == "created", "not created", body=response.json())
    task_id = response.json()["id"]
    facts = _alone(stage, task_id)
    before = stage.digest()
    gate.touch()
    slow.send_signal(signal.SIGCONT)
    until("the paused worker to go on", lambda: stage.logged(slow_name, "step.refused"))
    stage.end(slow)
    after = stage.digest()
    expect(before == after, "the late worker changed something", before=before, after=after)
    say(f"another worker finished it ({facts}); continued, the first was refused: nothing changed")
    return {"outcome": "created", "digest_before": before, "digest_after": after, **facts}


def _alone(stage: Stage, task_id: str) -> Seen:
    """One worktree, one agent, one event: counted in git, in the worktree and in the ledger."""
    stage.wait_for_agent(task_id)
    with stage.client() as client:
        made = client.get(f"/api/v1/tasks/{task_id}").json()["repositories"][0]
    worktrees = stage.worktrees(made["branch"])
    agents = (Path(made["path"]) / "AGENT-WAS-HERE").read_text().splitlines()
    statement = "SELECT type FROM outbox WHERE aggregate_id = :t"
    events = [row["type"] for row in stage.query(statement, t=task_id)]
    facts = {"worktrees": len(worktrees), "agents": len(agents), "events": events}
    expect(facts == {"worktrees": 1, "agents": 1, "events": ["task.created"]}, "not one", **facts)
    return facts


def _lease_ended(stage: Stage, task_id: str) -> bool:
    statement = "SELECT lease_until FROM operations WHERE task_id = :t"
    return bool(stage.query(statement, t=task_id)[0]["lease_until"] < time.time() * 1000)


ACTS: tuple[Callable[[Stage], Seen], ...] = (
    created_with_evidence,
    found_without_effect,
    wrong_but_held,
    twenty_at_once,
    killed_in_a_step,
    branch_in_use,
    paused_and_late,
)


def main() -> int:
    """Play all acts; a line each, and at the end a JSON object each."""
    folder = Path(tempfile.mkdtemp(prefix="onceborn-demo-")).resolve()
    stage, results = Stage(folder), []
    print(f"onceborn demo in {folder} (lease {LEASE_S:g} s)", flush=True)
    try:
        stage.up()
        for number, act in enumerate(ACTS, 1):
            print(f"{act.__doc__}".strip(), flush=True)
            results.append({"line": number, "ok": True, "saw": act(stage)})
    except Exception:
        traceback.print_exc()
        results.append({"line": len(results) + 1, "ok": False})
    finally:
        stage.down()
    for result in results:
        print(json.dumps(result, default=str))
    if len(results) == len(ACTS) and all(result["ok"] for result in results):
        shutil.rmtree(folder)
        return 0
    print(f"failed; what was seen is in {folder}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
