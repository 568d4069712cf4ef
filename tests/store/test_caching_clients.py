"""A client with redis-py's client-side caching, which caches the application's reads beside the ledger's calls."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import redis
from redis.cache import CacheConfig

from idemredis import FencedOut, InProgress, Ledger, Policy, Replay, Reservation, Reused, StoredResponse
from idemredis.testing import Clock
from tests.support.clock import TurnedClock
from tests.support.proxy import Proxy
from tests.support.servers import Server
from tests.support.subject import MakeSubject, Subject
from tests.support.waiting import wait_until

ROW = ("acct_1", "key-1")
ANSWER = StoredResponse(201, (("content-type", "text/plain"),), b"\xff\x00done")


def as_redis_8(data: bytes) -> bytes:
    """Change the reply to HELLO: redis-py caches only with Redis 7.4 or later."""
    return re.sub(
        rb"\$6\r\nserver\r\n\$\d\r\n(redis|valkey)\r\n\$7\r\nversion\r\n\$\d\r\n[\d.]+\r\n",
        b"$6\r\nserver\r\n$5\r\nredis\r\n$7\r\nversion\r\n$5\r\n8.0.0\r\n",
        data,
    )


@pytest.fixture
def proxy(real_server: Server) -> Iterator[Proxy]:
    with Proxy(real_server.port, rewrite=as_redis_8) as made:
        yield made


@pytest.fixture
def subject(make_subject: MakeSubject, real_server: Server, proxy: Proxy) -> Subject:
    return make_subject(
        "sync",
        real_server,
        policy=Policy(lease=3.0),
        port=proxy.port,
        protocol=3,
        cache_config=CacheConfig(),
    )


def cached(subject: Subject) -> int:
    """Return how many entries the client's cache has."""
    client: Any = subject.ledger.client
    return int(client.get_cache().size)


def test_every_call_of_a_ledger_works_with_a_client_that_caches(subject: Subject, clock: TurnedClock) -> None:
    a = subject.claimed(*ROW, "f")
    assert isinstance(subject.claim(*ROW, "f"), InProgress)
    assert subject.claim(*ROW, "g") == Reused()
    subject.checkpoint(a, "charged", {"charge": 1})
    subject.renew(a)
    row = subject.read(*ROW)
    assert row is not None
    assert row.last_checkpoint == ("charged", {"charge": 1})
    clock.turn(3.0)
    b = subject.claimed(*ROW, "f")
    assert b.generation == 2
    with pytest.raises(FencedOut):
        subject.complete(a, ANSWER)
    subject.release(b)
    c = subject.claimed(*ROW, "f")
    subject.complete(c, ANSWER)
    assert subject.claim(*ROW, "f") == Replay(ANSWER, 3, False)
    subject.fail(subject.claimed("acct_1", "key-2", "f"), ANSWER)
    assert subject.claim("acct_1", "key-2", "f") == Replay(ANSWER, 1, True)
    row = subject.read(*ROW)
    assert row is not None
    assert row.response == ANSWER
    assert cached(subject) == 0  # a row is never read from the cache


def test_check_and_the_clock_work_with_a_client_that_caches(subject: Subject) -> None:
    ledger: Ledger = subject.ledger
    subject.complete(subject.claimed(*ROW, "f"), ANSWER)
    assert [finding for finding in ledger.check().findings if finding.verdict == "problem"] == []
    subject.claimed("acct_1", "key-2", "f")
    Clock(ledger).turn(3.0)
    assert subject.claimed("acct_1", "key-2", "f").generation == 2


@pytest.mark.slow
def test_leases_are_renewed_while_the_application_reads_from_its_cache(subject: Subject) -> None:
    """It looks for push messages on whichever connection had the reply, also while that is in use.

    One thread of it: two can deadlock in redis-py, which takes the locks of its pool and its cache in either order.
    """
    client: redis.Redis = subject.ledger.client
    r = subject.claimed(*ROW, "f")
    subject.start_heartbeat(r)
    over = threading.Event()
    read: list[object] = []

    def application() -> None:
        while not over.wait(0.001):
            read.append(client.hget(r.row, "status"))

    thread = threading.Thread(target=application, daemon=True)
    thread.start()
    ends = subject.client.pexpiretime(r.row)
    for _ in range(1000):
        assert isinstance(subject.claim(*ROW, "f"), InProgress)
    wait_until(lambda: subject.client.pexpiretime(r.row) > ends + 3000)
    assert r.held
    subject.complete(r, ANSWER)
    wait_until(lambda: read[-1:] == [b"completed"])
    over.set()
    thread.join(10.0)
    assert set(read) <= {b"pending", b"completed"}
    assert isinstance(r, Reservation)
