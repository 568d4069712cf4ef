"""A view of three steps with a checkpoint after each, so that a retry resumes after the last step that was done.

    python examples/checkout_saga.py                            # demonstrates it on an embedded server, under gunicorn
    gunicorn --chdir examples 'checkout_saga:create_app()'      # the process that it starts

The demonstration kills the worker after each step. The three services do not support idempotency keys here, which is
why the checkpoints matter. An attempt can still die between a step and its checkpoint: if a service does support keys,
send it `downstream_key` too.
"""

from __future__ import annotations

import os
import signal
import sqlite3
import tempfile
import time
from contextlib import closing
from itertools import count

import httpx
from embedded import valkey
from flask import Blueprint, Flask, current_app, request
from flask.typing import ResponseReturnValue
from proof import prove, serving, wait_for

from idemredis.flask import Idempotency, current_reservation

STEPS = ("stock reserved", "card charged", "courier booked")

shop = Blueprint("shop", __name__)
idempotency = Idempotency(principal="shop")  # one tenant; a real shop uses the account that is logged in


def create_app(*, fragile: bool = False) -> Flask:
    app = Flask(__name__)
    app.config.from_mapping(SERVICES="services.sqlite3", FRAGILE=fragile, IDEMREDIS_URL="redis://127.0.0.1:6379/0")
    app.config.from_prefixed_env("SHOP")
    app.register_blueprint(shop)
    idempotency.init_app(app)
    return app


@shop.post("/checkouts")
@idempotency.protect(lease=3)
def check_out() -> ResponseReturnValue:
    order = request.get_json()["order"]
    last = current_reservation.last_checkpoint  # (name, data) of the last step that an earlier attempt did, or None
    done: dict[str, int] = dict(last[1]) if last else {}
    for step in STEPS:
        if step not in done:
            current_reservation.ensure_held()  # stop if another attempt has taken over
            done[step] = call_service(step, order)
            current_reservation.checkpoint(step, done)
            if current_app.config["FRAGILE"]:
                os.kill(os.getpid(), signal.SIGKILL)
    return {"order": order, "receipts": done, "attempt": current_reservation.generation}, 201


def call_service(step: str, order: int) -> int:
    """Call a fake service; two calls do the work twice."""
    with closing(sqlite3.connect(current_app.config["SERVICES"])) as db, db:
        return db.execute("INSERT INTO calls VALUES (NULL, ?, ?, ?)", (step, order, os.getpid())).lastrowid or 0


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, valkey() as url:
        services = f"{folder}/services.sqlite3"
        with closing(sqlite3.connect(services)) as db, db:
            db.execute("CREATE TABLE calls (id INTEGER PRIMARY KEY, step TEXT, bought INTEGER, process INTEGER)")
        env = {"SHOP_IDEMREDIS_URL": url, "SHOP_SERVICES": services}
        with serving("checkout_saga:create_app(fragile=True)", **env) as server:
            attempts = count(1)

            def ask() -> httpx.Response | None:
                headers = {"Idempotency-Key": "checkout-1001"}
                try:
                    answer = httpx.post(f"{server}/checkouts", json={"order": 1001}, headers=headers, timeout=20)
                except httpx.TransportError:
                    print(f"request {next(attempts)}: the worker was killed")
                    return None
                print(f"request {next(attempts)}: {answer.status_code}")
                if answer.status_code == 409:  # the killed attempt's lease has not ended yet
                    time.sleep(answer.json()["retry_after_ms"] / 1000)
                    return None
                return answer

            answer = wait_for(ask, 60)
            again = ask()
        with closing(sqlite3.connect(services)) as db:
            calls = db.execute("SELECT step, process FROM calls ORDER BY id").fetchall()
        prove("each step was done once, in order", [step for step, _ in calls] == list(STEPS))
        prove("each in another process, killed right after it", len({process for _, process in calls}) == 3)
        prove("the fourth attempt answered with all receipts", answer.json()["attempt"] == 4)
        replayed = again is not None and again.headers.get("Idempotent-Replayed") == "true"
        prove("a retry gets the same bytes", replayed and again is not None and again.content == answer.content)


if __name__ == "__main__":
    main()
