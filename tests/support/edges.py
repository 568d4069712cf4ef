"""Signals at the edges of `reserve` blocks: `python -m tests.support.edges URL NAMESPACE BLOCKS LEASE`.

A thread aims a signal, whose handler raises, at each block of the main thread. Prints as JSON how many blocks were
interrupted, how their rows were left, and which rows stayed held.
"""

from __future__ import annotations

import gc
import json
import random
import signal
import sys
import threading
import time
from collections import Counter
from contextlib import suppress

from idemredis import InProgress, Ledger, Policy
from tests.support.waiting import wait_until

HELD_AT_MOST = 20.0
"""Seconds; a heartbeat would renew a lease for ever."""


class LimitExceeded(Exception):
    """What a task queue raises in the middle of anything."""


def main(url: str, namespace: str, blocks: int, lease: float) -> None:
    counts: Counter[str] = Counter()
    ledger = Ledger.from_url(url, Policy(lease=lease), namespace, socket_timeout=20.0)
    look = Ledger.from_url(url, namespace=namespace, socket_timeout=20.0)
    armed, over = threading.Event(), threading.Event()
    spread = [0.001]

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
                time.sleep(random.random() * spread[0])
                signal.pthread_kill(main, signal.SIGUSR1)
            time.sleep(0)

    thread = threading.Thread(target=aim)
    thread.start()
    keys = [f"k{number}" for number in range(blocks)]
    for key in keys:
        began = time.monotonic()
        try:
            armed.set()
            with ledger.reserve("worker", key, "f") as r:
                r.result = key
            armed.clear()
            spread[0] = min(time.monotonic() - began, 0.005)
        except LimitExceeded:
            counts["interrupted"] += 1
    with suppress(LimitExceeded):
        armed.clear()
    over.set()
    thread.join()
    gc.collect()

    def is_free(key: str) -> bool:
        return not isinstance(state := look.claim("worker", key, "f", takeover=False), InProgress) or state.stale

    held = []
    for key in keys:
        row = look.read("worker", key)
        counts[
            "no row" if row is None else row.status if row.response else "released" if not row.owner else "left"
        ] += 1
        try:
            wait_until(lambda key=key: is_free(key), HELD_AT_MOST)  # type: ignore[misc]
        except AssertionError:
            held.append(key)
    with ledger.reserve("worker", "after", "f") as r:  # nothing was left locked
        began = look.client.pexpiretime(r.row)
        wait_until(lambda: look.client.pexpiretime(r.row) > began + lease * 500)
    print(json.dumps({**counts, "held": held}))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4]))
