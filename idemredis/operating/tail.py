"""What happens in the ledger, as it happens, seen from outside in the rows.

A server sends the names that were written to a connection that asked for it (`CLIENT TRACKING ON BCAST PREFIX`). It
costs one list entry a write while somebody tails, and nothing otherwise. The row is read after the fact, so a claim and
a completion that follow at once may show as one line.

What writes nothing (`fenced`, `reused`, `replayed`) is in no row; it is shown where the application has a
`telemetry.Publisher`.
"""

from __future__ import annotations

import json
import queue
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from ..core.keys import row_prefix
from ..core.outcomes import Row
from ..events import digest
from ..inspection.rows import RowSummary, look
from ..store.clients import Client
from ..store.errors import ERRORS, is_refusal, map_error
from ..store.nodes import Node, one_connection, own_client, primaries
from ..telemetry.publisher import channel

__all__ = ["Tail", "TailEvent"]

INVALIDATED = "__redis__:invalidate"

WRITTEN = frozenset({"claimed", "taken_over", "completed", "failed", "released"})
"""Events that a row shows by itself."""

REMEMBERED = 10_000
"""Rows whose last state is kept, to tell what changed."""

CLOCKS_DIFFER = 2.0
"""Seconds that the clocks of two well-kept hosts differ by at the very most."""

LISTEN_FOR = 0.2
"""Seconds after which a listener looks whether it is to end, and `look` returns with what there is."""


@dataclass(frozen=True, slots=True)
class TailEvent:
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
    row: RowSummary | None
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
        self._known: OrderedDict[str, RowSummary | None] = OrderedDict()
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

    def look(self) -> Iterator[TailEvent]:
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
                raise map_error(message, 0.0) from message
            yield from self._read(node, message)
            timeout = 0.0

    def _listen(self, node: Node, first: bool) -> None:
        """Events go to every node of a cluster, so they are heard on one; each node tells of its own rows only."""
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
            raise map_error(error, 0.0) from error
        if channels:
            thread = threading.Thread(target=self._hear, args=(node, listener), name="idemredis-tail", daemon=True)
            thread.start()
            self._open.callback(thread.join, 5.0)

    def _track(self, own: Node, listener: Node) -> None:
        """Have the names of written rows sent to the listener's connection: one that speaks RESP2 gets them so."""
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
            self.why_not = str(error)

    def _hear(self, node: Node, listener: Any) -> None:
        """Pass on what one server tells, as it comes: in a thread of its own, or a busy node would hide the others."""
        try:
            while not self._ending.is_set():
                if (message := listener.get_message(timeout=LISTEN_FOR)) is not None:
                    self._heard.put((node, message))
        except ERRORS as error:
            self._heard.put((node, error))

    def _read(self, node: Node, message: dict[str, Any]) -> Iterator[TailEvent]:
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
            seen = TailEvent(time.time(), event["name"], event["digest"], None, *facts)
        except (ValueError, TypeError, KeyError):
            return  # anybody with the right to publish may have sent it
        if not (self.sees_rows and seen.what in WRITTEN):
            yield seen

    def _happened(self, node: Node, row: str) -> TailEvent | None:
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
        return TailEvent(time.time(), what, digest(row), found, *facts)


def _what(before: RowSummary | None, found: RowSummary | None) -> str | None:
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


def _extended(before: RowSummary | None, row: Row) -> str:
    noted = before.row.checkpoint_seq if before is not None and before.row is not None else 0
    return "checkpointed" if row.checkpoint_seq > noted else "renewed"
