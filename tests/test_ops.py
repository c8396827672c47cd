"""Operators: what is stuck and why, un-parking, and nothing that steers a creation."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import typer.main
from sqlalchemy import update
from support.office import Office, git
from support.stack import Play, until
from support.world import digest_of_everything, rows, workplace

from onceborn.runtime import access, failpoints
from onceborn.runtime.ledger import tables as t
from onceborn.runtime.ledger.database import Database
from onceborn.runtime.protocol import rules
from onceborn.runtime.protocol.errors import Forbidden, NotFound, NotParked
from onceborn.runtime.protocol.rules import StopReason
from onceborn.runtime.protocol.states import Outcome
from onceborn.runtime.recovery import Owned
from onceborn.surfaces import logs
from onceborn.surfaces.cli import app, main
from onceborn.surfaces.rest.openapi import document


@pytest.fixture(autouse=True)
def _inert_failpoints() -> Iterator[None]:
    yield
    failpoints.configure("")


@pytest.fixture
def office(database: Database, tmp_path: Path) -> Office:
    return Office(database, tmp_path)


def in_doubt(office: Office) -> Owned:
    """A creation that is parked: its worktree's result was lost, and it is on a strange branch."""
    owned = office.begin()
    failpoints.configure("worktree.observed=raise@1")
    with pytest.raises(failpoints.FailpointError):
        office.bench.run(owned)
    failpoints.configure("")
    git(office.worktree(owned.operation_id), "switch", "-q", "-c", "theirs")
    assert office.bench.run(office.next_owner()) is StopReason.PARKED
    return owned


def repaired(office: Office, owned: Owned) -> None:
    git(office.worktree(owned.operation_id), "switch", "-q", office.branch(owned.operation_id))


# -- stuck, and on again --------------------------------------------------------------------------


@pytest.mark.proves("X10", "SA18")
def test_what_cannot_be_told_parks_with_the_reason_and_releases_nothing(office: Office) -> None:
    owned = in_doubt(office)
    operation = office.operation(owned.operation_id)
    assert operation["parked_reason"] == (
        "step worktree:0 is unknown and observing does not settle it"
    )
    # Nothing is released: not the identity, not the place, not the worktree, not its branches.
    found = office.place.create("E")
    assert (found.outcome, found.task_id) == (Outcome.FOUND_UNSETTLED, owned.task_id)
    assert rows(office.database, t.workspace_counters)[0]["preparing"] == 1
    assert office.worktree(owned.operation_id).exists()
    assert office.branches(owned.operation_id) == sorted(
        [office.branch(owned.operation_id), "theirs"]
    )
    assert rows(office.database, t.outbox) == []
    # No sweep takes it, whatever time passes; an operator sees it and why.
    office.database.clock.advance(10**9)
    assert office.bench.recovery.claim(office.bench.host.host_id, 9) == []
    (line,) = office.operators.open_operations(parked=True)
    assert line["operation_id"] == owned.operation_id
    assert line["parked_reason"] == operation["parked_reason"]
    shown = office.operators.show(owned.task_id)
    assert shown["next"]["action"] == "stop"
    assert shown["after_unpark"]["action"] == "resolve"
    assert shown["after_unpark"]["step"] == "worktree:0"
    (attach, worktree) = shown["steps"]
    assert (attach["state"], attach["evidence_hash_matches"]) == ("succeeded", True)
    assert attach["evidence"]["base_commit"] == git(office.repository, "rev-parse", "HEAD")
    assert (worktree["state"], worktree["doubts"]) == ("unknown", 8)
    assert "is on refs/heads/theirs" in worktree["failure"]["reason"]
    assert any(e["what"].startswith("parked: step worktree:0") for e in shown["timeline"])
    assert operation["token_hash"] not in json.dumps(shown)
    assert office.step(owned.operation_id, "worktree:0")["attempt_token"] not in json.dumps(shown)


@pytest.mark.proves("X10")
def test_unparked_it_is_driven_on_and_completes_or_parks_again(office: Office) -> None:
    owned = in_doubt(office)
    fence = office.operation(owned.operation_id)["fence"]
    told = office.operators.unpark(owned.operation_id)
    assert told["next"]["step"] == "worktree:0"
    operation = office.operation(owned.operation_id)
    assert (operation["parked_reason"], operation["parked_at"]) == (None, None)
    assert (operation["state"], operation["fence"]) == ("preparing", fence)
    # Nothing was repaired: it parks again, with the reason.
    assert office.bench.run(office.swept()) is StopReason.PARKED
    assert "observing does not settle it" in office.operation(owned.operation_id)["parked_reason"]
    office.operators.unpark(owned.task_id)
    repaired(office, owned)
    assert office.bench.run(office.swept()) is StopReason.COMPLETED
    assert [row["type"] for row in rows(office.database, t.outbox)] == ["task.created"]
    assert office.verify(owned.operation_id)["worktree:0"].verdict == "same"
    actions = rows(office.database, t.operator_actions)
    assert [(a["action"], a["operation_id"]) for a in actions] == [
        ("unpark", owned.operation_id)
    ] * 2
    assert all(a["actor"].startswith("token/tok_") and a["created_at"] for a in actions)
    shown = office.operators.show(owned.operation_id)
    assert [a["action"] for a in shown["actions"]] == ["unpark", "unpark"]
    assert [e["what"] for e in shown["timeline"]][-1] in (
        "completed",
        "event task.created, revision 1",
    )


@pytest.mark.proves("X10", "X02")
def test_an_undoing_that_cannot_be_done_parks_and_after_repair_ends_aborted(
    office: Office,
) -> None:
    owned = office.begin(fails=True)
    config = office.clone(owned.operation_id) / "config"
    good: list[str] = []

    def watch(action: rules.Action) -> None:
        if isinstance(action, rules.RequireUndo):
            good.append(config.read_text())
            config.write_text("[broken\n")

    assert office.bench.run(owned, watch=watch) is StopReason.PARKED
    assert office.operation(owned.operation_id)["parked_reason"] == (
        "step worktree:0 cannot be undone"
    )
    assert office.place.create("E").outcome is Outcome.FOUND_UNSETTLED
    assert office.worktree(owned.operation_id).exists()
    shown = office.operators.show(owned.operation_id)
    assert shown["after_unpark"] == {
        "action": "compensate",
        "step": "worktree:0",
        "why": "the creation is being undone; its undoing is unknown",
    }
    config.write_text(good[0])
    office.operators.unpark(owned.operation_id)
    assert office.bench.run(office.swept()) is StopReason.ABORTED
    assert not office.worktree(owned.operation_id).exists()
    assert office.place.create("E").handle is not None


@pytest.mark.proves("X10")
def test_a_spent_budget_starts_again_when_unparked(office: Office) -> None:
    owned = office.begin()
    failpoints.configure("repo_attach.claimed=raise")
    for _ in range(5):
        with pytest.raises(failpoints.FailpointError):
            office.bench.run(owned)
        owned = office.next_owner()
    assert office.bench.run(owned) is StopReason.PARKED
    failpoints.configure("")
    (line,) = office.operators.open_operations(parked=True)
    assert line["claims_without_progress"] == 6
    assert office.operators.show(owned.operation_id)["after_unpark"]["action"] == "resolve"
    office.operators.unpark(owned.operation_id)
    assert office.bench.run(office.swept()) is StopReason.COMPLETED


@pytest.mark.proves("X10", "S05")
def test_what_does_not_match_the_ledger_parks_again_until_it_does(office: Office) -> None:
    owned = office.begin()
    good: list[str] = []

    def tamper(action: rules.Action) -> None:
        if isinstance(action, rules.EnterCompletion) and not good:
            good.append(office.step(owned.operation_id, "worktree:0")["evidence"])
            _set_evidence(office, good[0].replace("worktrees", "elsewhere"))

    assert office.bench.run(owned, watch=tamper) is StopReason.PARKED
    assert "steps.worktree:0.evidence" in office.operation(owned.operation_id)["parked_reason"]
    shown = office.operators.show(owned.operation_id)
    assert shown["steps"][1]["evidence_hash_matches"] is False
    office.operators.unpark(owned.operation_id)
    assert office.bench.run(office.swept()) is StopReason.PARKED
    _set_evidence(office, good[0])
    office.operators.unpark(owned.operation_id)
    assert office.bench.run(office.swept()) is StopReason.COMPLETED


def _set_evidence(office: Office, evidence: str) -> None:
    with office.database.transaction("test") as connection:
        connection.execute(
            update(t.steps).where(t.steps.c.step_key == "worktree:0").values(evidence=evidence)
        )


# -- what is refused ------------------------------------------------------------------------------


def test_only_what_is_parked_can_be_unparked(office: Office) -> None:
    owned = office.begin()
    before = digest_of_everything(office.database)
    with pytest.raises(NotParked) as caught:
        office.operators.unpark(owned.operation_id)
    assert caught.value.fields["state"] == "preparing"
    for reference in ("op_" + "0" * 32, "", "E"):
        with pytest.raises(NotFound):
            office.operators.unpark(reference)
    assert digest_of_everything(office.database) == before
    assert office.bench.run(owned) is StopReason.COMPLETED
    with pytest.raises(NotParked):
        office.operators.unpark(owned.task_id)


def test_of_two_that_unpark_at_once_one_does(office: Office) -> None:
    owned = in_doubt(office)

    def unpark(_: int) -> bool:
        try:
            office.operators.unpark(owned.operation_id)
        except NotParked:
            return False
        return True

    with ThreadPoolExecutor(4) as pool:
        assert sum(pool.map(unpark, range(4))) == 1
    assert len(rows(office.database, t.operator_actions)) == 1


def test_members_and_operators_of_other_workspaces_are_refused(office: Office) -> None:
    owned = in_doubt(office)
    place = office.place.workspace_id
    member = access.create_token(office.database, place, role="member", name="m")
    with pytest.raises(Forbidden):
        office.seat(member.token)
    other = workplace(office.database, office.folder / "elsewhere", name="other")
    made = access.create_token(office.database, other.workspace_id, role="operator", name="o")
    stranger = office.seat(made.token)
    before = digest_of_everything(office.database)
    assert stranger.open_operations() == stranger.open_operations(parked=True) == []
    for call in (stranger.show, stranger.unpark, stranger.operation):
        with pytest.raises(NotFound):
            call(owned.operation_id)
    assert digest_of_everything(office.database) == before


def test_looking_writes_nothing(office: Office) -> None:
    in_doubt(office)
    office.aborted(lambda path: (path / "new").touch(), external_id="F")
    before = digest_of_everything(office.database)
    office.operators.jobs()
    for line in office.operators.open_operations():
        office.operators.show(line["operation_id"])
    assert digest_of_everything(office.database) == before


def test_every_action_is_told_with_its_step_and_reason(office: Office) -> None:
    """Through a creation that completes and one that is undone, whatever the next action is."""
    told: dict[str, dict[str, Any]] = {}

    def watch(action: rules.Action) -> None:
        lines = office.operators.open_operations()
        told.update({line["next"]["action"]: line["next"] for line in lines})
        del action

    first = office.begin("F", profile="marker", start_agent=True)
    assert office.bench.run(first, watch=watch) is StopReason.COMPLETED
    after = office.operators.show(first.operation_id)
    assert after["next"]["action"] == "dispatch_run"
    owned = office.begin(fails=True)
    assert office.bench.run(owned, watch=watch) is StopReason.ABORTED
    assert set(told) == {
        "perform",
        "enter_completion",
        "commit_completion",
        "require_undo",
        "compensate",
        "abort",
    }
    assert all(line["why"] for line in told.values())
    aborted = office.operators.show(owned.operation_id)
    assert aborted["next"]["action"] == "stop"
    assert aborted["operation"]["failure"]["step"] == "worktree:1"


@pytest.mark.proves("X06")
def test_no_surface_steers_a_creation() -> None:
    commands = set(_commands(typer.main.get_command(app), ()))
    operators = {" ".join(c) for c in commands if c[0] == "ops"}
    assert operators == {
        "ops list",
        "ops show",
        "ops unpark",
        "ops quarantine list",
        "ops quarantine purge",
    }
    steering = {"resume", "adopt", "complete", "abort", "expire", "repair", "take-over"}
    assert not {word for command in commands for word in command} & steering
    text = json.dumps(document()["paths"]).lower()
    assert not [word for word in steering if f"/{word}" in text]


def _commands(command: Any, path: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    children = getattr(command, "commands", None)
    if children is None:
        yield path
        return
    for name, child in children.items():
        yield from _commands(child, (*path, name))


# -- as processes ---------------------------------------------------------------------------------


def _exit_code(program: Callable[[], None]) -> int:
    with pytest.raises(SystemExit) as ended:
        program()
    assert isinstance(ended.value.code, int)
    return ended.value.code


class Terminal:
    """An operator's terminal on the server."""

    def __init__(self, office: Office, database_url: str) -> None:
        self.environment = {
            "DATABASE_URL": database_url,
            "ONCEBORN_DATA": str(office.data),
            "ONCEBORN_TOKEN": office.operator_token,
        }

    def run(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """One command to its end, in this process."""
        out, err = io.StringIO(), io.StringIO()
        with (
            pytest.MonkeyPatch.context() as patch,
            redirect_stdout(out),
            redirect_stderr(err),
        ):
            patch.setattr(sys, "argv", ["onceborn", *arguments])
            patch.setattr(logs, "configure", lambda _: None)  # it is the whole process's
            for name, value in {**self.environment, **environment}.items():
                patch.setenv(name, value)
            code = _exit_code(main)
        return subprocess.CompletedProcess(arguments, code, out.getvalue(), err.getvalue())

    def process(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """The same as a process of its own."""
        return subprocess.run(
            [sys.executable, "-m", "onceborn", *arguments],
            env={**os.environ, **self.environment},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    def json(self, *arguments: str) -> dict[str, Any]:
        done = self.run(*arguments, "--json")
        assert done.returncode == 0, done.stderr
        shown: dict[str, Any] = json.loads(done.stdout)
        return shown


@pytest.fixture
def terminal(office: Office, database_url: str) -> Terminal:
    return Terminal(office, database_url)


@pytest.mark.proves("X10")
def test_an_operator_sees_unparks_and_verifies(office: Office, terminal: Terminal) -> None:
    owned = in_doubt(office)
    listed = terminal.process("ops", "list", "--stuck")
    assert listed.returncode == 0, listed.stderr
    assert "observing does not settle it" in listed.stdout
    shown = terminal.run("ops", "show", owned.task_id)
    assert shown.returncode == 0, shown.stderr
    for told in ("step worktree:0: unknown", "after un-park", "evidence hash", "timeline"):
        assert told in shown.stdout
    differs = terminal.run("verify", owned.task_id, "--json")
    assert differs.returncode == 0, differs.stderr  # of the steps that have evidence none differs
    assert json.loads(differs.stdout)["steps"][1]["verdict"] == "nothing_to_compare"
    assert terminal.run("ops", "unpark", owned.task_id).returncode == 0
    again = terminal.run("ops", "unpark", owned.task_id)
    assert again.returncode == 1
    assert "is not parked" in again.stderr
    repaired(office, owned)
    assert office.bench.run(office.next_owner()) is StopReason.COMPLETED
    assert terminal.run("verify", owned.operation_id).returncode == 0
    (office.worktree(owned.operation_id) / "inner" / "other.txt").unlink()
    after = terminal.run("verify", owned.operation_id)
    assert after.returncode == 1
    assert "worktree:0: differs" in after.stdout


@pytest.mark.proves("SA05", "SH05")
def test_an_operator_purges_what_was_listed(office: Office, terminal: Terminal) -> None:
    operation = office.aborted(lambda path: (path / "new.txt").write_text("mine"))
    path = office.worktree(operation["id"])
    (entry,) = terminal.json("ops", "quarantine", "list")["entries"]
    assert entry["contents"]["folders"][0]["path"] == str(path)
    assert entry["proof"]["findings"] == [{"path": "new.txt", "what": "??"}]
    unnamed = terminal.run("ops", "quarantine", "purge", entry["id"])
    assert unnamed.returncode == 1
    assert entry["contents"]["digest"] in unnamed.stderr
    (path / "newer.txt").write_text("mine too")
    digest = ("--digest", entry["contents"]["digest"])
    refused = terminal.run("ops", "quarantine", "purge", entry["id"], *digest)
    assert refused.returncode == 1
    assert (path / "newer.txt").exists()
    (entry,) = terminal.json("ops", "quarantine", "list")["entries"]
    assert "newer.txt" not in json.dumps(entry["proof"])
    assert "digest" in terminal.run("ops", "quarantine", "list").stdout
    done = terminal.json(
        "ops", "quarantine", "purge", entry["id"], "--digest", entry["contents"]["digest"]
    )
    assert done["state"] == "purged"
    assert not path.exists()
    assert terminal.json("ops", "quarantine", "list")["entries"] == []
    wrong = terminal.run("ops", "quarantine", "purge", entry["id"], *digest)
    assert wrong.returncode == 1
    assert "purged" in wrong.stderr


def test_what_a_terminal_is_refused(office: Office, terminal: Terminal) -> None:
    operation = office.aborted(lambda path: (path / "new.txt").touch())
    place = office.place.workspace_id
    member = access.create_token(office.database, place, role="member", name="m").token
    for command in (("ops", "list"), ("verify", operation["id"])):
        refused = terminal.run(*command, ONCEBORN_TOKEN=member)
        assert refused.returncode == 1
        assert "role operator" in refused.stderr
    assert terminal.run("ops", "list", ONCEBORN_TOKEN="onb_" + "x" * 43).returncode == 1
    none = terminal.run("ops", "list", ONCEBORN_TOKEN="")
    assert none.returncode == 2
    assert "--role operator" in none.stderr
    # On a machine that is another host, or none, nothing there is touched.
    elsewhere = office.folder / "elsewhere"
    elsewhere.mkdir()
    entry = office.only_job()["id"]
    for command in (("verify", operation["id"]), ("ops", "quarantine", "purge", entry)):
        wrong = terminal.run(*command, ONCEBORN_DATA=str(elsewhere))
        assert wrong.returncode == 1
        assert operation["host_id"] in wrong.stderr
    assert list(elsewhere.iterdir()) == []


# -- on the real stack ----------------------------------------------------------------------------


@pytest.mark.proves("X10")
def test_a_caller_who_waits_on_a_parked_creation_gets_it_once_it_is_unparked(
    database_url: str, temporal_address: str, temporal_namespace: str, tmp_path: Path
) -> None:
    play = Play(
        tmp_path.resolve(),
        DATABASE_URL=database_url,
        TEMPORAL_ADDRESS=temporal_address,
        TEMPORAL_NAMESPACE=temporal_namespace,
        ONCEBORN_LEASE_S="2",
        ONCEBORN_SWEEP_INTERVAL_S="0.3",
        ONCEBORN_STEP_ATTEMPTS="2",
        ONCEBORN_RETRY_BASE_S="0.1",
    )
    try:
        play.up()
        victim = play.worker("worktree.observed=kill@1")
        waiting = play.creating("E", **play.manifest())
        victim.wait(60)
        task_id = play.holder("E")
        request = json.loads(play.steps(task_id)["worktree:0"]["request"])
        path = play.data / request["path"]
        git(path, "switch", "-q", "-c", "theirs")
        play.worker()
        until("it to be parked", lambda: play.operation(task_id)["parked_reason"])
        assert not waiting.done()
        token = play._onceborn("token", "create", play.workspace_id, "--role", "operator", "--json")
        play.settings["ONCEBORN_TOKEN"] = json.loads(token)["token"]
        listed = json.loads(play._onceborn("ops", "list", "--stuck", "--json"))
        assert [line["task_id"] for line in listed["operations"]] == [task_id]
        git(path, "switch", "-q", request["branch"])
        play._onceborn("ops", "unpark", task_id)
        answer = waiting.result().json()
        assert (answer["id"], answer["creation_complete"]) == (task_id, True)
        play.alone(task_id)
    finally:
        play.down()
