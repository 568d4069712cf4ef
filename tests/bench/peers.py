"""The libraries that do the same job, each in a virtual environment of its own, on the same server, in turns."""

from __future__ import annotations

import json
import subprocess
import sys
import venv
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path

from tests.support.servers import Server

from .turns import Figure, Turns

__all__ = ["Peer", "peers", "python_of"]

PACKAGES = {
    "idemredis": ["--editable", ".", "starlette"],
    "idemkit": ["idemkit[redis]", "flask", "starlette"],
    "powertools": ["aws-lambda-powertools", "boto3", "redis"],
}
FENCING = {"idemkit"}
"""Those that keep a late attempt from completing its successor's row, as ours does; the others only set a key twice."""

KINDS = ("function", "function again", "request", "request again")
ROUNDS, CALLS = 20, 50
ENVIRONMENTS = Path("build/peers")


class Peer:
    """A library in a process of its own, which runs a file of this folder."""

    def __init__(self, name: str, url: str, stack: ExitStack, file: str = "peer.py") -> None:
        words = [str(python_of(name)), str(Path(__file__).with_name(file)), name, url]
        self._process = stack.enter_context(
            subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        )
        stack.callback(self._process.kill)
        self.kinds = json.loads(self._answer())

    def run(self, kind: str, calls: int) -> list[float]:
        assert self._process.stdin is not None
        print(kind, calls, file=self._process.stdin, flush=True)
        times: list[float] = json.loads(self._answer())
        return times

    def _answer(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("a peer ended")
        return line


def peers(server: Server) -> Iterable[Figure]:
    """A first call and a repeated one, of a function and over WSGI; a ratio over 1 says that ours is faster."""
    with ExitStack() as stack:
        running = {name: Peer(name, server.url, stack) for name in PACKAGES}
        for kind in KINDS:
            able = {name: peer for name, peer in running.items() if kind in peer.kinds}
            turns = Turns({name: [] for name in able})
            for number in range(ROUNDS + 1):
                for name, peer in able.items():
                    times = peer.run(kind, CALLS)
                    if number:
                        turns.rounds[name].append(times)
            for name in able:
                ratio = 1.0 if name == "idemredis" else turns.ratio(name, "idemredis")
                aim = 1.0 if name in FENCING else None
                yield Figure(f"{kind}: {name} : ours", ratio, "x", aim, at_least=True, note=turns.note(name))


def python_of(name: str) -> Path:
    """Return the interpreter of a package's virtual environment, which is made if it is not there."""
    home = ENVIRONMENTS / name
    python = home / "bin" / "python"
    if not (home / "installed").exists():
        venv.create(home, with_pip=True, clear=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", *PACKAGES[name]], check=True, stdout=sys.stderr)
        (home / "installed").touch()
    return python.absolute()
