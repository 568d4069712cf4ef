"""Follow a ledger's rows as they change, from outside the application.

With `CLIENT TRACKING ON BCAST PREFIX`, a server reports the names of written keys to a connection. That costs the
server one list entry per write while somebody tails, and nothing otherwise. Rows are read after the report, so a claim
and a completion in quick succession can show as one event.

Events that write nothing (`fenced`, `reused`, `replayed`) leave no trace in rows. They are shown if the application has
a `telemetry.Publisher`. Whoever may PUBLISH can make such events up, so their parts are checked, and a printer must
escape their texts.
"""

from __future__ import annotations

import json
import queue
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from ..core.keys import row_prefix
from ..core.outcomes import Row
from ..core.text import escaped
from ..events import digest
from ..inspection.rows import RowSummary, look
from ..store.clients import Client
from ..store.errors import ERRORS, is_refusal, map_error, note_unsent
from ..store.nodes import Node, one_connection, own_client, primaries
from ..telemetry.publisher import channel

__all__ = ["Tail", "TailEvent"]

INVALIDATED = "__redis__:invalidate"

WRITTEN = frozenset({"claimed", "taken_over", "retried", "completed", "failed", "released"})
"""Events that can be seen in the row itself."""

MAX_MESSAGE = 16 * 1024
"""Bytes of a published event. A publisher's own have a few hundred, and some thousand with keys of full length."""

MAX_TEXT = 1024
"""Characters of a published operation or route."""

MAX_GENERATION = 10**15
"""As in rows, whose integers have at most 15 digits."""

_NAME = re.compile(r"[a-z_]{1,32}")
_DIGEST = re.compile(r"(?:[0-9a-f]{12})?")

MAX_ROWS = 10_000
"""Rows whose last state is kept, to find out what changed."""

MAX_CLOCK_SKEW = 2.0
"""Seconds by which the clocks of two hosts with NTP differ at most."""

POLL_INTERVAL = 0.2
"""Seconds after which a listener checks whether it should end, and `look` returns."""


@dataclass(frozen=True, slots=True)
class TailEvent:
    """One observed event.

    Attributes:
        at: seconds since the epoch, by this host's clock.
        what: the name of an event; or `gone`, `checkpointed`, `renewed` or `corrupt`.
        digest: digest of the row.
        row: the row just after the event; None if it is gone, or if a publisher reported the event.
        generation: generation of the attempt; 0 if there is none.
        operation: third part of the row's identity; "" if there is none.
        route: the endpoint or function; "" if unknown.
    """

    at: float
    what: str
    digest: str
    row: RowSummary | None
    generation: int
    operation: str
    route: str


class Tail:
    """Listen to every server of a client, on separate connections; a context manager.

    Attributes:
        sees_rows: whether the servers report which rows are written.
        why_not: the servers' error message if they do not; else "".

    Raises:
        LedgerUnavailable: a server cannot be reached, or refuses the subscription.
    """

    def __init__(self, client: Client, namespace: str) -> None:
        self._client = client
        self._namespace = namespace
        self._known: OrderedDict[str, RowSummary | None] = OrderedDict()
        self._open = ExitStack()
        self._messages: queue.SimpleQueue[tuple[Node, dict[str, Any] | Exception]] = queue.SimpleQueue()
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

    def look(self) -> Iterator[TailEvent]:
        """Yield the events since the last call, after waiting up to `POLL_INTERVAL` seconds for one.

        Raises:
            LedgerUnavailable: the connection to a server was lost.
        """
        timeout = POLL_INTERVAL
        while True:
            try:
                node, message = self._messages.get(timeout=timeout)
            except queue.Empty:
                return
            if isinstance(message, Exception):
                raise map_error(message, 0.0) from message
            yield from self._read(node, message)
            timeout = 0.0

    def _listen(self, node: Node, first: bool) -> None:
        """Subscribe to one server: to its writes, and on the first server also to published events.

        A cluster forwards published events to every node, but each node reports only the writes to its own rows.
        """
        try:
            own = own_client(node)
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
            note_unsent(error)
            raise map_error(error, 0.0) from error
        if channels:
            thread = threading.Thread(target=self._receive, args=(node, listener), name="idemredis-tail", daemon=True)
            thread.start()
            self._open.callback(thread.join, 5.0)

    def _track(self, own: Node, listener: Node) -> None:
        """Redirect the names of written rows to the listener's connection, as RESP2 requires."""
        try:
            listener.execute_command("CLIENT", "ID")
            number = listener.parse_response()
            tracker = one_connection(own)
            self._open.callback(tracker.close)
            words = ("BCAST", "PREFIX", row_prefix(self._namespace))
            tracker.execute_command("CLIENT TRACKING", "ON", "REDIRECT", number, *words)
        except ERRORS as error:
            if not is_refusal(error):
                raise
            self.sees_rows = False
            self.why_not = escaped(str(error))

    def _receive(self, node: Node, listener: Any) -> None:
        """Queue one server's messages; each server has its own thread, so that a busy one does not delay the others."""
        try:
            while not self._ending.is_set():
                if (message := listener.get_message(timeout=POLL_INTERVAL)) is not None:
                    self._messages.put((node, message))
        except ERRORS as error:
            self._messages.put((node, error))

    def _read(self, node: Node, message: dict[str, Any]) -> Iterator[TailEvent]:
        if message["type"] != "message":
            return
        name, data = message["channel"], message["data"]
        if (name if isinstance(name, str) else name.decode()) == INVALIDATED:
            names = data if isinstance(data, list) else []  # None after FLUSHALL, which names no rows
            for row in (name if isinstance(name, str) else name.decode("ascii", "replace") for name in names):
                if (written := self._compare(node, row)) is not None:
                    yield written
            return
        published = _published(data)
        if published is not None and not (self.sees_rows and published.what in WRITTEN):
            yield published

    def _compare(self, node: Node, row: str) -> TailEvent | None:
        [after] = look(self._client, node, [row])
        before = self._known.get(row)
        self._known[row] = after
        self._known.move_to_end(row)
        if len(self._known) > MAX_ROWS:
            self._known.popitem(last=False)
        what = _what(before, after)
        if what is None:
            return None
        at = after or before
        facts = (at.generation, at.identity.operation, at.row.route if at.row else "") if at else (0, "", "")
        return TailEvent(time.time(), what, digest(row), after, *facts)


def _published(data: object) -> TailEvent | None:
    """Return the event in a message, or None if it is not one that a publisher of ours sends."""
    if not isinstance(data, (bytes, str)) or len(data) > MAX_MESSAGE:
        return None
    try:
        event = json.loads(data)
    except (ValueError, RecursionError):
        return None
    match event:
        case {
            "name": str(name),
            "digest": str(digest),
            "generation": int(generation),
            "operation": str(operation),
            "route": str(route),
        }:
            texts_fit = len(operation) <= MAX_TEXT and len(route) <= MAX_TEXT
            number_fits = not isinstance(generation, bool) and 0 <= generation < MAX_GENERATION
            if _NAME.fullmatch(name) and _DIGEST.fullmatch(digest) and texts_fit and number_fits:
                return TailEvent(time.time(), name, digest, None, generation, operation, route)
    return None


def _what(before: RowSummary | None, after: RowSummary | None) -> str | None:
    """Return what changed, or None for no change; without `before`, derive it from the row alone."""
    if after is None:
        return "gone"
    if after.row is None or after.row.status != "pending":
        return None if before is not None and before.status == after.status else after.status
    if not after.row.owner:
        return "released"
    if before is not None and before.generation == after.generation:
        return _extended(before, after.row)
    if after.generation > 1:
        return "retried" if before is not None and before.status == "released" else "taken_over"
    return "claimed" if before is not None or _is_new(after.row) else _extended(before, after.row)


def _is_new(row: Row) -> bool:
    """Return True if the claim may be the last transition; `created_at` is by another host's clock."""
    return row.created_at is None or time.time() - row.created_at - row.age < MAX_CLOCK_SKEW


def _extended(before: RowSummary | None, row: Row) -> str:
    last = before.row.checkpoint_seq if before is not None and before.row is not None else 0
    return "checkpointed" if row.checkpoint_seq > last else "renewed"
