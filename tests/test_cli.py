"""The command line, as processes: the whole server in one command, and what a person types."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from gitrepos import Repository
from support.processes import arguments, descendants, living
from support.server import closed_port
from support.waiting import until

from onceborn.runtime import workspaces
from onceborn.runtime.ledger.database import Database

DONE, REFUSED, USAGE, UNAVAILABLE = 0, 1, 2, 3


def onceborn(
    *arguments: str, environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run one command to its end."""
    return subprocess.run(
        [sys.executable, "-m", "onceborn", *arguments],
        env={**os.environ, **(environment or {})},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@dataclass
class Up:
    """A running ``onceborn up`` with what it printed."""

    data: Path
    process: subprocess.Popen[str]
    url: str
    printed: list[str]
    environment: dict[str, str] = field(default_factory=dict)

    def command(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return onceborn(*arguments, environment=self.environment)

    def children(self) -> set[int]:
        return descendants(self.process.pid)

    def child(self, name: str) -> int | None:
        """The one child that has ``name`` in its arguments, while there is one."""
        return next((pid for pid in self.children() if name in arguments(pid)), None)

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(60)


def start(data: Path, roots: Path) -> Up:
    """Start the server and read what it prints until it is ready."""
    log = (data.parent / f"{data.name}.log").open("a", encoding="utf-8")
    with log:
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "onceborn", "up", "--data", str(data), "--port", "0"),
                *("--repository-root", str(roots)),
            ],
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
    assert process.stdout is not None
    printed: list[str] = []
    first = not (data / "ledger.db").exists()
    last = "export ONCEBORN_TOKEN" if first else "temporal"
    while not printed or last not in printed[-1]:
        line = process.stdout.readline()
        assert line, (data.parent / f"{data.name}.log").read_text(encoding="utf-8")
        printed.append(line.rstrip("\n"))
    exported = [line.split("export ", 1)[1] for line in printed if "export " in line]
    environment = dict(line.split("=", 1) for line in exported)
    return Up(data, process, printed[0].rsplit(" ", 1)[1], printed, environment)


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    folder = tmp_path_factory.mktemp("up")
    repository = Repository(folder / "repository")
    repository.commit()
    started = start(folder / "data", folder)
    yield started
    if started.process.poll() is None:
        started.stop()


# -- with a server --------------------------------------------------------------------------------


@pytest.mark.proves("C01", "C02", "C03", "C07")
def test_a_task_is_created_once_and_found_again(up: Up) -> None:
    source = str(up.data.parent / "repository")
    command = ("task", "create", "--title", "A first task", "--external-id", "cli:1", "--json")
    command += ("--repository", source, "--branch", "feature/cli", "--base-ref", "trunk")
    created = up.command(*command)
    assert created.returncode == DONE, created.stderr
    task = json.loads(created.stdout)
    assert (task["deduplicated"], task["creation_complete"]) == (False, True)
    (repository,) = task["repositories"]
    assert (repository["branch"], repository["source"]) == ("feature/cli", source)
    assert (Path(repository["path"]) / "README").exists()
    again = json.loads(up.command(*command).stdout)
    assert (again["id"], again["deduplicated"]) == (task["id"], True)
    assert again["request_match"] == "same"
    other = up.command("task", "create", "--title", "Another", "--external-id", "cli:1")
    assert other.stdout.startswith(f"found {task['id']}")
    assert "differs" in other.stdout
    found = json.loads(up.command("task", "lookup", "cli:1", "--json").stdout)
    assert found["id"] == task["id"]
    shown = up.command("task", "show", task["id"])
    assert "worktree:0: succeeded" in shown.stdout
    assert "outcome  created" in shown.stdout


@pytest.mark.proves("X02", "SA19")
def test_an_aborted_creation_says_why_and_what_was_undone(up: Up) -> None:
    source = str(up.data.parent / "repository")
    command = ("task", "create", "--title", "t", "--external-id", "cli:2")
    refused = up.command(*command, "--repository", source, "--branch", "trunk")
    assert refused.returncode == REFUSED
    assert "in step worktree:0" in refused.stderr
    assert "undone: repo_attach:0 (compensated)" in refused.stderr
    assert "Traceback" not in refused.stderr
    task_id = next(
        line.split()[1] for line in refused.stderr.splitlines() if line.startswith("  task:")
    )
    shown = up.command("task", "show", task_id)
    assert "state    aborted" in shown.stdout
    assert up.command(*command).stdout.startswith("created ")


def test_refusals_go_to_stderr_with_what_to_do(up: Up) -> None:
    refused = up.command("task", "create", "--title", "")
    assert (refused.returncode, refused.stdout) == (REFUSED, "")
    assert "title" in refused.stderr
    unheld = up.command("task", "lookup", "nobody's")
    assert (unheld.returncode, unheld.stdout) == (REFUSED, "")
    stranger = onceborn(
        "task", "show", "tsk_x", environment={**up.environment, "ONCEBORN_TOKEN": "onb_wrong"}
    )
    assert stranger.returncode == REFUSED
    assert "ONCEBORN_TOKEN" in stranger.stderr
    usage = up.command("task", "create", "--title", "t", "--branch", "b")
    assert usage.returncode == USAGE
    assert "--repository" in usage.stderr


def test_a_folder_and_a_port_belong_to_one_server(up: Up, tmp_path: Path) -> None:
    second = onceborn("up", "--data", str(up.data), "--port", "0")
    assert second.returncode == USAGE
    assert "already uses" in second.stderr
    port = up.url.rsplit(":", 1)[1]
    taken = onceborn("up", "--data", str(tmp_path / "other"), "--port", port)
    assert taken.returncode == USAGE
    assert "--port" in taken.stderr


def test_a_part_that_cannot_run_as_configured_ends_it_all(tmp_path: Path) -> None:
    (tmp_path / "profiles.toml").write_text("[profiles.x]\nargv = 7\n")
    ended = onceborn("up", "--data", str(tmp_path), "--port", "0")
    assert ended.returncode == USAGE
    assert "profiles.x.argv" in ended.stderr
    assert "cannot run as configured" in ended.stderr


@pytest.mark.proves("X01")
@pytest.mark.parametrize("name", ["worker", "api", "server"])
def test_a_part_that_dies_is_started_again(up: Up, name: str) -> None:
    before = up.child(name)
    assert before is not None
    os.kill(before, signal.SIGKILL)
    until(lambda: up.child(name) not in (None, before))
    made = up.command("task", "create", "--title", "t", "--external-id", f"after {name}")
    if made.returncode == UNAVAILABLE:
        # The engine was not back yet: what was admitted is finished when it is.
        assert "is finished" in made.stderr
    else:
        assert made.returncode == DONE, made.stderr
    until(lambda: "creation_complete  true" in up.command("task", "lookup", f"after {name}").stdout)


@pytest.mark.proves("U08")
def test_the_token_is_nowhere_but_on_the_screen(up: Up) -> None:
    token = up.environment["ONCEBORN_TOKEN"].encode()
    up.command("task", "lookup", "cli:1")
    files = [path for path in up.data.parent.rglob("*") if path.is_file()]
    assert len(files) > 10
    assert [path for path in files if token in path.read_bytes()] == []


def test_it_stops_cleanly_and_starts_again_without_a_new_token(tmp_path: Path) -> None:
    up = start(tmp_path / "data", tmp_path)
    made = up.command("task", "create", "--title", "t", "--external-id", "E", "--json")
    assert made.returncode == DONE, made.stderr
    children = up.children()
    assert up.stop() == DONE
    assert not children & living().keys()
    again = start(tmp_path / "data", tmp_path)
    assert not any("TOKEN" in line for line in again.printed)
    environment = {**up.environment, "ONCEBORN_URL": again.url}
    found = onceborn(
        "task", "create", "--title", "t", "--external-id", "E", environment=environment
    )
    assert found.stdout.startswith(f"found {json.loads(made.stdout)['id']}")
    children = again.children()
    again.process.kill()
    again.process.wait()
    # Even a supervisor that is killed leaves nothing behind.
    until(lambda: not children & living().keys())


# -- without one ----------------------------------------------------------------------------------


def test_version_and_usage() -> None:
    assert onceborn("--version").stdout.startswith("onceborn 0.")
    assert onceborn("no-such-command").returncode == USAGE
    assert onceborn("task", "show", "x").returncode == USAGE  # ONCEBORN_TOKEN is not set
    wrong = onceborn("db", "upgrade", environment={"ONCEBORN_SLOTS": "none"})
    assert wrong.returncode == USAGE
    assert "slots" in wrong.stderr.lower()


def test_nobody_there_is_told_apart_from_a_refusal() -> None:
    environment = {
        "ONCEBORN_TOKEN": "onb_x",
        "ONCEBORN_URL": f"http://127.0.0.1:{closed_port()}",
    }
    alone = onceborn("task", "show", "x", environment=environment)
    assert (alone.returncode, alone.stdout) == (UNAVAILABLE, "")
    assert "onceborn up" in alone.stderr
    assert "Traceback" not in alone.stderr


@pytest.mark.proves("X06")
def test_no_command_takes_a_creation_over() -> None:
    commands = onceborn("--help").stdout + onceborn("task", "--help").stdout
    for word in ("resume", "adopt", "complete ", "abort", "expire"):
        assert word not in commands.lower()


def test_workspaces_and_tokens_are_made_on_the_ledger(empty_database_url: str) -> None:
    environment = {"DATABASE_URL": empty_database_url}
    early = onceborn("workspace", "create", "w", environment=environment)
    assert early.returncode == USAGE
    assert "onceborn db upgrade" in early.stderr
    assert onceborn("db", "upgrade", environment=environment).returncode == DONE
    made = onceborn("workspace", "create", "w", "--capacity", "2", environment=environment)
    workspace_id = made.stdout.strip()
    database = Database(empty_database_url)
    (view,) = workspaces.list_workspaces(database)
    database.dispose()
    assert (view.id, view.name, view.capacity) == (workspace_id, "w", 2)
    token = onceborn(
        "token",
        "create",
        "w",
        "--role",
        "operator",
        "--name",
        "ci",
        "--json",
        environment=environment,
    )
    document = json.loads(token.stdout)
    assert document["token"].startswith("onb_")
    listed = onceborn("token", "list", workspace_id, environment=environment)
    assert document["id"] in listed.stdout
    assert document["token"] not in listed.stdout
    assert onceborn("token", "revoke", document["id"], environment=environment).returncode == DONE
    assert "revoked" in onceborn("token", "list", "w", environment=environment).stdout
    for refusable in (
        ("token", "revoke", "tok_x"),
        ("token", "create", "nobody"),
        ("token", "create", "w", "--role", "admin"),
        ("workspace", "create", "w", "--capacity", "0"),
    ):
        refused = onceborn(*refusable, environment=environment)
        assert refused.returncode == REFUSED, refusable
        assert "Traceback" not in refused.stderr
    down = {"DATABASE_URL": f"postgresql://u:secret-word@127.0.0.1:{closed_port()}/x"}
    gone = onceborn("workspace", "create", "w", environment=down)
    assert gone.returncode == UNAVAILABLE
    assert "secret-word" not in gone.stderr
