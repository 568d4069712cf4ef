"""So many operations of a kind, for `instructions`: `python -m tests.bench.counted KIND COUNT URL`."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable

import redis
from flask import Flask
from werkzeug.test import EnvironBuilder

from idemredis import Ledger, Policy, Reservation, StoredResponse
from idemredis.flask import Idempotency

__all__ = ["KINDS"]

FINGERPRINT = "f" * 64
RESPONSE = StoredResponse(201, (("content-type", "application/json"),), b"x" * 500)
WARM = 20


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


KINDS = (
    "GET",
    "SET NX + SET",
    "claim + complete",
    "replay",
    "in progress",
    "a plain request",
    "a protected request",
    "a protected request, replayed",
)


def main() -> None:
    kind, count, url = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    with redis.Redis.from_url(url) as client:
        ledger = Ledger(client, Policy(heartbeat=False), socket_timeout=60.0)
        actions = _plain(client) | _ledger(ledger) | _flask(ledger)
        stored = ledger.claim("acct_1", "stored", FINGERPRINT)
        if isinstance(stored, Reservation):
            ledger.complete(stored, RESPONSE)
        for number in range(WARM + count):
            actions[kind](f"key-{os.getpid()}-{number}")
        ledger.close()


if __name__ == "__main__":
    main()
