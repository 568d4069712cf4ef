"""Instructions of this process a call, counted by valgrind: the same on a busy machine, and from run to run."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from tests.support.servers import Server

from .counted import KINDS
from .turns import Figure

__all__ = ["instructions"]

ROOT = Path(__file__).parents[2]
FEW, MANY = 50, 150

AIMS = {
    "claim + complete": 340,
    "replay": 220,
    "a protected request": 460,
    "a protected request, replayed": 320,
    "own Python: claim + complete": 80,
    "own Python: replay": 50,
    "own Python: a protected request": 180,
    "own Python: a protected request, replayed": 150,
}
"""Thousands, with redis-py 7.4 and Python 3.11, without hiredis; requests less the plain one."""


def instructions(server: Server) -> Iterable[Figure]:
    """The difference of two lengths, so that starting Python does not count."""
    if shutil.which("valgrind") is None:
        print("  valgrind is not installed: apt-get install valgrind")
        return
    plain = 0.0
    for kind in KINDS:
        thousands = (_count(kind, MANY, server.url) - _count(kind, FEW, server.url)) / (MANY - FEW) / 1000
        if kind.endswith("a plain request"):
            plain = thousands
        less = plain if "a protected" in kind else 0.0
        note = "less a plain request" if less else ""
        yield Figure(f"instructions: {kind}", thousands - less, "k", AIMS.get(kind), note=note)


def _count(kind: str, count: int, url: str) -> int:
    tool = ["valgrind", "--tool=callgrind", "--callgrind-out-file=/dev/null"]
    words = [*tool, sys.executable, "-m", "tests.bench.counted", kind, str(count), url]
    environment = {**os.environ, "PYTHONHASHSEED": "0"}
    ran = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True)
    found = re.search(r"Collected : (\d+)", ran.stderr)
    if ran.returncode or found is None:
        raise RuntimeError(f"valgrind: {ran.stderr[-2000:]}")
    return int(found[1])
