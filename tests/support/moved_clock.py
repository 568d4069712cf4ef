"""Real servers whose wall clock a test can move."""

from __future__ import annotations

import os
import shutil
import struct
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import redis

from tests.support.clock import SLACK
from tests.support.servers import Server, command_of
from tests.support.waiting import wait_until

__all__ = ["MovedServer", "moved_server"]

SOURCE = Path(__file__).with_suffix(".c")


class MovedServer(Server):
    """A server whose clock starts at the present time and can be set."""

    def __init__(self, kind: str, directory: Path, compiler: str) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        shim = directory / "moved_clock.so"
        subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", str(shim), str(SOURCE)], check=True)
        self._offset = directory / "offset"
        self._offset.write_bytes(struct.pack("q", 0))
        moved = ["/usr/bin/env", f"LD_PRELOAD={shim}", f"MOVED_CLOCK={self._offset}"]
        super().__init__(kind, directory, [*moved, *command_of(kind)])

    def jump_to(self, seconds: int) -> None:
        """Set the clock so many seconds ahead of real time (negative: behind), and wait until the server uses it."""
        with self._offset.open("r+b") as file:
            file.write(struct.pack("q", seconds))
        with self.client() as client:
            wait_until(lambda: abs(_now(client) - time.time() - seconds) < SLACK)


@contextmanager
def moved_server(kind: str, directory: Path) -> Iterator[MovedServer]:
    """Run a server, "valkey" or "redis", whose clock can be moved; skip the test if there is no C compiler."""
    compiler = shutil.which("cc")
    if compiler is None:
        missing = "there is no C compiler (cc) on PATH"
        if os.environ.get("CI"):
            pytest.fail(missing)
        pytest.skip(missing)
    server = MovedServer(kind, directory, compiler)
    try:
        yield server
    finally:
        server.stop()


def _now(client: redis.Redis) -> float:
    """Return the server's cached time, which it updates ten times a second."""
    return float(client.info("server")["server_time_usec"]) / 1e6
