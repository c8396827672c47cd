"""From the shim's child to the agent: what happens between fork and exec."""

from __future__ import annotations

import json
import os
import signal

from .processes import die_with_parent

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Final, NoReturn

_RESET: Final = (
    signal.SIGTERM,
    signal.SIGINT,
    signal.SIGHUP,
    signal.SIGCHLD,
    # Python ignores these two; a program expects them as they come.
    signal.SIGPIPE,
    signal.SIGXFSZ,
)


def become_agent(
    launch: dict[str, Any], *, shim: int, go: int, errors: int, output: int
) -> NoReturn:
    """Wait for ``go``, then become the program; what stands in the way is written to ``errors``.

    The descriptors are pipes. ``errors`` closes by itself when the program is executed.
    """
    stage = "process"
    try:
        os.setpgid(0, 0)
        die_with_parent(signal.SIGKILL)
        signal.set_wakeup_fd(-1)
        for number in _RESET:
            signal.signal(number, signal.SIG_DFL)
        # Whose parent is another already missed the signal: the shim died before it was asked for.
        if os.read(go, 1) != b"g" or os.getppid() != shim:
            os._exit(127)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(output, 1)
        os.dup2(output, 2)
        stage = "working_directory"
        os.chdir(launch["working_directory"])
        os.umask(0o022)
        stage = "program"
        argv = launch["argv"]
        os.execvpe(argv[0], argv, environment(launch))  # noqa: S606
    except BaseException as error:
        code = error.errno if isinstance(error, OSError) else None
        message = os.strerror(code) if code else repr(error)
        document = {"stage": stage, "errno": code, "message": message}
        os.write(errors, json.dumps(document).encode())
    finally:
        os._exit(127)


def environment(launch: dict[str, Any]) -> dict[str, str]:
    """Exactly the names that the launch allows, our own variables, and nothing else."""
    allowed = {name: os.environ[name] for name in launch["environment"] if name in os.environ}
    variables: dict[str, str] = launch["variables"]
    return allowed | variables | {"PWD": launch["working_directory"]}
