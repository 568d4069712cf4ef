"""A Flask endpoint for webhooks, where each event charges a card once despite at-least-once delivery.

    python examples/webhooks.py                            # demonstrates it on an embedded server, under gunicorn
    gunicorn --chdir examples 'webhooks:create_app()'      # the process that it starts

A provider identifies its events in the body and sends no Idempotency-Key, so the view reserves the event itself. The
principal is the provider, after checking its signature, and the key is the event's id.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import signal
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
from embedded import valkey
from flask import Flask, current_app, request
from flask.typing import ResponseReturnValue
from gateway import SLOW, Gateway
from proof import prove, serving, wait_for

from idemredis import AlreadyCompleted, FencedOut, InvalidKey, KeyInProgress, KeyReused, Ledger, LedgerUnavailable
from idemredis import fingerprint_value as fingerprint

SECRETS = {"stripes": b"whsec_example"}
"""The webhook secret of each provider. A provider that is not here, or has no secret, cannot sign anything."""


def create_app() -> Flask:
    app = Flask(__name__)
    app.config.from_mapping(REDIS="redis://127.0.0.1:6379/0", NAMESPACE="idem", GATEWAY="gateway.sqlite3")
    app.config.from_prefixed_env("SHOP")
    app.extensions["ledger"] = Ledger.from_url(app.config["REDIS"], namespace=app.config["NAMESPACE"])
    app.add_url_rule("/webhooks/<provider>", view_func=receive, methods=["POST"])
    return app


def receive(provider: str) -> ResponseReturnValue:
    if not is_signed(provider, request.get_data(), request.headers.get("X-Signature", "")):
        return {"error": "signature"}, 401
    try:
        event = request.get_json()
        number, kind, data = str(event["id"]), str(event["type"]), dict(event["data"])
        card, amount = str(data["card"]), int(data["amount"])
    except (KeyError, TypeError, ValueError):
        return {"error": "event"}, 400
    ledger: Ledger = current_app.extensions["ledger"]
    gateway = Gateway(current_app.config["GATEWAY"])
    # Only the event itself is hashed; attempt counters and delivery times differ between deliveries.
    asked = fingerprint({"type": kind, "data": data})
    try:
        with ledger.reserve(provider, number, asked, "webhook", lease=2, wait=5) as r:
            key = r.downstream_key("gateway")  # the same for every delivery of this event
            r.result = gateway.charge(card, amount, key)
    except AlreadyCompleted:
        return {"status": "done before"}  # providers only need a 200
    except (KeyInProgress, FencedOut, LedgerUnavailable):
        return {"status": "deliver it again"}, 503, {"Retry-After": "2"}
    except (KeyReused, InvalidKey) as error:
        return {"error": str(error)}, 422
    return {"status": "done"}


def is_signed(provider: str, body: bytes, signature: str) -> bool:
    """Return True if the provider signed these bytes; compared as bytes, in constant time."""
    if not SECRETS.get(provider):
        return False
    return hmac.compare_digest(signature.encode("latin-1", "replace"), sign(provider, body).encode())


def sign(provider: str, body: bytes) -> str:
    return hmac.digest(SECRETS[provider], body, hashlib.sha256).hex()


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, valkey() as url:
        gateway = Gateway(Path(folder) / "gateway.sqlite3")
        env = {"SHOP_REDIS": url, "SHOP_GATEWAY": f"{folder}/gateway.sqlite3"}
        with serving("webhooks:create_app()", **env) as shop, httpx.Client(base_url=shop, timeout=20) as http:

            def deliver(event: str, card: str, attempt: int = 1, signature: str | None = None) -> int:
                data = {"card": card, "amount": 1999}
                body = json.dumps({"id": event, "type": "renewal.due", "data": data, "attempt": attempt}).encode()
                headers = {
                    "X-Signature": signature or sign("stripes", body),
                    "Content-Type": "application/json",
                }
                try:
                    return http.post("/webhooks/stripes", content=body, headers=headers).status_code
                except httpx.TransportError:
                    return 0  # the worker died; the provider will deliver the event again

            with ThreadPoolExecutor(8) as at_once:
                answers = list(at_once.map(lambda attempt: deliver("evt_1", "tok_visa", attempt), range(8)))
            prove("8 deliveries at once are all answered 200", answers == [200] * 8)
            prove("and charge the card once", len(gateway.requests()) == 1)

            with ThreadPoolExecutor(1) as beside:
                first = beside.submit(deliver, "evt_2", SLOW)
                os.kill(wait_for(lambda: gateway.requests()[1:])[0].process, signal.SIGKILL)
                prove("a worker was killed in mid-event: no answer", first.result() == 0)
            attempts = iter(range(2, 20))
            wait_for(lambda: deliver("evt_2", SLOW, next(attempts)) == 200)
            charged = [asked.charged for asked in gateway.requests()[1:]]
            prove("the event delivered again was taken over, and charged once", charged == [True, False])
            prove("the same event with another card is refused", deliver("evt_2", "tok_visa") == 422)
            prove("a wrong signature is refused", deliver("evt_3", "tok_visa", signature="0" * 64) == 401)
            prove("and nothing more was charged", len(gateway.requests()) == 3)


if __name__ == "__main__":
    main()
