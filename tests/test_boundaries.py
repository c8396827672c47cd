"""Every boundary of ours has its failpoints: the code is read, and what goes around is refused.

A boundary is where a crash makes a difference: a transaction, a process, a lock, a call to
Temporal, a change of the file system. Each kind has a handful of places; a new one belongs into
``PLACES``, with the failpoints that stand before and after it.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "onceborn"

TRANSACTION = {"create_engine", ".engine.begin", ".engine.connect", ".engine.raw_connection"}
SPAWN = {
    *(f"subprocess.{name}" for name in ("Popen", "run", "call", "check_call", "check_output")),
    *(f"os.{name}" for name in ("fork", "forkpty", "posix_spawn", "posix_spawnp", "system")),
    *(f"os.exec{name}" for name in ("l", "le", "lp", "lpe", "v", "ve", "vp", "vpe")),
    *(f"os.spawn{name}" for name in ("l", "le", "lp", "lpe", "v", "ve", "vp", "vpe")),
    "os.popen",
    "asyncio.create_subprocess_exec",
    "asyncio.create_subprocess_shell",
    "multiprocessing.Process",
}
LOCK = {"fcntl.flock", "fcntl.lockf", "os.lockf"}
TEMPORAL = {
    "Client.connect",
    "ServiceClient.connect",
    ".start_workflow",
    ".execute_workflow",
    ".get_workflow_handle",
    ".start_update_with_start_workflow",
    ".check_health",
    ".signal",
    ".terminate_workflow",
}
FILES = {
    ".rename",
    ".replace",
    ".rmdir",
    ".unlink",
    ".symlink_to",
    ".hardlink_to",
    "os.replace",
    "os.rename",
    "os.link",
    "os.unlink",
    "os.remove",
    "shutil.rmtree",
    "shutil.copytree",
    "shutil.move",
    "os.write",
    ".write_text",
    ".write_bytes",
}
SIGNAL = {"os.kill", "os.killpg", "signal.pidfd_send_signal"}

PLACES: dict[str, dict[str, tuple[str, ...]]] = {
    # module: function: its failpoints. A name with a leading dot ends that of the transaction.
    "runtime/ledger/database.py": {
        "Database.transaction": (".begin", ".commit", ".committed"),
        "Database.reading": (),  # reads: nothing is committed
        "Database.snapshot": (),
        "_sqlite": (),
        "_postgresql": (),
    },
    "activities/locks.py": {"HostLocks.acquire": ("lock.before", "lock.acquired")},
    "activities/git.py": {
        "Git._spawn": (),  # its only caller is run
        "Git.run": ("git.spawn", "git.spawned", "git.exited", "git.overdue", "git.stopped"),
    },
    "activities/gitprocess.py": {"_signal": (), "_feeder.feed": ()},  # by Git.run, within these
    "activities/gitconfig.py": {
        "generated_config": ("gitconfig.publish", "gitconfig.published"),
    },
    "activities/gitlocks.py": {"_clear_if_stale": ("git.lock_clear", "git.lock_cleared")},
    "activities/host.py": {
        "_host_id": ("host.name", "host.named"),
        "join_host": ("host.join", "host.joined"),
    },
    "activities/ownership.py": {
        "write_intent": ("intent.before", "intent.written"),
        "forget_intent": ("intent.forget", "intent.forgotten"),
    },
    "activities/clones.py": {
        "Clone.drop_unfinished": ("clone.drop", "clone.dropped"),
        "Clone._make": ("clone.begun", "clone.whole", "clone.published"),
    },
    "activities/worktree_commands.py": {
        "complete_record": ("worktree.record_complete", "worktree.record_completed"),
    },
    "activities/worktree_undo.py": {
        "Undoing._move_away": (
            "worktree.folder_remove",
            "worktree.folder_removed",
        ),
        "Undoing._rename_away": ("worktree.move_away", "worktree.moved_away"),
        "Undoing._keep_records": ("worktree.records_keep", "worktree.records_kept"),
        "Undoing._remove_nameless": ("worktree.nameless_remove", "worktree.nameless_removed"),
        "Undoing._empty_trash": (
            "trash.remove",
            "trash.removed",
            "quarantine.keep",
            "quarantine.kept",
        ),
        "drop_empty_trash": ("trash.drop", "trash.dropped"),
        "Undoing._drop_empty_parent": (),  # an empty folder, before the forgotten intent's commit
    },
    "activities/worktree_kept.py": {
        "WorktreeKept._moved_away": ("purge.folder_move", "purge.folder_moved"),
        "WorktreeKept._remove": ("purge.folder_remove", "purge.folder_removed"),
        "_move_back": ("purge.move_back", "purge.moved_back"),
    },
    "activities/agent.py": {
        "bar": ("agent.bar", "agent.barred"),
        "locked": ("agent.lock", "agent.locked"),
        "_write_launch": ("agent.intent", "agent.intended"),
        "_spawn": ("agent.spawn", "agent.spawned"),
    },
    "activities/agent_look.py": {
        "_lock_is_held": ("agent.look",),
        "stop": ("agent.stop", "agent.stopped"),
        "clear_strays": ("agent.stray",),
    },
    "activities/shim/entry.py": {
        "_detach": (),  # nothing is there yet; what waits for it is at agent.spawned
        "_detach.report": (),
        "_lock": (),  # its only caller is _run
        "_run": ("shim.lock", "shim.locked", "shim.launched", "shim.exited", "shim.ended"),
        "_launch": ("shim.fork", "shim.forked", "shim.started"),
    },
    "activities/shim/child.py": {"become_agent": ()},  # between shim.started and shim.launched
    "activities/shim/files.py": {"write_durably": ()},  # its callers have them
    "activities/shim/log.py": {"Log._write": (), "Log._rotate": ()},  # an agent's output
    "activities/shim/supervisor.py": {"Supervisor._signal": ()},  # before shim.exited
    "workflows/connection.py": {"connect": ("engine.connect.before", "engine.connect.after")},
    "workflows/engine.py": {
        "Engine.check": ("engine.check.before", "engine.check.after"),
        "Engine.wait_for": ("engine.wait.before", "engine.wait.after"),
        "Engine._start": ("engine.start.before", "engine.start.after"),
        "Engine._look_up": ("engine.look_up.before", "engine.look_up.after"),
    },
    "temporal_dev/server.py": {
        "EmbeddedTemporal._lock": ("temporal.lock", "temporal.locked"),
        "EmbeddedTemporal._record": ("temporal.publish", "temporal.published"),
        "EmbeddedTemporal._popen": ("temporal.spawn", "temporal.spawned"),
        "_bound": (),  # a log file's older half
    },
    "temporal_dev/ready.py": {"_answers": ("temporal.ask",)},
    "temporal_dev/child.py": {"<module>": ()},  # exec of the server, after temporal.spawned
    "surfaces/children.py": {
        "Child.supervise": ("child.spawn", "child.spawned"),
    },
    "surfaces/up.py": {"_folder": ("up.lock", "up.locked")},
    "runtime/failpoints.py": {"_hit": (), "_fire": ()},  # the failpoints themselves
}
"""Every place in which a boundary may be crossed. An empty tuple carries its reason beside it."""


@dataclass(frozen=True)
class Crossing:
    module: str
    function: str
    call: str
    line: int


class _Reader(ast.NodeVisitor):
    def __init__(self, module: str) -> None:
        self.module = module
        self.stack: list[str] = []
        self.crossings: list[Crossing] = []
        self.points: dict[str, set[str]] = {}

    @property
    def function(self) -> str:
        return ".".join(self.stack) or "<module>"

    def _inside(self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> None:
        self.stack.append(node.name)
        self.generic_visit(node)
        self.stack.pop()

    visit_FunctionDef = visit_AsyncFunctionDef = visit_ClassDef = _inside  # noqa: N815

    def visit_Call(self, node: ast.Call) -> None:
        name = ast.unparse(node.func)
        if name == "failpoint" and node.args:
            self.points.setdefault(self.function, set()).add(_point(node.args[0]))
        elif _crosses(name, node):
            self.crossings.append(Crossing(self.module, self.function, name, node.lineno))
        self.generic_visit(node)


def _point(argument: ast.expr) -> str:
    if isinstance(argument, ast.Constant):
        return str(argument.value)
    assert isinstance(argument, ast.JoinedStr)
    last = argument.values[-1]
    assert isinstance(last, ast.Constant)
    return str(last.value)


def _crosses(name: str, node: ast.Call) -> bool:
    if _is_text_method(name, node):
        return False
    tail = "." + name.rpartition(".")[2] if "." in name else name
    two = "." + ".".join(name.split(".")[-2:]) if "." in name else name
    for boundary in TRANSACTION | SPAWN | LOCK | TEMPORAL | FILES | SIGNAL:
        if boundary in (name, tail, two):
            # `signal.signal(...)` sets a handler; a workflow handle's `.signal` is a call.
            return not (boundary == ".signal" and name == "signal.signal")
    return False


def _is_text_method(name: str, node: ast.Call) -> bool:
    """`str.replace(old, new)` has two arguments; `Path.replace(target)` has one, or is os's."""
    return name.endswith(".replace") and not name.startswith("os.") and len(node.args) != 1


def read(module: Path, root: Path = PACKAGE) -> _Reader:
    reader = _Reader(module.relative_to(root).as_posix())
    reader.visit(ast.parse(module.read_text("utf-8")))
    return reader


def readers() -> Iterator[_Reader]:
    for module in sorted(PACKAGE.rglob("*.py")):
        if "migrations" not in module.parts:
            yield read(module)


def test_no_boundary_is_crossed_outside_the_helpers_that_hold_the_failpoints() -> None:
    strangers = [
        f"{c.module}:{c.line}: {c.call} in {c.function}"
        for reader in readers()
        for c in reader.crossings
        if c.function not in PLACES.get(c.module, {})
    ]
    assert strangers == []


def test_every_helper_has_its_failpoints_and_crosses_something() -> None:
    seen = {reader.module: reader for reader in readers()}
    for module, functions in PLACES.items():
        reader = seen[module]
        crossing = {c.function for c in reader.crossings}
        for function, points in functions.items():
            assert set(points) <= reader.points.get(function, set()), f"{module}: {function}"
            assert points or function in crossing, f"{module}: {function} crosses nothing any more"


def test_every_effect_of_a_helper_stands_between_failpoints() -> None:
    """A function with failpoints has one on an earlier line than its first crossing."""
    for reader in readers():
        for function, points in PLACES.get(reader.module, {}).items():
            lines = [c.line for c in reader.crossings if c.function == function]
            if not points or not lines:
                continue
            tree = ast.parse((PACKAGE / reader.module).read_text("utf-8"))
            own = [
                node.lineno
                for node in ast.walk(tree)
                if isinstance(node, ast.Call)
                and ast.unparse(node.func) == "failpoint"
                and _point(node.args[0]) in points
            ]
            assert min(own) < min(lines), f"{reader.module}: {function} acts before its failpoint"


BYPASSES = {
    "engine": "def f(database):\n    with database.engine.begin() as c:\n        pass\n",
    "an engine of its own": "from sqlalchemy import create_engine\ne = create_engine('x')\n",
    "process": "import subprocess\ndef f():\n    subprocess.run(['git'])\n",
    "fork": "import os\ndef f():\n    os.fork()\n",
    "exec": "import os\ndef f():\n    os.execv('a', ['a'])\n",
    "async process": "import asyncio\nasync def f():\n"
    "    await asyncio.create_subprocess_exec('a')\n",
    "lock": "import fcntl\ndef f(fd):\n    fcntl.flock(fd, fcntl.LOCK_EX)\n",
    "temporal": "async def f(client):\n    await client.start_workflow('w')\n",
    "another client": "async def f():\n    await Client.connect('x')\n",
    "rename": "def f(path, other):\n    path.rename(other)\n",
    "tree": "import shutil\ndef f(path):\n    shutil.rmtree(path)\n",
    "signal": "import os\ndef f(pid):\n    os.kill(pid, 9)\n",
}


@pytest.mark.parametrize("name", BYPASSES)
def test_a_bypass_would_be_seen(name: str, tmp_path: Path) -> None:
    module = tmp_path / "new.py"
    module.write_text(BYPASSES[name])
    assert len(read(module, tmp_path).crossings) == 1


def test_text_and_handlers_are_no_boundary(tmp_path: Path) -> None:
    module = tmp_path / "new.py"
    module.write_text("import signal\nsignal.signal(1, None)\n'a'.replace('a', 'b')\n")
    assert read(module, tmp_path).crossings == []
