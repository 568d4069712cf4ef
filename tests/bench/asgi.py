"""What the ASGI door adds to a Starlette endpoint, against raw EVALSHA and against idemkit's middleware."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path

from tests.support.servers import Server

from .instructions import FEW, MANY, counted
from .peers import Peer, python_of
from .turns import Figure, Turns

__all__ = ["instructions", "times"]

FILE = "asgi_peer.py"
PACKAGES = ("idemredis", "idemkit")
REQUESTS = {"request": "2 EVALSHA", "request again": "EVALSHA"}
"""Kinds of requests, and the raw calls that they need at least."""

GOAL = 2.0
ROUNDS, CALLS = 20, 50


def instructions(server: Server) -> Iterable[Figure]:
    """Thousands of instructions of the process a call; requests are counted less the bare one."""
    if shutil.which("valgrind") is None:
        print("  valgrind is not installed: apt-get install valgrind")
        return
    added: dict[tuple[str, str], float] = {}
    for name in PACKAGES:
        bare = _thousands(name, "bare", server)
        yield Figure(f"ASGI instructions: bare, beside {name}", bare, "k")
        for kind in REQUESTS:
            added[name, kind] = _thousands(name, kind, server) - bare
            yield Figure(f"ASGI instructions: {kind}, {name}", added[name, kind], "k", note="less the bare one")
    for kind, raw in REQUESTS.items():
        least = _thousands("idemredis", raw, server)
        yield Figure(f"ASGI instructions: {raw}, raw", least, "k")
        yield Figure(f"ASGI instructions: {kind} : {raw}", added["idemredis", kind] / least, "x")
        ratio = added["idemkit", kind] / added["idemredis", kind]
        yield Figure(f"ASGI instructions: {kind}, idemkit : ours", ratio, "x", GOAL, at_least=True)


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


def _thousands(name: str, kind: str, server: Server) -> float:
    words = [str(python_of(name)), str(Path(__file__).with_name(FILE)), name, server.url, kind]
    return (counted(*words, str(MANY)) - counted(*words, str(FEW))) / (MANY - FEW) / 1000
