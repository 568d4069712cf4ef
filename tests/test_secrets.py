"""No password is in a message, a repr, a log line or a local variable of a frame that an error comes through."""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import redis
import redis.asyncio
from click.testing import CliRunner
from flask import Flask, got_request_exception

from idemredis import AsyncLedger, ConfigurationError, Ledger, LedgerUnavailable
from idemredis.flask import Idempotency
from idemredis.operating.cli import main
from idemredis.store import clients
from idemredis.store.nodes import connect
from idemredis.web.settings import Settings
from tests.support.frames import leaks
from tests.support.servers import Server

SECRET = "s3cret"
PASSWORD = f"my-{SECRET}-password"


@pytest.fixture
def guarded(real_server: Server) -> Iterator[Server]:
    """A server that knows one user, with another password."""
    with real_server.client() as client:
        client.acl_setuser("somebody", enabled=True, passwords=["+right"], keys=["*"], commands=["+@all"])
        yield real_server
        client.acl_deluser("somebody")


@pytest.fixture(autouse=True)
def nothing_in_the_log(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    caplog.set_level(logging.DEBUG)
    yield
    assert SECRET not in caplog.text
    for record in caplog.records:
        assert record.exc_info is None or leaks(record.exc_info[1], SECRET) == []  # type: ignore[arg-type]


@contextmanager
def hanging() -> Iterator[int]:
    """A port where connections are accepted and nothing is ever said."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


@contextmanager
def babbling() -> Iterator[int]:
    """A port where something speaks that is no Redis."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            while True:
                try:
                    near, _ = listener.accept()
                except OSError:
                    return
                with near:
                    near.recv(1)
                    near.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        yield listener.getsockname()[1]
        listener.shutdown(socket.SHUT_RDWR)
    thread.join(5.0)


REPR_IS_SAFE = hasattr(redis.ConnectionPool, "SENSITIVE_REPR_KEYS")
"""Whether redis-py leaves passwords out of the repr of its clients, as it does since 7.4."""

TROUBLES = ["wrong password", "refused", "hanging", "babbling", "tls"]


@pytest.fixture(params=TROUBLES)
def url(request: pytest.FixtureRequest) -> Iterator[str]:
    """The URL of a server that cannot be used, each in its way."""
    credentials = f"somebody:{PASSWORD}"
    match request.param:
        case "wrong password":
            yield f"redis://{credentials}@127.0.0.1:{request.getfixturevalue('guarded').port}/0"
        case "refused":
            with socket.create_server(("127.0.0.1", 0)) as listener:
                port = listener.getsockname()[1]
            yield f"redis://{credentials}@127.0.0.1:{port}/0"
        case "hanging":
            with hanging() as port:
                yield f"redis://{credentials}@127.0.0.1:{port}/0"
        case "babbling":
            with babbling() as port:
                yield f"redis://{credentials}@127.0.0.1:{port}/0"
        case "tls":
            with babbling() as port:
                yield f"rediss://{credentials}@127.0.0.1:{port}/0"


@pytest.fixture
def real_server(valkey_server: Server) -> Server:
    return valkey_server


def raised(run: Callable[[], object], *kinds: type[BaseException]) -> BaseException:
    with pytest.raises(kinds or (LedgerUnavailable,)) as error:
        run()
    return error.value


def test_the_walk_finds_what_is_there(url: str) -> None:
    """With redis-py alone, the password is in a local variable of one of its frames, or of ours."""

    def fail(secret: dict[str, list[str]]) -> None:
        raise ValueError("no")

    code = compile("def fail(url):\n    raise ValueError('no')", "elsewhere.py", "exec")
    names: dict[str, Any] = {}
    exec(code, names)
    assert leaks(raised(lambda: names["fail"]({"url": [url]}), ValueError), SECRET)


LEDGER: dict[str, Callable[[Ledger], object]] = {
    "claim": lambda ledger: ledger.claim("a", "k", "f"),
    "claim and wait": lambda ledger: ledger.claim("a", "k", "f", wait=0.1),
    "read": lambda ledger: ledger.read("a", "k"),
    "reserve": lambda ledger: ledger.reserve("a", "k", "f").__enter__(),
    "once": lambda ledger: ledger.once(principal="a", key="k")(lambda: 1)(),
}


@pytest.mark.parametrize("made", ["by us", "by the user"])
@pytest.mark.parametrize("how", LEDGER)
def test_a_ledger(url: str, how: str, made: str) -> None:
    if made == "by us":
        ledger = Ledger.from_url(url, socket_timeout=0.2)
    else:
        ledger = Ledger(redis.Redis.from_url(url, retry=None), socket_timeout=0.2)
    assert leaks(raised(lambda: LEDGER[how](ledger)), SECRET) == []
    ledger.close()
    ledger.client.close()


@pytest.mark.slow
@pytest.mark.parametrize("made", ["by us", "by the user"])
@pytest.mark.parametrize("how", ["claim", "read", "reserve", "once"])
def test_an_async_ledger(url: str, how: str, made: str) -> None:
    async def run() -> BaseException:
        if made == "by us":
            ledger = AsyncLedger.from_url(url, socket_timeout=0.2)
        else:
            ledger = AsyncLedger(redis.asyncio.Redis.from_url(url), socket_timeout=0.2)

        async def function() -> int:
            return 1

        calls: dict[str, Callable[[], Awaitable[object]]] = {
            "claim": lambda: ledger.claim("a", "k", "f"),
            "read": lambda: ledger.read("a", "k"),
            "reserve": lambda: ledger.reserve("a", "k", "f").__aenter__(),
            "once": lambda: ledger.once(principal="a", key="k")(function)(),
        }
        with pytest.raises(LedgerUnavailable) as error:
            await calls[how]()
        await ledger.close()
        await ledger.client.aclose()
        return error.value

    assert leaks(asyncio.run(run()), SECRET) == []


def test_an_async_ledger_that_is_cancelled_while_it_connects() -> None:
    async def run() -> BaseException:
        sent = asyncio.Event()

        async def hang(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            if PASSWORD.encode() in await reader.read(4096):
                sent.set()
            await reader.read()
            writer.close()

        async with await asyncio.start_server(hang, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            ledger = AsyncLedger.from_url(f"redis://somebody:{PASSWORD}@127.0.0.1:{port}/0", socket_timeout=5.0)
            claim = asyncio.create_task(ledger.claim("a", "k", "f"))
            await asyncio.wait_for(sent.wait(), 20.0)
            claim.cancel()
            with pytest.raises(asyncio.CancelledError) as error:
                await claim
            server.close()

            await ledger.close()
            await ledger.client.aclose()
        return error.value

    assert leaks(asyncio.run(run()), SECRET) == []


def test_doctor(url: str) -> None:
    ledger = Ledger.from_url(url, socket_timeout=0.2)
    report = ledger.check()
    assert not report.reachable
    assert SECRET not in repr(report)
    ledger.close()
    ledger.client.close()

    async def check() -> str:
        there = AsyncLedger.from_url(url, socket_timeout=0.2)
        report = await there.check()
        await there.close()
        await there.client.aclose()
        return repr(report)

    assert SECRET not in asyncio.run(check())


COMMANDS = [
    ["ls"],
    ["stats"],
    ["show", "a", "k"],
    ["release", "a", "k", "--yes"],
    ["forget", "a", "k", "--yes"],
    ["tail", "--seconds", "0"],
    ["doctor"],
    ["acl"],
]


@pytest.mark.slow
@pytest.mark.parametrize("words", COMMANDS, ids=lambda words: words[0])
def test_the_command_line(url: str, words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("IDEMREDIS_URL", url)
    ran = CliRunner().invoke(main, ["--timeout", "0.2", *words])
    assert SECRET not in ran.output
    assert ran.exit_code in ((0,) if words == ["acl"] else (1, 2))
    assert ran.exc_info is not None
    assert ran.exc_info[1] is None or leaks(ran.exc_info[1], SECRET) == []


def test_a_client_of_a_cluster(url: str) -> None:
    assert leaks(raised(lambda: connect(url, 0.2)), SECRET) == []


def door(url: Any, **settings: Any) -> Flask:
    app = Flask("shop")
    app.config.update(IDEMREDIS_URL=url, IDEMREDIS_SOCKET_TIMEOUT_SECONDS=0.2, **settings)
    idempotency = Idempotency(app, principal="a")

    @app.post("/")
    @idempotency.protect
    def view() -> str:
        raise LookupError("of the view")

    return app


def test_the_flask_door_while_redis_is_away(url: str) -> None:
    answer = door(url).test_client().post("/", headers={"Idempotency-Key": "k"})
    assert answer.status_code == 503
    assert SECRET not in answer.text


@pytest.mark.parametrize("mode", ["enforce", "observe", "off"])
def test_an_exception_of_a_protected_view(real_server: Server, namespace: str, mode: str) -> None:
    """The settings are a local variable of each protected request's frames."""
    with real_server.client() as client:
        client.acl_setuser("us", enabled=True, passwords=[f"+{PASSWORD}"], keys=["*"], commands=["+@all"])
    app = door(
        f"redis://us:{PASSWORD}@127.0.0.1:{real_server.port}/0", IDEMREDIS_NAMESPACE=namespace, IDEMREDIS_MODE=mode
    )
    app.testing = False
    caught: list[BaseException] = []
    got_request_exception.connect(lambda sender, exception: caught.append(exception), app, weak=False)
    assert app.test_client().post("/", headers={"Idempotency-Key": "k"}).status_code == 500
    [error] = caught
    assert isinstance(error, LookupError)
    assert leaks(error, SECRET) == []
    state = app.extensions["idemredis"]
    assert SECRET not in repr(state) + repr(vars(state.settings) if hasattr(state.settings, "__dict__") else "")
    assert state.settings.url is None
    state.ledger.close()
    with real_server.client() as client:
        client.acl_deluser("us")


UNUSABLE = [
    f"http://somebody:{PASSWORD}@localhost/0",
    f"somebody:{PASSWORD}@localhost",
    f"redis:/somebody:{PASSWORD}@localhost",
    f"redis://somebody:{PASSWORD}#@localhost:6379/0",
    f"redis://somebody:#{PASSWORD}@localhost:6379/0",
    f"redis://somebody:/{PASSWORD}@localhost:6379/0",
    f"redis://somebody:6379?{PASSWORD}@localhost/0",
    f"redis://somebody:6379?{PASSWORD}=@localhost/0",
    f"redis://somebody:6379?x={PASSWORD}@localhost/0",
    f"redis://somebody:6379/0?{PASSWORD}=1",
    f"redis://somebody:[{PASSWORD}@localhost:6379/0",
    f"redis://somebody:{PASSWORD}]@localhost:6379/0",
    f"redis://[{PASSWORD}]:6379/0",
    f"redis://somebody:{PASSWORD}\u2100@localhost:6379/0",
    f"redis://localhost:{PASSWORD}/0",
    f"redis://somebody:{PASSWORD}@localhost:70000/0",
    f"redis://somebody:{PASSWORD}@localhost:6379/database",
    f"redis://somebody:{PASSWORD}@localhost:6379/0?socket_timeout={PASSWORD}",
    f"redis://somebody:{PASSWORD}@localhost:6379/0?socket_timeuot=1",
    f"unix://somebody:{PASSWORD}@/tmp/x.sock?db={PASSWORD}",
    f"  redis://somebody:{PASSWORD}@localhost",
    f"REDIS+SENTINEL://somebody:{PASSWORD}@localhost",
]


@pytest.mark.parametrize("bad", UNUSABLE)
def test_a_url_that_cannot_be_used_is_not_quoted(bad: str, monkeypatch: pytest.MonkeyPatch) -> None:
    refused = raised(lambda: door(bad), ConfigurationError)
    assert "IDEMREDIS_URL" in str(refused) or "the URL" in str(refused)
    assert leaks(refused, SECRET) == []
    makers: list[Any] = [clients.client, clients.async_client, connect, Ledger.from_url, AsyncLedger.from_url]
    for make in makers:
        try:
            made = make(bad)
            shown = [repr(made)] if REPR_IS_SAFE or isinstance(made, (Ledger, AsyncLedger)) else []
        except Exception as error:  # some of these are only found out on connecting
            shown = leaks(error, SECRET)
        assert SECRET not in "".join(shown)
    monkeypatch.setenv("IDEMREDIS_URL", bad)
    ran = CliRunner().invoke(main, ["--timeout", "0.2", "ls"])
    assert (ran.exit_code, SECRET in ran.output) == (2, False)


@pytest.mark.parametrize("wrong", [f"redis://:{PASSWORD}@localhost/0", f"redis://:{PASSWORD}@localhost/0".encode()])
def test_a_url_in_the_place_of_something_else_is_not_quoted(wrong: Any) -> None:
    ways: list[Callable[[], object]] = [
        lambda: Ledger(wrong),
        lambda: AsyncLedger(wrong),
        lambda: Idempotency(principal="a", ledger=wrong),
        lambda: Idempotency(Flask("shop"), principal="a", client=wrong),
    ]
    if isinstance(wrong, bytes):
        ways.append(lambda: door(wrong))
    for way in ways:
        assert leaks(raised(way, ConfigurationError), SECRET) == []


@pytest.mark.parametrize("other", ["LEASE_SECONDS", "MODE", "URLS", "MIN_REPLICAS", "METHODS"])
def test_another_setting_that_is_wrong_shows_nothing_of_the_url(other: str) -> None:
    url = f"redis://somebody:{PASSWORD}@localhost:6379/0"
    assert leaks(raised(lambda: door(url, **{f"IDEMREDIS_{other}": -1}), ConfigurationError), SECRET) == []
    assert leaks(raised(lambda: Ledger.from_url(url, namespace=""), ConfigurationError), SECRET) == []
    assert leaks(raised(lambda: Ledger.from_url(url, socket_timeout=-1), ConfigurationError), SECRET) == []
    assert SECRET not in repr(Settings.read({"URL": url}))
