"""Processes that die with the one that started them.

As a script, `processes.py PARENT PROGRAM …` becomes the program, and dies with its parent too.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

__all__ = ["die_with", "mortal"]

PR_SET_PDEATHSIG = 1


def mortal(words: list[str]) -> list[str]:
    """Return a command that runs this one and has it killed when the thread that started it ends, however it ends."""
    return [sys.executable, "-I", "-S", __file__, str(os.getpid()), *words]


def die_with(parent: int) -> None:
    """Have this process killed when its parent ends, however it ends. It outlives an exec."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit("the parent is gone")


if __name__ == "__main__":
    die_with(int(sys.argv[1]))
    os.execv(sys.argv[2], sys.argv[2:])
