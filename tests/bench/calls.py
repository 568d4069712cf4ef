"""What a call costs: the ledger, sync and async, and the Flask extension, against raw redis-py calls."""

from __future__ import annotations

import asyncio
import io
import statistics
import time
from collections.abc import Awaitable, Callable, Iterable
from itertools import count
from typing import Any

import redis
from flask import Flask
from werkzeug.test import EnvironBuilder

from idemredis import AsyncLedger, Ledger, Policy, Replay, Reservation, StoredResponse
from idemredis.core.scripts import load
from idemredis.flask import Idempotency
from tests.support.servers import Server

from .turns import Figure, in_turns

__all__ = ["ANSWER", "BODY", "FINGERPRINT", "async_ledger", "extension", "ledger", "own_python"]

FINGERPRINT = "f" * 64
OWNER = "0123456789abcdef"
BODY = b'{"id":"ch_1","amount":1000}'.ljust(500)
HEADERS = '[["content-type","application/json"]]'
ANSWER = StoredResponse(201, (("content-type", "application/json"),), BODY)
LEASE, RETENTION = 30_000, 86_400_000
CREATED_AT = 1_800_000_000_000
TASKS = 64

_keys = count()


def key() -> str:
    """One that was not used before, as long as a UUID."""
    return f"8e03978e-40d5-43dd-bc93-{next(_keys):012x}"


class Raw:
    """The same scripts on the same rows through redis-py, and nothing else."""

    def __init__(self, client: redis.Redis) -> None:
        self._client: Any = client
        for script in load().values():
            client.script_load(script.text)

    def claim(self, row: str) -> Any:
        return self._client.evalsha(load()["claim"].sha, 1, row, OWNER, FINGERPRINT, LEASE, RETENTION, CREATED_AT, "")

    def renew(self, row: str) -> Any:
        return self._client.evalsha(load()["renew"].sha, 1, row, 1, OWNER, LEASE, RETENTION)

    def first_run(self) -> None:
        row = f"idem:acct_1:{key()}"
        self.claim(row)
        self.complete(row)

    def complete(self, row: str) -> Any:
        return self._client.evalsha(load()["complete"].sha, 1, row, 1, OWNER, RETENTION, 201, HEADERS, BODY, "")


def ledger(server: Server) -> Iterable[Figure]:
    """`Ledger` against raw EVALSHA, SET and GET."""
    with server.client() as client:
        raw, ours = Raw(client), Ledger(client)
        done, busy = key(), key()
        held = ours.claim("acct_1", done, FINGERPRINT)
        assert isinstance(held, Reservation)
        ours.complete(held, ANSWER)
        ours.claim("acct_1", busy, FINGERPRINT)
        row = f"idem:acct_1:{done}"
        client.set("bench:answer", BODY, px=RETENTION)

        def first_run() -> None:
            r = ours.claim("acct_1", key(), FINGERPRINT)
            assert isinstance(r, Reservation)
            ours.complete(r, ANSWER)

        def floor() -> None:
            row = f"bench:acct_1:{key()}"
            client.set(row, OWNER, nx=True, px=LEASE)
            client.set(row, BODY, px=RETENTION)

        turns = in_turns(
            {
                "claim+complete": first_run,
                "2 EVALSHA": raw.first_run,
                "SET NX + SET": floor,
                "replay": lambda: ours.claim("acct_1", done, FINGERPRINT),
                "EVALSHA": lambda: raw.claim(row),
                "GET": lambda: client.get("bench:answer"),
                "in progress": lambda: ours.claim("acct_1", busy, FINGERPRINT),
                "EVALSHA busy": lambda: raw.claim(f"idem:acct_1:{busy}"),
                "reused": lambda: ours.claim("acct_1", done, "other"),
            }
        )
    yield Figure(
        "claim+complete : 2 raw EVALSHA",
        turns.ratio("claim+complete", "2 EVALSHA"),
        "x",
        1.2,
        note=turns.note("claim+complete", "2 EVALSHA"),
    )
    yield Figure(
        "replay : raw EVALSHA", turns.ratio("replay", "EVALSHA"), "x", 1.2, note=turns.note("replay", "EVALSHA")
    )
    yield Figure(
        "in progress : raw EVALSHA",
        turns.ratio("in progress", "EVALSHA busy"),
        "x",
        1.2,
        note=turns.note("in progress", "EVALSHA busy"),
    )
    yield Figure(
        "reused : raw EVALSHA of a replay", turns.ratio("reused", "EVALSHA"), "x", 1.2, note=turns.note("reused")
    )
    yield Figure(
        "claim+complete : SET NX PX + SET PX",
        turns.ratio("claim+complete", "SET NX + SET"),
        "x",
        1.25,
        note=turns.note("SET NX + SET"),
    )
    yield Figure("replay : GET", turns.ratio("replay", "GET"), "x", 1.3, note=turns.note("GET"))
    least = turns.ratio("2 EVALSHA", "SET NX + SET")
    yield Figure("2 raw EVALSHA : SET NX PX + SET PX (the least it can be)", least, "x")
    yield Figure("raw EVALSHA of a replay : GET (the least it can be)", turns.ratio("EVALSHA", "GET"), "x")


class InstantConnection:
    """A connection that replies at once: to claims what is chosen, to all else that it is done."""

    def __init__(self, reply: list[bytes]) -> None:
        self.reply = reply
        self._claim = load()["claim"].sha.encode()
        self._packed: list[bytes] = []

    def send_packed_command(self, packed: list[bytes]) -> None:
        self._packed = packed

    def read_response(self, **how: object) -> list[bytes]:
        words = self._packed[0].split(b"\r\n", 13)
        if words[4] == self._claim:
            return [self.reply[0], words[10], *self.reply[1:]]
        return [b"completed", words[12]]

    def disconnect(self) -> None:
        """There is nothing to close."""


class InstantPool(redis.ConnectionPool):
    """A pool of one such connection."""

    def __init__(self, reply: list[bytes]) -> None:
        super().__init__()
        self.connection: Any = InstantConnection(reply)

    def get_connection(self, *args: Any, **options: Any) -> Any:
        return self.connection

    def release(self, connection: Any) -> None:
        """It is never taken."""


def instant(reply: list[bytes]) -> redis.Redis:
    """Return a client that replies at once."""
    return redis.Redis(connection_pool=InstantPool(reply))


def own_python(server: Server | None = None) -> Iterable[Figure]:
    """Our own Python in each call: µs with a client that answers at once."""
    client = instant([b"claimed", b"1"])
    connection: Any = client.connection_pool.get_connection()
    ours = Ledger(client)
    replay = [b"replay", b"1", b"201", HEADERS.encode(), BODY]
    r = ours.claim("acct_1", key(), FINGERPRINT)
    assert isinstance(r, Reservation)

    def complete() -> None:
        ours.complete(r, ANSWER)

    def claim(reply: list[bytes]) -> Callable[[], object]:
        def run() -> object:
            connection.reply = reply
            return ours.claim("acct_1", "8e03978e-40d5-43dd-bc93-6894a57f9324", FINGERPRINT)

        return run

    turns = in_turns(
        {
            "claim": claim([b"claimed", b"1"]),
            "complete": complete,
            "replay": claim(replay),
            "in progress": claim([b"in_progress", b"29000"]),
            "protected": post(shop(Ledger(instant([b"claimed", b"1"])), protect=True)),
            "plain": post(shop(None, protect=False)),
            "without key": post(shop(Ledger(instant([b"claimed", b"1"])), protect=False), keyed=False),
            "plain without key": post(shop(None, protect=False), keyed=False),
            "with key": post(shop(Ledger(instant([b"claimed", b"1"])), protect=False)),
        },
        calls=300,
    )
    for what, aim in (("claim", 6.6), ("complete", 4.5), ("replay", 6.2), ("in progress", None)):
        yield Figure(f"own Python: {what}", turns.best(what), "µs", aim)
    yield Figure(
        "own Python: protected request",
        turns.best("protected") - turns.best("plain"),
        "µs",
        60.0,
        note=f"protected {turns.best('protected'):.1f}, plain {turns.best('plain'):.1f} µs",
    )
    unprotected = turns.best("without key") - turns.best("plain without key")
    yield Figure("own Python: an unprotected view", unprotected, "µs", 2.0)
    keyed = turns.best("with key") - turns.best("plain")
    yield Figure("own Python: an unprotected view that is sent a key", keyed, "µs")


def shop(ledger: Ledger | None, *, protect: bool) -> Flask:
    """An application with one view; with a ledger, one that the extension is set up on."""
    app = Flask("shop")

    def charge() -> tuple[bytes, int, dict[str, str]]:
        return BODY, 201, {"Content-Type": "application/json"}

    view: Callable[[], tuple[bytes, int, dict[str, str]]] = charge
    if ledger is not None:
        idempotency = Idempotency(app, principal="acct_1", ledger=ledger)
        view = idempotency.protect(charge) if protect else charge
    app.add_url_rule("/charges", view_func=view, methods=["POST"])
    return app


def post(
    app: Flask, same: str | None = None, path: str = "/charges", method: str = "POST", *, keyed: bool = True
) -> Callable[[], bytes]:
    """A request of the application through its WSGI door, each with a key of its own, or all with the same, or none."""
    order = b'{"amount":1000}'
    environ = EnvironBuilder(path, method=method, data=order, content_type="application/json").get_environ()

    def run() -> bytes:
        sent = {**environ, "wsgi.input": io.BytesIO(order)}
        if keyed:
            sent["HTTP_IDEMPOTENCY_KEY"] = same or key()
        answer = app.wsgi_app(sent, lambda status, headers, info=None: lambda data: None)
        body = b"".join(answer)
        answer.close()  # type: ignore[attr-defined]
        return body

    return run


def extension(server: Server) -> Iterable[Figure]:
    """The Flask extension against the same view without it, and against raw EVALSHA."""
    with server.client() as client:
        raw = Raw(client)
        ours = Ledger(client)
        app = shop(ours, protect=True)
        done = key()
        post(app, done)()
        assert post(app, done)() == BODY

        row = f"idem:acct_1:{done}"
        turns = in_turns(
            {
                "protected": post(app),
                "replay": post(app, done),
                "plain": post(shop(None, protect=False)),
                "2 EVALSHA": raw.first_run,
                "EVALSHA": lambda: raw.claim(row),
            }
        )
        ours.close()
    yield Figure(
        "Flask: protected less plain POST : 2 raw EVALSHA",
        turns.ratio("protected", "2 EVALSHA", less="plain"),
        "x",
        1.4,
        note=turns.note("protected", "plain", "2 EVALSHA"),
    )
    yield Figure("Flask: replay : plain POST", turns.ratio("replay", "plain"), "x", 1.4, note=turns.note("replay"))
    yield Figure(
        "Flask: replay : plain POST + raw EVALSHA (the least it can be)",
        turns.ratio("replay", "plain", "EVALSHA"),
        "x",
        note=turns.note("EVALSHA"),
    )


def async_ledger(server: Server) -> Iterable[Figure]:
    """`AsyncLedger` against the same raw calls, by 1 and by 64 tasks."""
    for tasks in (1, TASKS):
        ratios, seconds = asyncio.run(_async_ratios(server, tasks))
        note = f"ours {seconds * 1e6:.0f} µs a claim+complete"
        yield Figure(
            f"AsyncLedger, {tasks} tasks: claim+complete : 2 raw EVALSHA",
            statistics.median(ratios),
            "x",
            1.1,
            note=note,
        )


async def _async_ratios(server: Server, tasks: int, rounds: int = 15, calls: int = 640) -> tuple[list[float], float]:
    client = server.async_client(max_connections=TASKS)
    ours = AsyncLedger(client, Policy(heartbeat=False))
    scripts = load()
    for script in scripts.values():
        await client.script_load(script.text)

    async def first_run() -> None:
        r = await ours.claim("acct_1", key(), FINGERPRINT)
        assert isinstance(r, Reservation)
        await ours.complete(r, ANSWER)

    async def raw_first_run() -> None:
        row = f"idem:acct_1:{key()}"
        evalsha: Any = client.evalsha
        await evalsha(scripts["claim"].sha, 1, row, OWNER, FINGERPRINT, LEASE, RETENTION, CREATED_AT, "")
        await evalsha(scripts["complete"].sha, 1, row, 1, OWNER, RETENTION, 201, HEADERS, BODY, "")

    async def timed(run: Callable[[], Awaitable[None]]) -> float:
        async def several() -> None:
            for _ in range(calls // tasks):
                await run()

        began = time.perf_counter()
        await asyncio.gather(*(several() for _ in range(tasks)))
        return (time.perf_counter() - began) / calls

    try:
        await timed(first_run)
        pairs = [(await timed(first_run), await timed(raw_first_run)) for _ in range(rounds)]
        assert not isinstance(await ours.claim("acct_1", "none", FINGERPRINT), Replay)
    finally:
        await ours.close()
        await client.aclose()
    return [mine / raw for mine, raw in pairs], statistics.median(mine for mine, _ in pairs)
