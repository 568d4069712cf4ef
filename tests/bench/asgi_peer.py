"""A Starlette endpoint, bare and as libraries make it safe to repeat. Run by the Python that has the library installed.

`python asgi_peer.py NAME REDIS_URL` answers each line `KIND CALLS` of its input with a JSON list of microseconds;
`python asgi_peer.py NAME REDIS_URL CALLS` makes so many calls of each kind, in their order, for valgrind to count.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import sys
import time
import warnings
from collections.abc import Awaitable, Callable
from itertools import count
from typing import Any

App = Callable[[Any, Any, Any], Awaitable[None]]
Actions = dict[str, Callable[[], Awaitable[object]]]

BODY = b'{"id":"ch_1","amount":1000}'.ljust(500)
ORDER = b'{"amount":1000}'
HEADERS = '[["content-type","application/json"]]'
OWNER, FINGERPRINT = "0123456789abcdef", "f" * 64
LEASE, RETENTION, CREATED_AT = 30_000, 86_400_000, 1_800_000_000_000
WARM = 20

_keys = count()
_run = f"{os.getpid():08x}"


def key() -> str:
    return f"{_run}-40d5-43dd-bc93-{next(_keys):012x}"


async def charge(request: Any) -> Any:
    return importlib.import_module("starlette.responses").Response(BODY, 201, media_type="application/json")


def shop(endpoint: Any = charge) -> Any:
    route = importlib.import_module("starlette.routing").Route("/charges", endpoint, methods=["POST"])
    return importlib.import_module("starlette.applications").Starlette(routes=[route])


async def idemredis(url: str) -> Actions:
    ours, door = importlib.import_module("idemredis"), importlib.import_module("idemredis.asgi")
    core = importlib.import_module("idemredis.core.scripts")
    ledger = ours.AsyncLedger.from_url(url, ours.Policy(), socket_timeout=60.0)
    idempotency = door.Idempotency(principal="acct_1", ledger=ledger)
    app = shop(idempotency.protect(charge))
    app.add_middleware(door.IdempotencyMiddleware, idempotency=idempotency)
    client = importlib.import_module("redis.asyncio").Redis.from_url(url)
    scripts = core.load()
    for script in scripts.values():
        await client.script_load(script.text)

    def claim(name: str) -> Any:
        row = f"raw:acct_1:{name}"
        return client.evalsha(scripts["claim"].sha, 1, row, OWNER, FINGERPRINT, LEASE, RETENTION, CREATED_AT, "")

    async def first(name: str) -> None:
        await claim(name)
        row = f"raw:acct_1:{name}"
        await client.evalsha(scripts["complete"].sha, 1, row, 1, OWNER, RETENTION, 201, HEADERS, BODY, "")

    await first("always")
    bare = shop()
    return {
        **requests(app),
        "bare": lambda: post(bare, key()),
        "2 EVALSHA": lambda: first(key()),
        "EVALSHA": lambda: claim("always"),
    }


async def idemkit(url: str) -> Actions:
    library = importlib.import_module("idemkit")
    app = shop()
    app.add_middleware(
        library.IdempotencyMiddleware,
        backend=library.RedisBackend.from_url(url),
        config=library.HttpConfig(scope=lambda request: "acct_1"),
    )
    bare = shop()
    return {**requests(app), "bare": lambda: post(bare, key())}


def requests(app: App) -> Actions:
    return {"request": lambda: post(app, key()), "request again": lambda: post(app, "always")}


async def post(app: App, name: str) -> None:
    headers = [
        (b"host", b"shop"),
        (b"content-type", b"application/json"),
        (b"content-length", b"15"),
        (b"idempotency-key", name.encode()),
    ]
    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": "/charges",
        "raw_path": b"/charges",
        "query_string": b"",
        "root_path": "",
        "headers": headers,
        "client": ("127.0.0.1", 1),
        "server": ("shop", 80),
    }
    sent: list[Any] = []

    async def receive() -> Any:
        return {"type": "http.request", "body": ORDER, "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message)

    await app(scope, receive, send)
    if sent[0]["status"] != 201 or b"".join(message["body"] for message in sent[1:]) != BODY:
        raise RuntimeError(repr(sent)[:300])


async def main() -> None:
    warnings.simplefilter("ignore")
    name, url, *counted = sys.argv[1:]
    made = await {"idemredis": idemredis, "idemkit": idemkit}[name](url)
    if counted:
        for kind in sorted(made):
            for _ in range(WARM):
                await made[kind]()
            os.getloadavg()  # valgrind writes the count before each call of this, and begins anew
            for _ in range(int(counted[0])):
                await made[kind]()
            os.getloadavg()
        return
    print(json.dumps(sorted(made)), flush=True)
    for line in sys.stdin:
        kind, calls = line.rsplit(" ", 1)
        times = []
        for _ in range(int(calls)):
            began = time.perf_counter()
            await made[kind]()
            times.append((time.perf_counter() - began) * 1e6)
        print(json.dumps(times), flush=True)


if __name__ == "__main__":
    asyncio.run(main())
