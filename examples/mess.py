"""Make four things go wrong in a ledger; docs/operations.md shows how to find and settle them.

python examples/mess.py                             # on an embedded server, which keeps running
python examples/mess.py redis://127.0.0.1:6379/0    # on your own server or cluster; never one in production
"""

from __future__ import annotations

import logging
import signal
import sys
from contextlib import suppress
from typing import Any

import redis
from embedded import valkey

from idemredis import Ledger, Policy, Reservation, StoredResponse, fingerprint_value
from idemredis.store.nodes import connect, primaries

SOON = 0.05
"""Seconds of the lease of attempts that die."""

LONG = 900.0
"""Seconds of the lease that a hung handler still holds."""


def make_mess(client: redis.Redis | redis.RedisCluster, namespace: str = "idem") -> dict[str, Reservation]:
    """Make the four rows and settings; return the reservations whose attempts are still running."""
    ledger = Ledger(client, Policy(heartbeat=False), namespace)
    for number in range(5):
        settle_well(ledger, f"acct_{number}", f"order-{number}")

    # A handler that hangs: it holds its row, and every retry of a paying customer gets 409.
    stuck = claim(ledger, "acct_alice", "order-1001", LONG)

    # A worker that was killed, and a customer who has not retried.
    dead = claim(ledger, "acct_bob", "order-2002", SOON)

    # A worker that was killed after charging the card; the next one could not find out whether it had.
    killed = claim(ledger, "acct_carol", "order-3003", SOON)
    ledger.checkpoint(killed, "charging", {"amount": 4200})
    held = claim(ledger, "acct_carol", "order-3003", SOON)
    ledger.hold(held, for_review=True)
    for r in (dead, held):
        ledger.claim(r.principal, r.key, r.fingerprint, wait=5.0, takeover=False)  # wait until its lease ends

    # Somebody configured the server as a cache.
    for node in primaries(client):
        node.config_set("maxmemory-policy", "allkeys-lru")
    ledger.close()
    return {"stuck": stuck, "dead": dead, "held": held}


def claim(ledger: Ledger, principal: str, key: str, lease: float) -> Reservation:
    """Claim a key, waiting for a dead attempt's lease to end."""
    fingerprint = fingerprint_value({"order": key})
    outcome = ledger.claim(principal, key, fingerprint, lease=lease, wait=5.0, route="POST /orders")
    if not isinstance(outcome, Reservation):
        raise SystemExit(f"{principal} {key}: {outcome}; the mess wants an empty ledger")
    return outcome


def settle_well(ledger: Ledger, principal: str, key: str) -> None:
    answer = StoredResponse(201, (("content-type", "application/json"),), b'{"paid": true}')
    ledger.complete(claim(ledger, principal, key, LONG), answer)


def main() -> None:
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s")
    if len(sys.argv) > 1:
        make_mess(connect(sys.argv[1]))
        return
    with valkey() as url:
        client: Any = connect(url)
        make_mess(client)
        print(
            f"The mess is made; look at it from another terminal, until Ctrl-C here:\n\nexport IDEMREDIS_URL={url}",
            flush=True,
        )
        with suppress(KeyboardInterrupt):
            signal.pause()


if __name__ == "__main__":
    main()
