"""An RQ job that charges a card once, even if its work horse is killed during the job and the job is retried.

    python examples/rq_worker.py                    # demonstrates it on an embedded server
    rq worker --path examples                       # the process that it starts

`Retry` makes RQ run a job again when its work horse dies; `once` makes that safe.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from pathlib import Path

import redis
from embedded import running, valkey
from gateway import SLOW, Gateway
from proof import prove, wait_for
from rq import Queue, Retry

from idemredis import Ledger, current_reservation

REDIS = os.environ.get("SHOP_REDIS", "redis://127.0.0.1:6379/0")
GATEWAY = os.environ.get("SHOP_GATEWAY", "gateway.sqlite3")

ledger = Ledger.from_url(REDIS)


# A retried job waits for the killed attempt's lease to end, and takes over.
@ledger.once(principal="shop", key=lambda order: f"order-{order}", operation="charge", lease=2, wait=5)
def charge(order: int, card: str, amount: int) -> str:
    key = current_reservation.downstream_key("gateway")  # the same for every attempt of this order
    return Gateway(GATEWAY).charge(card, amount, key)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, valkey() as url, redis.Redis.from_url(url) as client:
        gateway = Gateway(Path(folder) / "gateway.sqlite3")
        env = {**os.environ, "SHOP_REDIS": url, "SHOP_GATEWAY": f"{folder}/gateway.sqlite3"}
        words = ["worker", "--url", url, "--path", str(Path(__file__).parent), "--quiet"]
        queue = Queue(connection=client)
        with running([sys.executable, "-m", "rq.cli", *words], env=env):
            job = queue.enqueue("rq_worker.charge", 1001, SLOW, 1999, retry=Retry(max=3))
            killed = wait_for(gateway.requests)[0].process
            os.kill(killed, signal.SIGKILL)  # the card is charged, and the work horse has no response yet
            result = wait_for(job.return_value)
            asked = gateway.requests()
            row = Ledger.from_url(url).read("shop", "order-1001", "charge")
            prove(
                f"process {killed} was killed in mid-job, {asked[-1].process} ran the job again",
                len({request.process for request in asked}) == 2,
            )
            prove("the second attempt took over behind the fence, at generation 2", bool(row and row.generation == 2))
            prove("the card was charged once", [request.charged for request in asked] == [True, False])
            duplicate = queue.enqueue("rq_worker.charge", 1001, SLOW, 1999)
            prove("a duplicate job gets the same charge", wait_for(duplicate.return_value) == result)
            prove("and the gateway was not asked again", len(gateway.requests()) == 2)


if __name__ == "__main__":
    main()
