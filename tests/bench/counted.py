"""So many operations of a kind, for `instructions`: `python -m tests.bench.counted KIND COUNT URL`."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable
from typing import Any

import redis
from flask import Flask
from werkzeug.test import EnvironBuilder

from idemredis import Ledger, Policy, Reservation, StoredResponse
from idemredis.core import operations
from idemredis.core.keys import identify
from idemredis.core.reservation import Lease
from idemredis.core.scripts import load
from idemredis.flask import Idempotency
from idemredis.store.evaluate import encode_call

from .calls import instant

__all__ = ["KINDS"]

FINGERPRINT = "f" * 64
RESPONSE = StoredResponse(201, (("content-type", "application/json"),), b"x" * 500)
WARM = 20

CLAIMED = [b"claimed", b"1"]
REPLAY = [b"replay", b"1", b"201", b'[["content-type","application/json"]]', RESPONSE.body]


def _plain(client: redis.Redis) -> dict[str, Callable[[str], object]]:
    def set_and_set(key: str) -> None:
        client.set(key, "x", nx=True, px=60_000)
        client.set(key, b"x" * 500, px=60_000)

    return {"GET": lambda key: client.get("stored"), "SET NX + SET": set_and_set}


def _ledger(ledger: Ledger) -> dict[str, Callable[[str], object]]:
    def first(key: str) -> None:
        r = ledger.claim("acct_1", key, FINGERPRINT)
        assert isinstance(r, Reservation)
        ledger.complete(r, RESPONSE)

    ledger.claim("acct_1", "running", FINGERPRINT)
    return {
        "claim + complete": first,
        "replay": lambda key: ledger.claim("acct_1", "stored", FINGERPRINT),
        "in progress": lambda key: ledger.claim("acct_1", "running", FINGERPRINT),
    }


def _redis_py(client: redis.Redis) -> dict[str, Callable[[str], object]]:
    """What redis-py's pool, connection and parser take of a call, whose bytes are made beforehand."""
    pool: Any = client.connection_pool
    any_key, owner = "0" * 13, "0123456789abcdef"
    identity = identify("raw", "acct_1", any_key)
    made = operations.claim(identity, owner, FINGERPRINT, 60.0, 3600.0, 1.8e9, "")
    r = Reservation(identity, FINGERPRINT, 1, owner, None, Lease(60.0, 0.0))
    claim = encode_call(load()["claim"], made)
    complete = encode_call(load()["complete"], operations.complete(r, RESPONSE, 3600.0))
    replay = encode_call(load()["claim"], made)

    def send(packed: bytes) -> None:
        connection = pool.get_connection()
        connection.send_packed_command([packed])
        connection.read_response(disable_decoding=True)
        pool.release(connection)

    def first(key: str) -> None:
        key = key[-len(any_key) :].rjust(len(any_key), "0")
        send(claim.replace(any_key.encode(), key.encode()))
        send(complete.replace(any_key.encode(), key.encode()))

    first(any_key)
    return {"claim + complete": first, "replay": lambda key: send(replay)}


def _flask(ledger: Ledger) -> dict[str, Callable[[str], object]]:
    app = Flask("shop")
    protect = Idempotency(app, principal="acct_1", ledger=ledger).protect
    app.add_url_rule("/plain", "plain", lambda: ("x" * 500, 201), methods=["POST"])
    app.add_url_rule("/protected", "protected", protect(lambda: ("x" * 500, 201)), methods=["POST"])

    def post(path: str, key: str) -> None:
        builder = EnvironBuilder(path, method="POST", data=b'{"amount": 1}', content_type="application/json")
        environ = builder.get_environ() | {"HTTP_IDEMPOTENCY_KEY": key, "wsgi.input": io.BytesIO(b'{"amount": 1}')}
        response = app.wsgi_app(environ, lambda status, headers, error=None: lambda data: None)
        b"".join(response)
        response.close()  # type: ignore[attr-defined]

    return {
        "a plain request": lambda key: post("/plain", key),
        "a protected request": lambda key: post("/protected", key),
        "a protected request, replayed": lambda key: post("/protected", "stored"),
    }


OWN, REDIS_PY = "own Python: ", "redis-py: "

KINDS = (
    "GET",
    "SET NX + SET",
    "claim + complete",
    "replay",
    "in progress",
    "a plain request",
    "a protected request",
    "a protected request, replayed",
    f"{REDIS_PY}claim + complete",
    f"{REDIS_PY}replay",
    f"{OWN}claim + complete",
    f"{OWN}replay",
    f"{OWN}a plain request",
    f"{OWN}a protected request",
    f"{OWN}a protected request, replayed",
)
"""With a server; what of it are redis-py's pool, connection and parser; and with a client that replies at once."""


def main() -> None:
    kind, count, url = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    with redis.Redis.from_url(url) as client:
        is_own = kind.startswith(OWN)
        replayed = is_own and ("replay" in kind)
        used = instant(REPLAY if replayed else CLAIMED) if is_own else client
        ledger = Ledger(used, Policy(heartbeat=False), socket_timeout=60.0)
        all_of_it = _plain(client) | _ledger(ledger) | _flask(ledger)
        actions = _redis_py(client) if kind.startswith(REDIS_PY) else all_of_it
        kind = kind.removeprefix(OWN).removeprefix(REDIS_PY)
        stored = ledger.claim("acct_1", "stored", FINGERPRINT)
        if isinstance(stored, Reservation):
            ledger.complete(stored, RESPONSE)
        for number in range(WARM + count):
            actions[kind](f"key-{os.getpid()}-{number}")
        ledger.close()


if __name__ == "__main__":
    main()
