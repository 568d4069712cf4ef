"""Duplicates that are interrupted between sending and reading: `python -m tests.support.interrupted KIND URL SECONDS`.

Each duplicate must get its own key's response or none. A bystander shares the client and leaves replies unread on its
connections. Prints as JSON how many duplicates were answered, interrupted, and answered wrongly.
"""

from __future__ import annotations

import json
import sys

if sys.argv[1:2] == ["gevent"]:
    from gevent import monkey

    monkey.patch_all()

import asyncio
import random
import signal
import threading
import time
from collections import Counter
from contextlib import suppress
from typing import Any

import redis
import redis.asyncio

from idemredis import AsyncLedger, Ledger, LedgerUnavailable, Replay, Reservation, StoredResponse

KEYS = 20

UNREAD = [("GET", "other-1"), ("EVAL", "return {'replay', 'x'}", 0), ("HGET", "other-1", "x")]
"""Commands of the bystander; the last is answered by an error."""


class LimitExceeded(Exception):
    """What a task queue raises in the middle of anything."""


def fill(url: str) -> None:
    with redis.Redis.from_url(url) as client:
        client.flushall()
        for number in range(KEYS):
            client.set(f"other-{number}", b"another's value", px=600_000)
            ledger = Ledger(client, namespace="interrupted")
            r = ledger.claim("acct", f"key-{number}", "f")
            assert isinstance(r, Reservation)
            ledger.complete(r, StoredResponse(200, (), b"%d" % number))


def note(counts: Counter[str], number: int, outcome: object) -> None:
    right = isinstance(outcome, Replay) and outcome.response.body == b"%d" % number
    counts["answered" if right else "wrong"] += 1
    if not right:
        print(number, outcome, file=sys.stderr)


def leave_unread(client: redis.Redis) -> None:
    """Give a connection back with a reply on its way, which redis-py lets anybody do."""
    pool = client.connection_pool
    with suppress(redis.RedisError):
        connection: Any = pool.get_connection()
        connection.send_command(*random.choice(UNREAD))
        pool.release(connection)


class Limit:
    """A time limit that about half of the calls keep, however busy the machine is."""

    def __init__(self) -> None:
        self._span = 0.004

    def draw(self) -> float:
        return random.random() * self._span

    def was_kept(self, kept: bool) -> None:
        self._span = min(self._span * (0.98 if kept else 1.02), 1.0)


def by_signals(url: str, seconds: float) -> Counter[str]:
    """Signals whose handler raises, in a thread's aim at the main thread; others share the client."""
    counts: Counter[str] = Counter()
    client = redis.Redis.from_url(url)
    ledger = Ledger(client, namespace="interrupted")
    armed, over = threading.Event(), threading.Event()

    def limit(*_: object) -> None:
        if armed.is_set():
            armed.clear()
            raise LimitExceeded

    signal.signal(signal.SIGUSR1, limit)

    def aim() -> None:
        main = threading.main_thread().ident
        assert main is not None
        while not over.is_set():
            if armed.is_set():
                time.sleep(random.random() * 0.0004)
                signal.pthread_kill(main, signal.SIGUSR1)
            time.sleep(0)

    def share() -> None:
        while not over.is_set():
            number = random.randrange(KEYS)
            try:
                note(counts, number, ledger.claim("acct", f"key-{number}", "f"))
            except LedgerUnavailable:
                pass
            except Exception as error:  # a reply that no ledger can read is another's, too
                note(counts, number, error)
            if random.random() < 0.1:
                leave_unread(client)

    threads = [threading.Thread(target=run) for run in (aim, share, share)]
    for thread in threads:
        thread.start()
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        number = random.randrange(KEYS)
        try:
            armed.set()
            outcome = ledger.claim("acct", f"key-{number}", "f")
            armed.clear()
            note(counts, number, outcome)
        except LimitExceeded:
            counts["interrupted"] += 1
        except LedgerUnavailable:
            counts["unavailable"] += 1
    with suppress(LimitExceeded):
        armed.clear()
    over.set()
    for thread in threads:
        thread.join()
    return counts


def by_greenlets(url: str, seconds: float) -> Counter[str]:
    """gevent's timeouts."""
    import gevent

    counts: Counter[str] = Counter()
    client = redis.Redis.from_url(url)
    ledger = Ledger(client, namespace="interrupted")
    until = time.monotonic() + seconds
    time_limit = Limit()

    def ask() -> None:
        while time.monotonic() < until:
            number = random.randrange(KEYS)
            try:
                with gevent.Timeout(time_limit.draw()):
                    outcome = ledger.claim("acct", f"key-{number}", "f")
                note(counts, number, outcome)
                time_limit.was_kept(True)
            except gevent.Timeout:
                counts["interrupted"] += 1
                time_limit.was_kept(False)
            except LedgerUnavailable:
                counts["unavailable"] += 1
            if random.random() < 0.05:
                leave_unread(client)

    gevent.joinall([gevent.spawn(ask) for _ in range(8)], raise_error=True)
    return counts


async def by_cancelling(url: str, seconds: float) -> Counter[str]:
    """asyncio's tasks, cancelled."""
    counts: Counter[str] = Counter()
    client = redis.asyncio.Redis.from_url(url)
    ledger = AsyncLedger(client, namespace="interrupted")
    until = time.monotonic() + seconds
    time_limit = Limit()

    async def leave_one_unread() -> None:
        pool: Any = client.connection_pool
        connection = await pool.get_connection()
        await connection.send_command("GET", "other-1")
        await pool.release(connection)

    async def ask() -> None:
        while time.monotonic() < until:
            number = random.randrange(KEYS)
            try:
                async with asyncio.timeout(time_limit.draw()):
                    outcome = await ledger.claim("acct", f"key-{number}", "f")
                note(counts, number, outcome)
                time_limit.was_kept(True)
            except TimeoutError:
                counts["interrupted"] += 1
                time_limit.was_kept(False)
            except LedgerUnavailable:
                counts["unavailable"] += 1
            if random.random() < 0.05:
                with suppress(redis.RedisError):
                    await leave_one_unread()

    await asyncio.gather(*(ask() for _ in range(8)))
    await ledger.close()
    await client.aclose()
    return counts


if __name__ == "__main__":
    kind, url, seconds = sys.argv[1], sys.argv[2], float(sys.argv[3])
    fill(url)
    match kind:
        case "signals":
            counts = by_signals(url, seconds)
        case "gevent":
            counts = by_greenlets(url, seconds)
        case _:
            counts = asyncio.run(by_cancelling(url, seconds))
    print(json.dumps(counts))
