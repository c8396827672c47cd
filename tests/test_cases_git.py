"""Cases of git on real repositories, through the whole loop, on both databases."""

from __future__ import annotations

import contextlib
import json
import threading
from pathlib import Path
from typing import Any

import pytest
from gitrepos import Repository, git
from support.loop import Bench
from support.world import HOST, Workplace, rows, workplace
from test_repo_attach import served

from onceborn.activities.host import open_host
from onceborn.runtime.ledger import tables as t
from onceborn.runtime.ledger.database import Database
from onceborn.runtime.protocol import rules
from onceborn.runtime.protocol.rules import StopReason
from onceborn.runtime.recovery import Owned
from onceborn.runtime.settings import Settings


class Ground:
    """A source repository, and one host that creates on it."""

    def __init__(self, database: Database, folder: Path, data: Path | None = None) -> None:
        self.database = database
        self.folder = folder.resolve()
        self.data = data or self.folder / "data"
        self.source = Repository(self.folder / "source")
        self.place: Workplace = workplace(database, self.data, roots=(self.folder,))

    def bench(self, **settings: Any) -> Bench:
        return Bench(self.database, self.data, roots=(self.folder,), **settings)

    def begin(self, *repositories: dict[str, Any], **body: Any) -> Owned:
        asked = repositories or ({"source": str(self.source.path)},)
        admitted = self.place.create(None, repositories=list(asked), **body)
        assert admitted.handle is not None
        return self.bench().recovery.take(admitted.handle)

    def doomed(self, **body: Any) -> Owned:
        """A creation whose second repository has the wanted branch already."""
        other = Repository(self.folder / "other")
        other.commit()
        other.git("branch", "taken")
        return self.begin(
            {"source": str(self.source.path)}, {"source": str(other.path), "branch": "taken"}
        )

    def configure(self, text: str) -> None:
        """What an operator puts into the host's git configuration."""
        (self.data / "git").mkdir(parents=True, exist_ok=True)
        (self.data / "git" / "host.gitconfig").write_text(text)

    def operation(self, owned: Owned) -> dict[str, Any]:
        found = [r for r in rows(self.database, t.operations) if r["id"] == owned.operation_id]
        return found[0]

    def failure(self, owned: Owned) -> dict[str, Any]:
        return dict(json.loads(self.operation(owned)["failure"]))

    def step(self, owned: Owned, key: str) -> dict[str, Any]:
        return next(
            row
            for row in rows(self.database, t.steps)
            if (row["operation_id"], row["step_key"]) == (owned.operation_id, key)
        )

    def evidence(self, owned: Owned, key: str) -> dict[str, Any]:
        return dict(json.loads(self.step(owned, key)["evidence"]))

    def worktree(self, owned: Owned) -> Path:
        return Path(self.evidence(owned, "worktree:0")["path"])

    def strays(self) -> list[str]:
        """What creations have left: worktrees, records of them, branches, intents, trash."""
        data = self.data.resolve()
        found = [str(p) for p in (data / "worktrees").glob("*/*")]
        for folder in ("intents", "trash", "quarantine"):
            found += [str(p) for p in (data / folder).glob("*")]
        for clone in (data / "repositories").iterdir():
            found += [str(p) for p in (clone / "worktrees").glob("*")]
            found += git(clone, "for-each-ref", "--format=%(refname)", "refs/heads").split()
            found += [str(p) for p in clone.rglob("*.lock")]
        return found


@pytest.fixture
def ground(database: Database, tmp_path: Path) -> Ground:
    return Ground(database, tmp_path)


# -- filters for large files -----------------------------------------------------------------------

POINTER = "version https://git-lfs.example.invalid/spec/v1\noid sha256:0\nsize 9\n"


def large_files(count: int) -> dict[str, str | bytes]:
    files: dict[str, str | bytes] = {f"large-{n}.bin": POINTER for n in range(count)}
    return files | {".gitattributes": "*.bin filter=lfs diff=lfs merge=lfs -text\n"}


@pytest.mark.proves("SA10")
def test_a_large_file_is_a_pointer_where_the_host_names_no_filter(ground: Ground) -> None:
    """Also where the repository itself would like to name one: its configuration is not read."""
    ground.source.commit(large_files(1))
    ground.source.git("config", "filter.lfs.smudge", "exit 1 #")
    ground.source.git("config", "filter.lfs.required", "true")
    owned = ground.begin()
    assert ground.bench().run(owned) is StopReason.COMPLETED
    assert (ground.worktree(owned) / "large-0.bin").read_text() == POINTER


@pytest.mark.proves("SA10")
@pytest.mark.parametrize("how", ["smudge", "process"])
def test_a_filter_whose_program_is_missing_is_a_clear_cause(ground: Ground, how: str) -> None:
    ground.source.commit(large_files(2))
    ground.configure(f'[filter "lfs"]\n\t{how} = no-such-program %f\n\trequired = true\n')
    owned = ground.begin()
    assert ground.bench().run(owned) is StopReason.ABORTED
    failure = ground.failure(owned)
    assert (failure["step"], failure["code"]) == ("worktree:0", "worktree.filter_missing")
    # Git itself names the file only if it notices before the other end of a pipe is gone.
    names = ["large-0.bin", "filter lfs"] if how == "smudge" else ["filter"]
    for part in (*names, "no-such-program", "host.gitconfig"):
        assert part in failure["reason"]
    assert ground.step(owned, "worktree:0")["attempt"] == 1
    assert ground.strays() == []


@pytest.mark.proves("SA10")
def test_a_filter_that_fails_is_tried_again_and_then_told(ground: Ground) -> None:
    ground.source.commit(large_files(1))
    ground.configure('[filter "lfs"]\n\tsmudge = "echo no quota >&2; exit 3"\n\trequired = true\n')
    owned = ground.begin()
    assert ground.bench(step_attempts=2).run(owned) is StopReason.ABORTED
    assert ground.failure(owned)["code"] == "worktree.filter_failed"
    assert "large-0.bin" in ground.failure(owned)["reason"]
    assert ground.step(owned, "worktree:0")["attempt"] == 2
    assert ground.strays() == []


@pytest.mark.proves("SA10")
def test_a_slow_filter_keeps_its_owner_alive_beyond_the_lease(ground: Ground) -> None:
    ground.source.commit(large_files(6))
    ground.configure('[filter "lfs"]\n\tsmudge = "sleep 0.9; cat"\n')
    owned = ground.begin()
    bench = ground.bench(lease_s=4)
    ends, due, over = [], [], threading.Event()

    def look() -> None:
        while not over.wait(0.05):
            due.append(bench.recovery.any_due(HOST))
            if ground.step(owned, "worktree:0")["state"] == "running":
                ends.append(ground.operation(owned)["lease_until"])

    watcher = threading.Thread(target=look)
    watcher.start()
    try:
        assert bench.run(owned) is StopReason.COMPLETED
    finally:
        over.set()
        watcher.join()
    assert not any(due)
    assert len(set(ends)) >= 3, "the lease was not renewed while git was at work"
    assert ground.step(owned, "worktree:0")["attempt"] == 1


@pytest.mark.proves("SA10")
def test_a_filter_beyond_the_time_limit_leaves_nothing_half_made(ground: Ground) -> None:
    ground.source.commit(large_files(9))
    marker = ground.folder / "filtered"
    ground.configure(f'[filter "lfs"]\n\tsmudge = "echo $$ >> {marker}; sleep 1; cat"\n')
    owned = ground.begin()
    bench = ground.bench(step_attempts=1, git_time_limit_s=3)
    assert bench.run(owned) is StopReason.ABORTED
    failure = ground.failure(owned)
    assert (failure["step"], failure["code"]) == ("worktree:0", "worktree.git_failed")
    assert "killed after 3 s" in failure["reason"]
    assert ground.strays() == []
    assert not any(_lives(int(pid)) for pid in marker.read_text().split())
    ground.configure("")
    assert ground.bench().run(ground.begin()) is StopReason.COMPLETED


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


# -- credentials -----------------------------------------------------------------------------------


def talking_to(address: str) -> list[str]:
    """The command lines of all processes that name the address."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = entry.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if address in line:
            found.append(line)
    return found


@pytest.mark.proves("SA15")
@pytest.mark.parametrize("helper", ["none", "expired", "interactive"])
def test_credentials_that_are_not_accepted_fail_fast(
    ground: Ground, helper: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ground.source.commit()
    asked = ground.folder / "asked"
    program = ground.folder / "window"
    program.write_text(f"#!/bin/sh\ntouch {asked}\nexec sleep 1000\n")
    program.chmod(0o755)
    for name in ("GIT_ASKPASS", "SSH_ASKPASS"):
        monkeypatch.setenv(name, str(program))
    monkeypatch.setenv("DISPLAY", ":0")
    if helper == "expired":
        ground.configure('[credential]\n\thelper = "!echo username=u; echo password=old #"\n')
    elif helper == "interactive":
        ground.configure(f"[core]\n\taskPass = {program}\n")
    with served(ground.folder, password="right") as address:
        owned = ground.begin({"source": f"{address}/source"})
        assert ground.bench().run(owned) is StopReason.ABORTED
        assert talking_to(address) == []
    failure = ground.failure(owned)
    assert (failure["step"], failure["code"]) == ("repo_attach:0", "repository.authentication")
    assert ground.step(owned, "repo_attach:0")["attempt"] == 1
    assert not asked.exists()
    assert "old" not in json.dumps(failure)


# -- stale or foreign commits ----------------------------------------------------------------------


@pytest.mark.proves("SA17")
def test_a_remote_that_cannot_be_reached_is_never_replaced_by_what_is_here(ground: Ground) -> None:
    ground.source.commit()
    with served(ground.folder) as address:
        source = {"source": f"{address}/source"}
        assert ground.bench().run(ground.begin(source)) is StopReason.COMPLETED
    ground.source.commit({"newer": "1"})
    owned = ground.begin(source)
    waits: list[str] = []

    def watch(action: rules.Action) -> None:
        if isinstance(action, rules.Wait):
            waits.append(ground.step(owned, "repo_attach:0")["state"])

    assert ground.bench(step_attempts=3).run(owned, watch=watch) is StopReason.ABORTED
    assert waits == ["retry_wait", "retry_wait"]
    failure = ground.failure(owned)
    assert failure["code"] == "repository.unreachable"
    assert address in failure["reason"]
    assert not any(
        r["operation_id"] == owned.operation_id for r in rows(ground.database, t.attachments)
    )


@pytest.mark.proves("SA17")
def test_a_remote_that_is_back_is_asked_anew(ground: Ground) -> None:
    ground.source.commit()
    with served(ground.folder) as address:
        source = {"source": f"{address}/source"}
        assert ground.bench().run(ground.begin(source)) is StopReason.COMPLETED
    newer = ground.source.commit({"newer": "1"})
    owned = ground.begin(source)
    with contextlib.ExitStack() as stack:

        def watch(action: rules.Action) -> None:
            if isinstance(action, rules.Wait):  # the network is back
                again = stack.enter_context(served(ground.folder))
                ground.configure(f'[url "{again}/"]\n\tinsteadOf = {address}/\n')

        assert ground.bench().run(owned, watch=watch) is StopReason.COMPLETED
    assert ground.step(owned, "repo_attach:0")["attempt"] == 2
    assert ground.evidence(owned, "repo_attach:0")["base_commit"] == newer
    assert git(ground.worktree(owned), "rev-parse", "HEAD") == newer


@pytest.mark.proves("SA17")
@pytest.mark.parametrize(
    ("checkout", "base_ref", "ref", "resolved_by"),
    [
        ("feature", None, "refs/heads/feature", "remote_head"),
        ("feature", "trunk", "refs/heads/trunk", "branch"),
        ("detached", None, "HEAD", "detached_remote_head"),
        ("detached", "trunk", "refs/heads/trunk", "branch"),
    ],
)
def test_which_commit_was_used_and_why_is_in_the_evidence(
    ground: Ground, checkout: str, base_ref: str | None, ref: str, resolved_by: str
) -> None:
    old = ground.source.commit({"a": "1"})
    trunk = ground.source.commit({"a": "2"})
    if checkout == "feature":
        ground.source.git("switch", "--quiet", "-c", "feature")
        there = ground.source.commit({"b": "1"})
    else:
        ground.source.git("checkout", "--quiet", "--detach", old)
        there = old
    owned = ground.begin({"source": str(ground.source.path), "base_ref": base_ref})
    assert ground.bench().run(owned) is StopReason.COMPLETED
    evidence = ground.evidence(owned, "repo_attach:0")
    wanted = there if base_ref is None else trunk
    assert (evidence["base_ref"], evidence["resolved_by"]) == (ref, resolved_by)
    assert evidence["base_commit"] == wanted
    assert git(ground.worktree(owned), "rev-parse", "HEAD") == wanted


# -- shallow history -------------------------------------------------------------------------------


@pytest.mark.proves("SA24")
def test_a_depth_1_source_gives_what_it_has_and_names_what_it_has_not(ground: Ground) -> None:
    old = ground.source.commit({"a": "1"})
    new = ground.source.commit({"a": "2"})
    git(ground.folder, "clone", "--quiet", "--depth=1", f"file://{ground.source.path}", "shallow")
    source = str(ground.folder / "shallow")
    first = ground.begin({"source": source})
    assert ground.bench().run(first) is StopReason.COMPLETED
    assert git(ground.worktree(first), "rev-parse", "HEAD") == new
    older = ground.begin({"source": source, "base_ref": old})
    assert ground.bench().run(older) is StopReason.ABORTED
    failure = ground.failure(older)
    assert failure["code"] == "repository.base_not_found"
    assert "shallow" in failure["reason"]
    assert ground.bench().run(ground.begin({"source": source})) is StopReason.COMPLETED
    assert git(ground.worktree(first), "status", "--porcelain") == ""


@pytest.mark.proves("SA24")
def test_a_shallow_fetch_by_an_agent_costs_the_next_task_nothing(ground: Ground) -> None:
    commits = [ground.source.commit({"a": str(n)}) for n in range(4)]
    agent, other = ground.begin(), ground.begin()
    for owned in (agent, other):
        assert ground.bench().run(owned) is StopReason.COMPLETED
    address = f"file://{ground.source.path}"
    git(ground.worktree(agent), "fetch", "--quiet", "--depth=1", address, "trunk")
    (clone,) = (ground.data / "repositories").glob("*.git")
    assert (clone / "shallow").exists()
    for base in (commits[0], commits[2], None):
        owned = ground.begin({"source": str(ground.source.path), "base_ref": base})
        assert ground.bench().run(owned) is StopReason.COMPLETED
        wanted = base or commits[-1]
        assert git(ground.worktree(owned), "rev-list", "HEAD").split() == list(
            reversed(commits[: commits.index(wanted) + 1])
        )
    for owned in (agent, other):
        path = ground.worktree(owned)
        assert git(path, "status", "--porcelain") == ""
        git(path, "commit", "--quiet", "--allow-empty", "-m", "work")
    newest = ground.source.commit({"a": "newest"})
    last = ground.begin()
    assert ground.bench().run(last) is StopReason.COMPLETED
    assert git(ground.worktree(last), "rev-parse", "HEAD") == newest


@pytest.mark.proves("SA24")
def test_a_commit_of_another_task_stays_no_base_where_history_was_cut(ground: Ground) -> None:
    ground.source.commit({"a": "1"})
    ground.source.commit({"a": "2"})
    agent = ground.begin()
    assert ground.bench().run(agent) is StopReason.COMPLETED
    path = ground.worktree(agent)
    git(path, "commit", "--quiet", "--allow-empty", "-m", "secret")
    theirs = git(path, "rev-parse", "HEAD")
    git(path, "fetch", "--quiet", "--depth=1", f"file://{ground.source.path}", "trunk")
    owned = ground.begin({"source": str(ground.source.path), "base_ref": theirs})
    assert ground.bench().run(owned) is StopReason.ABORTED
    assert ground.failure(owned)["code"] == "repository.base_not_found"


# -- submodules ------------------------------------------------------------------------------------


@pytest.mark.proves("SA09")
@pytest.mark.parametrize("dirty", [False, True])
def test_a_worktree_with_an_initialised_submodule_is_undone(ground: Ground, dirty: bool) -> None:
    library = Repository(ground.folder / "library")
    library.commit({"l": "1"})
    anyhow = ("-c", "protocol.file.allow=always", "submodule")
    ground.source.commit()
    ground.source.git(*anyhow, "add", "--quiet", str(library.path), "lib")
    ground.source.commit({"m": "1"})
    owned = ground.doomed()
    undone: list[str] = []

    def watch(action: rules.Action) -> None:
        if isinstance(action, rules.Perform) and action.step.key == "worktree:1":
            path = ground.worktree(owned)
            git(path, *anyhow, "update", "--init", "--quiet")
            if dirty:
                (path / "lib" / "l").write_text("somebody's work")
        if isinstance(action, rules.Compensate):
            undone.append(action.step.key)

    assert ground.bench().run(owned, watch=watch) is StopReason.ABORTED
    assert undone == ["repo_attach:1", "worktree:0", "repo_attach:0"]  # once each, and no more
    how = {u["step"]: u["how"] for u in ground.failure(owned)["undone"]}
    if not dirty:
        assert how["worktree:0"] == "compensated"
        assert ground.strays() == []
        assert rows(ground.database, t.cleanup_jobs) == []
        return
    assert how["worktree:0"] == "transferred"
    (job,) = rows(ground.database, t.cleanup_jobs)
    assert job["state"] == "quarantined"
    proof = json.loads(job["proof"])
    assert [found["path"] for found in proof["findings"]] == ["lib"]
    assert (Path(proof["path"]) / "lib" / "l").read_text() == "somebody's work"


# -- the data folder by another name ---------------------------------------------------------------


def spelled(folder: Path, spelling: str) -> Path:
    """The data folder ``real`` as a setting may name it."""
    (folder / "real" / "inner").mkdir(parents=True)
    (folder / "link").symlink_to("real")
    settings = Settings.model_validate({"data": spelling.format(folder)})
    assert open_host(settings).data == (folder / "real").resolve()
    return settings.data


@pytest.mark.proves("SA23")
@pytest.mark.parametrize(
    "spelling", ["{}/link", "{}/link/", "{}/real/inner/../../link/inner/..", "{}/real/../real"]
)
@pytest.mark.parametrize("ending", [StopReason.COMPLETED, StopReason.ABORTED])
def test_a_data_folder_by_another_name_is_the_same_folder(
    database: Database, tmp_path: Path, spelling: str, ending: StopReason
) -> None:
    """Begun under one name of the folder, cut off, and recovered, or undone, under another."""
    ground = Ground(database, tmp_path, data=spelled(tmp_path, spelling))
    ground.source.commit()
    owned = ground.doomed() if ending is StopReason.ABORTED else ground.begin()

    class Dies(Exception):
        pass

    def die(action: rules.Action) -> None:
        if isinstance(action, rules.Perform) and action.step.key == "worktree:1":
            raise Dies
        if isinstance(action, rules.EnterCompletion):
            raise Dies

    with pytest.raises(Dies):
        ground.bench().run(owned, watch=die)
    made = ground.worktree(owned)
    ground.data = tmp_path / "real"
    assert made.is_relative_to(ground.data.resolve())
    database.clock.advance(3_600_000)
    (after,) = ground.bench().recovery.claim(HOST, 9)
    assert ground.bench().run(after) is ending
    assert ground.step(owned, "worktree:0")["attempt"] == 1
    if ending is StopReason.COMPLETED:
        assert made.is_dir()
    else:
        assert ground.strays() == []
