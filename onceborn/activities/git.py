"""The ``git`` command: a thin typed wrapper, and the only place that starts it.

Arguments as a list and no shell; one locale; no configuration but ours (and what the operator
puts into ``<data>/git/host.gitconfig``, e.g. a credential helper); no prompts; no hooks; no
background work; an environment from an allow-list; a time limit after which the whole process
group is killed and seen to be dead.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

from ..runtime.failpoints import failpoint
from ..runtime.protocol.errors import ConfigurationError, OncebornError
from .gitconfig import OVERRIDES, environment, generated_config
from .gitprocess import Overdue, pump, stop_group
from .kind import Host, World

STDOUT_LIMIT: Final = 16 * 1024 * 1024
STDERR_LIMIT: Final = 64 * 1024

_CREDENTIALS: Final = re.compile(r"(?<=://)[^/@\s']+@")


def redact(text: str) -> str:
    """The text without the credentials of any URL in it."""
    return _CREDENTIALS.sub("***@", text)


@dataclass(frozen=True, slots=True)
class GitResult:
    """What a command left. ``stderr`` is redacted; ``truncated`` says that stdout is not whole."""

    stdout: bytes
    stderr: str
    code: int
    truncated: bool = False

    @property
    def text(self) -> str:
        """stdout as text; bytes that are not UTF-8 survive as surrogates."""
        return self.stdout.decode("utf-8", "surrogateescape")


class GitError(OncebornError):
    """A git command failed."""

    code = "git_failed"

    def __init__(self, args: Sequence[str], result: GitResult, what: str | None = None) -> None:
        self.result = result
        command = redact(" ".join(args[:2]))
        lines = [line for line in result.stderr.strip().splitlines() if line.strip()]
        told = next((line for line in lines if line.startswith(("fatal:", "error:"))), None)
        reason = what or told or (lines[-1] if lines else f"exit code {result.code}")
        super().__init__(
            f"git {command}: {reason}", exit_code=result.code, stderr=result.stderr[-4096:]
        )


class GitTimedOut(GitError):
    """A git command took longer than its limit and was killed, with all its children."""

    code = "git_timed_out"


class Git:
    """Runs git on one host, with the locks, heartbeat and guard of one attempt.

    Args:
        host: whose data folder holds the generated configuration, and the time limit.
        lock_fds: descriptors of host locks that every git process inherits.
        heartbeat: called about once a second while a command runs; what it raises ends the command.
        guard: called immediately before every command that changes something.
    """

    def __init__(
        self,
        host: Host,
        *,
        lock_fds: tuple[int, ...] = (),
        heartbeat: Callable[[], None] | None = None,
        guard: Callable[[], None] | None = None,
    ) -> None:
        self.host = host
        self._lock_fds = lock_fds
        self._heartbeat = heartbeat
        self._guard = guard
        self._environment = environment(generated_config(host.data))

    @classmethod
    def of(cls, world: World) -> Self:
        """Git as one attempt of a step may use it."""
        return cls(
            world.host, lock_fds=world.lock_fds, heartbeat=world.heartbeat, guard=world.guard
        )

    def guard(self) -> None:
        """Ask whether this attempt may still change things; for changes made without git."""
        if self._guard is not None:
            self._guard()

    def run(
        self,
        args: Sequence[str],
        *,
        git_dir: Path | None = None,
        work_tree: Path | None = None,
        cwd: Path | None = None,
        index: Path | None = None,
        mutates: bool = False,
        check: bool = True,
        input: bytes | None = None,  # noqa: A002 - the name that subprocess has
        time_limit_s: float | None = None,
        stdout_limit: int = STDOUT_LIMIT,
    ) -> GitResult:
        """Run one command to its end.

        Args:
            index: an index file other than the repository's own.
            mutates: it changes something: the guard is called first, and optional locks are on.
            check: raise where the exit code is not 0.
            time_limit_s: seconds; default: the host's.

        Raises:
            GitError: it failed (with ``check``).
            GitTimedOut: it was killed at its limit.
            ConfigurationError: there is no git on this host.
        """
        limit = self.host.git_time_limit_s if time_limit_s is None else time_limit_s
        command = [*_watchdog(limit), "git", *OVERRIDES]
        if not mutates:
            command.append("--no-optional-locks")
        if git_dir is not None:
            command.append(f"--git-dir={git_dir}")
        if work_tree is not None:
            command.append(f"--work-tree={work_tree}")
        command += args
        failpoint("git.spawn")
        if mutates:
            self.guard()
        process = self._spawn(command, cwd, index, with_input=input is not None)
        try:
            failpoint("git.spawned")
            output = pump(
                process, input, limit, self._heartbeat or _nothing, stdout_limit, STDERR_LIMIT
            )
        except Overdue as overdue:
            failpoint("git.overdue")
            stop_group(process)
            failpoint("git.stopped")
            result = _result(overdue.stdout, overdue.stderr, process.returncode or -1, False)
            raise GitTimedOut(args, result, f"killed after {limit:g} s") from None
        except BaseException:
            stop_group(process)
            raise
        if process.returncode != 0:
            # A leader that died by a signal may leave children; nothing of ours acts unseen.
            stop_group(process)
        failpoint("git.exited")
        result = _result(output.stdout, output.stderr, process.returncode, output.truncated)
        if check and result.code != 0:
            raise GitError(args, result)
        return result

    def _spawn(
        self, command: list[str], cwd: Path | None, index: Path | None, *, with_input: bool
    ) -> subprocess.Popen[bytes]:
        other_index = {} if index is None else {"GIT_INDEX_FILE": str(index)}
        try:
            return subprocess.Popen(
                command,
                cwd=cwd or self.host.data,
                env=self._environment | other_index,
                stdin=subprocess.PIPE if with_input else subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                bufsize=0,
                start_new_session=True,
                pass_fds=self._lock_fds,
            )
        except FileNotFoundError as error:
            if error.filename == "git":
                raise ConfigurationError(
                    "git is not installed on this host, or not in PATH"
                ) from None
            raise


def _result(stdout: bytes, stderr: bytes, code: int, truncated: bool) -> GitResult:
    return GitResult(stdout, redact(stderr.decode("utf-8", "replace")), code, truncated)


def _watchdog(limit_s: float) -> list[str]:
    # Should our worker be killed, nobody else ends a git that waits for a silent remote, and it
    # holds its lock for as long. coreutils' timeout ends its group a little after we would have.
    program = shutil.which("timeout")
    return [program, "--kill-after=10", f"{limit_s + 15:.0f}"] if program else []


def _nothing() -> None:
    return None
