"""The databases, started when a test first asks for one, and the orders in them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeAlias

import pytest

from idemredis import Ledger, Reservation
from tests.support.clock import TurnedClock
from tests.support.databases import KINDS, Database, Databases
from tests.support.orders import Orders, prepared
from tests.support.servers import Server
from tests.support.subject import Mode

Claim: TypeAlias = Callable[..., Reservation]


@pytest.fixture(scope="session")
def databases() -> Iterator[Databases]:
    databases = Databases()
    yield databases
    databases.close()


@pytest.fixture(params=KINDS)
def database(request: pytest.FixtureRequest, databases: Databases) -> Iterator[Database]:
    """A database with empty tables; after the test, no session may be left idle in a transaction."""
    database = prepared(databases, request.param)
    yield database
    database.assert_none_is_left_open()


@pytest.fixture
def make_orders(database: Database, mode: Mode) -> Iterator[Callable[..., Orders]]:
    made: list[Orders] = []

    def make(isolation: str | None = None) -> Orders:
        made.append(Orders(mode, database, isolation))
        return made[-1]

    yield make
    database.assert_none_is_left_open()
    for orders in made:
        orders.close()


@pytest.fixture
def orders(make_orders: Callable[..., Orders]) -> Orders:
    return make_orders()


@pytest.fixture
def ledger(valkey_server: Server, namespace: str) -> Iterator[Ledger]:
    client = valkey_server.client()
    ledger = Ledger(client, namespace=namespace, socket_timeout=5.0)
    yield ledger
    ledger.close()
    client.close()


@pytest.fixture
def claim(ledger: Ledger, clock: TurnedClock) -> Claim:
    """Claim a key; the lease of an attempt before has ended, so that this is the next generation."""

    def claim(key: str = "k", fingerprint: str = "f", principal: str = "alice", operation: str = "") -> Reservation:
        clock.turn(60)
        claimed = ledger.claim(principal, key, fingerprint, operation)
        assert isinstance(claimed, Reservation), claimed
        return claimed

    return claim
