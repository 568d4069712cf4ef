"""One call to Redis: it ends in time with any client, and no reply is taken for another's."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import redis
import redis.asyncio
import redis.asyncio.sentinel
import redis.sentinel
from redis.credentials import CredentialProvider

from idemredis import AsyncLedger, Ledger, LedgerUnavailable, Policy, Replay, Reservation, StoredResponse
from idemredis.store.deadline import LATE, TICK
from tests.support.clusters import Cluster
from tests.support.proxy import Proxy
from tests.support.servers import Server, free_port
from tests.support.subject import Mode
from tests.support.waiting import wait_until

ROOT = Path(__file__).parents[2]
ROW = ("acct_1", "key-1")

DEADLINE = 1.0
"""Seconds for one call, as by default; a call that got no reply is made once more."""

BOUND = 5.0
"""Three seconds are promised; a busy machine may pause for two."""


# Interrupted


@pytest.mark.slow
@pytest.mark.parametrize("how", ["signals", "gevent", "asyncio"])
def test_no_call_gets_the_reply_of_another_whatever_interrupts_it_and_whoever_shares_the_client(
    valkey_server: Server, how: str
) -> None:
    words = [sys.executable, "-m", "tests.support.interrupted", how, valkey_server.url, "5"]
    ran = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=100, check=True)
    counts = json.loads(ran.stdout)
    assert counts["answered"] > 100
    assert counts["interrupted"] > 100
    assert "wrong" not in counts, ran.stderr


def test_a_reply_that_somebody_left_on_a_connection_is_not_taken_and_the_call_is_made_again(
    valkey_server: Server, namespace: str
) -> None:
    """A late one: it is not there yet when the connection is taken from the pool."""
    with Proxy(valkey_server.port, b"") as proxy, redis.Redis(port=proxy.port) as client:
        ledger = Ledger(client, namespace=namespace)
        r = ledger.claim(*ROW, "f")
        assert isinstance(r, Reservation)
        for words in (("GET", "nothing"), ("HGET", "not-a-hash", "x"), ("EVAL", "return {'replay', 'x', '200'}", 0)):
            client.set("not-a-hash", "x", px=60_000)
            pool: Any = client.connection_pool
            connection = pool.get_connection()
            proxy.hold()
            connection.send_command(*words)
            pool.release(connection)
            held = threading.Timer(0.1, proxy.hold, [False])
            held.start()
            row = ledger.read(*ROW)
            held.join()
            assert row is not None
            assert row.owner == r.owner
        assert client.get("not-a-hash") == b"x"  # what is left in the pool is in step


def test_an_error_reply_is_believed_only_if_it_is_this_calls_own(valkey_server: Server, namespace: str) -> None:
    with valkey_server.client() as client:
        client.set(Ledger(client, namespace=namespace).claim("acct_1", "other", "f").row, "x", px=60_000)  # type: ignore[union-attr]
        ledger = Ledger(client, namespace=namespace)
        with pytest.raises(Exception, match="corrupt"):
            ledger.claim("acct_1", "other", "f")
        assert client.ping()


def test_a_connection_that_another_thread_closes_while_it_connects_is_an_outage(
    valkey_server: Server, namespace: str
) -> None:
    """As redis-py 6.4 does with all connections of a cluster's node when it reads the map of the slots."""
    errors: list[Exception] = []

    def claim() -> None:
        try:
            ledger.claim(*ROW, "f")
        except Exception as error:
            errors.append(error)

    with Proxy(valkey_server.port, b"") as proxy, redis.Redis(port=proxy.port) as client:
        ledger = Ledger(client, namespace=namespace)
        for _ in range(20):
            proxy.hold()
            claiming = threading.Thread(target=claim)
            claiming.start()
            while claiming.is_alive():
                client.connection_pool.disconnect()
                claiming.join(0.005)
            proxy.hold(False)
        assert {type(error) for error in errors} == {LedgerUnavailable}
        assert len(errors) == 20
        assert isinstance(ledger.claim(*ROW, "f"), Reservation)


@pytest.mark.slow
def test_a_connection_that_another_task_closes_while_it_connects_is_an_outage(
    valkey_server: Server, namespace: str
) -> None:
    async def scene(proxy: Proxy) -> None:
        async with redis.asyncio.Redis(port=proxy.port) as client:
            ledger = AsyncLedger(client, namespace=namespace)
            for _ in range(3):
                proxy.hold()
                claiming = asyncio.create_task(ledger.claim(*ROW, "f"))
                while not claiming.done():
                    await client.connection_pool.disconnect()
                    await asyncio.wait([claiming], timeout=0.005)
                proxy.hold(False)
                assert isinstance(claiming.exception(), LedgerUnavailable)
            assert isinstance(await ledger.claim(*ROW, "f"), Reservation)
            await ledger.close()

    with Proxy(valkey_server.port, b"") as proxy:
        asyncio.run(scene(proxy))


# Deadlines


class Trouble:
    """A port at which nothing is right."""

    def __init__(self, *, drip: bool = False, greeting: bytes = b"") -> None:
        self._drip = drip
        self._greeting = greeting
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._over = threading.Event()
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                threading.Thread(target=self._serve, args=(self._listener.accept()[0],), daemon=True).start()

    def _serve(self, near: socket.socket) -> None:
        with near, suppress(OSError):
            near.sendall(self._greeting)
            while not self._over.is_set():
                if not self._drip:
                    self._over.wait(0.2)
                    continue
                near.recv(65536)
                for byte in b"*3\r\n$5\r\nhello\r\n$5\r\nhello\r\n$5\r\nhello\r\n":
                    near.sendall(bytes([byte]))
                    if self._over.wait(0.3):
                        return

    def close(self) -> None:
        self._over.set()
        self._listener.close()


@contextmanager
def half_open(server: Server) -> Iterator[int]:
    """It takes connections and never says a word."""
    trouble = Trouble()
    yield trouble.port
    trouble.close()


@contextmanager
def slow(server: Server) -> Iterator[int]:
    """It replies a byte at a time."""
    trouble = Trouble(drip=True)
    yield trouble.port
    trouble.close()


TROUBLES = [half_open, slow]


def plain(mode: Mode, port: int) -> Any:
    """With redis-py's own defaults, or as unbounded as it can be made."""
    made = redis.Redis if mode == "sync" else redis.asyncio.Redis
    return made(port=port, socket_timeout=None)


def blocking(mode: Mode, port: int) -> Any:
    if mode == "sync":
        made: Any = redis.BlockingConnectionPool
        return redis.Redis.from_pool(made(port=port, timeout=60, socket_timeout=None))
    return redis.asyncio.Redis.from_pool(redis.asyncio.BlockingConnectionPool(port=port, timeout=60))


def resp2(mode: Mode, port: int) -> Any:
    made = redis.Redis if mode == "sync" else redis.asyncio.Redis
    return made(port=port, protocol=2, decode_responses=True)


CLIENTS: list[Callable[[Mode, int], Any]] = [plain, blocking, resp2]


class Caller:
    """A ledger of either kind on a client, called without `await`."""

    def __init__(self, client: Any, namespace: str, **options: Any) -> None:
        self._runner = asyncio.Runner() if type(client).__module__.startswith("redis.asyncio") else None
        kind: Any = Ledger if self._runner is None else AsyncLedger
        self.client = client
        self.ledger = kind(client, namespace=namespace, **{"socket_timeout": DEADLINE, **options})

    def claim(self, key: str = ROW[1]) -> Any:
        return self._run(self.ledger.claim(ROW[0], key, "f"))

    def complete(self, r: Any, response: StoredResponse) -> None:
        self._run(self.ledger.complete(r, response))

    def close(self) -> None:
        self._run(self.ledger.close())
        self._run(self.client.close() if self._runner is None else self.client.aclose())
        if self._runner is not None:
            self._runner.close()

    def _run(self, value: Any) -> Any:
        return value if self._runner is None else self._runner.run(value)


@contextmanager
def calling(client: Any, namespace: str, **options: Any) -> Iterator[Caller]:
    caller = Caller(client, namespace, **options)
    yield caller
    caller.close()


def given_up(caller: Caller, key: str = "key-2") -> LedgerUnavailable:
    began = time.monotonic()
    with pytest.raises(LedgerUnavailable) as unavailable:
        caller.claim(key)
    assert time.monotonic() - began < BOUND
    return unavailable.value


@pytest.mark.slow
@pytest.mark.parametrize("trouble", TROUBLES, ids=lambda each: each.__name__)
@pytest.mark.parametrize("make", CLIENTS, ids=lambda each: each.__name__)
def test_a_call_ends_in_time_with_any_client(
    mode: Mode, valkey_server: Server, namespace: str, make: Any, trouble: Any
) -> None:
    with trouble(valkey_server) as port, calling(make(mode, port), namespace) as caller:
        assert given_up(caller).reason == "timeout"
        assert given_up(caller).reason == "timeout"  # and again, on what the first left behind


@pytest.mark.slow
@pytest.mark.parametrize("make", CLIENTS, ids=lambda each: each.__name__)
def test_a_server_that_hangs_in_the_middle_and_comes_back_is_used_again(
    mode: Mode, valkey_server: Server, namespace: str, make: Any
) -> None:
    with Proxy(valkey_server.port, b"") as proxy, calling(make(mode, proxy.port), namespace) as caller:
        caller.claim()
        proxy.hold()
        assert given_up(caller).reason == "timeout"
        proxy.hold(False)
        wait_until(lambda: serves(caller))


def serves(caller: Caller) -> bool:
    with suppress(LedgerUnavailable):
        return bool(caller.claim("key-3"))
    return False


@pytest.mark.slow
def test_many_calls_at_once_to_a_server_that_hangs_all_end_in_time(valkey_server: Server, namespace: str) -> None:
    with Proxy(valkey_server.port, b"") as proxy, calling(plain("sync", proxy.port), namespace) as caller:
        caller.claim()
        proxy.hold()
        took = []

        def call(number: int) -> None:
            began = time.monotonic()
            with suppress(LedgerUnavailable):
                caller.ledger.claim("acct_1", f"many-{number}", "f")
            took.append(time.monotonic() - began)

        threads = [threading.Thread(target=call, args=(number,)) for number in range(12)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        proxy.hold(False)
    assert len(took) == 12
    assert max(took) < BOUND


IN_GEVENT = """
from gevent import monkey
monkey.patch_all()
import sys, time, gevent, redis
from idemredis import Ledger, LedgerUnavailable
ledger = Ledger(redis.Redis(port=int(sys.argv[1]), socket_timeout=None))
def call(number):
    began = time.monotonic()
    try:
        ledger.claim("acct_1", f"key-{number}", "f")
    except LedgerUnavailable as error:
        return error.reason, time.monotonic() - began
calls = [gevent.spawn(call, number) for number in range(5)]
gevent.joinall(calls, raise_error=True)
assert {each.value[0] for each in calls} == {"timeout"}, [each.value for each in calls]
print(max(each.value[1] for each in calls))
"""


@pytest.mark.slow
@pytest.mark.parametrize("trouble", TROUBLES, ids=lambda each: each.__name__)
def test_greenlets_are_not_held_up_either(valkey_server: Server, trouble: Any) -> None:
    with trouble(valkey_server) as port:
        words = [sys.executable, "-c", IN_GEVENT, str(port)]
        ran = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, ran.stderr
    assert float(ran.stdout) < BOUND


PATCHED_LATE = """
import sys, warnings, redis
from idemredis import Ledger
ledger = Ledger(redis.Redis(port=int(sys.argv[1])), namespace=sys.argv[2])
warnings.simplefilter("ignore")
from gevent import monkey
monkey.patch_all()
import gevent
def call(number):
    ledger.claim("acct_1", f"key-{number}", "f")
for number in range(3):
    gevent.joinall([gevent.spawn(call, f"{number}-{each}") for each in range(20)], raise_error=True)
    gevent.sleep(0.5)  # long enough for what watches the calls to find none under way
print("done")
"""


@pytest.mark.slow
def test_what_watches_the_calls_holds_nobody_up_when_gevent_patches_late(valkey_server: Server, namespace: str) -> None:
    words = [sys.executable, "-c", PATCHED_LATE, str(valkey_server.port), namespace]
    ran = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert ran.stdout == "done\n", ran.stderr


@pytest.mark.slow
def test_a_shorter_timeout_of_the_clients_own_is_obeyed(mode: Mode, valkey_server: Server, namespace: str) -> None:
    made = redis.Redis if mode == "sync" else redis.asyncio.Redis
    with Proxy(valkey_server.port, b"") as proxy:
        client: Any = made(port=proxy.port, socket_timeout=0.2)
        with calling(client, namespace, socket_timeout=60.0) as caller:
            caller.claim()
            proxy.hold()
            given_up(caller)
            proxy.hold(False)


def test_a_call_in_asyncio_makes_no_task_and_leaves_the_clients_own_timeout_as_it_was(
    valkey_server: Server, namespace: str
) -> None:
    made: list[Any] = []

    def count(loop: asyncio.AbstractEventLoop, work: Any, **options: Any) -> asyncio.Task[Any]:
        made.append(work)
        return asyncio.Task(work, loop=loop, **options)

    async def scene() -> None:
        async with redis.asyncio.Redis(port=valkey_server.port, socket_timeout=7.0) as client:
            ledger = AsyncLedger(client, namespace=namespace)
            await ledger.claim(*ROW, "f")
            asyncio.get_running_loop().set_task_factory(count)
            await ledger.claim(*ROW, "f")
            assert made == []
            pool: Any = client.connection_pool
            connection = pool.get_available_connection()
            assert connection.is_connected
            assert connection.socket_timeout == 7.0
            await pool.release(connection)
            await ledger.close()

    asyncio.run(scene())


@pytest.mark.slow
def test_a_cancelled_task_stays_cancelled_also_when_its_call_is_overdue(valkey_server: Server, namespace: str) -> None:
    """Cancelled by somebody else between the end of the call's time and the task's next step."""
    ended: list[str] = []

    async def attempt(ledger: AsyncLedger) -> None:
        try:
            await ledger.claim(*ROW, "f")
        except asyncio.CancelledError:
            ended.append("cancelled")
            raise
        except LedgerUnavailable as error:
            ended.append(error.reason)

    def cancel_too(task: asyncio.Task[None]) -> None:
        if task.cancelling():  # by the deadline
            task.cancel()
        else:
            asyncio.get_running_loop().call_soon(cancel_too, task)

    async def scene(port: int) -> None:
        async with redis.asyncio.Redis(port=port) as client:
            ledger = AsyncLedger(client, namespace=namespace, socket_timeout=0.2)
            alone = asyncio.create_task(attempt(ledger))
            await asyncio.wait([alone])
            assert ended == ["timeout"]
            assert not alone.cancelled()
            both = asyncio.create_task(attempt(ledger))
            cancel_too(both)
            await asyncio.wait([both])
            assert ended[1:] == ["cancelled"]
            assert both.cancelled()
            await ledger.close()

    with half_open(valkey_server) as port:
        asyncio.run(scene(port))


def test_a_timeout_that_a_notice_of_the_server_has_relaxed_is_reset_also_during_a_call(
    valkey_server: Server, namespace: str
) -> None:
    """What redis-py does at the notices that come before and after a server is moved."""

    async def scene(proxy: Proxy) -> None:
        async with redis.asyncio.Redis(port=proxy.port, socket_timeout=None) as client:
            ledger = AsyncLedger(client, namespace=namespace)
            await client.ping()
            pool: Any = client.connection_pool
            connection = pool.get_available_connection()
            if not hasattr(connection, "set_tmp_settings"):
                pytest.skip("this redis-py knows no such notices")
            connection.set_tmp_settings(tmp_relaxed_timeout=10.0)
            await pool.release(connection)
            proxy.hold(True)
            claim = asyncio.create_task(ledger.claim(*ROW, "f"))
            await asyncio.sleep(0)  # one turn: the call has the connection, and its reply is held
            connection.reset_tmp_settings(reset_relaxed_timeout=True)
            proxy.hold(False)
            assert isinstance(await claim, Reservation)
            assert connection.is_connected
            assert connection.socket_timeout is None
            await ledger.close()

    with Proxy(valkey_server.port) as proxy:
        asyncio.run(scene(proxy))


class SlowCredentials(CredentialProvider):
    """Asks for a password as many providers do: over HTTP, on the event loop's own thread."""

    def get_credentials(self) -> tuple[str, str]:
        time.sleep(0.4)  # blocks the loop for longer than the call has
        return "default", "any"


@pytest.mark.slow
def test_a_call_ends_in_time_although_its_time_was_over_while_the_client_logged_in(
    valkey_server: Server, namespace: str
) -> None:
    """In Python 3.11, redis-py's `asyncio.wait_for` may swallow the cancellation then."""

    async def scene() -> float:
        options: Any = {"socket_timeout": 0.3, "credential_provider": SlowCredentials()}
        async with redis.asyncio.Redis(port=valkey_server.port, **options) as client:
            ledger = AsyncLedger(client, namespace=namespace)
            began = time.monotonic()
            async with asyncio.timeout(BOUND):
                with pytest.raises(LedgerUnavailable, match="Timeout"):
                    await ledger.claim(*ROW, "f")
            return time.monotonic() - began

    with valkey_server.client() as client:
        client.client_pause(60_000, all=False)  # scripts wait, logins do not
        try:
            assert asyncio.run(scene()) < BOUND
        finally:
            client.client_unpause()


class InterruptedLoop(asyncio.SelectorEventLoop):
    """Its first look at the calls is ended by an exception, as by one that the handler of a signal raises."""

    _was_interrupted = False

    def call_later(  # type: ignore[override]  # typeshed ties the arguments to the callback
        self, delay: float, callback: Any, *args: Any, context: Any = None
    ) -> asyncio.TimerHandle:
        if delay == TICK and not self._was_interrupted:
            self._was_interrupted = True
            callback = _interrupted
        return super().call_later(delay, callback, *args, context=context)


def _interrupted() -> None:
    raise ValueError("of a signal's handler")


@pytest.mark.slow
def test_a_look_at_the_calls_that_an_exception_ends_is_made_up_for(valkey_server: Server, namespace: str) -> None:
    raised: list[Any] = []

    async def scene(port: int) -> list[Any]:
        asyncio.get_running_loop().set_exception_handler(lambda loop, found: raised.append(found["exception"]))
        async with redis.asyncio.Redis(port=port) as client:
            ledger = AsyncLedger(client, namespace=namespace, socket_timeout=0.2)
            first = asyncio.create_task(ledger.claim(*ROW, "f"))
            await asyncio.wait([first], timeout=TICK + LATE + 0.5)
            assert not first.done()
            ended = await asyncio.gather(first, ledger.claim("acct_1", "key-2", "f"), return_exceptions=True)
            await ledger.close()
            return list(ended)

    with half_open(valkey_server) as port, asyncio.Runner(loop_factory=InterruptedLoop) as runner:
        began = time.monotonic()
        assert [type(error) for error in runner.run(scene(port))] == [LedgerUnavailable] * 2
        assert time.monotonic() - began < TICK + LATE + BOUND
    assert [type(error) for error in raised] == [ValueError]


@pytest.mark.slow
def test_calls_on_the_event_loops_of_several_threads_all_end_in_time(valkey_server: Server, namespace: str) -> None:
    with half_open(valkey_server) as port, ThreadPoolExecutor(3) as pool:

        def attempt(number: int) -> str:
            with calling(redis.asyncio.Redis(port=port), f"{namespace}-{number}") as caller:
                return given_up(caller).reason

        assert list(pool.map(attempt, range(6))) == ["timeout"] * 6


@pytest.mark.slow
def test_sentinels_that_hang_are_given_up(mode: Mode, valkey_server: Server, namespace: str) -> None:
    made: Any = redis.sentinel.Sentinel if mode == "sync" else redis.asyncio.sentinel.Sentinel
    with half_open(valkey_server) as port:
        client = made([("127.0.0.1", port)]).master_for("ledger")
        with calling(client, namespace) as caller:
            assert given_up(caller).reason == "timeout"
            given_up(caller)


@pytest.mark.slow
def test_a_node_of_a_cluster_that_hangs_is_given_up(mode: Mode, cluster: Cluster, namespace: str) -> None:
    client = cluster.client() if mode == "sync" else cluster.async_client()
    with calling(client, namespace) as caller:
        keys = [f"key-{number}" for number in range(20)]
        wait_until(lambda: all(serves_key(caller, key) for key in keys))
        cluster.nodes[2].freeze()
        try:
            began = time.monotonic()
            refused = 0
            for key in keys:
                try:
                    caller.claim(key)
                except LedgerUnavailable:
                    refused += 1
                    assert time.monotonic() - began < BOUND
                    break
                began = time.monotonic()
        finally:
            cluster.nodes[2].thaw()
        assert refused
        wait_until(lambda: all(serves_key(caller, key) for key in keys))


def serves_key(caller: Caller, key: str) -> bool:
    with suppress(LedgerUnavailable):
        return bool(caller.claim(key))
    return False


# A full pool


@pytest.mark.parametrize("kind", ["pool", "blocking"])
def test_a_full_pool_is_waited_for(valkey_server: Server, namespace: str, kind: str) -> None:
    made: Any = redis.ConnectionPool if kind == "pool" else redis.BlockingConnectionPool
    pool = made(port=valkey_server.port, max_connections=1)
    with calling(redis.Redis.from_pool(pool), namespace, socket_timeout=20.0) as caller:
        taken = pool.get_connection()
        threading.Timer(0.2, pool.release, [taken]).start()
        assert isinstance(caller.claim(), Reservation)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["pool", "blocking"])
def test_a_pool_that_stays_full_is_busy_here_and_nothing_ran(
    mode: Mode, valkey_server: Server, namespace: str, kind: str
) -> None:
    where = redis if mode == "sync" else redis.asyncio
    made: Any = where.ConnectionPool if kind == "pool" else where.BlockingConnectionPool
    pool = made(port=valkey_server.port, max_connections=1)
    with calling(where.Redis.from_pool(pool), namespace) as caller:
        taken = pool.get_connection() if mode == "sync" else pool.get_available_connection()
        busy = given_up(caller)
        assert (busy.reason, busy.unknown) == ("busy_pool", False)
        assert "all 1 connections of the client's pool are busy" in str(busy)
        assert str(busy).endswith("it did not run")
        caller._run(pool.release(taken))
        assert isinstance(caller.claim(), Reservation)


# What the client was made with


@pytest.mark.parametrize(
    "options",
    [
        {"protocol": 2},
        {"protocol": 3},
        {"decode_responses": True},
        {"protocol": 3, "decode_responses": True},
        {"health_check_interval": 1},
        {"client_name": "shop"},
        {"db": 3},
        {"single_connection_client": True},
    ],
    ids=str,
)
def test_a_ledger_works_with_whatever_the_client_was_made_with(
    mode: Mode, real_server: Server, namespace: str, options: dict[str, Any]
) -> None:
    client = real_server.client(**options) if mode == "sync" else real_server.async_client(**options)
    stored = StoredResponse(201, (("content-type", "text/plain"),), b"\xff\x00done")
    with calling(client, namespace, socket_timeout=20.0, policy=Policy(heartbeat=False)) as caller:
        r = caller.claim()
        caller.complete(r, stored)
        assert caller.claim() == Replay(stored, 1, False)
        if "client_name" in options:
            with real_server.client() as admin:
                assert "shop" in {each["name"] for each in admin.client_list()}


def test_why_a_call_failed_is_said_without_a_secret(valkey_server: Server, namespace: str) -> None:
    trouble = Trouble(greeting=b"-ERR no TLS here\r\n")
    made = {
        "connection": redis.Redis(port=free_port()),
        "credentials": redis.Redis(port=valkey_server.port, username="nobody", password="pw-secret"),
        "tls": redis.Redis(port=trouble.port, ssl=True),
    }
    for reason, client in made.items():
        with calling(client, namespace, socket_timeout=20.0) as caller:
            refused = given_up(caller)
            assert (refused.reason, refused.unknown) == (reason, False)
            assert "pw-secret" not in str(refused)
    trouble.close()
