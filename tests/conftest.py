"""Servers that start when first needed, one of each kind a test process; and a ledger to try on each of them."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from .support.clock import TurnedClock
from .support.servers import Memory, Server, start
from .support.subject import AnyServer, MakeSubject, Mode, Subject

_namespaces = count(1)


def pytest_configure() -> None:
    """A shell ignores Ctrl-C for what runs in the background, and so would all that the tests start and end by it."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


class Servers:
    """Each kind of server, started when a test first asks for it."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._started: dict[str, Server | Memory] = {}
        self.used: list[AnyServer] = []

    def get(self, kind: str) -> AnyServer:
        """Return the server of that kind, to be looked over when the test ends."""
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
        """Look this server over when the test ends: every key left on it must expire."""
        if server not in self.used:
            self.used.append(server)

    def stop(self) -> None:
        for server in self._started.values():
            server.stop()


@pytest.fixture(scope="session")
def all_servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    servers = Servers(tmp_path_factory.mktemp("servers"))
    yield servers
    servers.stop()


@pytest.fixture(autouse=True)
def every_key_left_expires(all_servers: Servers) -> Iterator[Servers]:
    all_servers.used.clear()
    yield all_servers
    for server in all_servers.used:
        with server.client() as client:
            if server.kind != "fakeredis":
                assert "cmdstat_time" not in client.info("commandstats"), f"TIME was called on {server.kind}"
            keys = client.keys()
            lasting = [key for key in keys if client.pttl(key) == -1]
            client.flushall()
            assert not lasting, f"keys that never expire, on {server.kind}: {lasting}"


@pytest.fixture(params=["fakeredis", "valkey", "redis"])
def server(request: pytest.FixtureRequest, every_key_left_expires: Servers) -> AnyServer:
    return every_key_left_expires.get(request.param)


@pytest.fixture(params=["valkey", "redis"])
def real_server(request: pytest.FixtureRequest, every_key_left_expires: Servers) -> Server:
    return _real(every_key_left_expires.get(request.param))


@pytest.fixture
def valkey_server(every_key_left_expires: Servers) -> Server:
    return _real(every_key_left_expires.get("valkey"))


@pytest.fixture(params=["sync", "async"])
def mode(request: pytest.FixtureRequest) -> Mode:
    chosen: Mode = request.param
    return chosen


@pytest.fixture
def namespace() -> str:
    return f"test{os.getpid()}-{next(_namespaces)}"


@pytest.fixture
def clock(namespace: str, every_key_left_expires: Servers) -> TurnedClock:
    """Turns the clock of the test's rows, on every server that the test uses."""
    return TurnedClock(namespace, every_key_left_expires.used)


@pytest.fixture
def make_subject(namespace: str, every_key_left_expires: Servers) -> Iterator[MakeSubject]:
    """Make subjects: `make_subject(mode, server, policy=…, url=…, **client_options)`."""
    made: list[Subject] = []

    def make(mode: Mode, server: AnyServer, **options: Any) -> Subject:
        made.append(Subject(mode, server, **{"namespace": namespace, **options}))
        return made[-1]

    yield make
    for subject in made:
        subject.close()


@pytest.fixture
def subject(make_subject: MakeSubject, mode: Mode, server: AnyServer) -> Subject:
    return make_subject(mode, server)


def _real(server: AnyServer) -> Server:
    assert isinstance(server, Server)
    return server
