"""Duplicates that wait are bounded: one tenant cannot hold every thread of a server."""

from __future__ import annotations

import asyncio
import os
import select
import socket
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack

import pytest
from flask import request
from werkzeug.test import TestResponse

from idemredis import AsyncLedger, InProgress, Ledger, LedgerUnavailable, Replay, Reservation, StoredResponse
from idemredis.core.keys import identify
from idemredis.ledger.waiting import A_KEY, A_PRINCIPAL, WaitingRoom, bounded
from tests.support.proxy import Proxy
from tests.support.servers import Server
from tests.support.serving import Served, read_answer
from tests.support.site import MakeSite, Site
from tests.support.waiting import wait_until

ANSWER = StoredResponse(201, (), b"done")
LONG = 60.0
"""Seconds that duplicates would wait; much longer than a client of the tests does."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "threads", "waiting"), [("gunicorn-gthread", 8, 4), ("waitress", 3, 1), ("uwsgi", 4, 2)]
)
def test_a_tenants_duplicates_leave_half_of_a_servers_threads_to_others(
    valkey_server: Server, namespace: str, kind: str, threads: int, waiting: int
) -> None:
    duplicates = threads - 1
    with (
        Served(
            kind,
            valkey_server.url,
            namespace,
            workers=1,
            threads=threads,
            uwsgi_threads=threads,
            wait=LONG,
            socket_timeout=5.0,
        ) as served,
        ExitStack() as stack,
    ):
        first = stack.enter_context(served.send("k", "/held"))
        wait_until(lambda: served.runs() == ["k"])
        sent = [stack.enter_context(served.send("k", "/held")) for _ in range(duplicates)]
        refused: list[socket.socket] = wait_until(lambda: answered(sent, duplicates - waiting))
        assert served.exchange("GET /up HTTP/1.1").status == 200  # others are served meanwhile
        for connection in refused:
            answer = read_answer(connection)
            assert (answer.status, answer.error) == (409, "idempotency_key_in_progress")
            assert int(answer.headers["retry-after"]) >= 1
        assert len(refused) == duplicates - waiting
        served.let_go("k")
        rest = [read_answer(connection) for connection in sent if connection not in refused]
        assert [answer.status for answer in rest] == [201] * waiting
        assert all(answer.headers["idempotent-replayed"] == "true" for answer in rest)
        assert read_answer(first).status == 201


def answered(sent: list[socket.socket], count: int) -> list[socket.socket]:
    """Return the connections with an answer to read, or none while there are fewer than that."""
    ready = select.select(sent, [], [], 0.0)[0]
    return ready if len(ready) >= count else []


class Held:
    """Requests to a site whose views go on when the block ends."""

    def __init__(self, site: Site, pool: ThreadPoolExecutor) -> None:
        self._site = site
        self._pool = pool
        self.go_on = threading.Event()
        site.inside = lambda: self.go_on.wait(LONG)

    def begin(self, key: str, principal: str) -> Future[TestResponse]:
        before = len(self._site.runs)
        sent = self.send(key, principal)
        wait_until(lambda: len(self._site.runs) > before)
        return sent

    def send(self, key: str, principal: str) -> Future[TestResponse]:
        return self._pool.submit(self._site.send, key, headers=[("X-Principal", principal)])


@pytest.fixture
def held(make_site: MakeSite, valkey_server: Server) -> Iterator[Held]:
    site = make_site(valkey_server, principal=lambda: request.headers["X-Principal"], WAIT_SECONDS=LONG)
    site.view()
    with ThreadPoolExecutor(40) as pool:
        held = Held(site, pool)
        yield held
        held.go_on.set()


def refused_of(sent: list[Future[TestResponse]], count: int) -> int:
    """Wait until so many are answered, and return how many are: 409, each of them."""
    wait_until(lambda: sum(one.done() for one in sent) >= count)
    answered = [one.result() for one in sent if one.done()]
    assert all(answer.status_code == 409 for answer in answered)
    assert all(answer.json["error"] == "idempotency_key_in_progress" for answer in answered if answer.json)
    return len(answered)


def test_of_the_duplicates_of_one_key_four_wait(held: Held) -> None:
    for turn in range(2):  # who has waited gives the place back
        held.go_on.clear()
        first = held.begin(f"k{turn}", "a")
        sent = [held.send(f"k{turn}", "a") for _ in range(A_KEY + 5)]
        assert refused_of(sent, 5) == 5
        held.go_on.set()
        assert first.result().status_code == 201
        assert Counter(one.result().status_code for one in sent) == {201: A_KEY, 409: 5}


def test_of_the_duplicates_of_one_principal_eight_wait_and_others_are_not_counted(held: Held) -> None:
    keys = ["k1", "k2", "k3"]
    firsts = [held.begin(key, "a") for key in keys]
    firsts.append(held.begin("k1", "b"))
    sent = [held.send(key, "a") for key in keys for _ in range(A_KEY)]
    assert refused_of(sent, len(sent) - A_PRINCIPAL) == len(sent) - A_PRINCIPAL
    of_another = held.send("k1", "b")
    held.go_on.set()
    assert [one.result().status_code for one in firsts] == [201] * 4
    assert of_another.result().headers["Idempotent-Replayed"] == "true"
    assert Counter(one.result().status_code for one in sent) == {201: A_PRINCIPAL, 409: len(sent) - A_PRINCIPAL}


def test_a_place_is_given_back_when_redis_goes_away(valkey_server: Server, namespace: str) -> None:
    with Proxy(valkey_server.port) as proxy:
        ledger = Ledger.from_url(proxy.url, namespace=namespace, socket_timeout=0.5)

        def duplicate() -> object:
            with bounded():
                return ledger.claim("a", "k", "f", wait=LONG)

        r = ledger.claim("a", "k", "f")
        assert isinstance(r, Reservation)
        with ThreadPoolExecutor(A_KEY + 1) as pool:
            for _ in range(2):
                sent = [pool.submit(duplicate) for _ in range(A_KEY + 1)]
                wait_until(lambda sent=sent: any(one.done() for one in sent))  # type: ignore[misc]
                assert [type(one.result()) for one in sent if one.done()] == [InProgress]
                proxy.refuse()
                errors = [one.exception() for one in sent]
                assert sum(isinstance(error, LedgerUnavailable) for error in errors) == A_KEY
                proxy.refuse(False)
            sent = [pool.submit(duplicate) for _ in range(A_KEY)]
            ledger.complete(r, ANSWER)
            assert [one.result() for one in sent] == [Replay(ANSWER, 1, failed=False)] * A_KEY
        ledger.close()
        ledger.client.close()


def test_workers_that_wait_are_not_bounded(valkey_server: Server, namespace: str) -> None:
    ledger = Ledger(valkey_server.client(), namespace=namespace)
    r = ledger.claim("a", "k", "f")
    assert isinstance(r, Reservation)
    count = 2 * A_PRINCIPAL
    with ThreadPoolExecutor(count) as pool:
        sent = [pool.submit(ledger.claim, "a", "k", "f", wait=LONG) for _ in range(count)]
        ledger.complete(r, ANSWER)
        assert [one.result() for one in sent] == [Replay(ANSWER, 1, failed=False)] * count
    ledger.close()


def test_tasks_that_wait_are_bounded_too_and_a_cancelled_one_gives_its_place_back(
    valkey_server: Server, namespace: str
) -> None:
    async def run() -> None:
        ledger = AsyncLedger(valkey_server.async_client(), namespace=namespace)
        r = await ledger.claim("a", "k", "f")
        assert isinstance(r, Reservation)

        async def duplicate() -> object:
            with bounded():
                return await ledger.claim("a", "k", "f", wait=LONG)

        for _ in range(2):
            tasks = [asyncio.create_task(duplicate()) for _ in range(A_KEY + 2)]
            async with asyncio.timeout(20.0):
                while sum(task.done() for task in tasks) < 2:
                    await asyncio.wait(tasks, timeout=0.1, return_when=asyncio.FIRST_COMPLETED)
            done = [task for task in tasks if task.done()]
            assert all(isinstance(task.result(), InProgress) for task in done)
            assert len(done) == 2
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        tasks = [asyncio.create_task(duplicate()) for _ in range(A_KEY)]
        await ledger.complete(r, ANSWER)
        assert await asyncio.gather(*tasks) == [Replay(ANSWER, 1, failed=False)] * A_KEY
        await ledger.close()
        await ledger.client.aclose()

    asyncio.run(run())


def test_a_forked_child_starts_with_an_empty_room() -> None:
    room, identity = WaitingRoom(), identify("idem", "a", "k")
    assert [room.enter(identity, None) for _ in range(A_KEY + 1)] == [True] * A_KEY + [False]
    child = os.fork()
    if child == 0:
        os._exit(0 if room.enter(identity, None) else 1)
    assert os.waitpid(child, 0)[1] == 0
    room.leave(identity)
    assert room.enter(identity, None)


@pytest.mark.parametrize(("threads", "places"), [(1, 1), (2, 1), (3, 1), (8, 4), (100, 50), (None, 200)])
def test_half_of_the_threads_may_wait_where_they_are_known(threads: int | None, places: int) -> None:
    room = WaitingRoom()
    entered = [room.enter(identify("idem", f"a{n}", "k"), threads) for n in range(200)]
    assert entered.count(True) == places
