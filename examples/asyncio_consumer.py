"""A consumer group of a Redis Stream, where each message charges a card once despite at-least-once delivery.

    python examples/asyncio_consumer.py                    # demonstrates it on an embedded server
    python examples/asyncio_consumer.py consume NAME       # the process that it starts

The key is the message's id. A message is acknowledged after its row is completed. If the consumer dies in between, the
message is delivered again, and the row shows that the work is done.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

import redis
import redis.asyncio
from embedded import valkey
from gateway import SLOW, Gateway
from proof import prove, script, wait_for

from idemredis import AlreadyCompleted, AsyncLedger, FencedOut, KeyInProgress, Ledger, fingerprint_value

REDIS = os.environ.get("SHOP_REDIS", "redis://127.0.0.1:6379/0")
GATEWAY = os.environ.get("SHOP_GATEWAY", "gateway.sqlite3")

STREAM, GROUP = "orders", "chargers"
SILENT_FOR = 500
"""Milliseconds after which an unacknowledged message is delivered to another consumer."""


async def consume(name: str) -> None:
    client = redis.asyncio.Redis.from_url(REDIS, decode_responses=True)
    ledger = AsyncLedger.from_url(REDIS)
    gateway = Gateway(GATEWAY)
    while True:
        _, messages, *_ = await client.xautoclaim(STREAM, GROUP, name, SILENT_FOR, count=1)
        if not messages:
            new: Any = await client.xreadgroup(GROUP, name, {STREAM: ">"}, count=1, block=200)
            messages = new[0][1] if new else []
        for message, order in messages:
            try:
                async with ledger.reserve(STREAM, message, fingerprint_value(order), lease=2, wait=5) as r:
                    key = r.downstream_key("gateway")  # the same for every attempt of this message
                    r.result = await asyncio.to_thread(gateway.charge, order["card"], int(order["amount"]), key)
            except AlreadyCompleted:
                pass  # only the acknowledgement was lost
            except (KeyInProgress, FencedOut):
                continue  # another consumer has it; if that one dies, the message is delivered again
            await client.xack(STREAM, GROUP, message)


def main() -> None:
    with (
        tempfile.TemporaryDirectory() as folder,
        valkey() as url,
        redis.Redis.from_url(url, decode_responses=True, protocol=2) as client,
    ):
        gateway = Gateway(Path(folder) / "gateway.sqlite3")
        env = {"SHOP_REDIS": url, "SHOP_GATEWAY": f"{folder}/gateway.sqlite3"}
        client.xgroup_create(STREAM, GROUP, mkstream=True)
        message = str(client.xadd(STREAM, {"card": SLOW, "amount": "1999"}))

        with script(__file__, "consume", "first", **env) as first:
            wait_for(gateway.requests)
            first.send_signal(signal.SIGKILL)  # the card is charged, and the message is not acknowledged
            first.wait()
        with script(__file__, "consume", "second", **env):
            wait_for(lambda: client.xpending(STREAM, GROUP)["pending"] == 0)
            row = Ledger.from_url(url).read(STREAM, message)
            prove("the second consumer took the message over, at generation 2", bool(row and row.generation == 2))
            prove("the card was charged once", [asked.charged for asked in gateway.requests()] == [True, False])

            other = str(client.xadd(STREAM, {"card": "tok_visa", "amount": "500"}))
            client.xgroup_setid(STREAM, GROUP, "0")  # deliver the whole stream again, as an operator might
            wait_for(lambda: _delivered(client, other) and client.xpending(STREAM, GROUP)["pending"] == 0)
            asked = gateway.requests()
            prove("the whole stream delivered again charges only what is new", [a.charged for a in asked[2:]] == [True])


def _delivered(client: redis.Redis, message: str) -> bool:
    return any(group["last-delivered-id"] == message for group in client.xinfo_groups(STREAM))


if __name__ == "__main__":
    if sys.argv[1:2] == ["consume"]:
        asyncio.run(consume(sys.argv[2]))
    else:
        main()
