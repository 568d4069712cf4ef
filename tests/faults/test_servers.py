"""Every way in which a server fails, each for real: before the view it is a 503, after the view nothing is lost."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from idemredis import Policy, StoredResponse
from tests.support.outages import OUTAGES as REFUSALS
from tests.support.proxy import Proxy
from tests.support.servers import Server, free_port, start, valkey
from tests.support.shop import Shop
from tests.support.started import Servers
from tests.support.waiting import wait_until

BOUND = 3.0
"""Seconds within which a 503 is promised, also from a server that hangs."""

AGAIN_WITHIN = 2.0
"""Seconds after which a client's own lost claim is no longer in its way."""

Outage: TypeAlias = Callable[[Server], AbstractContextManager[Any]]


def said(outage: Callable[[Any], AbstractContextManager[None]]) -> Outage:
    """Make an outage of what an operator's connection does to the server."""

    @contextmanager
    def during(server: Server) -> Iterator[None]:
        with server.client(single_connection_client=True) as admin, outage(admin):
            yield

    during.__name__ = outage.__name__
    return during


@contextmanager
def hung(server: Server) -> Iterator[None]:
    server.freeze()
    try:
        yield
    finally:
        server.thaw()


@contextmanager
def killed(server: Server) -> Iterator[None]:
    server.kill()
    try:
        yield
    finally:
        server.start()


@contextmanager
def loading(server: Server) -> Iterator[None]:
    """It was killed, and reads a log of many thousand commands, slowly."""
    with server.client() as client, client.pipeline(transaction=False) as pipeline:
        for i in range(50_000):
            pipeline.set(f"ballast:{i}", "x", px=600_000)
        pipeline.execute()
    server.kill()
    loaded = threading.Event()

    def start_and_stay() -> None:
        server.start()
        loaded.set()
        while is_alive(server.pid):  # it would die with the thread that started it
            threading.Event().wait(0.2)

    threading.Thread(target=start_and_stay, daemon=True).start()
    try:
        wait_until(lambda: is_loading(server))
        yield
    finally:
        assert loaded.wait(60.0)


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def is_loading(server: Server) -> bool:
    try:
        with server.client(socket_timeout=1.0, retry=Retry(NoBackoff(), 0)) as client:
            client.ping()
    except redis.BusyLoadingError:
        return True
    except (redis.ConnectionError, redis.TimeoutError):
        pass
    return False


@contextmanager
def full(server: Server) -> Iterator[None]:
    with server.client() as admin:
        admin.config_set("maxmemory", 1)
        try:
            yield
        finally:
            admin.config_set("maxmemory", 0)


OUTAGES: list[Outage] = [hung, killed, loading, full, *(said(outage) for outage in REFUSALS)]
by_name = pytest.mark.parametrize("outage", OUTAGES, ids=lambda outage: outage.__name__)
STORES = {"full", "no_password"}
"""Outages in which what already runs can be finished all the same."""


@pytest.fixture(params=["valkey", "redis"])
def victim(request: pytest.FixtureRequest, every_key_left_expires: Servers, tmp_path: Path) -> Iterator[Server]:
    """A server of this test alone, with a log on disk that is written before it answers."""
    every_key_left_expires.get(request.param)  # or skip
    server = start(request.param, tmp_path, "--appendonly", "yes", "--appendfsync", "always", "--key-load-delay", "10")
    yield server
    with server.client() as client:
        assert [key for key in client.scan_iter("*acct_1*", 10_000) if client.pttl(key) == -1] == []
    server.stop()


@by_name
def test_before_the_view_it_is_a_503_in_time_and_the_view_does_not_run(
    victim: Server, namespace: str, outage: Outage
) -> None:
    with Shop(victim.url, namespace) as warm, Shop(victim.url, namespace) as cold:
        assert warm.post("warm").status == 201
        shops = [cold] if outage.__name__ in ("no_password", "loading") else [warm, cold]  # time, or a login, is short
        with outage(victim):
            for shop in shops:
                runs = shop.runs
                refused = shop.post("key-1")
                if outage is hung and refused.seconds >= BOUND:
                    refused = shop.post("key-1")  # a broken promise is late each time, a busy machine is not
                assert refused.status == 503, refused
                assert "idempotency_unavailable" in refused.text
                assert refused.headers["Retry-After"] == "2"
                assert refused.seconds < BOUND
                assert shop.runs == runs
        again = wait_until(lambda: (got := warm.post("key-1")).status == 201 and got, AGAIN_WITHIN)
        assert again
        assert warm.post("key-1").replayed
        assert warm.runs == 2


@by_name
@pytest.mark.parametrize("victim", ["valkey"], indirect=True)
def test_with_fail_open_the_view_runs_unprotected_and_says_so(
    victim: Server, namespace: str, outage: Outage, caplog: pytest.LogCaptureFixture
) -> None:
    with Shop(victim.url, namespace, FAIL_OPEN=True) as shop:
        with outage(victim):
            got = shop.post("key-1")
            assert (got.status, shop.runs) == (201, 1)
            assert got.headers["Idempotency-Status"] == "unprotected"
            assert got.seconds < BOUND
            assert caplog.text.count("runs unprotected") == 1

        def is_protected() -> bool:
            now = shop.post("key-2")
            return now.status == 201 and "Idempotency-Status" not in now.headers

        wait_until(is_protected, AGAIN_WITHIN)


@by_name
def test_after_the_view_the_client_has_its_answer_and_it_is_stored_also_past_the_lease(
    victim: Server, namespace: str, outage: Outage
) -> None:
    with Shop(victim.url, namespace, Policy(lease=0.5)) as shop, victim.client() as client:
        shop.post("warm")
        with ExitStack() as broken:
            shop.inside = lambda: broken.enter_context(outage(victim))
            first = shop.post("key-1")
            assert (first.status, first.text) == (201, "charge 2")
            assert first.seconds < BOUND + (6.0 if outage is loading else 0.5)  # the log takes its time to be made
            assert ("unavailable" in shop.events) != (outage.__name__ in STORES)
        shop.inside = lambda: None
        wait_until(lambda: client.hget(shop.row("key-1"), "status") == b"completed", 10.0)
        again = shop.post("key-1")
        assert (again.text, again.replayed, shop.runs) == ("charge 2", True, 2)
        assert "completion_lost" not in shop.events
        assert client.hget(shop.row("key-1"), "generation") == b"1"


def test_an_answer_that_the_server_never_takes_is_told_lost_once(
    valkey_server: Server, namespace: str, caplog: pytest.LogCaptureFixture
) -> None:
    with Proxy(valkey_server.port) as proxy, Shop(proxy.url, namespace) as shop:
        shop.inside = proxy.refuse
        assert shop.post("key-1").status == 201
        shop.close()
        assert shop.events.count("completion_lost") == 1
        assert caplog.text.count("completion_lost") == 1


def test_a_full_server_takes_what_already_runs_and_refuses_what_is_new(victim: Server, namespace: str) -> None:
    with Shop(victim.url, namespace) as shop, victim.client() as client:
        ledger = shop.ledger
        running: list[Any] = [ledger.claim("acct_1", f"r-{i}", "f") for i in range(4)]
        with full(victim):
            assert shop.post("new").status == 503
            for r in running:
                ledger.renew(r)
            ledger.checkpoint(running[0], "charged", {"id": 1})
            ledger.release(running[0])
            ledger.fail(running[1], answer := StoredResponse(201, (), b"x" * 10_000))
            ledger.complete(running[2], answer)
            assert client.hget(shop.row("r-1"), "status") == b"failed"
            assert client.hget(shop.row("r-2"), "status") == b"completed"
            assert client.hget(shop.row("r-0"), "owner") == b""
        assert not client.exists(shop.row("new"))


COMMANDS = ("evalsha", "eval", "hmget", "hset", "pexpire", "pttl", "del")


@pytest.mark.parametrize("command", COMMANDS)
def test_a_user_who_may_not_use_one_command_leaves_no_row_without_a_ttl(
    real_server: Server, namespace: str, command: str
) -> None:
    allowed = [f"+{name}" for name in (*COMMANDS, "ping") if name != command]
    with real_server.client() as admin:
        admin.script_flush()
        words = ["on", ">pw", "resetkeys", f"~{namespace}:*", "resetchannels", "-@all", *allowed]
        admin.execute_command("ACL", "SETUSER", "ledger", "reset", *words)
        try:
            with Shop(f"redis://ledger:pw@127.0.0.1:{real_server.port}/0", namespace) as shop:
                got = shop.post("key-1")
                if command == "del":  # needed only to take back a row whose PEXPIRE was denied
                    assert (got.status, shop.runs) == (201, 1)
                    return
                assert (got.status, shop.runs) == (503, 0), got
                assert got.seconds < BOUND
                assert not admin.exists(shop.row("key-1"))
        finally:
            admin.execute_command("ACL", "DELUSER", "ledger")


def test_connections_that_are_killed_and_scripts_that_are_forgotten_are_not_noticed(
    real_server: Server, namespace: str
) -> None:
    with Shop(real_server.url, namespace) as shop, real_server.client(single_connection_client=True) as admin:

        def harm() -> None:
            admin.script_flush()
            admin.client_kill_filter(_type="normal", skipme=True)

        shop.inside = harm
        for i in range(5):
            harm()
            assert shop.post(f"key-{i}").text == f"charge {i + 1}"
            harm()
            assert shop.post(f"key-{i}").replayed
        assert shop.runs == 5
        assert "unavailable" not in shop.events


def test_a_server_without_a_log_forgets_and_the_late_answer_is_fenced(tmp_path: Path, namespace: str) -> None:
    with (
        valkey(tmp_path) as server,
        Shop(server.url, namespace) as shop,
        server.client() as client,
        ExitStack() as restarted,
    ):
        shop.inside = lambda: restarted.enter_context(killed(server))
        assert shop.post("key-1").status == 201
        restarted.close()
        wait_until(lambda: "fenced" in shop.events)
        assert client.keys() == []
        shop.inside = lambda: None
        assert shop.post("key-1").text == "charge 2"


def test_a_name_that_nobody_answers_to_is_a_503(namespace: str) -> None:
    with Shop(f"redis://127.0.0.1:{free_port()}/0", namespace) as shop:
        got = shop.post("key-1")
    assert (got.status, shop.runs) == (503, 0)
    assert got.seconds < BOUND


@pytest.mark.parametrize("fail_open", [False, True])
def test_a_full_pool_is_waited_for_and_then_a_503_that_never_opens_the_door(
    valkey_server: Server, namespace: str, fail_open: bool
) -> None:
    """That the connections are in use says nothing about Redis."""
    url = f"{valkey_server.url}?max_connections=1"
    with Shop(url, namespace, SOCKET_TIMEOUT_SECONDS=0.5, FAIL_OPEN=fail_open) as shop:
        shop.post("warm")
        pool = shop.ledger.client.connection_pool
        taken = pool.get_connection()
        refused = shop.post("key-1")
        assert (refused.status, refused.seconds > 0.4, shop.runs) == (503, True, 1)
        pool.release(taken)
        assert shop.post("key-1").status == 201


def test_two_hundred_requests_share_ten_connections(valkey_server: Server, namespace: str) -> None:
    with Shop(f"{valkey_server.url}?max_connections=10", namespace, FAIL_OPEN=True) as shop:
        with ThreadPoolExecutor(200) as threads:
            statuses = Counter(got.status for got in threads.map(lambda _: shop.post("key-1"), range(200)))
    assert shop.runs == 1
    assert set(statuses) <= {201, 409}


def test_a_request_that_is_delivered_after_its_client_gave_up_locks_nobody_out(
    valkey_server: Server, namespace: str
) -> None:
    with Proxy(valkey_server.port) as proxy, Shop(proxy.url, namespace) as shop:
        shop.post("warm")
        proxy.delay_requests(2, 1.5)
        assert shop.post("key-1").status == 503
        again = wait_until(lambda: (got := shop.post("key-1")).status == 201 and got, AGAIN_WITHIN)
        assert again
        assert shop.runs == 2


def test_a_reply_that_breaks_off_in_the_middle_is_asked_for_again(valkey_server: Server, namespace: str) -> None:
    with Proxy(valkey_server.port) as proxy, Shop(proxy.url, namespace) as shop:
        for i in range(4):
            proxy.cut_replies(1)
            assert shop.post(f"key-{i}").status == 201
            proxy.cut_replies(1)
            assert shop.post(f"key-{i}").replayed
        assert shop.runs == 4
