"""What happens in the ledger, as it happens: seen from outside in the rows, and told by whoever publishes its events.

Rows: a server tells a connection that asked (`CLIENT TRACKING ON BCAST PREFIX`) which names were written. It costs one
list entry a write while somebody tails, and nothing otherwise. The row is read after the fact, so a claim and a
completion that follow at once may show as one line.

Events: what writes nothing (`fenced`, `reused`, `replayed`) is in no row. A ledger with a `Publisher` among its
observers PUBLISHes each event: one small command an event, from a thread of its own, listener or not.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import queue
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import Any

import redis

from .. import clients
from ..clients import ERRORS, Client
from ..events import Event
from ..keys import digest
from ..operations import Row
from .nodes import Node, primaries
from .rows import Found, look, prefix

__all__ = ["Publisher", "Seen", "Tail", "channel"]

logger = logging.getLogger("idemredis")

INVALIDATED = "__redis__:invalidate"

WRITTEN = frozenset({"claimed", "taken_over", "completed", "failed", "released"})
"""Events that a row shows by itself."""

REMEMBERED = 10_000
"""Rows whose last state is kept, to tell what changed."""

QUEUED = 1_000
"""Events that wait to be published; the next ones are dropped, and counted."""

_POOL_OWN = ("maint_", "orig_", "himport_")  # what redis-py's own pool adds to the options that it was given

CLOCKS_DIFFER = 2.0
"""Seconds that the clocks of two well-kept hosts differ by at the very most."""

LISTEN_FOR = 0.2
"""Seconds after which a listener looks whether it is to end, and `look` returns with what there is."""


def channel(namespace: str) -> str:
    """Return the name of the channel that a namespace's events are published on."""
    return f"{prefix(namespace)}idemredis-events"


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
        self._forget()
        atexit.register(self.close)

    def _forget(self) -> None:
        """Begin with nothing, as a forked child does: what its parent queued is the parent's to send."""
        self._process = os.getpid()
        self._queue: queue.Queue[Event | None] = queue.Queue(QUEUED)
        self._lock = threading.RLock()  # the garbage collector may bring an event in the middle of another
        self._thread: threading.Thread | None = None

    def __call__(self, event: Event) -> None:
        """Queue an event."""
        if self._process != os.getpid():
            self._forget()
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
            told = {name: value for name, value in asdict(event).items() if value is not None}
            try:
                self._client.execute_command("PUBLISH", self._channel, json.dumps(told, separators=(",", ":")))
            except ERRORS as error:
                self.dropped += 1
                if self.dropped == 1:
                    logger.warning("events cannot be published, and are dropped (this is said once): %s", error)


@dataclass(frozen=True, slots=True)
class Seen:
    """One thing that happened.

    Attributes:
        at: seconds since the epoch, by this host.
        what: an event's name; or `gone`, `checkpointed`, `renewed`, `corrupt`, `changed`.
        digest: of the row.
        row: as it was just after; None where only an event told it.
        generation: of the attempt; 0 where there is none.
        operation: of the row.
        route: the endpoint or function; "" where unknown.
    """

    at: float
    what: str
    digest: str
    row: Found | None
    generation: int
    operation: str
    route: str


class Tail:
    """Listens to every server of a client, on connections of its own. A context manager.

    Attributes:
        sees_rows: whether the servers tell which rows are written.
        why_not: where they do not, what they said.

    Raises:
        LedgerUnavailable: a server cannot be reached, or refuses to be listened to.
    """

    def __init__(self, client: Client, namespace: str) -> None:
        self._client = client
        self._namespace = namespace
        self._known: OrderedDict[str, Found | None] = OrderedDict()
        self._open = ExitStack()
        self._heard: queue.SimpleQueue[tuple[Node, dict[str, Any] | Exception]] = queue.SimpleQueue()
        self._ending = threading.Event()
        self.sees_rows = True
        self.why_not = ""
        try:
            for i, node in enumerate(primaries(client)):
                self._listen(node, i == 0)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Tail:
        """Return itself."""
        return self

    def __exit__(self, *ended: object) -> None:
        """Stop listening."""
        self.close()

    def close(self) -> None:
        """Stop listening."""
        self._ending.set()
        self._open.close()

    def look(self) -> Iterator[Seen]:
        """Yield what happened since the last look, waiting for it a little.

        Raises:
            LedgerUnavailable: a server went away.
        """
        timeout = LISTEN_FOR
        while True:
            try:
                node, message = self._heard.get(timeout=timeout)
            except queue.Empty:
                return
            if isinstance(message, Exception):
                raise clients.ours(message, 0.0) from message
            yield from self._read(node, message)
            timeout = 0.0

    def _listen(self, node: Node, first: bool) -> None:
        """Events go to every node of a cluster, so they are heard on one; each node tells of its own rows only."""
        try:
            own = _own_client(node)
            self._open.callback(own.close)
            listener = own.pubsub()
            self._open.callback(listener.close)
            channels = [channel(self._namespace)] if first else []
            if self.sees_rows:
                self._track(own, listener)
            if self.sees_rows:
                channels.append(INVALIDATED)
            if channels:
                listener.subscribe(*channels)
        except ERRORS as error:
            raise clients.ours(error, 0.0) from error
        if channels:
            thread = threading.Thread(target=self._hear, args=(node, listener), name="idemredis-tail", daemon=True)
            thread.start()
            self._open.callback(thread.join, 5.0)

    def _track(self, own: Node, listener: Node) -> None:
        """Have the names of written rows sent to the listener's connection: one that speaks RESP2 gets them so."""
        try:
            listener.execute_command("CLIENT", "ID")
            number = listener.parse_response()
            tracker: Node = redis.Redis(connection_pool=own.connection_pool, single_connection_client=True)
            self._open.callback(tracker.close)
            words = ("BCAST", "PREFIX", prefix(self._namespace))
            tracker.execute_command("CLIENT TRACKING", "ON", "REDIRECT", number, *words)
        except redis.ResponseError as error:
            self.sees_rows = False
            self.why_not = str(error)

    def _hear(self, node: Node, listener: Any) -> None:
        """Pass on what one server tells, as it comes: in a thread of its own, or a busy node would hide the others."""
        try:
            while not self._ending.is_set():
                if (message := listener.get_message(timeout=LISTEN_FOR)) is not None:
                    self._heard.put((node, message))
        except ERRORS as error:
            self._heard.put((node, error))

    def _read(self, node: Node, message: dict[str, Any]) -> Iterator[Seen]:
        if message["type"] != "message":
            return
        name, data = message["channel"], message["data"]
        if (name if isinstance(name, str) else name.decode()) == INVALIDATED:
            names = data if isinstance(data, list) else []  # nothing: the whole server was flushed
            for row in (name if isinstance(name, str) else name.decode("ascii", "replace") for name in names):
                if (seen := self._happened(node, row)) is not None:
                    yield seen
            return
        try:
            event = json.loads(data)
            facts = (int(event["generation"]), event["operation"], event["route"])
            seen = Seen(time.time(), event["name"], event["digest"], None, *facts)
        except (ValueError, TypeError, KeyError):
            return  # anybody with the right to publish may have sent it
        if not (self.sees_rows and seen.what in WRITTEN):
            yield seen

    def _happened(self, node: Node, row: str) -> Seen | None:
        [found] = look(self._client, node, [row])
        before = self._known.get(row)
        self._known[row] = found
        self._known.move_to_end(row)
        if len(self._known) > REMEMBERED:
            self._known.popitem(last=False)
        what = _what(before, found)
        if what is None:
            return None
        at = found or before
        facts = (at.generation, at.identity.operation, at.row.route if at.row else "") if at else (0, "", "")
        return Seen(time.time(), what, digest(row), found, *facts)


def _what(before: Found | None, found: Found | None) -> str | None:
    """Say what changed; without a row before, what the row itself tells."""
    if found is None:
        return "gone"
    if found.row is None or found.row.status != "pending":
        return None if before is not None and before.status == found.status else found.status
    if not found.row.owner:
        return "released"
    if before is not None and before.generation == found.generation:
        return _extended(before, found.row)
    if found.generation > 1:
        return "taken_over"
    return "claimed" if before is not None or _is_new(found.row) else _extended(before, found.row)


def _is_new(row: Row) -> bool:
    """Whether its last transition may have been the claim: the clock of whoever claimed it is not ours."""
    return row.created_at is None or time.time() - row.created_at - row.age < CLOCKS_DIFFER


def _extended(before: Found | None, row: Row) -> str:
    noted = before.row.checkpoint_seq if before is not None and before.row is not None else 0
    return "checkpointed" if row.checkpoint_seq > noted else "renewed"


def _own_client(node: Node) -> Node:
    """Return a client with connections of its own, which end with it, and of the older protocol: see `Tail._track`."""
    pool = node.connection_pool
    kept = {name: value for name, value in node.get_connection_kwargs().items() if not name.startswith(_POOL_OWN)}
    options = {**kept, "protocol": 2}
    return redis.Redis(connection_pool=redis.ConnectionPool(connection_class=pool.connection_class, **options))
