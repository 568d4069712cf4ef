"""Scan all rows of a namespace for those that need attention most, and for totals. Read-only.

The servers classify the rows themselves (`survey.lua`), many in one call, so that a million rows take seconds and
little memory. Only the rows that are shown are read one by one.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any, NamedTuple

from ..core import operations
from ..core.keys import row_bytes, row_prefix, row_text
from ..core.outcomes import Survey, SurveyedRow
from ..core.scripts import load
from ..errors import IdempotencyError, LedgerUnavailable
from ..store.clients import Client, is_cluster
from ..store.errors import is_cross_slot, was_redirected
from ..store.nodes import Node, ask_all, run_on_many
from .rows import STATUSES, Advance, RowSummary, Status, foreign_names, look, names

__all__ = ["BATCH", "Listing", "Stats", "stats", "worst"]

BATCH = 64
"""Rows in one call. The call takes the server about a millisecond, and other clients wait that long."""

MAX_BYTES = 1 << 20
"""Bytes of stored bodies after which a call ends early. The server copies them, in a fraction of a millisecond."""

MEMORY_SAMPLE = 200
"""Rows whose MEMORY USAGE is queried; enough for a mean."""

RATE_PERIOD = 3600.0
"""Seconds over which the rate of new rows is measured."""

FINISHED: frozenset[Status] = frozenset({"completed", "failed"})

_RANKS = ("completed", "failed", "pending", "released", "overdue", "stale", "corrupt")

_calls = count(1)


class _Found(NamedTuple):
    """A row as the survey saw it; the names are those of `RowSummary`."""

    name: bytes
    node: Node
    status: Status
    ttl: float | None
    age: float
    since_claim: float
    overdue: bool


@dataclass(slots=True)
class _Totals:
    """Counts so far: rows by status, rows without a TTL, recent rows; and the seconds since the earliest claim."""

    counts: dict[Status, int] = field(default_factory=lambda: dict.fromkeys(STATUSES, 0))
    lasting: int = 0
    recent: int = 0
    oldest: float = 0.0


@dataclass(frozen=True, slots=True)
class Listing:
    """The rows that need attention most.

    Attributes:
        rows: the rows, those that need it most first.
        counts: number of all rows by status.
    """

    rows: list[RowSummary]
    counts: dict[Status, int]


@dataclass(frozen=True, slots=True)
class Stats:
    """Totals of a namespace.

    Attributes:
        counts: number of rows by status.
        oldest_pending: seconds since the claim of the row that has been running longest, by the clocks of its caller
            and of this host; None if none is running.
        oldest_stale: seconds since the last change of the row that has been stale longest; None if none is stale.
        row_bytes: mean memory of a row in bytes, from a sample; None if the server does not report it.
        rate: rows claimed per second, over the last hour, or since the oldest row if that is newer.
        day_bytes: bytes that the rows of one day need at that rate; None if `row_bytes` is None.
        lasting: number of rows without a TTL.
    """

    counts: dict[Status, int]
    oldest_pending: float | None
    oldest_stale: float | None
    row_bytes: float | None
    rate: float
    day_bytes: float | None
    lasting: int


def worst(
    client: Client,
    namespace: str,
    principal: str = "",
    *,
    limit: int,
    statuses: frozenset[Status] = frozenset(STATUSES) - FINISHED,
    advance: Advance = lambda keys: None,
) -> Listing:
    """Scan all rows, and return those that need attention most. Memory does not grow with the number of rows.

    Corrupt rows come first, then stale rows, rows that have been running for longer than one lease, released rows, and
    all other rows. Within each group, those that have waited longest come first.

    Args:
        client: the client.
        namespace: first part of the rows' names.
        principal: only rows of this principal; "" for all.
        limit: return at most this many rows.
        statuses: only rows of these statuses.
        advance: called with the number of keys scanned since the last call.

    Raises:
        LedgerUnavailable: a server was unreachable, refused a call, or was too slow.
    """
    totals = _Totals()
    kept: list[tuple[tuple[int, float], bytes, _Found]] = []
    known = set[bytes]()
    for row in _survey(client, namespace, principal, totals, bool(statuses & FINISHED), 0.0, advance):
        entry = (_attention(row), row.name, row)
        if row.status not in statuses or row.name in known:
            continue
        if len(kept) < limit:
            known.add(row.name)
            heapq.heappush(kept, entry)
        elif kept[0][:2] < entry[:2]:
            known.add(row.name)
            known.discard(heapq.heappushpop(kept, entry)[1])
    rows = [row for row in _read(client, [found for *_, found in kept]) if row.status in statuses]
    rows.sort(key=_attention, reverse=True)
    return Listing(rows, totals.counts)


def stats(client: Client, namespace: str, advance: Advance = lambda keys: None) -> Stats:
    """Scan all rows and return their totals; `advance` is called as in `worst`.

    Raises:
        LedgerUnavailable: a server was unreachable, refused a call, or was too slow.
    """
    totals = _Totals()
    oldest: dict[Status, float] = {}
    sizes: list[int] = []
    for row in _survey(client, namespace, "", totals, False, RATE_PERIOD, advance, sizes):
        seconds = row.age if row.status == "stale" else row.since_claim
        oldest[row.status] = max(oldest.get(row.status, 0.0), seconds)
    rate = totals.recent / max(min(totals.oldest, RATE_PERIOD), 60.0)  # seconds are too few to extrapolate to a day
    mean = sum(sizes) / len(sizes) if sizes else None
    day = None if mean is None else mean * rate * 86400
    return Stats(totals.counts, oldest.get("pending"), oldest.get("stale"), mean, rate, day, totals.lasting)


def _attention(row: _Found | RowSummary) -> tuple[int, float]:
    """Return how much a row needs attention: its group, then how long it has waited."""
    if row.status in FINISHED:
        seconds = -row.age  # the latest first
    elif row.status == "pending":
        seconds = row.since_claim
    else:
        seconds = row.age
    return _RANKS.index("overdue" if row.overdue else row.status), seconds


def _survey(
    client: Client,
    namespace: str,
    principal: str,
    totals: _Totals,
    finished: bool,
    period: float,
    advance: Advance,
    sizes: list[int] | None = None,
) -> Iterator[_Found]:
    """Yield the rows of a namespace that are not finished, or all rows; count all of them.

    Args:
        client: the client.
        namespace: first part of the rows' names.
        principal: only rows of this principal; "" for all.
        totals: counts all rows.
        finished: yield finished rows too.
        period: rows that were claimed within these seconds are recent.
        advance: called with the number of keys scanned since the last call.
        sizes: the memory of some rows is appended to it; None to query none.
    """
    together = not is_cluster(client)
    for node, scanned in names(client, f"{row_prefix(namespace, principal)}*", advance):
        if sizes is not None and len(sizes) < MEMORY_SAMPLE:
            memory = ask_all(node, [("MEMORY USAGE", name) for name in scanned[: MEMORY_SAMPLE - len(sizes)]])
            sizes += [size for size in memory if isinstance(size, int)]
        unread = foreign_names(scanned, namespace)
        rest = [name for name in scanned if name not in unread] if unread else scanned
        while rest:
            try:
                surveys = _ask(node, rest[:BATCH], together, finished, period)
            except _Apart:
                together = False
                continue
            for survey in surveys:
                totals.counts["completed"] += survey.completed
                totals.counts["failed"] += survey.failed
                totals.lasting += survey.lasting
                totals.recent += survey.recent
                totals.oldest = max(totals.oldest, survey.oldest or 0.0)
                for row in survey.others:
                    if row.state == "unread":
                        unread.append(rest[row.position])
                        continue
                    found = _found(rest[row.position], node, row)
                    if found.status not in FINISHED:
                        totals.counts[found.status] += 1
                        totals.lasting += found.ttl is None
                    yield found
                rest = rest[survey.rows :]
        for i in range(0, len(unread), BATCH):
            for summary in look(client, node, [row_text(name) for name in unread[i : i + BATCH]]):
                if summary is None:
                    continue
                _count(summary, totals, period)
                if finished or summary.status not in FINISHED:
                    yield _summarised(summary, node)


class _Apart(Exception):
    """The server requires separate calls for rows of different slots, as a proxy in front of a cluster does."""


def _ask(node: Node, rows: Sequence[bytes], together: bool, finished: bool, period: float) -> list[Survey]:
    """Return the surveys of these rows, or of the first of them: one for all if `together`, otherwise one for each."""
    token = str(next(_calls))
    args = operations.survey(token, time.time(), period, finished, MAX_BYTES)
    surveys = []
    for reply in run_on_many(node, load()["survey"], [rows] if together else [[name] for name in rows], args):
        if was_redirected(reply):  # its slot is being moved; the row is read through the cluster's client
            surveys.append(Survey(1, 0, 0, 0, 0, None, [SurveyedRow(0, "unread", None, 0.0, 0.0, 0.0)]))
        elif isinstance(reply, LedgerUnavailable) and together and is_cross_slot(reply.__cause__):
            raise _Apart
        elif isinstance(reply, IdempotencyError):
            raise reply
        else:
            surveys.append(operations.surveyed(token, reply))
    return surveys


def _found(name: bytes, node: Node, row: SurveyedRow) -> _Found:
    status: Any = "pending" if row.state == "running" else row.state
    overdue = row.state == "running" and row.since_claim > row.age + row.lease_left
    return _Found(name, node, status, row.ttl, row.age, row.since_claim, overdue)


def _summarised(row: RowSummary, node: Node) -> _Found:
    name = row_bytes(row.identity.row)
    return _Found(name, node, row.status, row.ttl, row.age, row.since_claim, row.overdue)


def _count(row: RowSummary, totals: _Totals, period: float) -> None:
    totals.counts[row.status] += 1
    totals.lasting += row.ttl is None
    if row.row is not None:
        totals.recent += row.since_claim <= period
        totals.oldest = max(totals.oldest, row.since_claim)


def _read(client: Client, found: Sequence[_Found]) -> Iterator[RowSummary]:
    """Yield the summaries of the rows that still exist, one batch of one server at a time."""
    by_node: dict[int, list[_Found]] = {}
    for row in found:
        by_node.setdefault(id(row.node), []).append(row)
    for rows in by_node.values():
        for i in range(0, len(rows), BATCH):
            names_ = [row_text(row.name) for row in rows[i : i + BATCH]]
            yield from (row for row in look(client, rows[0].node, names_) if row is not None)
