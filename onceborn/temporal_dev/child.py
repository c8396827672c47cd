"""Run by path: become the server, such that it ends if the process that started it is killed.

python -I -S child.py PARENT_PID PROGRAM ARGUMENT...
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1

if __name__ == "__main__":
    parent, program, *arguments = sys.argv[1:]
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != int(parent):  # it died before the kernel was asked
        sys.exit(1)
    os.execv(program, [program, *arguments])  # noqa: S606
