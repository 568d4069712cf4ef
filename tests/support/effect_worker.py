"""A worker process that makes one order, and stops itself on the way, as a virtual machine that is suspended does.

    python -m tests.support.effect_worker REDIS_URL NAMESPACE DATABASE_URL KEY STEP

It claims the key, stops itself after the step, goes on once it is continued, and prints what came of it.
"""

from __future__ import annotations

import json
import os
import signal
import sys

from idemredis import EffectDone, FencedOut, Ledger, Reservation
from tests.support.databases import Database
from tests.support.orders import Orders

__all__ = ["main"]


def main(redis_url: str, namespace: str, database_url: str, key: str, step: str) -> None:
    """Make the order, and print the outcome as JSON."""
    ledger = Ledger.from_url(redis_url, namespace=namespace)
    kind = {"postgresql+psycopg": "postgresql", "mysql+pymysql": "mariadb"}.get(
        database_url.partition(":")[0], "sqlite"
    )
    orders = Orders("sync", Database(kind, database_url, database_url))
    r = ledger.claim("alice", key, "f")
    assert isinstance(r, Reservation)

    def pause(reached: str) -> None:
        if reached == step:
            os.kill(os.getpid(), signal.SIGSTOP)

    try:
        answer, outcome = orders.place(r, pause=pause), "committed"
    except EffectDone as done:
        answer, outcome = done.response, "refused"
    try:
        ledger.complete(r, answer)
        completion = "completed"
    except FencedOut:
        completion = "fenced"
    print(json.dumps([outcome, completion, answer.body.decode()]), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
