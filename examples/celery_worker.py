"""A Celery task that charges a card once, even if its worker is killed during the task and it is delivered again.

    python examples/celery_worker.py                            # demonstrates it on an embedded server
    celery --workdir examples --app celery_worker worker        # the process that it starts

`acks_late` makes Celery redeliver a task when its worker dies; `once` makes that safe.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from pathlib import Path

from celery import Celery
from embedded import running, valkey
from gateway import SLOW, Gateway
from proof import prove, wait_for

from idemredis import FencedOut, KeyInProgress, Ledger, current_reservation

REDIS = os.environ.get("SHOP_REDIS", "redis://127.0.0.1:6379/0")
GATEWAY = os.environ.get("SHOP_GATEWAY", "gateway.sqlite3")

app = Celery("shop", broker=REDIS, backend=REDIS)
app.conf.update(
    task_acks_late=True,  # keep the message until the task has ended
    task_reject_on_worker_lost=True,  # requeue it if the process that runs the task is killed
    worker_prefetch_multiplier=1,
    broker_connection_retry_on_startup=True,
)
ledger = Ledger.from_url(REDIS)


# A redelivered task waits for the killed attempt's lease to end, and takes over. If another worker holds the key for
# longer than that, Celery retries the task later.
@app.task(name="charge", autoretry_for=(KeyInProgress, FencedOut), retry_backoff=1, max_retries=10)  # type: ignore[untyped-decorator]
@ledger.once(principal="shop", key=lambda order: f"order-{order}", operation="charge", lease=2, wait=5)
def charge(order: int, card: str, amount: int) -> str:
    key = current_reservation.downstream_key("gateway")  # the same for every attempt of this order
    return Gateway(GATEWAY).charge(card, amount, key)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, valkey() as url:
        gateway = Gateway(Path(folder) / "gateway.sqlite3")
        app.conf.update(broker_url=url, result_backend=url)
        env = {**os.environ, "SHOP_REDIS": url, "SHOP_GATEWAY": f"{folder}/gateway.sqlite3"}
        words = ["--quiet", "--workdir", str(Path(__file__).parent), "--app", "celery_worker", "worker"]
        options = ["--concurrency", "2", "--loglevel", "CRITICAL", "--without-gossip", "--without-mingle"]
        with running([sys.executable, "-m", "celery", *words, *options], env=env):
            delivered = charge.delay(1001, SLOW, 1999)
            killed = wait_for(gateway.requests)[0].process
            os.kill(killed, signal.SIGKILL)  # the card is charged, and the worker has no response yet
            result = delivered.get(timeout=20)
            asked = gateway.requests()
            row = Ledger.from_url(url).read("shop", "order-1001", "charge")
            prove(
                f"process {killed} was killed in mid-task, {asked[-1].process} ran the task again",
                len({request.process for request in asked}) == 2,
            )
            prove("the second attempt took over behind the fence, at generation 2", bool(row and row.generation == 2))
            prove("the card was charged once", [request.charged for request in asked] == [True, False])
            prove("a duplicate task gets the same charge", charge.delay(1001, SLOW, 1999).get(timeout=20) == result)
            prove("and the gateway was not asked again", len(gateway.requests()) == 2)


if __name__ == "__main__":
    main()
