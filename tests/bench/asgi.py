"""What the ASGI door adds to a Starlette endpoint, against raw EVALSHA and against idemkit's middleware."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path

from tests.support.servers import Server

from .peers import Peer, python_of
from .turns import Figure, Turns

__all__ = ["instructions", "times"]

FILE = "asgi_peer.py"
PACKAGES = ("idemredis", "idemkit")
REQUESTS = {"request": "2 EVALSHA", "request again": "EVALSHA"}
"""Kinds of requests, and the raw calls that they need at least."""

GOAL = 2.0
ROUNDS, CALLS, COUNTED = 20, 50, 100


def instructions(server: Server) -> Iterable[Figure]:
    """Thousands of instructions of the process a call; requests are counted less the bare one."""
    if shutil.which("valgrind") is None:
        print("  valgrind is not installed: apt-get install valgrind")
        return
    ours, theirs = (_thousands(name, server) for name in PACKAGES)
    yield Figure("ASGI instructions: bare", ours["bare"], "k", note=f"beside idemkit {theirs['bare']:.0f}")
    for kind, raw in REQUESTS.items():
        added, other = ours[kind] - ours["bare"], theirs[kind] - theirs["bare"]
        yield Figure(f"ASGI instructions: {kind} less bare", added, "k", note=f"idemkit {other:.0f}")
        yield Figure(
            f"ASGI instructions: {kind} less bare : {raw}", added / ours[raw], "x", note=f"raw {ours[raw]:.0f}"
        )
        yield Figure(f"ASGI instructions: {kind}, idemkit : ours", other / added, "x", GOAL, at_least=True)


def times(server: Server) -> Iterable[Figure]:
    """Microseconds of a request less the bare one, in turns."""
    with ExitStack() as stack:
        running = {name: Peer(name, server.url, stack, FILE) for name in PACKAGES}
        turns = Turns({f"{name}: {kind}": [] for name, peer in running.items() for kind in peer.kinds})
        for number in range(ROUNDS + 1):
            for name, peer in running.items():
                for kind in peer.kinds:
                    taken = peer.run(kind, CALLS)
                    if number:
                        turns.rounds[f"{name}: {kind}"].append(taken)
    bare = turns.p50("idemredis: bare")
    yield Figure("ASGI: bare", bare, "µs")
    for kind, raw in REQUESTS.items():
        ours, theirs, least = f"idemredis: {kind}", f"idemkit: {kind}", f"idemredis: {raw}"
        yield Figure(f"ASGI: {kind} less bare", turns.p50(ours) - bare, "µs", note=turns.note(ours))
        ratio = turns.ratio(ours, least, less="idemredis: bare")
        yield Figure(f"ASGI: {kind} less bare : {raw}", ratio, "x", note=turns.note(least))
        added = (turns.p50(theirs) - turns.p50("idemkit: bare")) / (turns.p50(ours) - bare)
        yield Figure(
            f"ASGI: {kind} less bare, idemkit : ours", added, "x", GOAL, at_least=True, note=turns.note(theirs)
        )


def _thousands(name: str, server: Server) -> dict[str, float]:
    """Return the instructions of each kind of call; all are counted in one process, as starting it takes longest."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out"
        tool = ["valgrind", "--tool=callgrind", f"--callgrind-out-file={out}", "--dump-before=getloadavg"]
        words = [str(python_of(name)), str(Path(__file__).with_name(FILE)), name, server.url, str(COUNTED)]
        environment = {**os.environ, "PYTHONHASHSEED": "0"}
        subprocess.run([*tool, *words], env=environment, capture_output=True, check=True)
        dumps = sorted(Path(folder).glob("out.*"), key=lambda path: int(path.suffix[1:]))
        totals = [int(re.findall(r"^(?:totals|summary): (\d+)", dump.read_text(), re.MULTILINE)[-1]) for dump in dumps]
    with ExitStack() as stack:
        kinds = Peer(name, server.url, stack, FILE).kinds
    return {kind: totals[2 * n + 1] / COUNTED / 1000 for n, kind in enumerate(kinds)}
