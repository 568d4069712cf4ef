"""Every way in which a server fails, each for real: before the view it is a 503, after the view nothing is lost."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry
from werkzeug.test import TestResponse

from idemredis import Policy, StoredResponse
from tests.support.doors import MakeDoor
from tests.support.outages import OUTAGES as REFUSALS
from tests.support.proxy import Proxy
from tests.support.servers import Server, free_port, start, valkey
from tests.support.site import PRINCIPAL, Door
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


BALLAST = "for i = 1, 1000 do redis.call('SET', ARGV[1] .. i, 'x', 'PX', 600000) end"


@contextmanager
def loading(server: Server) -> Iterator[None]:
    """It was killed, and reads a log of many thousand commands, slowly, until the block ends."""
    with server.client() as client:
        for i in range(50):
            client.eval(BALLAST, 0, f"ballast:{i}:")
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
        with server.client() as client:
            client.execute_command("CONFIG", "SET", "key-load-delay", 0)
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


@pytest.fixture(params=["flask", "async"])
def door_kind(request: pytest.FixtureRequest) -> str:
    """Flask, and the ASGI door with `async def` endpoints."""
    kind: str = request.param
    return kind


@pytest.fixture(params=["valkey", "redis"])
def victim(request: pytest.FixtureRequest, every_key_left_expires: Servers, tmp_path: Path) -> Iterator[Server]:
    """A server of this test alone, with a log on disk that is written before it answers."""
    every_key_left_expires.get(request.param)  # or skip
    server = start(request.param, tmp_path, "--appendonly", "yes", "--appendfsync", "always", "--key-load-delay", "10")
    yield server
    with server.client() as client:
        assert [key for key in client.scan_iter(f"*{PRINCIPAL}*", 10_000) if client.pttl(key) == -1] == []
    server.stop()


def open_site(make_door: MakeDoor, server: Server, **options: Any) -> Door:
    """Make a site whose client is what `from_url` makes, as a service has it, and whose view counts itself."""
    site = make_door(server, **{"url": server.url, **options})
    site.view()
    return site


def timed(site: Door, key: str) -> tuple[TestResponse, float]:
    """Send a request; return the answer and the seconds that it took."""
    began = time.monotonic()
    return site.send(key), time.monotonic() - began


def is_replay(answer: TestResponse) -> bool:
    return "Idempotent-Replayed" in answer.headers


@by_name
def test_before_the_view_it_is_a_503_in_time_and_the_view_does_not_run(
    victim: Server, make_door: MakeDoor, outage: Outage
) -> None:
    warm, cold = (open_site(make_door, victim) for _ in range(2))
    assert warm.send("warm").status_code == 201
    sites = [cold] if outage.__name__ in ("no_password", "loading") else [warm, cold]  # time, or a login, is short
    with outage(victim):
        for site in sites:
            runs = len(site.runs)
            refused, seconds = timed(site, "key-1")
            if outage is hung and seconds >= BOUND:
                refused, seconds = timed(site, "key-1")  # a broken promise is late each time, a busy machine is not
            assert refused.status_code == 503, refused.text
            assert "idempotency_unavailable" in refused.text
            assert refused.headers["Retry-After"] == "2"
            assert seconds < BOUND
            assert len(site.runs) == runs
    wait_until(lambda: warm.send("key-1").status_code == 201, AGAIN_WITHIN)
    assert is_replay(warm.send("key-1"))
    assert len(warm.runs) == 2


@by_name
@pytest.mark.parametrize("victim", ["valkey"], indirect=True)
def test_with_fail_open_the_view_runs_unprotected_and_says_so(
    victim: Server, make_door: MakeDoor, outage: Outage, caplog: pytest.LogCaptureFixture
) -> None:
    site = open_site(make_door, victim, FAIL_OPEN=True)
    with outage(victim):
        answer, seconds = timed(site, "key-1")
        assert (answer.status_code, len(site.runs)) == (201, 1)
        assert answer.headers["Idempotency-Status"] == "unprotected"
        assert seconds < BOUND
        assert caplog.text.count("runs unprotected") == 1

    def is_protected() -> bool:
        now = site.send("key-2")
        return now.status_code == 201 and "Idempotency-Status" not in now.headers

    wait_until(is_protected, AGAIN_WITHIN)


@by_name
def test_after_the_view_the_client_has_its_answer_and_it_is_stored_also_past_the_lease(
    victim: Server, make_door: MakeDoor, outage: Outage
) -> None:
    site = open_site(make_door, victim, policy=Policy(lease=0.5))
    site.send("warm")
    with ExitStack() as broken:
        site.inside = lambda: broken.enter_context(outage(victim))
        first, seconds = timed(site, "key-1")
        assert (first.status_code, first.text) == (201, "charge 2")
        assert seconds < BOUND + (6.0 if outage is loading else 0.5)  # the log takes its time to be made
        assert ("unavailable" in site.told()) != (outage.__name__ in STORES)
    site.inside = lambda: None
    wait_until(lambda: site.row("key-1")["status"] == b"completed", 10.0)
    again = site.send("key-1")
    assert (again.text, is_replay(again), len(site.runs)) == ("charge 2", True, 2)
    assert "completion_lost" not in site.told()
    assert site.row("key-1")["generation"] == b"1"


def test_an_answer_that_the_server_never_takes_is_told_lost_once(
    valkey_server: Server, make_door: MakeDoor, caplog: pytest.LogCaptureFixture
) -> None:
    with Proxy(valkey_server.port) as proxy:
        site = open_site(make_door, valkey_server, url=proxy.url)
        site.inside = proxy.refuse
        assert site.send("key-1").status_code == 201
        site.do("close")
        assert site.told().count("completion_lost") == 1
        assert caplog.text.count("completion_lost") == 1


def test_a_full_server_takes_what_already_runs_and_refuses_what_is_new(victim: Server, make_door: MakeDoor) -> None:
    site = open_site(make_door, victim)
    running: list[Any] = [site.do("claim", PRINCIPAL, f"r-{i}", "f") for i in range(4)]
    with full(victim):
        assert site.send("new").status_code == 503
        for r in running:
            site.do("renew", r)
        site.do("checkpoint", running[0], "charged", {"id": 1})
        site.do("release", running[0])
        site.do("fail", running[1], answer := StoredResponse(201, (), b"x" * 10_000))
        site.do("complete", running[2], answer)
        assert site.row("r-1")["status"] == b"failed"
        assert site.row("r-2")["status"] == b"completed"
        assert site.row("r-0")["owner"] == b""
    assert not site.row("new")


COMMANDS = ("evalsha", "eval", "hmget", "hset", "pexpire", "pttl", "del")


@pytest.mark.parametrize("command", COMMANDS)
def test_a_user_who_may_not_use_one_command_leaves_no_row_without_a_ttl(
    real_server: Server, make_door: MakeDoor, namespace: str, command: str
) -> None:
    allowed = [f"+{name}" for name in (*COMMANDS, "ping") if name != command]
    with real_server.client() as admin:
        admin.script_flush()
        words = ["on", ">pw", "resetkeys", f"~{namespace}:*", "resetchannels", "-@all", *allowed]
        admin.execute_command("ACL", "SETUSER", "ledger", "reset", *words)
        try:
            site = open_site(make_door, real_server, url=f"redis://ledger:pw@127.0.0.1:{real_server.port}/0")
            answer, seconds = timed(site, "key-1")
            if command == "del":  # needed only to take back a row whose PEXPIRE was denied
                assert (answer.status_code, len(site.runs)) == (201, 1)
                return
            assert (answer.status_code, site.runs) == (503, []), answer.text
            assert seconds < BOUND
            assert not site.row("key-1")
        finally:
            admin.execute_command("ACL", "DELUSER", "ledger")


def test_connections_that_are_killed_and_scripts_that_are_forgotten_are_not_noticed(
    real_server: Server, make_door: MakeDoor
) -> None:
    site = open_site(make_door, real_server)
    with real_server.client(single_connection_client=True) as admin:

        def harm() -> None:
            admin.script_flush()
            admin.client_kill_filter(_type="normal", skipme=True)

        site.inside = harm
        for i in range(5):
            harm()
            assert site.send(f"key-{i}").text == f"charge {i + 1}"
            harm()
            assert is_replay(site.send(f"key-{i}"))
    assert len(site.runs) == 5
    assert "unavailable" not in site.told()


def test_a_server_without_a_log_forgets_and_the_late_answer_is_fenced(tmp_path: Path, make_door: MakeDoor) -> None:
    with valkey(tmp_path) as server, server.client() as client, ExitStack() as restarted:
        site = open_site(make_door, server)
        site.inside = lambda: restarted.enter_context(killed(server))
        assert site.send("key-1").status_code == 201
        restarted.close()
        wait_until(lambda: "fenced" in site.told())
        assert client.keys() == []
        site.inside = lambda: None
        assert site.send("key-1").text == "charge 2"


def test_a_name_that_nobody_answers_to_is_a_503(make_door: MakeDoor) -> None:
    site = make_door(url=f"redis://127.0.0.1:{free_port()}/0")
    site.view()
    answer, seconds = timed(site, "key-1")
    assert (answer.status_code, site.runs) == (503, [])
    assert seconds < BOUND


@pytest.mark.parametrize("fail_open", [False, True])
def test_a_full_pool_is_waited_for_and_then_a_503_that_never_opens_the_door(
    valkey_server: Server, make_door: MakeDoor, fail_open: bool
) -> None:
    """That the connections are in use says nothing about Redis."""
    url = f"{valkey_server.url}?max_connections=1"
    site = open_site(make_door, valkey_server, url=url, socket_timeout=0.5, FAIL_OPEN=fail_open)
    site.send("warm")
    give_back = site.take_connection()
    refused, seconds = timed(site, "key-1")
    assert (refused.status_code, seconds > 0.4, len(site.runs)) == (503, True, 1)
    give_back()
    assert site.send("key-1").status_code == 201


@pytest.mark.parametrize("fail_open", [False, True])
def test_two_hundred_requests_share_ten_connections(
    valkey_server: Server, make_door: MakeDoor, fail_open: bool
) -> None:
    url = f"{valkey_server.url}?max_connections=10"
    site = open_site(make_door, valkey_server, url=url, socket_timeout=20.0, FAIL_OPEN=fail_open)
    with ThreadPoolExecutor(200) as threads:
        statuses = set(threads.map(lambda _: site.send("key-1").status_code, range(200)))
    assert len(site.runs) == 1
    assert statuses <= {201, 409}


def test_a_request_that_is_delivered_after_its_client_gave_up_locks_nobody_out(
    valkey_server: Server, make_door: MakeDoor
) -> None:
    with Proxy(valkey_server.port) as proxy:
        site = open_site(make_door, valkey_server, url=proxy.url)
        site.send("warm")
        proxy.delay_requests(2, 1.5)
        assert site.send("key-1").status_code == 503
        wait_until(lambda: site.send("key-1").status_code == 201, AGAIN_WITHIN)
        assert len(site.runs) == 2


def test_a_reply_that_breaks_off_in_the_middle_is_asked_for_again(valkey_server: Server, make_door: MakeDoor) -> None:
    with Proxy(valkey_server.port) as proxy:
        site = open_site(make_door, valkey_server, url=proxy.url)
        for i in range(4):
            proxy.cut_replies(1)
            assert site.send(f"key-{i}").status_code == 201
            proxy.cut_replies(1)
            assert is_replay(site.send(f"key-{i}"))
        assert len(site.runs) == 4
