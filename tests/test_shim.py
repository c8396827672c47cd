"""The shim and what looks at it, with real processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.waiting import until

from onceborn.activities import agent, shim
from onceborn.activities.agent import Launch, NotLaunched
from onceborn.activities.agent_look import Look, clear_strays, look, stop
from onceborn.activities.kind import Host
from onceborn.activities.shim.processes import is_process

MAIN = Path(shim.__file__).parent / "__main__.py"


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    data = (tmp_path / "data").resolve()
    data.mkdir()
    yield Host(host_id="hst_1", data=data)
    for started in data.glob("runs/*/started.json"):
        stop(started.parent)
        until(lambda folder=started.parent: look(folder).over)


@pytest.fixture
def worktree(tmp_path: Path) -> Path:
    folder = tmp_path / "work tree"
    folder.mkdir()
    return folder.resolve()


def python(program: str) -> tuple[str, ...]:
    return (sys.executable, "-c", textwrap.dedent(program))


def spec(worktree: Path, *argv: str, run_id: str = "run_1", **changes: Any) -> Launch:
    values: dict[str, Any] = {
        "run_id": run_id,
        "task_id": "tsk_1",
        "token": "t1",
        "argv": argv,
        "environment": (),
        "working_directory": worktree,
        "time_limit_s": 60,
        "prompt": "do it\n",
        "grace_s": 0.5,
    }
    return Launch(**(values | changes))


def launch(host: Host, what: Launch) -> Look:
    return agent.launch(host, what, lambda: None)


def ended(host: Host, run_id: str = "run_1") -> dict[str, Any]:
    directory = agent.run_directory(host, run_id)
    until(lambda: look(directory).over)
    seen = look(directory)
    assert seen.state == "ended"
    assert seen.exit is not None
    return seen.exit


def log_of(host: Host, run_id: str = "run_1") -> str:
    return (agent.run_directory(host, run_id) / "log").read_text()


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b") ")[2][:1]
    except FileNotFoundError:
        return False
    return state not in b"ZX"


def pids_in(path: Path, count: int) -> list[int]:
    def read() -> list[int] | None:
        words = path.read_text().split() if path.exists() else []
        return [int(word) for word in words] if len(words) == count else None

    found: list[int] = until(read)
    return found


# -- one launch -----------------------------------------------------------------------------------


def test_an_agent_runs_and_its_end_is_recorded(host: Host, worktree: Path) -> None:
    seen = launch(host, spec(worktree, *python("print('hello'); raise SystemExit(3)")))
    assert seen.state in ("running", "ended")
    end = ended(host)
    assert (end["exit_code"], end["signal"], end["reason"]) == (3, None, "exited")
    assert end["survivors"] == []
    assert log_of(host) == "hello\n"
    evidence = look(agent.run_directory(host, "run_1")).evidence()
    assert evidence["log_tail"] == "hello\n"
    assert evidence["started"]["boot_id"]


@pytest.fixture
def checkout(tmp_path: Path, worktree: Path) -> Path:
    """A main checkout whose linked worktree is the agent's."""
    main = tmp_path / "main checkout"
    git(tmp_path, "init", "-q", str(main))
    (main / "file").write_text("content")
    git(main, "add", "file")
    git(main, "-c", "user.name=x", "-c", "user.email=x@example.org", "commit", "-qm", "one")
    git(main, "worktree", "add", "-q", "-b", "fresh", str(worktree))
    return main


def git(folder: Path, *arguments: str) -> str:
    done = subprocess.run(
        ["git", "-C", str(folder), *arguments], check=True, capture_output=True, text=True
    )
    return done.stdout


@pytest.mark.proves("SE06")
def test_an_agent_sees_its_worktree_and_its_prompt(
    host: Host, worktree: Path, checkout: Path
) -> None:
    program = """
        import json, os, subprocess, sys
        command = ["git", "rev-parse", "--show-toplevel"]
        top = subprocess.run(command, capture_output=True, text=True).stdout.strip()
        prompt = open(os.environ["ONCEBORN_PROMPT_FILE"]).read()
        print(json.dumps({"cwd": os.getcwd(), "pwd": os.environ["PWD"], "top": top,
                          "prompt": prompt, "argv": sys.argv[1:], "stdin": sys.stdin.read(),
                          "run": os.environ["ONCEBORN_RUN_ID"]}))
        open("mark", "w").close()
    """
    arguments = ("{prompt_file}", "{task_id}/{run_id}", '{"x": {}}')
    launch(host, spec(worktree, *python(program), *arguments, prompt="π {run_id}\n"))
    assert ended(host)["exit_code"] == 0
    seen = json.loads(log_of(host))
    assert seen["cwd"] == seen["pwd"] == seen["top"] == str(worktree)
    assert seen["prompt"] == "π {run_id}\n"
    assert seen["argv"][1:] == ["tsk_1/run_1", '{"x": {}}']
    assert Path(seen["argv"][0]).read_text() == seen["prompt"]
    assert (seen["stdin"], seen["run"]) == ("", "run_1")
    assert (worktree / "mark").exists()
    assert git(checkout, "status", "--porcelain") == ""


@pytest.mark.proves("SE06", "SE09")
def test_a_missing_worktree_fails_the_launch(host: Host, worktree: Path, checkout: Path) -> None:
    git(checkout, "worktree", "remove", str(worktree))
    seen = launch(host, spec(worktree, "touch", "mark"))
    assert seen.state == "ended"
    end = ended(host)
    assert (end["reason"], end["exit_code"]) == ("not_executed", None)
    assert end["error"]["stage"] == "working_directory"
    assert "No such file" in end["error"]["message"]
    assert not worktree.exists()
    assert git(checkout, "status", "--porcelain") == ""


@pytest.mark.proves("SE09", "SE11")
@pytest.mark.parametrize("program", ["no-such-program", "/no/such/program", "/etc/passwd"])
def test_a_program_that_cannot_run_is_told_at_once(
    host: Host, worktree: Path, program: str
) -> None:
    assert launch(host, spec(worktree, program)).state == "ended"
    end = ended(host)
    assert end["reason"] == "not_executed"
    assert end["error"]["stage"] == "program"
    assert end["error"]["message"] in ("No such file or directory", "Permission denied")


@pytest.mark.proves("SE09", "SE11")
def test_an_early_death_keeps_code_and_output(host: Host, worktree: Path) -> None:
    launch(host, spec(worktree, "sh", "-c", "echo broken >&2; exit 1"))
    assert ended(host)["exit_code"] == 1
    assert look(agent.run_directory(host, "run_1")).evidence()["log_tail"] == "broken\n"


@pytest.mark.proves("SE07")
def test_only_allowed_variables_arrive(
    host: Host, worktree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CANARY", "canary-value-1")
    monkeypatch.setenv("DATABASE_URL", "postgresql://canary-value-2")
    monkeypatch.setenv("AGENT_KEY", "secret-value-3")
    program = "import json, os; print(json.dumps(dict(os.environ)))"
    launch(host, spec(worktree, *python(program), environment=("AGENT_KEY", "NOT_SET")))
    assert ended(host)["exit_code"] == 0
    seen = json.loads(log_of(host))
    ours = {"AGENT_KEY", "PWD", "ONCEBORN_RUN_ID", "ONCEBORN_TASK_ID", "ONCEBORN_PROMPT_FILE"}
    assert ours <= set(seen)
    assert set(seen) <= ours | set(agent.BASE_ENVIRONMENT)
    directory = agent.run_directory(host, "run_1")
    everything = b"".join(path.read_bytes() for path in directory.iterdir())
    assert b"canary-value" not in everything
    # What the agent was entrusted with is on disk only where the agent itself wrote it.
    assert b"secret-value-3" not in (directory / "launch.json").read_bytes()
    evidence = json.dumps(look(directory).evidence())
    assert "secret-value-3" not in evidence
    assert "[AGENT_KEY]" in evidence


def test_the_log_is_bounded_and_keeps_head_and_tail(host: Host, worktree: Path) -> None:
    program = """
        import sys
        print("first")
        for number in range(20000): print(f"line {number}")
        print("last")
    """
    launch(host, spec(worktree, *python(program), log_limit_bytes=4096))
    end = ended(host)
    directory = agent.run_directory(host, "run_1")
    sizes = [path.stat().st_size for path in directory.glob("log*")]
    assert len(sizes) == 3
    assert sum(sizes) + end["log_bytes_lost"] == end["log_bytes"]
    assert (directory / "log.head").read_text().startswith("first\n")
    assert look(directory).evidence()["log_tail"].endswith("last\n")


# -- one launch for ever --------------------------------------------------------------------------


def run_shim(directory: Path, token: str, **environment: str) -> int:
    arguments = [sys.executable, "-I", "-S", str(MAIN), str(directory), token]
    return subprocess.run(arguments, env=os.environ | environment, check=False).returncode


def counting(worktree: Path) -> tuple[str, ...]:
    """An agent that leaves a mark for each process of it that ever ran, and stays."""
    return ("sh", "-c", f"echo $$ >> '{worktree}/marks'; exec sleep 1000")


@pytest.mark.proves("SE02")
def test_a_second_shim_fails_on_the_lock(host: Host, worktree: Path) -> None:
    launch(host, spec(worktree, *counting(worktree)))
    directory = agent.run_directory(host, "run_1")
    assert run_shim(directory, "t1") == shim.BUSY
    pids_in(worktree / "marks", 1)
    stop(directory)
    assert ended(host)["reason"] == "stopped"
    assert run_shim(directory, "t1") == shim.ALREADY_LAUNCHED
    assert len((worktree / "marks").read_text().split()) == 1


def test_a_shim_with_another_token_does_not_launch(host: Host, worktree: Path) -> None:
    directory = agent.run_directory(host, "run_1")
    directory.mkdir(parents=True)
    what = spec(worktree, *counting(worktree))
    agent._write_launch(directory, what, lambda: None)
    assert run_shim(directory, "another") == shim.NOT_OURS
    assert look(directory).state == "absent"


def test_a_barred_run_launches_never(host: Host, worktree: Path) -> None:
    directory = agent.run_directory(host, "run_1")
    directory.mkdir(parents=True)
    agent._write_launch(directory, spec(worktree, *counting(worktree)), lambda: None)
    assert agent.bar(host, "run_1").state == "absent"
    assert run_shim(directory, "t1") == shim.NOT_OURS
    assert look(directory).state == "absent"


@pytest.mark.proves("SE02")
def test_twenty_launchers_at_once_start_one_agent(host: Host, worktree: Path) -> None:
    barrier = threading.Barrier(20)
    seen: list[Look] = []

    def one(number: int) -> None:
        what = spec(worktree, *counting(worktree), token=f"token-{number}")
        barrier.wait()
        seen.append(launch(host, what))

    threads = [threading.Thread(target=one, args=(number,)) for number in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    directory = agent.run_directory(host, "run_1")
    until(lambda: look(directory).state == "running")
    pids = pids_in(worktree / "marks", 1)
    started = look(directory).started
    assert started is not None
    assert pids == [started["pid"]]
    adopted = {look.started["pid"] for look in seen if look.started}
    assert adopted <= set(pids)


@pytest.mark.proves("SE02", "SE04")
def test_a_launcher_that_wakes_up_late_starts_nothing(host: Host, worktree: Path) -> None:
    """Paused between its intent and its spawn, while another launches and the agent ends."""
    program = f"""
        from pathlib import Path
        from onceborn.activities import agent
        from onceborn.activities.kind import Host
        what = agent.Launch(
            run_id="run_1", task_id="t", token="early", argv=("touch", "early-mark"),
            environment=(), working_directory=Path({str(worktree)!r}), time_limit_s=9, prompt="")
        print(agent.launch(Host("hst_1", Path({str(host.data)!r})), what, lambda: None).state)
    """
    points = os.environ | {"ONCEBORN_FAILPOINTS": "agent.spawn=stop"}
    early = subprocess.Popen(python(program), env=points, stdout=subprocess.PIPE, text=True)
    until(lambda: Path(f"/proc/{early.pid}/stat").read_text().rpartition(") ")[2][0] == "T")
    launch(host, spec(worktree, "touch", "late-mark", token="late"))
    assert ended(host)["exit_code"] == 0
    early.send_signal(signal.SIGCONT)
    output, _ = early.communicate()
    assert output == "ended\n"
    assert [path.name for path in worktree.iterdir()] == ["late-mark"]


@pytest.mark.proves("SE04")
@pytest.mark.parametrize(
    ("point", "expected"),
    [
        ("agent.locked", "absent"),
        ("agent.intent", "absent"),
        ("agent.intended", "absent"),
        ("agent.spawn", "absent"),
        ("agent.spawned", "running"),
    ],
)
def test_a_launcher_killed_anywhere_leaves_proof(
    host: Host, worktree: Path, point: str, expected: str
) -> None:
    program = f"""
        from pathlib import Path
        from onceborn.activities import agent
        from onceborn.activities.kind import Host
        what = agent.Launch(
            run_id="run_1", task_id="t", token="first", argv={counting(worktree)!r},
            environment=(), working_directory=Path({str(worktree)!r}), time_limit_s=60, prompt="")
        agent.launch(Host("hst_1", Path({str(host.data)!r})), what, lambda: None)
    """
    points = os.environ | {"ONCEBORN_FAILPOINTS": f"{point}=kill"}
    died = subprocess.run(python(program), env=points, check=False)
    assert died.returncode == -signal.SIGKILL
    directory = agent.run_directory(host, "run_1")
    if expected == "running":
        until(lambda: look(directory).state == "running")
    else:
        assert look(directory).state == "absent"
    # The next launcher finishes it or adopts it: one agent either way.
    assert launch(host, spec(worktree, *counting(worktree), token="second")).state == "running"
    assert len(pids_in(worktree / "marks", 1)) == 1


@pytest.mark.proves("SE04")
@pytest.mark.parametrize(
    ("point", "state", "marks"),
    [("shim.locked", "running", 1), ("shim.forked", "running", 1), ("shim.started", "lost", 0)],
)
def test_a_shim_killed_before_the_agent_runs(
    host: Host,
    worktree: Path,
    monkeypatch: pytest.MonkeyPatch,
    point: str,
    state: str,
    marks: int,
) -> None:
    """Before started.json there was no agent, and it may be launched; after it, never again."""
    monkeypatch.setenv("ONCEBORN_FAILPOINTS", f"{point}=kill")
    what = spec(worktree, *counting(worktree))
    if state == "running":
        with pytest.raises(NotLaunched):
            launch(host, what)
    else:
        launch(host, what)
    monkeypatch.delenv("ONCEBORN_FAILPOINTS")
    seen = launch(host, spec(worktree, *counting(worktree), token="again"))
    assert seen.state == state
    assert clear_strays("run_2") == ([], [])
    if marks:
        pids_in(worktree / "marks", marks)
    else:
        assert not (worktree / "marks").exists()


def test_a_launch_whose_guard_refuses_starts_nothing(host: Host, worktree: Path) -> None:
    def refuse() -> None:
        raise LookupError

    with pytest.raises(LookupError):
        agent.launch(host, spec(worktree, *counting(worktree)), refuse)
    directory = agent.run_directory(host, "run_1")
    assert look(directory).state == "absent"
    assert not (directory / "launch.json").exists()


# -- the end --------------------------------------------------------------------------------------

STUBBORN = """
    import os, signal, sys, time
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if os.fork() == 0:
        os.setsid()  # leaves the group, and the session
        if os.fork() == 0:
            open("pids", "a").write(f"{os.getpid()}\\n")
            time.sleep(1000)
        open("pids", "a").write(f"{os.getpid()}\\n")
        time.sleep(1000)
    open("pids", "a").write(f"{os.getpid()}\\n")
    time.sleep(1000)
"""


@pytest.mark.proves("SE01")
def test_stopping_ends_the_whole_family(host: Host, worktree: Path) -> None:
    launch(host, spec(worktree, *python(STUBBORN)))
    pids = pids_in(worktree / "pids", 3)
    assert all(alive(pid) for pid in pids)
    assert stop(agent.run_directory(host, "run_1"))
    end = ended(host)
    assert (end["reason"], end["signal"], end["survivors"]) == ("stopped", signal.SIGKILL, [])
    assert not any(alive(pid) for pid in pids)


@pytest.mark.proves("SE01")
def test_the_time_limit_ends_the_whole_family(host: Host, worktree: Path) -> None:
    launch(host, spec(worktree, *python(STUBBORN), time_limit_s=1.5))
    pids = pids_in(worktree / "pids", 3)
    end = ended(host)
    assert (end["reason"], end["survivors"]) == ("time_limit", [])
    assert not any(alive(pid) for pid in pids)


def test_an_agent_that_stops_when_asked_is_not_killed(host: Host, worktree: Path) -> None:
    program = """
        import signal, sys, time
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
        open("ready", "w").close()
        time.sleep(1000)
    """
    launch(host, spec(worktree, *python(program), grace_s=60))
    until((worktree / "ready").exists)
    stop(agent.run_directory(host, "run_1"))
    end = ended(host)
    assert (end["reason"], end["exit_code"]) == ("stopped", 7)


def test_what_an_agent_leaves_behind_ends_with_it(host: Host, worktree: Path) -> None:
    program = "setsid sh -c 'echo $$ >> pids; trap \"\" TERM; sleep 1000' & sleep 0.2; exit 0"
    launch(host, spec(worktree, "sh", "-c", program))
    end = ended(host)
    assert (end["reason"], end["exit_code"], end["survivors"]) == ("exited", 0, [])
    assert not any(alive(pid) for pid in pids_in(worktree / "pids", 1))


def test_a_killed_shim_is_a_lost_run_and_its_strays_are_found(host: Host, worktree: Path) -> None:
    launch(host, spec(worktree, *python(STUBBORN)))
    pids = pids_in(worktree / "pids", 3)
    directory = agent.run_directory(host, "run_1")
    started = look(directory).started
    assert started is not None
    os.kill(started["shim_pid"], signal.SIGKILL)
    until(lambda: look(directory).state == "lost")
    until(lambda: not alive(started["pid"]))  # it dies with its shim
    ended_pids, left = clear_strays("run_1")
    assert left == []
    assert set(ended_pids) == set(pids) - {started["pid"]}
    assert not any(alive(pid) for pid in pids)
    # Lost is for ever: nothing is launched again.
    assert launch(host, spec(worktree, *counting(worktree), token="t2")).state == "lost"
    assert not (worktree / "marks").exists()


@pytest.mark.proves("SE05")
def test_another_program_with_the_recorded_number_is_not_touched(host: Host) -> None:
    bystander = subprocess.Popen(["sleep", "1000"])
    try:
        directory = agent.run_directory(host, "run_9")
        directory.mkdir(parents=True)
        started = {
            "pid": bystander.pid,
            "start_time": 1,
            "shim_pid": bystander.pid,
            "shim_start_time": 1,
            "boot_id": Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
        }
        (directory / "started.json").write_text(json.dumps(started))
        assert not is_process(bystander.pid, 1, started["boot_id"])
        assert stop(directory) is False
        assert look(directory).state == "lost"
        assert clear_strays("run_9") == ([], [])
        assert bystander.poll() is None
        # The right start time of another boot is another process too.
        real = int(Path(f"/proc/{bystander.pid}/stat").read_text().rpartition(") ")[2].split()[19])
        assert is_process(bystander.pid, real, started["boot_id"])
        assert not is_process(bystander.pid, real, "another-boot")
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()


def test_the_agent_outlives_its_launcher(host: Host, worktree: Path) -> None:
    program = f"""
        from pathlib import Path
        from onceborn.activities import agent
        from onceborn.activities.kind import Host
        what = agent.Launch(
            run_id="run_1", task_id="t", token="first",
            argv=("sh", "-c", "while ! test -e go; do sleep 0.02; done; exit 5"),
            environment=(), working_directory=Path({str(worktree)!r}), time_limit_s=60, prompt="")
        agent.launch(Host("hst_1", Path({str(host.data)!r})), what, lambda: None)
    """
    subprocess.run(python(program), check=True)
    directory = agent.run_directory(host, "run_1")
    assert look(directory).state == "running"
    (worktree / "go").touch()
    assert ended(host)["exit_code"] == 5
