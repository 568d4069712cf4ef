"""Publishes a ledger's events in Redis, for `idemredis tail`.

One small PUBLISH an event, from a thread of its own, whether anybody listens or not.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import queue
import threading
from dataclasses import asdict
from typing import Any

from ..core.keys import row_prefix
from ..events import Event
from ..store.clients import Client
from ..store.errors import ERRORS

__all__ = ["Publisher", "channel"]

logger = logging.getLogger("idemredis")

QUEUED = 1_000
"""Events that wait to be published; the next ones are dropped, and counted."""


def channel(namespace: str) -> str:
    """Return the name of the channel that a namespace's events are published on."""
    return f"{row_prefix(namespace)}idemredis-events"


class Publisher:
    """An observer that publishes each event as JSON on the namespace's channel, for `idemredis tail`.

    It never blocks the caller and never raises: events wait in a bounded queue for a thread of its own, and are
    dropped when Redis is away or slow.

    Args:
        client: any sync redis-py client; the ledger's own will do.
        namespace: the ledger's.

    Attributes:
        dropped: events that were never sent.
    """

    def __init__(self, client: Client, namespace: str = "idem") -> None:
        self._client: Any = client
        self._channel = channel(namespace)
        self.dropped = 0
        self._reset()
        atexit.register(self.close)

    def _reset(self) -> None:
        """Begin with nothing, as a forked child does: what its parent queued is the parent's to send."""
        self._process = os.getpid()
        self._queue: queue.Queue[Event | None] = queue.Queue(QUEUED)
        self._lock = threading.RLock()  # the garbage collector may bring an event in the middle of another
        self._thread: threading.Thread | None = None

    def __call__(self, event: Event) -> None:
        """Queue an event."""
        if self._process != os.getpid():
            self._reset()
        if self._thread is None or not self._thread.is_alive():
            self._start()
        try:
            self._queue.put_nowait(event)
        except queue.Full:
            self.dropped += 1

    def close(self, seconds: float = 1.0) -> None:
        """Publish what waits, for at most so many seconds, and end the thread."""
        thread = self._thread
        if thread is not None and thread.is_alive():
            try:
                self._queue.put(None, timeout=seconds)
            except queue.Full:
                return
            thread.join(seconds)

    def _start(self) -> None:
        with self._lock:
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._run, name="idemredis-publisher", daemon=True)
                self._thread.start()

    def _run(self) -> None:
        while (event := self._queue.get()) is not None:
            facts = {name: value for name, value in asdict(event).items() if value is not None}
            try:
                self._client.execute_command("PUBLISH", self._channel, json.dumps(facts, separators=(",", ":")))
            except ERRORS as error:
                self.dropped += 1
                if self.dropped == 1:
                    logger.warning("events cannot be published, and are dropped (logged once): %s", error)
