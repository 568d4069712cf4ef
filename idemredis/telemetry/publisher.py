"""Publish a ledger's events in Redis, for `idemredis tail`.

Each event is one small PUBLISH from a background thread, whether or not anybody listens.
"""

from __future__ import annotations

import atexit
import json
import logging
import queue
import threading
from dataclasses import asdict
from typing import Any

from ..core.keys import row_prefix
from ..core.text import escaped
from ..events import Event
from ..store.clients import Client
from ..store.deadline import made_of
from ..store.errors import ERRORS

__all__ = ["Publisher", "channel"]

logger = logging.getLogger("idemredis")

MAX_QUEUED = 1_000
"""Events waiting to be published; more are dropped and counted."""


def channel(namespace: str) -> str:
    """Return the name of the channel for a namespace's events."""
    return f"{row_prefix(namespace)}idemredis-events"


class Publisher:
    """Publish each event as JSON on the namespace's channel; pass an instance as an observer.

    A publisher never blocks its caller and never raises. Events wait in a bounded queue for a background thread, and
    are dropped if Redis is unreachable or slow, or if the process dies.

    Args:
        client: any sync redis-py client, such as the ledger's own.
        namespace: the ledger's namespace.

    Attributes:
        dropped: number of events that were not sent.
    """

    def __init__(self, client: Client, namespace: str = "idem") -> None:
        self._client: Any = client
        self._channel = channel(namespace)
        self.dropped = 0
        self._reset()
        atexit.register(self.close)

    def _reset(self) -> None:
        """Start with an empty queue and no thread.

        So must a forked child, since queued events belong to the parent; and so must a process whose locks gevent has
        replaced since. There, the thread of before publishes what it has, and then waits for the end of the process.
        """
        self._made_of = made_of()
        # In C, without a lock of Python's: a signal's exception leaves none locked, and the garbage collector may emit.
        self._queue: queue.SimpleQueue[Event | None] = queue.SimpleQueue()
        self._lock = threading.RLock()  # reentrant: the garbage collector may emit an event while it is held
        self._thread: threading.Thread | None = None

    def __call__(self, event: Event) -> None:
        """Queue one event."""
        if self._made_of != made_of():
            self._reset()
        if self._thread is None or not self._thread.is_alive():
            self._start()
        if self._queue.qsize() < MAX_QUEUED:
            self._queue.put(event)
        else:
            self.dropped += 1

    def close(self, seconds: float = 1.0) -> None:
        """Publish the queued events for at most about `seconds` seconds, and stop the thread."""
        thread = self._thread
        if thread is not None and thread.is_alive():
            self._queue.put(None)
            thread.join(seconds)

    def _start(self) -> None:
        with self._lock:
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(
                    target=self._run, args=(self._queue,), name="idemredis-publisher", daemon=True
                )
                self._thread.start()

    def _run(self, events: queue.SimpleQueue[Event | None]) -> None:
        while (event := events.get()) is not None:
            facts = {name: value for name, value in asdict(event).items() if value is not None}
            try:
                self._client.execute_command("PUBLISH", self._channel, json.dumps(facts, separators=(",", ":")))
            except ERRORS as error:
                self.dropped += 1
                if self.dropped == 1:
                    logger.warning("events cannot be published and are dropped (logged once): %s", escaped(str(error)))
