"""The servers of a test process: one of each kind, started when a test first asks for it."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.support.servers import Memory, Server, start
from tests.support.subject import AnyServer

__all__ = ["Servers"]


class Servers:
    """Each kind of server, started when a test first asks for it."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._started: dict[str, Server | Memory] = {}
        self._clients: dict[AnyServer, Any] = {}
        self.used: list[AnyServer] = []

    def get(self, kind: str) -> AnyServer:
        """Return the server of one kind, which is checked at the end of the test."""
        if kind == "redis" and shutil.which("redis-server") is None:
            missing = "there is no redis-server on PATH"
            if os.environ.get("CI"):
                pytest.fail(missing)
            pytest.skip(missing)
        if kind not in self._started:
            self._started[kind] = Memory() if kind == "fakeredis" else start(kind, self._directory / kind)
        server = self._started[kind]
        self.watch(server)
        return server

    def watch(self, server: AnyServer) -> None:
        """Check this server at the end of the test: every key left on it must have a TTL."""
        if server not in self.used:
            self.used.append(server)

    def look_over(self) -> None:
        """Empty every server that the test used, and see that all it left there would have expired."""
        for server in self.used:
            if server not in self._clients:
                self._clients[server] = server.client()  # to make one takes longer than the look
            client = self._clients[server]
            if server.kind != "fakeredis":
                assert "cmdstat_time" not in client.info("commandstats"), f"TIME was called on {server.kind}"
            keys = client.keys()
            lasting = [key for key in keys if client.pttl(key) == -1]
            client.flushall()
            assert not lasting, f"keys that never expire, on {server.kind}: {lasting}"

    def stop(self) -> None:
        for client in self._clients.values():
            client.close()
        for server in self._started.values():
            server.stop()
