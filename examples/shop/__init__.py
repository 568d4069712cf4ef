"""The payments shop with a page to try it in, which can cause failures and shows the ledger.

    gunicorn --chdir examples --workers 2 --threads 8 'shop:create_app()'

A real shop has `payments.py`, and `static/client.js` in the browser. The code here only causes failures and shows their
effects.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable
from contextlib import suppress
from typing import TYPE_CHECKING

import redis
from flask import Blueprint, Flask, current_app, request
from flask.typing import ResponseReturnValue
from gateway import Gateway
from payments import authenticate, idempotency
from payments import create_app as create_payments

from idemredis import CorruptRow, InvalidKey, Ledger, LedgerUnavailable, Row
from idemredis.core.keys import identify
from idemredis.core.reservation import Unprotected

if TYPE_CHECKING:
    from _typeshed.wsgi import StartResponse, WSGIApplication, WSGIEnvironment

AWAY_SECONDS = int(os.environ.get("SHOP_AWAY_SECONDS", "4"))
"""Seconds for which Redis hangs on request. Longer than a claim is tried, so that the page gets 503."""

HELD_SECONDS = 5.0
"""Seconds by which a stored response is delayed, so that the page gives it up."""

page = Blueprint("page", __name__, static_folder="static", static_url_path="/shop")
behind = Blueprint("behind", __name__, url_prefix="/behind")
behind.before_request(authenticate)


def create_app() -> Flask:
    app = create_payments()
    app.register_blueprint(page)
    app.register_blueprint(behind)
    app.wsgi_app = HoldBack(app.wsgi_app)  # type: ignore[method-assign]
    return app


@page.get("/")
def show() -> ResponseReturnValue:
    return page.send_static_file("index.html")


@page.get("/favicon.ico")
def show_no_icon() -> ResponseReturnValue:
    return "", 204


@behind.get("/")
def look_behind() -> ResponseReturnValue:
    """Return the row of the caller's key, and the requests that the gateway recorded.

    Of each request to the gateway it says whether it was for this key. The gateway's key is derived from the row's
    name, so that is known while Redis is away, too.
    """
    ledger: Ledger = current_app.extensions["idemredis"].ledger
    away, row = False, None
    try:
        identity = identify(ledger.namespace, idempotency.principal(), request.args.get("key", "none"), "")
        row = ledger.read(identity.principal, identity.key)
    except (LedgerUnavailable, CorruptRow):
        away = True
    except InvalidKey:
        return {"error": "key"}, 400
    own = Unprotected(lambda: identity).downstream_key("gateway")
    asked = [
        {**asked._asdict(), "own": asked.key == own} for asked in Gateway(current_app.config["GATEWAY"]).requests()
    ]
    return {"name": identity.row, "away": away, "row": row and as_shown(row), "gateway": asked}


@behind.post("/kill-worker")
def kill_worker() -> ResponseReturnValue:
    """Kill the process that called the gateway last; it has charged the card and not recorded the order."""
    process = request.get_json()["process"]
    if process not in {asked.process for asked in Gateway(current_app.config["GATEWAY"]).requests()}:
        return {"error": "that process has charged nothing"}, 404
    with suppress(ProcessLookupError):  # the browser sent this again after the worker that served it was killed
        os.kill(process, signal.SIGKILL)
    return {"killed": process}


@behind.post("/redis-away")
def send_redis_away() -> ResponseReturnValue:
    """Make Redis hang: connections stay open, and there are no replies."""
    with redis.Redis.from_url(current_app.config["IDEMREDIS_URL"]) as client:
        client.client_pause(AWAY_SECONDS * 1000)
    return {"away_seconds": AWAY_SECONDS}


class HoldBack:
    """A WSGI layer that delays a response which the page wants to lose; it is stored already when it comes here."""

    def __init__(self, application: WSGIApplication) -> None:
        self.application = application

    def __call__(self, environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        answer = self.application(environ, start_response)
        if environ.get("HTTP_X_TROUBLE") == "hold-answer":
            time.sleep(HELD_SECONDS)
        return answer


def as_shown(row: Row) -> dict[str, object]:
    return {
        "name": row.identity.row,
        "status": row.status,
        "generation": row.generation,
        "owner": row.owner,
        # Redis runs on this machine, so both use the same clock.
        "lease_ms": max(round(row.lease_left * 1000), 0) if row.status == "pending" else None,
        "lease_full_ms": round(row.lease * 1000),
        "response_status": row.response and row.response.status,
    }
