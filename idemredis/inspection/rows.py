"""What is in the ledger: rows found by SCAN, and what they add up to. Nothing here changes anything."""

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
"""In the order in which they want to be looked at; `corrupt` is what no attempt will ever run or overwrite."""

BATCH = 500
"""Names a SCAN goes over at a time: some tenths of a millisecond of the server."""

SAMPLED = 200
"""Rows whose memory is asked for."""

RATE_OVER = 3600.0
"""Seconds that the present rate is taken from."""


@dataclass(frozen=True, slots=True)
class RowSummary:
    """A row as a list shows it.

    Attributes:
        identity: whose it is, and its name; the parts are empty when the name is not one that this ledger makes.
        status: as stored; `stale` for pending with no lease left; `corrupt` with `why`.
        ttl: seconds until the row expires; None for a row that never does.
        row: the row itself, the stored body left out; None where it is corrupt.
        why: what is wrong with a corrupt row.
    """

    identity: Identity = field(repr=False)
    status: Status
    ttl: float | None = None
    row: Row | None = None
    why: str = ""

    @property
    def generation(self) -> int:
        """Of the attempt; 0 for a corrupt row."""
        return self.row.generation if self.row else 0

    @property
    def age(self) -> float:
        """Seconds since the last transition, by the server's clock; 0.0 for a corrupt row."""
        return self.row.age if self.row else 0.0

    @property
    def claimed_at(self) -> float | None:
        """When it was first claimed, in seconds since the epoch, by the clock of whoever claimed it; for people."""
        return self.row.created_at if self.row else None

    @property
    def digest(self) -> str:
        """What log lines, events and spans call the row."""
        return digest(self.identity.row)


def identity_of(row: str) -> Identity:
    """Return whose row it is; the parts are empty where the name is not one that this ledger makes."""
    try:
        _, principal, operation, key = parse_row_name(row)
    except (ValueError, UnicodeError):
        return Identity("", "", "", row)
    return Identity(principal, operation, key, row)


def summarise(identity: Identity, row: Row | IdempotencyError | None) -> RowSummary | None:
    """Return what a list shows of a row as it was read; None where there is none.

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
        return RowSummary(identity, "corrupt", row.ttl, why="its name is not one of this ledger's")
    status: Any = "stale" if row.stale else row.status
    return RowSummary(identity, status, row.ttl, row)


def look(client: Client, node: Node, names: Sequence[str]) -> list[RowSummary | None]:
    """Look at rows of one server; None for each that is gone. One whose slot moves away or here is looked for anew.

    Raises:
        LedgerUnavailable: the server did not answer, or refused.
    """
    identities = [identity_of(name) for name in names]
    calls = [operations.read(identity, body=False) for identity in identities]
    found = []
    for identity, call, row in zip(identities, calls, evaluate(own_wire(node), calls), strict=True):
        seen = evaluate(wire(client), [call])[0] if was_redirected(row) else row
        found.append(summarise(identity, seen))
    return found


def scan(
    client: Client, namespace: str, principal: str = "", passed: Callable[[int], object] = lambda names: None
) -> Iterator[RowSummary]:
    """Go through the rows by SCAN, on every primary of a cluster; `passed` is told how many names it went over.

    A row that is there all the time is found at least once (twice where the server's table grows meanwhile); one that
    comes or goes may be missed.

    Raises:
        LedgerUnavailable: a server did not answer, or refused.
    """
    pattern = f"{row_prefix(namespace, principal)}*"
    for node in primaries(client):
        cursor = 0
        while True:
            cursor, names = ask(node, "SCAN", cursor, "MATCH", pattern, "COUNT", BATCH)
            found = look(client, node, [name.decode("ascii", "replace") for name in names])
            yield from (row for row in found if row is not None)
            passed(BATCH)
            if not int(cursor):
                break


@dataclass(frozen=True, slots=True)
class Stats:
    """What the rows add up to.

    Attributes:
        counts: rows by status.
        oldest_pending: seconds since the first claim of the oldest row that is pending or stale, by the clocks of
            whoever claimed it and of this host; None without one.
        row_bytes: mean bytes of a row, sampled; None where the server does not tell.
        rate: rows claimed a second, over the last hour or as long as there are rows.
        day_bytes: what a day's rows need at that rate.
        lasting: rows without a TTL.
    """

    counts: dict[Status, int]
    oldest_pending: float | None
    row_bytes: float | None
    rate: float
    day_bytes: float | None
    lasting: int


def stats(client: Client, namespace: str, passed: Callable[[int], object] = lambda names: None) -> Stats:
    """Count all rows of the namespace."""
    counts = dict.fromkeys(STATUSES, 0)
    ages: list[float] = []
    oldest_pending: float | None = None
    lasting = 0
    names: list[str] = []
    for found in scan(client, namespace, passed=passed):
        counts[found.status] += 1
        lasting += found.ttl is None
        if found.status == "corrupt":
            continue
        since_claim = found.age if found.claimed_at is None else max(time.time() - found.claimed_at, 0.0)
        ages.append(since_claim)
        if found.status in ("stale", "pending"):
            oldest_pending = max(oldest_pending or 0.0, since_claim)
        if len(names) < SAMPLED:
            names.append(found.identity.row)
    span = min(max(ages, default=0.0), RATE_OVER)
    recent = sum(age <= span for age in ages)
    rate = recent / max(span, 60.0)  # a ledger of a few seconds says little about a day
    sizes = _sizes(client, names)
    mean = sum(sizes) / len(sizes) if sizes else None
    return Stats(counts, oldest_pending, mean, rate, None if mean is None else mean * rate * 86400, lasting)


def _sizes(client: Client, names: list[str]) -> list[int]:
    """Sampled by name on each node, which answers for its own rows and refuses the others."""
    sizes: list[int] = []
    for node in primaries(client):
        answers = ask_all(node, [("MEMORY USAGE", name) for name in islice(names, SAMPLED)])
        sizes += [answer for answer in answers if isinstance(answer, int)]
    return sizes
