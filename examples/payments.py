"""A small shop that charges a card and records an order once, however often the client sends the request.

    flask --app examples/payments.py run
    gunicorn --chdir examples --workers 2 'payments:create_app()'

Settings come from the environment: SHOP_IDEMREDIS_URL, SHOP_DATABASE and so on.
"""

from __future__ import annotations

import secrets
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager

from flask import Blueprint, Flask, current_app, g, request, url_for
from flask.typing import ResponseReturnValue
from gateway import CardDeclined, Gateway
from opentelemetry.exporter.prometheus import PrometheusMetricReader
from opentelemetry.sdk.metrics import MeterProvider
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from idemredis import LedgerUnavailable
from idemredis.flask import Idempotency, current_reservation
from idemredis.telemetry import Telemetry

ACCOUNTS = {"alice-token": "acct_alice", "bob-token": "acct_bob"}

_TABLES = """
CREATE TABLE IF NOT EXISTS orders (
    id INTEGER PRIMARY KEY,
    account TEXT NOT NULL,
    charge TEXT NOT NULL UNIQUE,
    amount INTEGER NOT NULL
);
"""

shop = Blueprint("shop", __name__)

telemetry = Telemetry(MeterProvider([PrometheusMetricReader()]))  # per process: scrape each worker, or push

# A key belongs to the account that sends it: two customers may both use "order-1".
idempotency = Idempotency(principal=lambda: g.account, observers=[telemetry])


def create_app() -> Flask:
    app = Flask(__name__)
    app.config.from_mapping(
        DATABASE="shop.sqlite3",
        GATEWAY="gateway.sqlite3",
        HEALTH_TOKEN="",  # who may see /healthz; nobody, unless SHOP_HEALTH_TOKEN is set
        IDEMREDIS_URL="redis://127.0.0.1:6379/0",
    )
    app.config.from_prefixed_env("SHOP")
    app.register_blueprint(shop)
    app.add_url_rule("/healthz", view_func=show_health)
    app.add_url_rule("/metrics", view_func=show_metrics)
    idempotency.init_app(app)
    with closing(sqlite3.connect(app.config["DATABASE"])) as db:
        db.executescript(_TABLES)
    return app


@shop.before_request
def authenticate() -> ResponseReturnValue | None:
    """Return the account of a token; a real shop would look the token up or check its signature."""
    token = request.authorization.token if request.authorization else None
    g.account = ACCOUNTS.get(token or "")
    return None if g.account else ({"error": "unauthorized"}, 401)


@shop.post("/charges")
@idempotency.protect
def create_charge() -> ResponseReturnValue:
    wanted = request.get_json()
    card, amount = wanted.get("card"), wanted.get("amount")
    if not isinstance(card, str) or type(amount) is not int or amount <= 0:
        return {"error": "card and amount (in cents) are required"}, 422

    # The ledger cannot undo what a killed worker did. The gateway therefore receives a key that is the same for every
    # attempt of this operation, and charges once.
    gateway = Gateway(current_app.config["GATEWAY"])
    try:
        charge = gateway.charge(card, amount, current_reservation.downstream_key("gateway"))
    except CardDeclined:
        return {"error": "card_declined"}, 402  # stored and replayed, like most responses below 500

    # For the same reason, an order is unique by its charge.
    with database() as db:
        new = (g.account, charge, amount)
        db.execute("INSERT INTO orders (account, charge, amount) VALUES (?, ?, ?) ON CONFLICT (charge) DO NOTHING", new)
        order = db.execute("SELECT * FROM orders WHERE charge = ?", (charge,)).fetchone()
    return dict(order), 201, {"Location": url_for("shop.show_order", number=order["id"])}


@shop.get("/orders")
def list_orders() -> ResponseReturnValue:
    with database() as db:
        orders = db.execute("SELECT * FROM orders WHERE account = ? ORDER BY id", (g.account,)).fetchall()
    return {"orders": [dict(order) for order in orders]}


@shop.get("/orders/<int:number>")
def show_order(number: int) -> ResponseReturnValue:
    with database() as db:
        order = db.execute("SELECT * FROM orders WHERE account = ? AND id = ?", (g.account, number)).fetchone()
    return dict(order) if order else ({"error": "not_found"}, 404)


def show_health() -> ResponseReturnValue:
    """Say whether Redis replies, to who has the token; one call that reads, with the application's own rights.

    Use it for alerts. Do not use it for load balancing: during an outage it would take all instances out at once.
    """
    token = (request.authorization.token if request.authorization else None) or ""
    expected = str(current_app.config["HEALTH_TOKEN"])
    if not expected or not secrets.compare_digest(token.encode(), expected.encode()):
        return {"error": "unauthorized"}, 401
    try:
        current_app.extensions["idemredis"].ledger.ping()
    except LedgerUnavailable:
        return {"redis": "unavailable"}, 503
    return {"redis": "ok"}


def show_metrics() -> ResponseReturnValue:
    return generate_latest(), {"Content-Type": CONTENT_TYPE_LATEST}


@contextmanager
def database() -> Iterator[sqlite3.Connection]:
    with closing(sqlite3.connect(current_app.config["DATABASE"])) as db, db:
        db.row_factory = sqlite3.Row
        yield db
