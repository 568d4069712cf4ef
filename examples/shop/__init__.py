"""The payments shop with a page to try it in, a switch for each trouble, and the ledger to watch beside it.

    gunicorn --chdir examples --workers 2 --threads 8 'shop:create_app()'

What a real shop has is `payments.py`, and `static/client.js` in the browser. What is here only makes troubles, and
shows what comes of them.
"""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress

import redis
from flask import Blueprint, Flask, Response, current_app, request
from flask.typing import ResponseReturnValue
from gateway import Gateway
from payments import authenticate, idempotency
from payments import create_app as create_payments

from idemredis import CorruptRow, InvalidKey, Ledger, LedgerUnavailable, Row

AWAY_SECONDS = int(os.environ.get("SHOP_AWAY_SECONDS", "4"))
"""How long Redis hangs when told to: longer than a claim is tried, so that the page is told 503."""

HELD_SECONDS = 5.0
"""How long an answer is held back, that the page may lose it, after it was stored."""

page = Blueprint("page", __name__, static_folder="static", static_url_path="/shop")
behind = Blueprint("behind", __name__, url_prefix="/behind")
behind.before_request(authenticate)


def create_app() -> Flask:
    app = create_payments()
    app.register_blueprint(page)
    app.register_blueprint(behind)
    app.after_request(hold_back)
    return app


@page.get("/")
def show() -> ResponseReturnValue:
    return page.send_static_file("index.html")


@page.get("/favicon.ico")
def show_no_icon() -> ResponseReturnValue:
    return "", 204


@behind.get("/")
def look_behind() -> ResponseReturnValue:
    """The row of the caller's key, and what the gateway noted."""
    ledger: Ledger = current_app.extensions["idemredis"].ledger
    away, row = False, None
    try:
        row = ledger.read(idempotency.principal(), request.args.get("key", "none"))
    except (LedgerUnavailable, CorruptRow):
        away = True
    except InvalidKey:
        return {"error": "key"}, 400
    asked = Gateway(current_app.config["GATEWAY"]).requests()
    return {"away": away, "row": row and as_shown(row), "gateway": [request._asdict() for request in asked]}


@behind.post("/kill-worker")
def kill_worker() -> ResponseReturnValue:
    """Kill the process that asked the gateway last: it has charged the card, and not recorded the order."""
    process = request.get_json()["process"]
    if process not in {asked.process for asked in Gateway(current_app.config["GATEWAY"]).requests()}:
        return {"error": "that process has charged nothing"}, 404
    with suppress(ProcessLookupError):  # the browser sent this again, as its own worker was the one killed
        os.kill(process, signal.SIGKILL)
    return {"killed": process}


@behind.post("/redis-away")
def send_redis_away() -> ResponseReturnValue:
    """Let Redis hang: connections stay open, and nothing answers."""
    with redis.Redis.from_url(current_app.config["IDEMREDIS_URL"]) as client:
        client.client_pause(AWAY_SECONDS * 1000)
    return {"away_seconds": AWAY_SECONDS}


def hold_back(answer: Response) -> Response:
    """Hold an answer back where the page wants to lose it. It is stored by now: functions like this one come after."""
    if request.headers.get("X-Trouble") == "hold-answer":
        time.sleep(HELD_SECONDS)
    return answer


def as_shown(row: Row) -> dict[str, object]:
    return {
        "name": row.identity.row,
        "status": row.status,
        "generation": row.generation,
        "owner": row.owner,
        # By this machine's clock, which here is that of Redis too.
        "lease_ms": max(round(row.lease_left * 1000), 0) if row.status == "pending" else None,
        "response_status": row.response and row.response.status,
    }
