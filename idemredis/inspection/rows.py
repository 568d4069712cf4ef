"""Summaries of rows, read one by one or found by their digest or key. Read-only."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from ..core import operations
from ..core.keys import Identity, identify, parse_row_name, row_prefix, row_text
from ..core.outcomes import Row
from ..errors import CorruptRow, IdempotencyError
from ..events import digest
from ..store.clients import Client
from ..store.cluster import wire
from ..store.errors import was_redirected
from ..store.evaluate import evaluate
from ..store.nodes import Node, ask, own_wire, primaries

__all__ = [
    "ALL_OF_DIGEST",
    "SCAN_COUNT",
    "STATUSES",
    "Advance",
    "RowSummary",
    "Status",
    "find_digest",
    "find_operations",
    "foreign_names",
    "identity_of",
    "look",
    "names",
    "summarise",
]

Status: TypeAlias = Literal["corrupt", "stale", "released", "pending", "failed", "completed"]

STATUSES: tuple[Status, ...] = ("corrupt", "stale", "released", "pending", "failed", "completed")
"""Statuses in the order of the attention that they need."""

SCAN_COUNT = 500
"""Keys that one SCAN call covers. With a million keys in memory it takes the server about a millisecond."""

ALL_OF_DIGEST = 12
"""Hex digits of a whole digest; a scan for one ends where it is found."""

Advance: TypeAlias = Callable[[int], object]
"""Called with the number of keys scanned since the last call."""

_PLAIN_NAME = re.compile(rb"[\w\-.~/@+=,]+(?::[\w\-.~/@+=,]+)?:[\w\-.~/@+=,]{1,255}\Z", re.ASCII)
"""What follows the namespace in most rows' names: parts that need no decoding."""


@dataclass(frozen=True, slots=True)
class RowSummary:
    """A row as lists show it.

    Attributes:
        identity: the row's name and parts; the parts are empty if the name is not that of a ledger's row.
        status: the stored status, but for a pending row without a lease: `released` if its attempt gave it up, and
            `stale` if it did not, since it died or hangs; `corrupt` if the row cannot be read.
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
    def overdue(self) -> bool:
        """True if the row is pending and was claimed longer ago than its lease lasts, so it was renewed since."""
        return self.status == "pending" and self.row is not None and self.since_claim > self.row.lease

    @property
    def since_claim(self) -> float:
        """Seconds since the claim, by the clocks of its caller and of this host; if unknown, since the last change."""
        return self.age if self.claimed_at is None else max(time.time() - self.claimed_at, 0.0)

    @property
    def digest(self) -> str:
        """The digest that identifies the row in log lines, events and spans."""
        return digest(self.identity.row)


def identity_of(row: str) -> Identity:
    """Return the identity in a row's name; its parts are empty if the ledger makes no such name."""
    try:
        namespace, principal, operation, key = parse_row_name(row)
        identity = identify(namespace, principal, key, operation)
    except (ValueError, UnicodeError, IdempotencyError):
        return Identity("", "", "", row)
    return identity if identity.row == row else Identity("", "", "", row)


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
    status: Any = row.status
    if row.stale:
        status = "stale" if row.owner else "released"
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


def foreign_names(some: Sequence[bytes], namespace: str) -> list[bytes]:
    """Return those of these names that the ledger does not make; all begin with the prefix of the namespace."""
    start, is_plain = len(row_prefix(namespace)), _PLAIN_NAME.match
    return [name for name in some if not is_plain(name, start) and not identity_of(row_text(name)).key]


def names(client: Client, pattern: str, advance: Advance = lambda keys: None) -> Iterator[tuple[Node, list[bytes]]]:
    """Yield the keys that match a pattern by SCAN, some at a time, with the server that has them.

    A key that exists during the whole scan is found at least once, and twice if the server's hash table grows
    meanwhile. A key that is made or deleted during the scan may be missed.

    Raises:
        LedgerUnavailable: a server was unreachable, refused a call, or was too slow.
    """
    for node in primaries(client):
        cursor = 0
        while True:
            cursor, found = ask(node, "SCAN", cursor, "MATCH", pattern, "COUNT", SCAN_COUNT)
            yield node, found
            advance(SCAN_COUNT)
            if not int(cursor):
                break


def find_digest(client: Client, namespace: str, prefix: str, advance: Advance = lambda keys: None) -> list[str]:
    """Return the names of the rows whose digest begins with `prefix`; at most one for a whole digest.

    Raises:
        LedgerUnavailable: a server was unreachable, refused a call, or was too slow.
    """
    found = set[str]()
    for _, some in names(client, f"{row_prefix(namespace)}*", advance):
        found.update(row for row in map(row_text, some) if digest(row).startswith(prefix))
        if found and len(prefix) >= ALL_OF_DIGEST:
            break
    return sorted(found)


def find_operations(client: Client, namespace: str, principal: str, key: str) -> list[str]:
    """Return the operations under which there is a row of this principal and key; "" stands for none.

    Raises:
        LedgerUnavailable: a server was unreachable, refused a call, or was too slow.
    """
    prefix, row = row_prefix(namespace, principal), identify(namespace, principal, key).row
    found = set[str]()
    for _, some in names(client, f"{prefix}*{row.removeprefix(prefix)}"):
        for identity in map(identity_of, map(row_text, some)):
            if (identity.principal, identity.key) == (principal, key):
                found.add(identity.operation)
    return sorted(found)
