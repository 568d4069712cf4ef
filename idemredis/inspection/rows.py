"""Find rows by SCAN, summarise and count them. Read-only."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Literal, TypeAlias

from ..core import operations
from ..core.keys import Identity, parse_row_name, row_prefix
from ..core.outcomes import Row
from ..errors import CorruptRow, IdempotencyError
from ..events import digest
from ..store.clients import Client
from ..store.cluster import wire
from ..store.errors import was_redirected
from ..store.evaluate import evaluate
from ..store.nodes import Node, ask, ask_all, own_wire, primaries

__all__ = [
    "BATCH",
    "STATUSES",
    "RowSummary",
    "Stats",
    "Status",
    "identity_of",
    "look",
    "scan",
    "stats",
    "summarise",
]

Status: TypeAlias = Literal["stale", "pending", "failed", "completed", "corrupt"]

STATUSES: tuple[Status, ...] = ("stale", "pending", "failed", "completed", "corrupt")
"""Statuses in the order of the attention that they need."""

BATCH = 500
"""Names that one SCAN call covers. It takes the server some tenths of a millisecond."""

MEMORY_SAMPLE = 200
"""Rows whose MEMORY USAGE is queried; enough for a mean."""

RATE_PERIOD = 3600.0
"""Seconds over which the rate of new rows is measured."""


@dataclass(frozen=True, slots=True)
class RowSummary:
    """A row as lists show it.

    Attributes:
        identity: the row's name and parts; the parts are empty if the name is not that of a ledger's row.
        status: the stored status; `stale` if it is pending and its lease has ended; `corrupt` if it cannot be read.
        ttl: seconds until the row expires; None if it has no TTL.
        row: the row without its stored body; None if it is corrupt.
        why: why the row is corrupt; "" if it is not.
    """

    identity: Identity = field(repr=False)
    status: Status
    ttl: float | None = None
    row: Row | None = None
    why: str = ""

    @property
    def generation(self) -> int:
        """The generation of the row's attempt; 0 for a corrupt row."""
        return self.row.generation if self.row else 0

    @property
    def age(self) -> float:
        """Seconds since the last transition, by the server's clock; 0.0 for a corrupt row."""
        return self.row.age if self.row else 0.0

    @property
    def claimed_at(self) -> float | None:
        """When the row was claimed, in seconds since the epoch by the caller's clock; informational."""
        return self.row.created_at if self.row else None

    @property
    def digest(self) -> str:
        """The digest that identifies the row in log lines, events and spans."""
        return digest(self.identity.row)


def identity_of(row: str) -> Identity:
    """Return the identity in a row's name; its parts are empty if the name is not that of a ledger's row."""
    try:
        _, principal, operation, key = parse_row_name(row)
    except (ValueError, UnicodeError):
        return Identity("", "", "", row)
    return Identity(principal, operation, key, row)


def summarise(identity: Identity, row: Row | IdempotencyError | None) -> RowSummary | None:
    """Return the summary of a row as it was read, or None if there is no row.

    Raises:
        LedgerUnavailable: the row could not be read.
    """
    if row is None:
        return None
    if isinstance(row, CorruptRow):
        return RowSummary(identity, "corrupt", row.ttl, why=row.why)
    if isinstance(row, IdempotencyError):
        raise row
    if not identity.key:
        return RowSummary(identity, "corrupt", row.ttl, why="its name is not that of a ledger's row")
    status: Any = "stale" if row.stale else row.status
    return RowSummary(identity, status, row.ttl, row)


def look(client: Client, node: Node, names: Sequence[str]) -> list[RowSummary | None]:
    """Return the summaries of rows of one server, with None for a row that is gone.

    A row whose slot is being moved is read again through the cluster's client.

    Raises:
        LedgerUnavailable: the server was unreachable, refused the call, or was too slow.
    """
    identities = [identity_of(name) for name in names]
    calls = [operations.read(identity, body=False) for identity in identities]
    summaries = []
    for identity, call, row in zip(identities, calls, evaluate(own_wire(node), calls), strict=True):
        current = evaluate(wire(client), [call])[0] if was_redirected(row) else row
        summaries.append(summarise(identity, current))
    return summaries


def scan(
    client: Client, namespace: str, principal: str = "", advance: Callable[[int], object] = lambda names: None
) -> Iterator[RowSummary]:
    """Yield the rows of a namespace by SCAN, on every primary of a cluster.

    A row that exists during the whole scan is found at least once, and twice if the server's hash table grows
    meanwhile. A row that is made or deleted during the scan may be missed.

    Args:
        client: the client.
        namespace: first part of the rows' names.
        principal: only rows of this principal; "" for all.
        advance: called with the number of names scanned since the last call.

    Raises:
        LedgerUnavailable: a server was unreachable, refused a call, or was too slow.
    """
    pattern = f"{row_prefix(namespace, principal)}*"
    for node in primaries(client):
        cursor = 0
        while True:
            cursor, names = ask(node, "SCAN", cursor, "MATCH", pattern, "COUNT", BATCH)
            summaries = look(client, node, [name.decode("ascii", "replace") for name in names])
            yield from (row for row in summaries if row is not None)
            advance(BATCH)
            if not int(cursor):
                break


@dataclass(frozen=True, slots=True)
class Stats:
    """Totals of a namespace.

    Attributes:
        counts: number of rows by status.
        oldest_pending: seconds since the claim of the oldest pending or stale row, by the clocks of its caller and of
            this host; None if there is none.
        row_bytes: mean memory of a row in bytes, from a sample; None if the server does not report it.
        rate: rows claimed per second, over the last hour, or since the oldest row if that is newer.
        day_bytes: bytes that the rows of one day need at that rate; None if `row_bytes` is.
        lasting: number of rows without a TTL.
    """

    counts: dict[Status, int]
    oldest_pending: float | None
    row_bytes: float | None
    rate: float
    day_bytes: float | None
    lasting: int


def stats(client: Client, namespace: str, advance: Callable[[int], object] = lambda names: None) -> Stats:
    """Scan the namespace and return its totals; `advance` is called as in `scan`.

    Raises:
        LedgerUnavailable: a server was unreachable, refused a call, or was too slow.
    """
    counts = dict.fromkeys(STATUSES, 0)
    ages: list[float] = []
    oldest_pending: float | None = None
    lasting = 0
    names: list[str] = []
    for row in scan(client, namespace, advance=advance):
        counts[row.status] += 1
        lasting += row.ttl is None
        if row.status == "corrupt":
            continue
        since_claim = row.age if row.claimed_at is None else max(time.time() - row.claimed_at, 0.0)
        ages.append(since_claim)
        if row.status in ("stale", "pending"):
            oldest_pending = max(oldest_pending or 0.0, since_claim)
        if len(names) < MEMORY_SAMPLE:
            names.append(row.identity.row)
    span = min(max(ages, default=0.0), RATE_PERIOD)
    recent = sum(age <= span for age in ages)
    rate = recent / max(span, 60.0)  # a few seconds are too short to extrapolate to a day
    sizes = _sizes(client, names)
    mean = sum(sizes) / len(sizes) if sizes else None
    return Stats(counts, oldest_pending, mean, rate, None if mean is None else mean * rate * 86400, lasting)


def _sizes(client: Client, names: list[str]) -> list[int]:
    """Return the memory of these rows; each node replies for its own rows, and with an error for the others."""
    sizes: list[int] = []
    for node in primaries(client):
        replies = ask_all(node, [("MEMORY USAGE", name) for name in islice(names, MEMORY_SAMPLE)])
        sizes += [reply for reply in replies if isinstance(reply, int)]
    return sizes
