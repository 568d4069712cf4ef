"""Servers with a URL, and the command line, which runs in this process."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count
from typing import Any, TypeAlias

import pytest
from click.testing import CliRunner

from idemredis import Ledger, Policy
from idemredis.operating.cli import main
from idemredis.store.nodes import connect
from tests.support.servers import Server
from tests.support.started import Servers

_memories = count(1)


@dataclass
class Place:
    """A server of one kind, with the URL that the command line needs."""

    kind: str
    url: str
    nodes: list[Server]
    client: Any


@dataclass
class Ran:
    """The exit code and output of a command."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


Run: TypeAlias = Callable[..., Ran]


@pytest.fixture(params=["fakeredis", "valkey", "redis", "cluster"])
def place(request: pytest.FixtureRequest, every_key_left_expires: Servers) -> Iterator[Place]:
    kind = request.param
    if kind == "cluster":
        cluster = request.getfixturevalue("started_cluster")
        for node in cluster.nodes:
            every_key_left_expires.watch(node)
        made = Place(kind, cluster.nodes[1].url, cluster.nodes, None)
    elif kind == "fakeredis":
        made = Place(kind, f"memory://operating-{next(_memories)}", [], None)
    else:
        server = every_key_left_expires.get(kind)
        assert isinstance(server, Server)
        made = Place(kind, server.url, [server], None)
    made.client = connect(made.url, 5.0)
    yield made
    made.client.close()
    for node in made.nodes:
        with node.client() as client:
            client.config_set("maxmemory-policy", "noeviction")
            client.config_set("maxmemory", 0)


@pytest.fixture
def ledger(place: Place, namespace: str) -> Iterator[Ledger]:
    made = Ledger(place.client, Policy(), namespace)
    yield made
    made.close()


@pytest.fixture
def run(place: Place, namespace: str) -> Run:
    """Run `idemredis` with the place's URL and the test's namespace."""

    def run_it(*words: str, url: str = place.url, namespace: str = namespace, **options: Any) -> Ran:
        ran = CliRunner().invoke(main, ["--url", url, "--namespace", namespace, "--timeout", "5", *words], **options)
        if ran.exception is not None and not isinstance(ran.exception, SystemExit):
            raise ran.exception
        return Ran(ran.exit_code, ran.stdout, ran.stderr)

    return run_it
